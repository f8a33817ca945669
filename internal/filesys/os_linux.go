package filesys

import (
	"errors"
	"math"
	"math/bits"
	"os"
	"slices"

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

func room(path string) (Room, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(path, &s); err != nil {
		return Room{}, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	r, known := roomOf(&s, os.Geteuid() == 0)
	if !known {
		return r, &os.PathError{Op: "statfs", Path: path, Err: errors.ErrUnsupported}
	}
	return r, nil
}

// elsewhere are the kinds of file systems whose figures come from another machine or a
// program. One that does not know its own says that nothing is free.
var elsewhere = []int64{unix.NFS_SUPER_MAGIC, unix.SMB_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC, unix.CIFS_SUPER_MAGIC, unix.FUSE_SUPER_MAGIC, unix.CEPH_SUPER_MAGIC, unix.V9FS_MAGIC, unix.AFS_SUPER_MAGIC, unix.AFS_FS_MAGIC, unix.CODA_SUPER_MAGIC}

// roomOf is what the kernel's figures say; false: nothing.
func roomOf(s *unix.Statfs_t, root bool) (Room, bool) {
	if s.Blocks == 0 || s.Bfree == 0 && slices.Contains(elsewhere, int64(s.Type)) {
		return Room{}, false
	}
	bytes := func(blocks uint64) int64 {
		high, low := bits.Mul64(blocks, uint64(s.Bsize))
		if high > 0 || low > math.MaxInt64 {
			return math.MaxInt64
		}
		return int64(low)
	}
	r := Room{Free: bytes(s.Bavail), Most: bytes(s.Bavail)}
	if root {
		r.Most = max(r.Free, bytes(s.Bfree))
	}
	return r, true
}
