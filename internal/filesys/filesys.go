// Package filesys is the file system that checkpoints and the disk tier work on,
// with one in between where a test wants to watch it, to fail it, or to lose what
// was not synced.
//
// The package's functions take paths, as those of package os, and go to the system
// itself unless a test has put another file system over the folder: see Mount.
//
//	OS       the system, with nothing in between
//	Memory   a tree in memory
//	Record   another one, with a log of what changed it and what was synced
//	Fault    another one, one of whose operations fails
//
// What a power loss may leave of a logged run is enumerated by Log.States.
package filesys

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spillway-ml/spillway/internal/regular"
)

// FS is a file system. Its methods are those of package os of the same names, safe
// for several goroutines; errors name operation and path as os's do.
type FS interface {
	// OpenFile opens a file or, for reading, a folder. Flags are os's and the system's
	// (Direct among them); a file system may leave out the system's.
	OpenFile(path string, flag int, perm fs.FileMode) (File, error)
	Mkdir(path string, perm fs.FileMode) error
	Remove(path string) error
	Rename(from, to string) error
	// RenameNew is Rename to a name that nobody has: fs.ErrExist where it is taken.
	// Filesystems that can't promise it (NFS) have the caller's look beforehand.
	RenameNew(from, to string) error
	ReadDir(path string) ([]fs.DirEntry, error)
	Stat(path string) (fs.FileInfo, error)
	Lstat(path string) (fs.FileInfo, error)
	// SyncDir makes a folder's names durable.
	SyncDir(path string) error
	// Room is what is free where path lies; an error where nobody can say.
	Room(path string) (Room, error)
}

// Room is what a file system has free, in bytes, quotas aside.
type Room struct {
	Free int64 // for everybody
	Most int64 // for this process, which may be let into what is kept for root
}

// File is an open file. Its methods are those of *os.File, and two more.
type File interface {
	io.Reader
	io.Writer
	io.ReaderAt
	io.WriterAt
	io.Closer
	Name() string
	Stat() (fs.FileInfo, error)
	Truncate(size int64) error
	Sync() error
	// Fd is the system's number of the file; of one in memory it is no file's.
	Fd() uintptr
	// Allocate gives a file that size and reserves its bytes, where the filesystem
	// can; else a full disk shows at a write.
	Allocate(size int64) error
	// TryLock takes the file's lock until Close, or the end of the process; false
	// where another open file has it.
	TryLock() (bool, error)
}

// OpenFile is FS.OpenFile of the file system at path, as the following are.
func OpenFile(path string, flag int, perm fs.FileMode) (File, error) {
	return at(path).OpenFile(path, flag, perm)
}

// Mkdir makes a folder.
func Mkdir(path string, perm fs.FileMode) error { return at(path).Mkdir(path, perm) }

// Remove removes a file or an empty folder.
func Remove(path string) error { return at(path).Remove(path) }

// Rename gives a file or folder another name, over what had it.
func Rename(from, to string) error { return at(from).Rename(from, to) }

// RenameNew gives a file or folder a name that nobody has: see FS.
func RenameNew(from, to string) error { return at(from).RenameNew(from, to) }

// ReadDir lists a folder by name.
func ReadDir(path string) ([]fs.DirEntry, error) { return at(path).ReadDir(path) }

// Stat describes what path names, through links.
func Stat(path string) (fs.FileInfo, error) { return at(path).Stat(path) }

// Lstat describes what path names, links themselves.
func Lstat(path string) (fs.FileInfo, error) { return at(path).Lstat(path) }

// SyncDir makes a folder's names durable.
func SyncDir(path string) error { return at(path).SyncDir(path) }

// RoomAt is the room where a folder is or would be made; false where nobody can say.
func RoomAt(dir string) (Room, bool) {
	for dir = absolute(dir); ; dir = filepath.Dir(dir) {
		r, err := at(dir).Room(dir)
		if err == nil {
			return r, true
		}
		if !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
			return Room{}, false
		}
	}
}

// Open opens a file or folder for reading.
func Open(path string) (File, error) { return OpenFile(path, os.O_RDONLY, 0) }

// OpenRegular opens a regular file, or a link to one, for reading. A pipe or a
// device, which would wait for a writer or never end, is refused. What it opens is
// what it looked at: nobody can put a pipe there in between.
func OpenRegular(path string) (File, error) {
	f, err := OpenFile(path, os.O_RDONLY|NoWait, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file (%s)", path, regular.Kind(st.Mode()))
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// ReadFile reads a regular file of at most max bytes.
func ReadFile(path string, max int64) ([]byte, error) {
	f, err := OpenRegular(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, max+1))
	if err == nil && int64(len(text)) > max {
		err = fmt.Errorf("%s has more than %d bytes", path, max)
	}
	return text, err
}

// WriteSynced makes a file with these contents and syncs it; its name is durable
// once its folder is.
func WriteSynced(path string, data []byte, perm fs.FileMode) error {
	f, err := OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data, 0)
	return errors.Join(err, f.Sync(), f.Close())
}

// RemoveAll removes path and what is in it; what is not there is no error.
func RemoveAll(path string) error {
	err := Remove(path)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	st, serr := Lstat(path)
	if errors.Is(serr, fs.ErrNotExist) {
		return nil
	}
	if serr != nil || !st.IsDir() {
		return err
	}
	names, lerr := ReadDir(path)
	if lerr != nil && !errors.Is(lerr, fs.ErrNotExist) {
		return lerr
	}
	for _, n := range names {
		if err := RemoveAll(filepath.Join(path, n.Name())); err != nil {
			return err
		}
	}
	if err = Remove(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// MakeFolder makes a folder and those above it, each durable in its parent, and
// returns those that were missing, outermost first.
func MakeFolder(dir string) (made []string, err error) {
	if st, err := Stat(dir); err == nil {
		if !st.IsDir() {
			return nil, fmt.Errorf("%s is not a folder", dir)
		}
		return nil, nil
	}
	parent := filepath.Dir(dir)
	if parent != dir {
		if made, err = MakeFolder(parent); err != nil {
			return made, err
		}
	}
	if err := Mkdir(dir, 0o777); errors.Is(err, fs.ErrExist) {
		return made, nil // somebody made it meanwhile
	} else if err != nil {
		return made, err
	}
	return append(made, dir), SyncDir(parent)
}

// SameFile tells whether two descriptions are of one file.
func SameFile(a, b fs.FileInfo) bool {
	x, ok := a.Sys().(*node)
	y, both := b.Sys().(*node)
	if ok || both {
		return x == y
	}
	return os.SameFile(a, b)
}
