//go:build unix

package checkpoint

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// tryLock takes the lock of an open file; false where another process has it.
func tryLock(f *os.File) (bool, error) {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("its filesystem gives no locks (flock: %w); two runs could write there at once", err)
	}
	return true, nil
}

// noFollow keeps a link under a lock's or marks' name from being written through.
const noFollow = syscall.O_NOFOLLOW | syscall.O_NONBLOCK
