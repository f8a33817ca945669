//go:build unix

package training

import (
	"math"
	"net"
	"syscall"
)

// filesLeft returns a lower bound of the number of files that this process may still open. The
// kernel gives a new file the lowest free number, so all numbers below that of c are in use.
func filesLeft(c net.Conn) int {
	var limit syscall.Rlimit
	s, ok := c.(syscall.Conn)
	if !ok || syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil {
		return math.MaxInt
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return 0
	}
	left := 0
	if err := raw.Control(func(fd uintptr) { left = int(min(uint64(limit.Cur), math.MaxInt32)) - 1 - int(fd) }); err != nil {
		return 0
	}
	return left
}
