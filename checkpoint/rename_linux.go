package checkpoint

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// renameNew renames a folder to a name that nobody has. Filesystems that can't
// promise it (NFS) have the caller's look beforehand.
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
