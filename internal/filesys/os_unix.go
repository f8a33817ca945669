//go:build unix

package filesys

import (
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// NoWait does not wait for a pipe's writer, nor for a terminal's carrier.
	NoWait = syscall.O_NONBLOCK
	// NoFollow keeps a link from being written through.
	NoFollow = syscall.O_NOFOLLOW
)

func tryLock(f *os.File) (bool, error) {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}
