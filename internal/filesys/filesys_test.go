package filesys

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
)

// names lists a tree: folders with a slash, files with their bytes.
func names(t require.TestingT, f FS, dir string) string {
	list, err := f.ReadDir(dir)
	require.NoError(t, err)
	var all []string
	for _, e := range list {
		path := filepath.Join(dir, e.Name())
		if e.IsDir() {
			all = append(all, e.Name()+"/("+names(t, f, path)+")")
			continue
		}
		o, err := f.OpenFile(path, os.O_RDONLY, 0)
		require.NoError(t, err)
		text, err := io.ReadAll(o)
		require.NoError(t, err)
		st, err := o.Stat()
		require.NoError(t, err)
		require.Equal(t, int64(len(text)), st.Size())
		require.NoError(t, o.Close())
		all = append(all, fmt.Sprintf("%s=%s", e.Name(), strings.ReplaceAll(string(text), "\x00", "_")))
	}
	return strings.Join(all, " ")
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

// act does one operation of a random program on an open file or a path.
func act(t require.TestingT, f FS, base, op, a, b string, n int64) string {
	path, to := filepath.Join(base, a), filepath.Join(base, b)
	open := func(flag int, do func(File) error) error {
		o, err := f.OpenFile(path, flag, 0o666)
		if err != nil {
			return err
		}
		return errors.Join(do(o), o.Close())
	}
	var err error
	switch op {
	case "write":
		err = open(os.O_RDWR|os.O_CREATE, func(o File) error {
			_, err := o.WriteAt([]byte(b), n)
			return err
		})
	case "append":
		err = open(os.O_WRONLY|os.O_APPEND, func(o File) error {
			_, err := o.Write([]byte(b))
			return err
		})
	case "new":
		err = open(os.O_WRONLY|os.O_CREATE|os.O_EXCL, func(o File) error { return nil })
	case "empty":
		err = open(os.O_WRONLY|os.O_TRUNC, func(o File) error { return o.Sync() })
	case "truncate":
		err = open(os.O_WRONLY, func(o File) error { return o.Truncate(n) })
	case "allocate":
		err = open(os.O_WRONLY, func(o File) error { return o.Allocate(n + 1) })
	case "mkdir":
		err = f.Mkdir(path, 0o777)
	case "remove":
		err = f.Remove(path)
	case "rename new":
		err = f.RenameNew(path, to)
	case "list":
		_, err = f.ReadDir(path)
	case "sync folder":
		if st, serr := f.Stat(path); serr != nil || st.IsDir() {
			err = f.SyncDir(path)
		}
	}
	return kindOf(err)
}

// A file system in memory, and one that logs, do what the system does.
func TestMemoryIsAsTheSystem(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		dir, err := os.MkdirTemp(t.TempDir(), "")
		require.NoError(r, err)
		m := NewMemory("/m")
		rec := NewRecord(NewMemory("/r"), "/r", false)
		paths := rapid.SampledFrom([]string{"a", "b", "d", "d/x", "d/y", "a/z", "d/e", "d/e/f", "no/where"})
		for range rapid.IntRange(1, 25).Draw(r, "steps") {
			op := rapid.SampledFrom([]string{"write", "append", "new", "empty", "truncate", "allocate", "mkdir", "remove", "rename new", "list", "sync folder"}).Draw(r, "op")
			a, b, n := paths.Draw(r, "a"), paths.Draw(r, "b"), rapid.Int64Range(0, 6).Draw(r, "n")
			want := act(r, OS, dir, op, a, b, n)
			require.Equal(r, want, act(r, m, "/m", op, a, b, n), "%s %s %s", op, a, b)
			require.Equal(r, want, act(r, rec, "/r", op, a, b, n), "%s %s %s", op, a, b)
			require.Equal(r, names(r, OS, dir), names(r, m, "/m"))
		}
		// What is left where nothing of what was logged is lost is what there is.
		rec.Note("ended")
		all := map[string]bool{}
		_, err = rec.Log().States("/r", Bounds{Every: 1}, func(s State) error {
			if s.Note == "ended" {
				all[names(r, s.Files, "/r")] = true
			}
			return nil
		})
		require.NoError(r, err)
		require.Contains(r, all, names(r, OS, dir))
	})
}

func TestOpenFilesOutliveTheirNames(t *testing.T) {
	for _, dir := range []string{t.TempDir(), "/m"} {
		var f FS = OS
		if dir == "/m" {
			f = NewMemory(dir)
		}
		path := filepath.Join(dir, "a")
		o, err := f.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o666)
		require.NoError(t, err)
		require.NoError(t, f.Remove(path))
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
		require.Empty(t, names(t, f, dir))
	}
}

func TestLocks(t *testing.T) {
	for _, dir := range []string{t.TempDir(), "/m"} {
		var f FS = OS
		if dir == "/m" {
			f = NewMemory(dir)
		}
		open := func() File {
			o, err := f.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE|NoFollow, 0o666)
			require.NoError(t, err)
			return o
		}
		a, b := open(), open()
		stA, err := a.Stat()
		require.NoError(t, err)
		stB, err := f.Stat(filepath.Join(dir, "lock"))
		require.NoError(t, err)
		require.True(t, SameFile(stA, stB))
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

func TestMount(t *testing.T) {
	outer, inner := NewMemory("/spillway-test/a"), NewMemory("/spillway-test/a/b")
	undo := Mount("/spillway-test/a", outer)
	undoInner := Mount("/spillway-test/a/b", inner)
	require.NoError(t, WriteSynced("/spillway-test/a/f", []byte("1"), 0o666))
	require.NoError(t, WriteSynced("/spillway-test/a/b/f", []byte("2"), 0o666))
	require.Equal(t, "f=1", names(t, outer, "/spillway-test/a"))
	require.Equal(t, "f=2", names(t, inner, "/spillway-test/a/b"))
	_, err := Stat("/spillway-test/ab/f")
	require.ErrorIs(t, err, fs.ErrNotExist)
	text, err := ReadFile("/spillway-test/a/b/f", 1)
	require.NoError(t, err)
	require.Equal(t, "2", string(text))
	_, err = ReadFile("/spillway-test/a/b/f", 0)
	require.EqualError(t, err, "/spillway-test/a/b/f has more than 0 bytes")
	_, err = OpenRegular("/spillway-test/a")
	require.EqualError(t, err, "/spillway-test/a is not a regular file (it is a folder)")

	made, err := MakeFolder("/spillway-test/a/c/d")
	require.NoError(t, err)
	require.Equal(t, []string{"/spillway-test/a/c", "/spillway-test/a/c/d"}, made)
	made, err = MakeFolder("/spillway-test/a/c/d")
	require.NoError(t, err)
	require.Empty(t, made)
	_, err = MakeFolder("/spillway-test/a/f")
	require.EqualError(t, err, "/spillway-test/a/f is not a folder")
	require.NoError(t, WriteSynced("/spillway-test/a/c/d/f", nil, 0o666))
	require.NoError(t, RemoveAll("/spillway-test/a/c"))
	require.NoError(t, RemoveAll("/spillway-test/a/c"))
	require.Equal(t, "f=1", names(t, outer, "/spillway-test/a"))

	undoThird := Mount("/spillway-test/a", NewMemory("/spillway-test/a")) // the last one counts
	_, err = Stat("/spillway-test/a/f")
	require.ErrorIs(t, err, fs.ErrNotExist)
	undoThird()
	undo()
	_, err = Stat("/spillway-test/a/f")
	require.ErrorIs(t, err, fs.ErrNotExist)
	_, err = Stat("/spillway-test/a/b/f")
	require.NoError(t, err)
	undoInner()
	require.Nil(t, mounts.Load())
}

// The n-th operation fails, one time each, until none is left.
func TestFault(t *testing.T) {
	program := func(f FS) error {
		o, err := f.OpenFile("/m/a", os.O_RDWR|os.O_CREATE, 0o666)
		if err != nil {
			return err
		}
		_, err = o.WriteAt([]byte("abcd"), 0)
		return errors.Join(err, o.Sync(), o.Close(), f.Rename("/m/a", "/m/b"), f.SyncDir("/m"))
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
			f := &Fault{FS: m, At: n, Trouble: trouble}
			err := program(f)
			if f.Hit() == "" {
				require.NoError(t, err)
				require.Equal(t, "b=abcd", names(t, m, "/m"))
				require.Equal(t, 6, f.Count())
				break
			}
			require.Error(t, err)
			require.Equal(t, trouble == Killed, errors.Is(err, ErrKilled))
			hits, trees = append(hits, f.Hit()), append(trees, names(t, m, "/m"))
		}
		require.Equal(t, want[trouble], hits, trouble)
		require.Equal(t, left[trouble], trees, trouble)
	}
}
