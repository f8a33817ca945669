//go:build unix

package filesys

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// NoWait opens a pipe or terminal without waiting for a writer or a carrier.
	NoWait = syscall.O_NONBLOCK
)

// dir is a folder of the operating system's file system; all operations use its open
// descriptor.
type dir struct {
	f    *os.File
	path string
}

func (system) Open(path string) (Folder, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	return &dir{f, settled(path, f)}, nil
}

// settled returns the path by which errors name an open folder: the path as given, or, if that
// contains links, the path with links resolved.
func settled(path string, f *os.File) string {
	real, err := filepath.EvalSymlinks(path)
	if err != nil || real == filepath.Clean(path) {
		return path
	}
	st, err := os.Stat(real)
	if ours, serr := f.Stat(); err == nil && serr == nil && os.SameFile(st, ours) {
		return real
	}
	return path
}

// at runs a system call with the folder's descriptor, and keeps the descriptor open during the
// call.
func (d *dir) at(op, name string, call func(fd int) error) error {
	if name == "" || name == ".." || strings.ContainsRune(name, filepath.Separator) {
		return &fs.PathError{Op: op, Path: join(d, name), Err: fs.ErrInvalid}
	}
	conn, err := d.f.SyscallConn()
	if err == nil {
		cerr := conn.Control(func(fd uintptr) {
			for err = unix.EINTR; errors.Is(err, unix.EINTR); {
				err = call(int(fd))
			}
		})
		if cerr != nil {
			err = os.ErrClosed
		}
	}
	if err != nil {
		return &fs.PathError{Op: op, Path: join(d, name), Err: err}
	}
	return nil
}

func (d *dir) Path() string { return d.path }

func (d *dir) Info() (Info, error) { return file{d.f}.Stat() }

func (d *dir) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	fd := -1
	err := d.at("open", name, func(at int) (err error) {
		fd, err = unix.Openat(at, name, flag|unix.O_NOFOLLOW|unix.O_CLOEXEC, uint32(perm.Perm()))
		return err
	})
	if err != nil {
		return nil, err
	}
	return file{os.NewFile(uintptr(fd), join(d, name))}, nil
}

func (d *dir) Sub(name string) (Folder, error) {
	fd := -1
	err := d.at("open", name, func(at int) (err error) {
		fd, err = openSub(at, name)
		return err
	})
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EMLINK) {
		if st, serr := d.Lstat(name); serr == nil && st.Mode&fs.ModeSymlink != 0 {
			return nil, &fs.PathError{Op: "open", Path: join(d, name), Err: leads{"it is a link"}}
		}
	}
	if errors.Is(err, unix.EXDEV) {
		return nil, &fs.PathError{Op: "open", Path: join(d, name), Err: leads{"it is a mount"}}
	}
	if err != nil {
		return nil, err
	}
	return &dir{os.NewFile(uintptr(fd), join(d, name)), join(d, name)}, nil
}

// leads is an ErrLeads with the reason.
type leads struct{ why string }

func (l leads) Error() string { return l.why + ", which is not followed" }
func (l leads) Unwrap() error { return ErrLeads }

func (d *dir) Mkdir(name string, perm fs.FileMode) error {
	return d.at("mkdir", name, func(at int) error { return unix.Mkdirat(at, name, uint32(perm.Perm())) })
}

func (d *dir) Remove(name string) error {
	return d.at("remove", name, func(at int) error {
		err := unix.Unlinkat(at, name, 0)
		if err == nil || errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOENT) {
			return err
		}
		derr := unix.Unlinkat(at, name, unix.AT_REMOVEDIR)
		if errors.Is(derr, unix.ENOTDIR) {
			return err
		}
		return derr
	})
}

func (d *dir) Rename(from, to string) error {
	return d.at("rename", from, func(at int) error { return unix.Renameat(at, from, at, to) })
}

func (d *dir) RenameNew(from, to string) error {
	return d.at("rename", from, func(at int) error { return renameNew(at, from, to) })
}

// Names opens the folder again, since an open descriptor can list it only once.
func (d *dir) Names() ([]string, error) {
	fd := -1
	err := d.at("open", ".", func(at int) (err error) {
		fd, err = unix.Openat(at, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), d.path)
	names, err := f.Readdirnames(-1)
	slices.Sort(names)
	return names, errors.Join(err, f.Close())
}

func (d *dir) Lstat(name string) (Info, error) {
	var st unix.Stat_t
	err := d.at("lstat", name, func(at int) error { return unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW) })
	if err != nil {
		return Info{}, err
	}
	return infoOf(name, &st), nil
}

func (d *dir) Sync() error { return d.f.Sync() }

func (d *dir) Room() (r Room, err error) {
	err = d.at("statfs", ".", func(at int) (err error) {
		r, err = room(at)
		return err
	})
	return r, err
}

// Owner makes a file without a name, or, if the file system has none, a named one that it
// removes at once, and returns its owner.
func (d *dir) Owner() (int64, error) {
	f, err := d.OpenFile(".", os.O_WRONLY|unnamed, 0o600)
	if unnamed == 0 || err != nil {
		var b [16]byte
		_, _ = rand.Read(b[:]) // never fails: the process ends if the system has no randomness
		name := ".spillway-owner-" + hex.EncodeToString(b[:])
		if f, err = d.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err == nil {
			err = d.Remove(name)
		}
		if err != nil {
			return NoOwner, err
		}
	}
	st, err := f.Stat()
	return st.Owner, errors.Join(err, f.Close())
}

func (d *dir) Close() error { return d.f.Close() }

// infoOf converts the kernel's description of a name.
func infoOf(name string, st *unix.Stat_t) Info {
	mode := fs.FileMode(st.Mode & 0o777)
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		mode |= fs.ModeDir
	case unix.S_IFLNK:
		mode |= fs.ModeSymlink
	case unix.S_IFIFO:
		mode |= fs.ModeNamedPipe
	case unix.S_IFSOCK:
		mode |= fs.ModeSocket
	case unix.S_IFCHR:
		mode |= fs.ModeDevice | fs.ModeCharDevice
	case unix.S_IFBLK:
		mode |= fs.ModeDevice
	}
	if st.Mode&unix.S_ISVTX != 0 {
		mode |= fs.ModeSticky
	}
	return Info{Name: name, Size: st.Size, Mode: mode, Owner: int64(st.Uid), Links: uint64(st.Nlink), ID: ID{Device: uint64(st.Dev), Number: st.Ino}}
}

// file holds only an *os.File, so that an interface can hold it without an allocation.
type file struct{ *os.File }

func (f file) Stat() (Info, error) {
	var st unix.Stat_t
	conn, err := f.SyscallConn()
	if err == nil {
		cerr := conn.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &st) })
		if cerr != nil {
			err = os.ErrClosed
		}
	}
	if err != nil {
		return Info{}, &fs.PathError{Op: "stat", Path: f.Name(), Err: err}
	}
	return infoOf(filepath.Base(f.Name()), &st), nil
}

func (f file) Allocate(size int64) error { return allocate(f.File, size) }

// TryLock locks a file that is open for this process alone: see File.TryLock.
func TryLock(f *os.File) (bool, error) { return file{f}.TryLock() }

func (f file) TryLock() (bool, error) {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}

// openSubPlain opens a subfolder. It recognizes a mount by its device number, so it misses a
// mount of the same device.
func openSubPlain(at int, name string) (int, error) {
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	var above, below unix.Stat_t
	err = errors.Join(unix.Fstat(at, &above), unix.Fstat(fd, &below))
	if err == nil && above.Dev != below.Dev {
		err = unix.EXDEV
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}
