package hostmem

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// limitedTo is the environment variable that makes TestAddressSpaceLimit run as the process with
// the limit.
const limitedTo = "SPILLWAY_TEST_RLIMIT_AS"

// Machine reports at most the limit of this process's address space.
func TestAddressSpaceLimit(t *testing.T) {
	const limit = 3 << 30 // less than the memory and swap of any test machine, but enough for Go and its heap
	if os.Getenv(limitedTo) != "" {
		before := Machine()
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_AS, &unix.Rlimit{Cur: limit, Max: limit}))
		fmt.Println("memory", before, Machine())
		return
	}
	c := exec.Command(os.Args[0], "-test.run=^TestAddressSpaceLimit$")
	c.Env = append(os.Environ(), limitedTo+"=1")
	out, err := c.CombinedOutput()
	require.NoError(t, err, string(out))
	var before, after int64
	_, err = fmt.Sscanf(string(out), "memory %d %d", &before, &after)
	require.NoError(t, err, string(out))
	require.Equal(t, min(before, limit), after)
	require.LessOrEqual(t, after, int64(limit))
}
