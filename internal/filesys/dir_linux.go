package filesys

import (
	"errors"
	"math"
	"math/bits"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// Direct bypasses the page cache: see open(2), O_DIRECT.
const Direct = unix.O_DIRECT

// unnamed makes a file without a name.
const unnamed = unix.O_TMPFILE

// openSub opens a subfolder on the same mount.
func openSub(at int, name string) (int, error) {
	how := unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_XDEV | unix.RESOLVE_NO_SYMLINKS}
	fd, err := unix.Openat2(at, name, &how)
	if !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EPERM) {
		return fd, err
	}
	return openSubPlain(at, name) // a kernel before 5.6, or a sandbox that does not know the call
}

func renameNew(at int, from, to string) error {
	err := unix.Renameat2(at, from, at, to, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		return unix.Renameat(at, from, at, to)
	}
	return err
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

func room(fd int) (Room, error) {
	var s unix.Statfs_t
	if err := unix.Fstatfs(fd, &s); err != nil {
		return Room{}, err
	}
	r, known := roomOf(&s, os.Geteuid() == 0)
	if !known {
		return r, errors.ErrUnsupported
	}
	return r, nil
}

// elsewhere lists file systems whose free space is reported by another machine or a program. If
// such a file system does not know its free space it reports 0.
var elsewhere = []int64{unix.NFS_SUPER_MAGIC, unix.SMB_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC, unix.CIFS_SUPER_MAGIC, unix.FUSE_SUPER_MAGIC, unix.CEPH_SUPER_MAGIC, unix.V9FS_MAGIC, unix.AFS_SUPER_MAGIC, unix.AFS_FS_MAGIC, unix.CODA_SUPER_MAGIC}

// roomOf converts the kernel's figures; false if they carry no information.
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
	r := Room{Free: bytes(s.Bavail), Most: bytes(s.Bavail), Block: int64(s.Bsize)}
	if root {
		r.Most = max(r.Free, bytes(s.Bfree))
	}
	return r, true
}
