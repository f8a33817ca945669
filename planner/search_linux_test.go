package planner

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/search"
)

// opens returns a function that counts the file opens in the folders since its last call.
func opens(t *testing.T, folders ...string) func() int {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Close(fd)) })
	for _, dir := range folders {
		_, err := unix.InotifyAddWatch(fd, dir, unix.IN_OPEN)
		require.NoError(t, err)
	}
	return func() (n int) {
		buf := make([]byte, 1<<16)
		for {
			k, err := unix.Read(fd, buf)
			if err != nil || k <= 0 {
				return n
			}
			for at := 0; at+unix.SizeofInotifyEvent <= k; at += unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(buf[at+12:])) {
				n++
			}
		}
	}
}

// Resolving a configuration reads its files. A search over dozens of configurations then opens no
// file, and neither do the ways out.
func TestASearchOpensNoFile(t *testing.T) {
	c := fitConfig(t)
	c.Disk, c.DeviceMemory = t.TempDir(), 22<<20
	count := opens(t, c.Model, c.Disk, filepath.Dir(c.Model))
	_, err := os.ReadFile(filepath.Join(c.Model, "config.json"))
	require.NoError(t, err)
	require.Positive(t, count(), "an open is seen")

	r, err := c.resolve()
	require.NoError(t, err)
	hw := fewPlans()
	s, err := r.spec(hw.Machine(c.Ranks))
	require.NoError(t, err)
	require.Positive(t, count(), "the model's shape was read")
	tried := 0
	for _, limit := range []int64{26 << 20, 18 << 20} {
		s.Capacity[graph.Device] = limit
		found, err := search.Fit(t.Context(), s, search.Given{}, nil, 0, hw)
		require.NoError(t, err)
		tried += found.Tried
	}
	require.Greater(t, tried, 80)
	require.Zero(t, count())

	asked, err := search.Predict(t.Context(), s, cost.CPU(2, c.Ranks))
	require.NoError(t, err)
	require.False(t, asked.Fits())
	ways, _ := search.WaysOut(t.Context(), asked, hw)
	require.NotEmpty(t, ways)
	require.Zero(t, count())
}
