//go:build unix

package data

import (
	"os"

	"golang.org/x/sys/unix"
)

// mapFile maps the first size bytes of f read-only, size > 0. f may be closed
// afterwards.
func mapFile(f *os.File, size int64) ([]byte, func() error, error) {
	if int64(int(size)) != size {
		return nil, nil, unix.EFBIG
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, os.NewSyscallError("mmap", err)
	}
	return data, func() error { return os.NewSyscallError("munmap", unix.Munmap(data)) }, nil
}

// dropName removes the name of an open temporary file: its bytes live until
// the last descriptor and mapping of it go, however the process ends.
func dropName(f *os.File) (after func(), err error) {
	return func() {}, os.Remove(f.Name())
}
