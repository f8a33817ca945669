//go:build unix

package cpu

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// warnPin limits the warning about unlocked memory to one in a process.
var warnPin sync.Once

// pin locks a mapping's pages into memory. If that fails, it warns, or returns an error with
// RequirePinned.
func (c *Context) pin(m mapping) error {
	err := unix.Mlock(m.data) // the kernel rounds to pages, no further
	if err == nil {
		return nil
	}
	refused := &PinError{Bytes: m.size, Advice: lockAdvice(), Err: err}
	if c.opts.RequirePinned {
		return refused
	}
	if c.opts.Warn != nil {
		warnPin.Do(func() { c.opts.Warn(refused.Error() + "; going on with unlocked memory") })
	}
	return nil
}

// lockAdvice describes the limit on locked memory and how to raise it.
func lockAdvice() string {
	var l unix.Rlimit
	if e := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l); e != nil {
		return ""
	}
	if l.Cur == unix.RLIM_INFINITY {
		return "its limit (RLIMIT_MEMLOCK) allows it, so the machine has too little memory"
	}
	return fmt.Sprintf("this process may lock %d bytes in all (RLIMIT_MEMLOCK); raise it with `ulimit -l` in the shell, a memlock line in /etc/security/limits.conf, "+
		"LimitMEMLOCK= of a systemd unit, or a memlock ulimit of -1 for a container", l.Cur)
}
