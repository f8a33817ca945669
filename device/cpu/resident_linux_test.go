package cpu

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/graph"
)

func TestArenaIsZeroLazyAndReleased(t *testing.T) {
	c := New(0, Options{})
	const size = 64<<20 + 100
	p := alloc(t, c, graph.Device, size)
	b, err := Bytes(p)
	require.NoError(t, err)
	require.Len(t, b, size)
	require.Zero(t, address(b)%hugeSize)
	resident := func() (n int) {
		page := os.Getpagesize()
		vec := make([]byte, (size+page-1)/page)
		require.NoError(t, mincore(b, vec))
		for _, v := range vec {
			n += int(v & 1)
		}
		return n * page
	}
	require.Zero(t, resident(), "nothing was touched")
	b[10<<20] = 1
	require.LessOrEqual(t, resident(), hugeSize, "one page was touched")
	require.Zero(t, b[0])
	require.Zero(t, b[size-1])
	addr := b
	require.NoError(t, c.Close())
	require.Error(t, mincore(addr, make([]byte, size)), "unmapped")
	_, err = Bytes(p)
	require.ErrorContains(t, err, "closed")
	_, err = c.Alloc(graph.Device, 1)
	require.ErrorContains(t, err, "closed")
}

func mincore(b, vec []byte) error {
	_, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(address(b)), uintptr(len(b)), uintptr(address(vec)))
	if e != 0 {
		return e
	}
	return nil
}
