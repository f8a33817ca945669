package doctor

import (
	"golang.org/x/sys/unix"
)

// lockableBytes returns the limit on locked memory; nil: there is none, or the process may ignore
// it.
func lockableBytes() *int64 {
	const capIPCLock = 14
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if unix.Capget(&hdr, &data[0]) == nil && data[0].Effective&(1<<capIPCLock) != 0 {
		return nil
	}
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l) != nil || l.Cur == unix.RLIM_INFINITY {
		return nil
	}
	n := int64(min(l.Cur, 1<<62))
	return &n
}
