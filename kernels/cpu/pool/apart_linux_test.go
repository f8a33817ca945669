package pool

import (
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestWorkerMovesOffAnOccupiedCore(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("one core")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, after unix.CPUSet
	require.NoError(t, unix.SchedGetaffinity(0, &before))
	p := new(places)
	p.init(2)

	// All cores but one are occupied, so it does not matter on which core this runs.
	free := nowhere
	for cpu := range p.on {
		if before.IsSet(cpu) {
			p.on[cpu].Store(1)
			free = cpu
		}
	}
	p.on[free].Store(0)
	require.NotEqual(t, nowhere, free)
	got := p.enter(true)
	require.Equal(t, free, got)
	require.EqualValues(t, 1, p.on[free].Load())
	require.NoError(t, unix.SchedGetaffinity(0, &after))
	require.Equal(t, before, after, "the worker stays free to be moved")
	p.leave(got)
	require.Zero(t, p.on[free].Load())
}

func TestCallersAndCrowdsStay(t *testing.T) {
	p := new(places)
	p.init(2)
	for cpu := range p.on {
		p.on[cpu].Store(1)
	}
	require.Equal(t, nowhere, p.move(), "no core is free")
	for cpu := range p.on {
		p.on[cpu].Store(0)
	}
	p.moved.Store(time.Now().Add(time.Hour).UnixNano())
	require.Equal(t, nowhere, p.move(), "one moved a moment ago")
	p.moved.Store(time.Now().Add(-time.Second).UnixNano())
	require.NotEqual(t, nowhere, p.move())

	crowd := new(places)
	crowd.init(runtime.NumCPU() + 1)
	require.Equal(t, nowhere, crowd.enter(true))
	crowd.leave(nowhere)
}
