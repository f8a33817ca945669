//go:build linux

package cuda

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
)

// fixedFn is device work that can be captured.
type fixedFn struct{ fn }

func (f *fixedFn) Fixed() {}

// Enqueue allocates if the label says so, which breaks a capture.
func (f *fixedFn) Enqueue(api driver.API, s driver.Stream) error {
	if f.label == "allocates" {
		if a, err := api.Alloc(8); err == nil {
			return api.Free(a)
		}
	}
	return f.fn.Enqueue(api, s)
}

// Kernels captured as a graph run in order at each launch, between the stream's earlier and later
// work, and count as touched. A refused capture returns an error that names the operation or the
// capture.
func TestCapture(t *testing.T) {
	c, d := open(t, drivertest.Options{}, Options{})
	arena, err := c.Alloc(graph.Device, 64)
	require.NoError(t, err)
	st, err := c.NewStream(graph.Compute)
	require.NoError(t, err)
	s := st.(*Stream)
	var order []string
	at := func(off int64) device.Ptr { return device.Ptr{Arena: arena, Off: off, Len: 8} }
	work := func(label string, touches ...device.Ptr) device.Kernel {
		return &fixedFn{fn{label, touches, func() error { order = append(order, label); return nil }}}
	}
	a, b, broken := work("a", at(0)), work("b", at(48), at(8)), work("allocates", at(0))
	loose := onGPU("loose", func() { order = append(order, "loose") }, at(16))
	host := onHost("host", func() { order = append(order, "host") }, at(16))
	require.True(t, s.Captures(a))
	require.False(t, s.Captures(loose))
	for _, k := range []device.Kernel{a, b, broken, loose} {
		require.NoError(t, s.Launch(k))
	}
	_, err = s.Capture("a b", []device.Kernel{a, loose})
	require.ErrorContains(t, err, `operation "loose"`)
	_, err = s.Capture("a broken", []device.Kernel{a, broken})
	require.ErrorContains(t, err, `capture "a broken" as a CUDA graph`)
	require.ErrorContains(t, err, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED (901)")
	both, err := s.Capture("a b", []device.Kernel{a, b})
	require.NoError(t, err)
	require.NoError(t, s.Sync())
	order = nil
	for range 2 {
		for _, k := range []device.Kernel{host, both, loose} {
			require.NoError(t, s.Launch(k))
		}
	}
	require.NoError(t, s.Sync())
	require.Equal(t, []string{"host", "a", "b", "loose", "host", "a", "b", "loose"}, order)
	require.EqualValues(t, 56, arena.Touched())
	require.Equal(t, 2, d.Calls()["cuGraphLaunch"])
	require.Empty(t, c.Running())

	require.NoError(t, s.Time(new(spans)))
	_, err = s.Capture("a b", []device.Kernel{a, b})
	require.ErrorContains(t, err, "timed one by one")
}
