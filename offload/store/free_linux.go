package store

import (
	"errors"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Free is how many bytes the filesystem of a folder has free for this user, of the
// nearest folder above one that is not there yet; 0 where nobody can say, or for "".
func Free(dir string) int64 {
	if dir == "" {
		return 0
	}
	for {
		var s unix.Statfs_t
		err := unix.Statfs(dir, &s)
		switch up := filepath.Dir(dir); {
		case err == nil:
			return int64(s.Bavail) * s.Bsize
		case !errors.Is(err, unix.ENOENT) || up == dir:
			return 0
		default:
			dir = up
		}
	}
}
