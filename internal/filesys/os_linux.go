package filesys

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Direct goes around the page cache: see open(2), O_DIRECT.
const Direct = unix.O_DIRECT

func renameNew(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		return os.Rename(from, to)
	}
	if err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return nil
}

func allocate(f *os.File, size int64) error {
	for {
		err := unix.Fallocate(int(f.Fd()), 0, 0, size)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EINVAL):
			return f.Truncate(size)
		case err != nil:
			return &os.PathError{Op: "allocate", Path: f.Name(), Err: err}
		}
		return nil
	}
}
