package folders

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// names lists a tree: folders with a slash, files with their bytes.
func names(t require.TestingT, f filesys.Folder) string {
	list, err := f.Names()
	require.NoError(t, err)
	var all []string
	for _, name := range list {
		st, err := f.Lstat(name)
		require.NoError(t, err)
		if st.IsDir() {
			sub, err := f.Sub(name)
			require.NoError(t, err)
			all = append(all, name+"/("+names(t, sub)+")")
			require.NoError(t, sub.Close())
			continue
		}
		o, err := f.OpenFile(name, os.O_RDONLY, 0)
		require.NoError(t, err)
		text, err := io.ReadAll(o)
		require.NoError(t, err)
		require.Equal(t, int64(len(text)), st.Size)
		require.NoError(t, o.Close())
		all = append(all, fmt.Sprintf("%s=%s", name, strings.ReplaceAll(string(text), "\x00", "_")))
	}
	return strings.Join(all, " ")
}

// system is a new folder of the system.
func system(t testing.TB) filesys.Folder {
	f, err := filesys.Open(t.TempDir())
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// kindOf is what a program asks of an error.
func kindOf(err error) string {
	for _, e := range []error{fs.ErrNotExist, fs.ErrExist, fs.ErrClosed, syscall.ENOTEMPTY, syscall.EISDIR, syscall.ENOTDIR, syscall.EBADF, syscall.EINVAL} {
		if errors.Is(err, e) {
			return e.Error()
		}
	}
	if err != nil {
		return "another error"
	}
	return ""
}

// act does one operation of a random program on a path of folders' names.
func act(root filesys.Folder, op, path, b string, n int64) string {
	dir, name := filepath.Split(path)
	f, err := At(root).Open(filepath.Join(root.Path(), dir))
	if err != nil {
		return kindOf(err)
	}
	defer f.Close()
	open := func(flag int, do func(filesys.File) error) error {
		o, err := f.OpenFile(name, flag, 0o666)
		if err != nil {
			return err
		}
		return errors.Join(do(o), o.Close())
	}
	switch op {
	case "write":
		err = open(os.O_RDWR|os.O_CREATE, func(o filesys.File) error {
			_, err := o.WriteAt([]byte(b), n)
			return err
		})
	case "append":
		err = open(os.O_WRONLY|os.O_APPEND, func(o filesys.File) error {
			_, err := o.Write([]byte(b))
			return err
		})
	case "new":
		err = open(os.O_WRONLY|os.O_CREATE|os.O_EXCL, func(o filesys.File) error { return nil })
	case "empty":
		err = open(os.O_WRONLY|os.O_TRUNC, func(o filesys.File) error { return o.Sync() })
	case "truncate":
		err = open(os.O_WRONLY, func(o filesys.File) error { return o.Truncate(n) })
	case "allocate":
		err = open(os.O_WRONLY, func(o filesys.File) error { return o.Allocate(n + 1) })
	case "mkdir":
		err = f.Mkdir(name, 0o777)
	case "remove":
		err = f.Remove(name)
	case "rename new":
		err = f.RenameNew(name, b)
	case "list":
		var sub filesys.Folder
		if sub, err = f.Sub(name); err == nil {
			_, err = sub.Names()
			err = errors.Join(err, sub.Sync(), sub.Close())
		}
	}
	return kindOf(err)
}

// A tree in memory, and one that is logged, do what the system does.
func TestMemoryIsAsTheSystem(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		dir, err := os.MkdirTemp(t.TempDir(), "")
		require.NoError(r, err)
		disk, err := filesys.Open(dir)
		require.NoError(r, err)
		defer disk.Close()
		m := NewMemory("/m").Folder()
		rec := NewRecord(NewMemory("/r").Folder(), false)
		paths := rapid.SampledFrom([]string{"a", "b", "d", "d/x", "d/y", "a/z", "d/e", "d/e/f", "no/where"})
		single := rapid.SampledFrom([]string{"a", "b", "d", "x"})
		for range rapid.IntRange(1, 25).Draw(r, "steps") {
			op := rapid.SampledFrom([]string{"write", "append", "new", "empty", "truncate", "allocate", "mkdir", "remove", "rename new", "list"}).Draw(r, "op")
			a, b, n := paths.Draw(r, "a"), single.Draw(r, "b"), rapid.Int64Range(0, 6).Draw(r, "n")
			want := act(disk, op, a, b, n)
			require.Equal(r, want, act(m, op, a, b, n), "%s %s %s", op, a, b)
			require.Equal(r, want, act(rec.Folder(), op, a, b, n), "%s %s %s", op, a, b)
			require.Equal(r, names(r, disk), names(r, m))
		}
		// What is left where nothing of what was logged is lost is what there is.
		rec.Note("ended")
		all := map[string]bool{}
		_, err = rec.Log().States("/r", Bounds{Every: 1}, func(s State) error {
			if s.Note == "ended" {
				all[names(r, s.Files.Folder())] = true
			}
			return nil
		})
		require.NoError(r, err)
		require.Contains(r, all, names(r, disk))
	})
}

// What was opened outlives its name: files, and folders, in which nothing new is made.
func TestOpenFilesOutliveTheirNames(t *testing.T) {
	for _, f := range []filesys.Folder{system(t), NewMemory("/m").Folder()} {
		o, err := f.OpenFile("a", os.O_RDWR|os.O_CREATE, 0o666)
		require.NoError(t, err)
		require.NoError(t, f.Remove("a"))
		n, err := o.WriteAt([]byte("abc"), 2)
		require.NoError(t, err)
		require.Equal(t, 3, n)
		got := make([]byte, 9)
		n, err = o.ReadAt(got, 1)
		require.Equal(t, io.EOF, err)
		require.Equal(t, "\x00abc", string(got[:n]))
		require.NoError(t, o.Close())
		_, err = o.WriteAt([]byte("abc"), 0)
		require.ErrorIs(t, err, os.ErrClosed)
		require.ErrorIs(t, o.Close(), os.ErrClosed)

		require.NoError(t, f.Mkdir("d", 0o777))
		d, err := f.Sub("d")
		require.NoError(t, err)
		require.NoError(t, f.Remove("d"))
		require.ErrorIs(t, d.Mkdir("e", 0o777), fs.ErrNotExist)
		_, err = d.OpenFile("e", os.O_WRONLY|os.O_CREATE, 0o666)
		require.ErrorIs(t, err, fs.ErrNotExist)
		require.NoError(t, d.Close())
		require.Empty(t, names(t, f))
	}
}

func TestLocks(t *testing.T) {
	for _, f := range []filesys.Folder{system(t), NewMemory("/m").Folder()} {
		open := func() filesys.File {
			o, err := f.OpenFile("lock", os.O_RDWR|os.O_CREATE, 0o666)
			require.NoError(t, err)
			return o
		}
		a, b := open(), open()
		stA, err := a.Stat()
		require.NoError(t, err)
		stB, err := f.Lstat("lock")
		require.NoError(t, err)
		require.True(t, filesys.Same(stA, stB))
		got, err := a.TryLock()
		if errors.Is(err, errors.ErrUnsupported) {
			t.Skip("this system has no locks")
		}
		require.NoError(t, err)
		require.True(t, got)
		got, err = b.TryLock()
		require.NoError(t, err)
		require.False(t, got)
		require.NoError(t, a.Close())
		got, err = b.TryLock()
		require.NoError(t, err)
		require.True(t, got)
		require.NoError(t, b.Close())
	}
}

// Folders are made with those above them, and those that were made are removed again
// where nothing is in them.
func TestMakeFolder(t *testing.T) {
	for _, root := range []filesys.Folder{system(t), NewMemory("/spillway-test/m").Folder()} {
		require.NoError(t, filesys.WriteSynced(root, "f", []byte("1"), 0o666))
		text, err := filesys.ReadFile(root, "f", 1)
		require.NoError(t, err)
		require.Equal(t, "1", string(text))
		_, err = filesys.ReadFile(root, "f", 0)
		require.EqualError(t, err, filepath.Join(root.Path(), "f")+" has more than 0 bytes")

		path := filepath.Join(root.Path(), "c", "d")
		f, made, err := filesys.MakeFolder(At(root), path)
		require.NoError(t, err)
		require.Equal(t, path, f.Path())
		require.Len(t, made, 2)
		g, again, err := filesys.MakeFolder(At(root), path)
		require.NoError(t, err)
		require.Empty(t, again)
		require.NoError(t, g.Close())
		_, _, err = filesys.MakeFolder(At(root), filepath.Join(root.Path(), "f"))
		require.ErrorIs(t, err, syscall.ENOTDIR)
		_, _, err = filesys.MakeFolder(At(root), filepath.Join(root.Path(), "f", "g"))
		require.ErrorIs(t, err, syscall.ENOTDIR)
		require.NoError(t, filesys.WriteSynced(f, "x", nil, 0o666))
		_, err = filesys.OpenRegular(root, "c")
		require.EqualError(t, err, filepath.Join(root.Path(), "c")+" is not a regular file (it is a folder)")
		require.NoError(t, filesys.RemoveAll(root, "c"))
		require.NoError(t, filesys.RemoveAll(root, "c"))
		made.Stay()
		require.NoError(t, f.Close())

		f, made, err = filesys.MakeFolder(At(root), path)
		require.NoError(t, err)
		require.NoError(t, filesys.WriteSynced(root, "c2", nil, 0o666))
		made.Remove()
		require.NoError(t, f.Close())
		require.Equal(t, "c2= f=1", names(t, root))
	}
}

// The n-th operation fails, one time each, until none is left.
func TestFault(t *testing.T) {
	program := func(f filesys.Folder) error {
		o, err := f.OpenFile("a", os.O_RDWR|os.O_CREATE, 0o666)
		if err != nil {
			return err
		}
		_, err = o.WriteAt([]byte("abcd"), 0)
		return errors.Join(err, o.Sync(), o.Close(), f.Rename("a", "b"), f.Sync())
	}
	want := map[Trouble][]string{
		Broken: {"create /m/a", "write /m/a", "sync /m/a", "close /m/a", "rename /m/a", "sync folder /m"},
		Full:   {"create /m/a", "write /m/a", "sync /m/a", "rename /m/a", "rename /m/a", "sync folder /m"},
		Short:  {"write /m/a", "write /m/a"},
		Killed: {"create /m/a", "write /m/a", "sync /m/a", "close /m/a", "rename /m/a", "sync folder /m"},
	}
	left := map[Trouble][]string{
		Broken: {"", "b=", "b=abcd", "b=abcd", "a=abcd", "b=abcd"},
		Full:   {"", "b=", "b=abcd", "a=abcd", "a=abcd", "b=abcd"},
		Short:  {"b=ab", "b=ab"},
		Killed: {"", "a=", "a=abcd", "a=abcd", "a=abcd", "b=abcd"},
	}
	for _, trouble := range Troubles {
		var hits, trees []string
		for n := 1; ; n++ {
			m := NewMemory("/m")
			f := &Fault{At: n, Trouble: trouble}
			err := program(f.Folder(m.Folder()))
			if f.Hit() == "" {
				require.NoError(t, err)
				require.Equal(t, "b=abcd", names(t, m.Folder()))
				require.Equal(t, 6, f.Count())
				break
			}
			require.Error(t, err)
			require.Equal(t, trouble == Killed, errors.Is(err, ErrKilled))
			hits, trees = append(hits, f.Hit()), append(trees, names(t, m.Folder()))
		}
		require.Equal(t, want[trouble], hits, trouble)
		require.Equal(t, left[trouble], trees, trouble)
	}
}
