// Package filesys is the file system interface for checkpoints and the disk tier: folders that
// are opened once, and files by their names in an open folder.
//
// A path is resolved when its folder is opened, and never again. A link that is retargeted or a
// folder that is renamed afterwards therefore has no effect. Names in a folder are single path
// elements. Links and mounts in a folder are not followed. Blocks writes a large file concurrently and
// past the page cache.
//
// A Folder belongs to the operating system. Tests use one in memory, one that logs or one that
// fails: see package internal/testkit/folders.
package filesys

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spillway-ml/spillway/internal/regular"
)

// Folder is an open folder. Its methods may be called concurrently. Errors name the operation and
// path as in package os.
type Folder interface {
	// Path returns the folder's path for errors.
	Path() string
	// Info describes the folder itself, even if another folder now has its name.
	Info() (Info, error)
	// OpenFile opens a file with the flags of package os and of the system, such as Direct. A
	// folder may ignore the system's flags. A link is refused.
	OpenFile(name string, flag int, perm fs.FileMode) (File, error)
	// Sub opens a subfolder. A link or another mount is refused with ErrLeads.
	Sub(name string) (Folder, error)
	Mkdir(name string, perm fs.FileMode) error
	// Remove removes a file or an empty folder.
	Remove(name string) error
	Rename(from, to string) error
	// RenameNew does the same as Rename for a name that must not exist; otherwise the error is
	// fs.ErrExist. Some file systems (NFS) can't check that atomically; there the caller must check
	// first.
	RenameNew(from, to string) error
	// Names lists the folder in ascending order.
	Names() ([]string, error)
	// Lstat describes the file, folder or link of the given name; links are not followed.
	Lstat(name string) (Info, error)
	// Sync makes the folder's names durable.
	Sync() error
	// Room returns the free space of the folder's file system; an error if it is unknown.
	Room() (Room, error)
	// Owner returns the user who owns files that this process creates here; a network file system
	// may map users. It returns NoOwner if files have no owners.
	Owner() (int64, error)
	Close() error
}

// NoOwner is the owner of files on systems without file owners.
const NoOwner = -1

// ErrLeads is wrapped by errors about a name that is a link or a mount, and so leads out of its
// folder.
var ErrLeads = errors.New("it is a link or a mount point, and neither is followed; use the real folder")

// nowhere is an ErrLeads for a link whose target does not exist.
type nowhere struct{}

func (nowhere) Error() string {
	return "it is a link to a folder that does not exist; make that folder, or remove the link"
}
func (nowhere) Unwrap() error { return ErrLeads }

// Info describes a file or folder.
type Info struct {
	Name  string
	Size  int64 // bytes
	Mode  fs.FileMode
	Owner int64  // a user's number, or NoOwner
	Links uint64 // number of its names; 0: unknown
	ID    ID
}

// IsDir says whether it is a folder.
func (i Info) IsDir() bool { return i.Mode.IsDir() }

// ID distinguishes a file or folder from every other that exists at the same time.
type ID struct {
	Device, Number uint64
	Of             any // in tests the file itself; on systems without numbers an fs.FileInfo
}

// Same says whether two descriptions are of the same file or folder.
func Same(a, b Info) bool {
	x, ok := a.ID.Of.(fs.FileInfo)
	y, both := b.ID.Of.(fs.FileInfo)
	if ok && both {
		return os.SameFile(x, y)
	}
	return a.ID == b.ID
}

// Room is the free space of a file system, in bytes, without quotas.
type Room struct {
	Free  int64 // for every user
	Most  int64 // for this process, which may use space reserved for root
	Block int64 // a file occupies a multiple of these bytes; 0: unknown
}

// File is an open file. It has the methods of *os.File, and three more.
type File interface {
	io.Reader
	io.Writer
	io.ReaderAt
	io.WriterAt
	io.Closer
	// Name returns the file's path, for messages.
	Name() string
	Stat() (Info, error)
	Truncate(size int64) error
	Sync() error
	// Fd returns the file's descriptor. A file in memory has no valid one.
	Fd() uintptr
	// Allocate sets a file's size and reserves its blocks if the file system can. Otherwise a
	// full disk shows only at a write.
	Allocate(size int64) error
	// TryLock locks the file until Close or the end of the process. It returns false if another
	// open file holds the lock.
	TryLock() (bool, error)
}

// Opener opens the folder at a path; links in the path are followed.
type Opener interface {
	Open(path string) (Folder, error)
}

// System opens folders of the operating system.
var System Opener = system{}

type system struct{}

// Open opens a folder of the operating system.
func Open(path string) (Folder, error) { return System.Open(path) }

// Made lists folders that MakeFolder created, outermost first, each the parent of the next.
type Made []made

type made struct {
	parent Folder
	name   string
}

// MakeFolder opens a folder. It creates missing folders along the path and makes each durable
// in its parent.
func MakeFolder(o Opener, path string) (Folder, Made, error) {
	f, err := o.Open(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return f, nil, err
	}
	above, name := Above(path)
	if name == "" {
		return nil, nil, err
	}
	parent, all, err := MakeFolder(o, above)
	if err != nil {
		return nil, nil, err
	}
	err = parent.Mkdir(name, 0o777)
	mine := err == nil
	if mine {
		all = append(all, made{parent, name})
		err = parent.Sync()
	} else if errors.Is(err, fs.ErrExist) { // somebody made it meanwhile
		err = nil
	}
	if err == nil {
		f, err = parent.Sub(name)
	}
	if !mine && errors.Is(err, ErrLeads) { // Open follows a link: its target is missing
		err = &fs.PathError{Op: "open", Path: filepath.Join(parent.Path(), name), Err: nowhere{}}
	}
	if err != nil {
		all.Remove()
		if !mine {
			err = errors.Join(err, parent.Close())
		}
		return nil, nil, err
	}
	if !mine {
		err = parent.Close()
	}
	return f, all, err
}

// Remove removes the created folders, innermost first, up to the first one that is not empty.
func (m Made) Remove() {
	for i := len(m) - 1; i >= 0; i-- {
		if m[i].parent.Remove(m[i].name) != nil { // the folder has other contents
			m = m[:i+1]
			break
		}
		_ = m[i].parent.Close()
		m = m[:i]
	}
	m.Stay()
}

// Stay keeps the created folders.
func (m Made) Stay() {
	for _, f := range m {
		_ = f.parent.Close() // its names are synced already
	}
}

// Above splits a path into the folder of its last element and that element, which is "" if it
// can't be created. Unlike filepath.Dir it keeps "..": behind a link, that is not the folder
// named before it in the path.
func Above(path string) (folder, name string) {
	for {
		path = strings.TrimRight(path, string(filepath.Separator))
		i := strings.LastIndexByte(path, filepath.Separator)
		if folder, name = path[:i+1], path[i+1:]; name != "." || folder == "" {
			break
		}
		path = folder
	}
	if folder == "" {
		folder = "."
	}
	if name == "." || name == ".." { // it can't be created
		name = ""
	}
	return folder, name
}

// RoomAt returns the free space for a folder that exists or would be created; false if unknown.
func RoomAt(o Opener, dir string) (Room, bool) {
	for at := dir; ; {
		f, err := o.Open(at)
		if err == nil {
			r, err := f.Room()
			return r, errors.Join(err, f.Close()) == nil
		}
		above, name := Above(at)
		if !errors.Is(err, fs.ErrNotExist) || name == "" {
			return Room{}, false
		}
		at = above
	}
}

// OpenRegular opens a regular file for reading. It refuses a pipe or a device, which could
// block or never end. The check is of the opened file, so nobody can substitute a pipe in
// between.
func OpenRegular(in Folder, name string) (File, error) {
	f, err := in.OpenFile(name, os.O_RDONLY|NoWait, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode.IsRegular() {
		err = fmt.Errorf("%s is not a regular file (%s)", f.Name(), regular.Kind(st.Mode))
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// ReadFile reads a regular file of at most max bytes.
func ReadFile(in Folder, name string, max int64) ([]byte, error) {
	f, err := OpenRegular(in, name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, max+1))
	if err == nil && int64(len(text)) > max {
		err = fmt.Errorf("%s has more than %d bytes", f.Name(), max)
	}
	return text, err
}

// WriteSynced creates a file with the given contents and syncs it. Its name is durable once the
// folder is synced.
func WriteSynced(in Folder, name string, data []byte, perm fs.FileMode) error {
	f, err := in.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data, 0)
	return errors.Join(err, f.Sync(), f.Close())
}

// RemoveAll removes a file, or a folder with its contents. A missing name is no error.
func RemoveAll(in Folder, name string) error {
	err := in.Remove(name)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	st, serr := in.Lstat(name)
	if errors.Is(serr, fs.ErrNotExist) {
		return nil
	}
	if serr != nil || !st.IsDir() {
		return err
	}
	f, err := in.Sub(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	names, err := f.Names()
	for _, n := range names {
		if err = RemoveAll(f, n); err != nil {
			break
		}
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err = in.Remove(name); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// join returns the path of a name in a folder, for messages.
func join(f Folder, name string) string { return filepath.Join(f.Path(), name) }
