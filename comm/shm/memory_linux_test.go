package shm

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// pmdMapped returns how many bytes of b's mapping are huge pages of shared memory.
func pmdMapped(t *testing.T, b []byte) int {
	text, err := os.ReadFile("/proc/self/smaps")
	require.NoError(t, err)
	start := strconv.FormatInt(address(b), 16) + "-"
	_, rest, found := strings.Cut("\n"+string(text), "\n"+start)
	require.True(t, found, "no mapping begins at %s", start)
	_, rest, found = strings.Cut(rest, "ShmemPmdMapped:")
	require.True(t, found)
	kb, err := strconv.Atoi(strings.Fields(rest)[0])
	require.NoError(t, err)
	return kb << 10
}

func TestArenasAreOnHugePages(t *testing.T) {
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), "test")
	defer f.Close()
	const bytes = 2*hugeSize + 12345
	require.NoError(t, f.Truncate(hugeSize+bytes))
	own, err := mapFile(f, hugeSize, bytes)
	require.NoError(t, err)
	require.Len(t, own.data, bytes)
	advised := huge(own.data)
	require.True(t, slices.Equal(make([]byte, bytes), own.data))
	for i := range own.data {
		own.data[i] = byte(i % 251)
	}
	peer, err := mapFile(f, hugeSize, bytes)
	require.NoError(t, err)
	require.True(t, slices.Equal(own.data, peer.data))
	require.Zero(t, (address(own.data)|address(peer.data))%hugeSize)
	if advised == nil {
		require.Positive(t, pmdMapped(t, own.data))
	} else {
		t.Logf("the system gives no huge pages here: %v", advised)
	}
	require.NoError(t, peer.unmap())
	require.NoError(t, own.unmap())

	require.NoError(t, huge(make([]byte, hugeSize-1)), "nothing to put on a huge page")
}

// If the address space is too small for a rank's memory, the error says which limit to raise.
func TestAMappingWithoutAddressSpace(t *testing.T) {
	f, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer f.Close()
	_, err = mapFile(f, 0, 1<<60)
	require.EqualError(t, err, "mmap: cannot allocate memory: a process maps the memory of all ranks: raise ulimit -v")
}
