package nulldevice_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/nulldevice"
)

func TestLaunchTouchesAndRunsNothing(t *testing.T) {
	c := nulldevice.New(2)
	a, err := c.Alloc(graph.Device, 1<<50)
	require.NoError(t, err)
	s, err := c.NewStream(graph.Compute)
	require.NoError(t, err)
	e, err := c.NewEvent()
	require.NoError(t, err)
	at := func(off, n int64) device.Ptr { return device.Ptr{Arena: a, Off: off, Len: n} }
	require.NoError(t, s.Wait(e))
	require.NoError(t, s.Launch(nulldevice.NewKernel("k", at(1<<40, 8), device.Ptr{}, at(0, 4))))
	require.NoError(t, s.Record(e))
	require.Equal(t, int64(1<<40+8), a.Touched())
	k, err := c.Copy("c", at(1<<41, 8), at(0, 8))
	require.NoError(t, err)
	require.NoError(t, s.Launch(k))
	require.NoError(t, s.Sync())
	require.Equal(t, int64(1<<41+8), a.Touched())
	require.Equal(t, int64(2), c.Launches(graph.Compute))

	_, err = c.Copy("c", at(0, 8), at(0, 9))
	require.ErrorContains(t, err, "destination has 8 bytes, source 9")
	require.ErrorContains(t, s.Launch(nulldevice.NewKernel("far", at(1<<50, 1))), `rank 2, stream compute, operation "far": operand: bytes [`)
	require.ErrorContains(t, s.Launch(other{}), "not a kernel of the null device (nulldevice_test.other)")
	require.ErrorContains(t, s.Record(7), "not an event of this context")
	foreign := cpu.New(0, cpu.Options{})
	defer foreign.Close()
	m, err := foreign.Alloc(graph.Device, 8)
	require.NoError(t, err)
	require.ErrorContains(t, s.Launch(nulldevice.NewKernel("x", device.Ptr{Arena: m, Len: 8})), "not memory of the null device")
	_, err = c.Alloc(graph.Host, -1)
	require.ErrorContains(t, err, "positive")
}

type other struct{}

func (other) Label() string         { return "o" }
func (other) Touches() []device.Ptr { return nil }

func TestHostBytesKeepWhatTheHostWrote(t *testing.T) {
	c := nulldevice.New(0)
	a, err := c.Alloc(graph.Host, 100)
	require.NoError(t, err)
	p := device.Ptr{Arena: a, Off: 8, Len: 16}
	b, err := c.HostBytes(p)
	require.NoError(t, err)
	b[3] = 9
	again, err := c.HostBytes(p)
	require.NoError(t, err)
	require.Equal(t, byte(9), again[3])
	d, err := c.Alloc(graph.Device, 100)
	require.NoError(t, err)
	_, err = c.HostBytes(device.Ptr{Arena: d, Len: 8})
	require.ErrorContains(t, err, "want host memory")
}

type times int

func (n *times) Ran(start, end time.Duration) { *n++ }

func TestAbortIsSticky(t *testing.T) {
	c := nulldevice.New(0)
	s, err := c.NewStream(graph.Comm)
	require.NoError(t, err)
	var n times
	require.NoError(t, s.(device.Timed).Time(&n))
	require.NoError(t, s.Launch(nulldevice.NewKernel("k")))
	require.Equal(t, times(1), n)
	var got error
	c.OnError(func(err error) { got = err })
	boom := errors.New("boom")
	c.Abort(boom)
	c.Abort(errors.New("later"))
	require.Equal(t, boom, got)
	require.ErrorIs(t, s.Launch(nulldevice.NewKernel("k")), boom)
	require.ErrorIs(t, s.Sync(), boom)
	require.Equal(t, times(1), n)
}
