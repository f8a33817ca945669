// Package filesys is the file system under checkpoints and the disk tier: folders that
// are opened once, and files by their names in an open folder.
//
// A path is resolved when its folder is opened, and never again: a link that is
// retargeted, or a folder that is renamed, leads nobody elsewhere. Names in a folder are
// single names. Links there are not followed, and neither are mounts.
//
// A Folder is the system's, or in tests one in memory, one that logs or one that fails:
// see package internal/testkit/folders.
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

// Folder is an open folder. Its methods are safe for several goroutines; errors name
// operation and path as package os's do.
type Folder interface {
	// Path is what errors call the folder.
	Path() string
	// Info describes the folder itself, whatever has its name now.
	Info() (Info, error)
	// OpenFile opens a file with the flags of package os and of the system (Direct among
	// them); a folder may leave out the system's. A link is refused.
	OpenFile(name string, flag int, perm fs.FileMode) (File, error)
	// Sub opens a folder in it, neither through a link nor on another mount: ErrLeads.
	Sub(name string) (Folder, error)
	Mkdir(name string, perm fs.FileMode) error
	// Remove removes a file or an empty folder.
	Remove(name string) error
	Rename(from, to string) error
	// RenameNew is Rename to a name that nobody has: fs.ErrExist where it is taken.
	// Filesystems that can't promise it (NFS) have the caller's look beforehand.
	RenameNew(from, to string) error
	// Names lists the folder in ascending order.
	Names() ([]string, error)
	// Lstat describes what has a name, links themselves.
	Lstat(name string) (Info, error)
	// Sync makes the folder's names durable.
	Sync() error
	// Room is what is free where the folder lies; an error where nobody can say.
	Room() (Room, error)
	// Owner is the user to whom a file belongs that this process makes here, which a
	// network file system may decide; NoOwner where files have none.
	Owner() (int64, error)
	Close() error
}

// NoOwner is the owner of files that have none.
const NoOwner = -1

// ErrLeads is wrapped by errors about a name that leads out of its folder: a link or a
// mount.
var ErrLeads = errors.New("it is not a folder of its own")

// Info describes a file or folder.
type Info struct {
	Name  string
	Size  int64 // bytes
	Mode  fs.FileMode
	Owner int64  // a user's number, or NoOwner
	Links uint64 // how many names it has; 0: nobody says
	ID    ID
}

// IsDir tells whether it is a folder.
func (i Info) IsDir() bool { return i.Mode.IsDir() }

// ID tells a file or folder from every other that is there at the same time.
type ID struct {
	Device, Number uint64
	Of             any // in tests the file itself; on systems without numbers an fs.FileInfo
}

// Same tells whether two descriptions are of one file or folder.
func Same(a, b Info) bool {
	x, ok := a.ID.Of.(fs.FileInfo)
	y, both := b.ID.Of.(fs.FileInfo)
	if ok && both {
		return os.SameFile(x, y)
	}
	return a.ID == b.ID
}

// Room is what a file system has free, in bytes, quotas aside.
type Room struct {
	Free  int64 // for everybody
	Most  int64 // for this process, which may be let into what is kept for root
	Block int64 // a file takes a multiple of these; 0: nobody says
}

// File is an open file. Its methods are those of *os.File, and three more.
type File interface {
	io.Reader
	io.Writer
	io.ReaderAt
	io.WriterAt
	io.Closer
	// Name is the path of the folder and the file's name, for messages.
	Name() string
	Stat() (Info, error)
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

// Opener opens the folder at a path, through links.
type Opener interface {
	Open(path string) (Folder, error)
}

// System opens the system's folders.
var System Opener = system{}

type system struct{}

// Open opens a folder of the system.
func Open(path string) (Folder, error) { return System.Open(path) }

// Made are folders that MakeFolder made, outermost first, each in its parent.
type Made []made

type made struct {
	parent Folder
	name   string
}

// MakeFolder opens a folder, and makes it and those above it where they are missing, each
// durable in its parent.
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

// Remove removes the folders as far as they are empty, and ends with that.
func (m Made) Remove() {
	for i := len(m) - 1; i >= 0; i-- {
		if m[i].parent.Remove(m[i].name) != nil { // somebody put something there
			m = m[:i+1]
			break
		}
		_ = m[i].parent.Close()
		m = m[:i]
	}
	m.Stay()
}

// Stay keeps the folders.
func (m Made) Stay() {
	for _, f := range m {
		_ = f.parent.Close() // nothing was written through it that is not synced
	}
}

// Above is the folder that a path's last element lies in, and that element, "" for
// one that can't be made. Unlike filepath.Dir it keeps "..", which behind a link is not the folder that the path
// names before it.
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
	if name == "." || name == ".." { // it can't be made
		name = ""
	}
	return folder, name
}

// RoomAt is the room where a folder is or would be made; false where nobody can say.
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

// OpenRegular opens a regular file for reading. A pipe or a device, which would wait for
// a writer or never end, is refused. What it opens is what it looked at: nobody can put a
// pipe there in between.
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

// WriteSynced makes a file with these contents and syncs it; its name is durable once its
// folder is.
func WriteSynced(in Folder, name string, data []byte, perm fs.FileMode) error {
	f, err := in.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data, 0)
	return errors.Join(err, f.Sync(), f.Close())
}

// RemoveAll removes a file, or a folder and what is in it; what is not there is no error.
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

// join is the path of a name in a folder, for messages.
func join(f Folder, name string) string { return filepath.Join(f.Path(), name) }
