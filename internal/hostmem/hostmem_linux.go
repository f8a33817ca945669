// Package hostmem reports the memory that this process may use.
package hostmem

import (
	"math"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Machine returns the bytes of memory and swap that this process may use: the machine's, or a
// smaller limit of its control groups or address space. 0: unknown.
func Machine() int64 {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 0
	}
	total := (int64(info.Totalram) + int64(info.Totalswap)) * int64(info.Unit)
	total = min(total, groupMemory("/", "/proc/self/cgroup"))
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_AS, &limit) == nil && limit.Cur < math.MaxInt64 {
		total = min(total, int64(limit.Cur))
	}
	return total
}

// groupMemory returns the smallest memory limit of the control groups in a /proc/PID/cgroup
// file and of all their parents: memory.max of version 2, memory.limit_in_bytes of version 1.
// Inside a container the path may be the host's and not exist; then the mount's top is the
// container's own group. Without a limit it is MaxInt64. root is a prefix of every path, for
// tests.
func groupMemory(root, self string) int64 {
	least := int64(math.MaxInt64)
	look := func(file string) {
		text, err := os.ReadFile(path.Join(root, file))
		if err != nil {
			return
		}
		if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && n > 0 { // "max" is no number
			least = min(least, n)
		}
	}
	up := func(mount, group, file string) {
		for group = path.Clean("/" + group); ; group = path.Dir(group) {
			look(path.Join(mount, group, file))
			if group == "/" {
				return
			}
		}
	}
	up("/sys/fs/cgroup", "/", "memory.max")
	up("/sys/fs/cgroup/memory", "/", "memory.limit_in_bytes")
	text, err := os.ReadFile(path.Join(root, self))
	if err != nil {
		return least
	}
	for _, line := range strings.Split(string(text), "\n") { // "4:cpu,memory:/user/1", or "0::/user/1"
		id, rest, _ := strings.Cut(line, ":")
		controllers, group, ok := strings.Cut(rest, ":")
		switch {
		case !ok:
		case id == "0" && controllers == "":
			up("/sys/fs/cgroup", group, "memory.max")
			up("/sys/fs/cgroup/unified", group, "memory.max")
		case strings.Contains(","+controllers+",", ",memory,"):
			up("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes")
		}
	}
	return least
}
