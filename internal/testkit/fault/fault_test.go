package fault_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/fault"
	"github.com/spillway-ml/spillway/internal/testkit/nulldevice"
)

type kernel struct {
	label string
	runs  *int
}

func (k kernel) Label() string         { return k.label }
func (k kernel) Touches() []device.Ptr { return nil }
func (k kernel) Run() error            { *k.runs++; return nil }

func open(t *testing.T, p fault.Plan) (*fault.Context, device.Stream) {
	c := fault.Wrap(cpu.New(1, cpu.Options{}), p)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	s, err := c.NewStream(graph.Compute)
	require.NoError(t, err)
	return c, s
}

func TestNthMatchingLaunchFails(t *testing.T) {
	for _, mode := range []fault.Mode{fault.AtLaunch, fault.WhenRun, fault.Panic} {
		c, s := open(t, fault.Plan{Launch: 2, Label: "ln", Mode: mode})
		runs := 0
		for _, label := range []string{"h.0/ln", "h.0/gelu"} {
			require.NoError(t, s.Launch(kernel{label, &runs}))
		}
		require.NoError(t, s.Sync())
		require.False(t, c.Fired())
		err := s.Launch(kernel{"h.1/ln", &runs})
		require.Equal(t, mode == fault.AtLaunch, err != nil)
		require.True(t, c.Fired())
		err = s.Sync()
		require.ErrorContains(t, err, `rank 1, stream compute, operation "h.1/ln": `)
		require.Equal(t, mode != fault.Panic, errors.Is(err, fault.ErrInjected))
		require.Equal(t, 2, runs)
	}
}

func TestHangEndsWithAbort(t *testing.T) {
	c, s := open(t, fault.Plan{Launch: 1, Mode: fault.Hang})
	runs := 0
	require.NoError(t, s.Launch(kernel{"k", &runs}))
	lost := errors.New("lost")
	go c.Abort(lost)
	require.ErrorIs(t, s.Sync(), lost)
	require.Zero(t, runs)
}

func TestNothingPlannedChangesNothing(t *testing.T) {
	c, s := open(t, fault.Plan{})
	runs := 0
	for range 3 {
		require.NoError(t, s.Launch(kernel{"k", &runs}))
	}
	require.NoError(t, s.Sync())
	require.Equal(t, 3, runs)
	a, err := c.Alloc(graph.Device, 64)
	require.NoError(t, err)
	p, err := c.Poison("p", device.Ptr{Arena: a, Len: 64})
	require.NoError(t, err)
	require.NoError(t, s.Launch(p))
	require.NoError(t, s.Sync())
	require.Equal(t, int64(64), a.Touched())
}

func TestAllocAndCopyFail(t *testing.T) {
	c, _ := open(t, fault.Plan{Alloc: true, Space: graph.Host, Copy: "park"})
	_, err := c.Alloc(graph.Host, 64)
	require.ErrorIs(t, err, fault.ErrInjected)
	a, err := c.Alloc(graph.Device, 64)
	require.NoError(t, err)
	p := device.Ptr{Arena: a, Len: 8}
	_, err = c.Copy("h.0/park", p, p)
	require.ErrorIs(t, err, fault.ErrInjected)
	_, err = c.Copy("h.0/fetch", p, p)
	require.NoError(t, err)
}

func TestOtherDevicesRefuseWhatOnlyTheCPURuns(t *testing.T) {
	c := fault.Wrap(nulldevice.New(0), fault.Plan{Launch: 1, Mode: fault.WhenRun})
	s, err := c.NewStream(graph.Compute)
	require.NoError(t, err)
	require.ErrorContains(t, s.Launch(nulldevice.NewKernel("k")), "not a kernel of the null device")
}
