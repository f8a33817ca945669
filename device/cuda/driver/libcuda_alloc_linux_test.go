// The race detector's build allocates in calls that otherwise do not.

//go:build !race

package driver

import (
	"testing"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
)

// The driver calls of a training step allocate no Go memory. A function of the C library stands in
// for each driver function: it returns 0 for any arguments.
func TestCallsAllocateNothing(t *testing.T) {
	zero, err := purego.Dlsym(purego.RTLD_DEFAULT, "sched_yield")
	if err != nil {
		t.Skip("the C library has no sched_yield to call")
	}
	l := &libcuda{}
	for _, at := range l.symbols() {
		*at = zero
	}
	var args Args
	p, n := args.Pointer(8).Int64(1).Packed()
	one := Dim{1, 1, 1}
	run := func() {
		_ = l.Record(1, 2)
		_ = l.Wait(1, 2)
		_, _ = l.Done(1)
		_ = l.WriteValue(1, 2, 3)
		_ = l.WaitValue(1, 2, 3)
		_ = l.CopyOnDevice(1, 2, 3, 4)
		_ = l.CopyPeer(1, 2, 3, 4, 5, 6)
		_ = l.Launch(1, one, one, 0, 2, p, n)
	}
	run()
	require.Zero(t, alloctest.PerRun(100, run))
}
