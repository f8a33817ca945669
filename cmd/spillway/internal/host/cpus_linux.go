package host

import (
	"os"
	"runtime"
	"strconv"
	"strings"
)

// OnlineCPUs returns the number of processors of the machine, regardless of this process's
// affinity.
func OnlineCPUs() int {
	b, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err != nil {
		return runtime.NumCPU()
	}
	return countCPUs(string(b))
}

// countCPUs counts the processors of a list such as "0-3,8".
func countCPUs(list string) (n int) {
	for _, part := range strings.Split(strings.TrimSpace(list), ",") {
		from, to, isRange := strings.Cut(part, "-")
		a, err := strconv.Atoi(from)
		b := a
		if isRange && err == nil {
			b, err = strconv.Atoi(to)
		}
		if err != nil || b < a {
			return runtime.NumCPU()
		}
		n += b - a + 1
	}
	return n
}
