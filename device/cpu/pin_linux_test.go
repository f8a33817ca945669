package cpu

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/graph"
)

const noLocking = "SPILLWAY_TEST_NO_LOCKING"

// TestLockingRefused runs itself again in a process that may lock at most 64 KiB.
func TestLockingRefused(t *testing.T) {
	if os.Getenv(noLocking) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestLockingRefused$", "-test.v")
		cmd.Env = append(os.Environ(), noLocking+"=1")
		out, err := withoutIPCLock(cmd)
		require.NoError(t, err, string(out))
		require.Contains(t, string(out), "--- PASS")
		return
	}
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 64 << 10, Max: 64 << 10}))

	var told []string
	warn := func(s string) { told = append(told, s) }
	a, b := open(t, Options{Pin: true, Warn: warn}), open(t, Options{Pin: true, Warn: warn})
	alloc(t, a, graph.Host, 10_000)
	require.Empty(t, told, "within the limit")
	alloc(t, a, graph.Host, 1<<20)
	alloc(t, b, graph.Host, 1<<20)
	require.Len(t, told, 1, "once a process")
	require.Contains(t, told[0], "locking 1048576 bytes of host memory is refused (")
	require.Contains(t, told[0], "this process may lock 65536 bytes in all (RLIMIT_MEMLOCK); raise it with `ulimit -l`")
	require.Contains(t, told[0], "going on with unlocked memory")

	c := open(t, Options{RequirePinned: true})
	_, err := c.Alloc(graph.Host, 1<<20)
	var refused *PinError
	require.ErrorAs(t, err, &refused)
	require.ErrorContains(t, err, "rank 3: allocate 1048576 bytes of host memory: locking 1048576 bytes")
	alloc(t, c, graph.Device, 1<<20) // other spaces are not locked
	alloc(t, c, graph.Host, 4096)
}

// withoutIPCLock runs a command without the capability that exempts root from the limit. Dropping
// it affects only a locked thread, which ends with its goroutine.
func withoutIPCLock(cmd *exec.Cmd) (out []byte, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		const capIPCLock = 14
		_ = unix.Prctl(unix.PR_CAPBSET_DROP, capIPCLock, 0, 0, 0) // fails without the capability
		out, err = cmd.CombinedOutput()
	}()
	<-done
	return out, err
}

func lockedKiB(t *testing.T) (n int) {
	text, err := os.ReadFile("/proc/self/status")
	require.NoError(t, err)
	for _, line := range strings.Split(string(text), "\n") {
		if rest, ok := strings.CutPrefix(line, "VmLck:"); ok {
			_, err := fmt.Sscan(rest, &n)
			require.NoError(t, err)
		}
	}
	return n
}

// A pinned allocation locks its size rounded up to a page, and no more.
func TestPinnedMemoryHasItsExactSize(t *testing.T) {
	before := lockedKiB(t)
	c := New(0, Options{RequirePinned: true})
	const size = 5<<20 + 100
	if _, err := c.Alloc(graph.Host, size); err != nil {
		t.Skipf("this process may not lock 5 MiB: %v", err)
	}
	require.Equal(t, 5<<10+4, lockedKiB(t)-before)
	alloc(t, c, graph.Device, size)
	require.Equal(t, 5<<10+4, lockedKiB(t)-before)
	require.NoError(t, c.Close())
	require.Equal(t, before, lockedKiB(t))
}
