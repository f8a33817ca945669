package spillway

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// machineMemory returns the bytes of memory and swap that this process may use:
// the machine's, or its control group's where that is less. 0: unknown.
func machineMemory() int64 {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 0
	}
	total := (int64(info.Totalram) + int64(info.Totalswap)) * int64(info.Unit)
	if text, err := os.ReadFile("/sys/fs/cgroup/memory.max"); err == nil { // "max" where there is no limit
		if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && n > 0 {
			total = min(total, n)
		}
	}
	return total
}
