//go:build linux

package cuda

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
)

// fn is device work that runs a Go function on the driver double.
type fn struct {
	label   string
	touches []device.Ptr
	run     func() error
}

func (f *fn) Label() string         { return f.label }
func (f *fn) Touches() []device.Ptr { return f.touches }
func (f *fn) Enqueue(api driver.API, s driver.Stream) error {
	return api.(*drivertest.Driver).Run(s, f.label, f.run)
}

// hostFn is a host kernel.
type hostFn struct {
	label   string
	touches []device.Ptr
	run     func() error
}

func (f *hostFn) Label() string         { return f.label }
func (f *hostFn) Touches() []device.Ptr { return f.touches }
func (f *hostFn) Run() error            { return f.run() }

func onGPU(label string, f func(), touches ...device.Ptr) device.Kernel {
	return &fn{label, touches, func() error { f(); return nil }}
}

func onHost(label string, f func(), touches ...device.Ptr) device.Kernel {
	return &hostFn{label, touches, func() error { f(); return nil }}
}

// open returns a context on a new driver double, and the double. When the test ends, closing both
// must report no fault and no leak.
func open(t *testing.T, d drivertest.Options, o Options) (*Context, *drivertest.Driver) {
	t.Helper()
	runtime.LockOSThread()
	o.Driver = drivertest.New(d)
	c, err := New(3, o)
	require.NoError(t, err)
	double := o.Driver.(*drivertest.Driver)
	t.Cleanup(func() {
		require.NoError(t, c.Close())
		require.NoError(t, double.Close())
		runtime.UnlockOSThread()
	})
	return c, double
}

func alloc(t *testing.T, c *Context, space graph.Space, n int64) device.Ptr {
	t.Helper()
	a, err := c.Alloc(space, n)
	require.NoError(t, err)
	return device.Ptr{Arena: a, Len: n}
}

func stream(t *testing.T, c *Context, id graph.StreamID) *Stream {
	t.Helper()
	s, err := c.NewStream(id)
	require.NoError(t, err)
	return s.(*Stream)
}

func event0(t *testing.T, c *Context) device.Event {
	t.Helper()
	e, err := c.NewEvent()
	require.NoError(t, err)
	return e
}

func at(p device.Ptr, off, n int64) device.Ptr {
	return device.Ptr{Arena: p.Arena, Off: p.Off + off, Len: n}
}

func TestCapacityIsAWall(t *testing.T) {
	o := Options{}
	o.Capacity[graph.Device] = 1000
	c, _ := open(t, drivertest.Options{Memory: 1 << 20, Used: 1<<20 - 800}, o)
	alloc(t, c, graph.Device, 600)
	_, err := c.Alloc(graph.Device, 401)
	require.EqualError(t, err, "rank 3: allocate 401 bytes of device memory: the capacity is 1000 bytes, of which 600 are in use")
	_, err = c.Alloc(graph.Device, 400)
	require.EqualError(t, err, "rank 3: allocate 400 bytes of device memory: cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory; "+
		"200 of the GPU's 1048576 bytes are free", "an arena larger than what is free")
	alloc(t, c, graph.Device, 200)
	_, err = c.Alloc(graph.Disk, 1)
	require.ErrorContains(t, err, "the rank was given no folder for it (Config.Disk DIR)")
	_, err = c.Alloc(graph.Host, 0)
	require.ErrorContains(t, err, "positive")
}

func TestMemoryByAddressAndByView(t *testing.T) {
	c, double := open(t, drivertest.Options{}, Options{Poison: true})
	d, h := alloc(t, c, graph.Device, 64), alloc(t, c, graph.Host, 100)
	a, err := Address(at(d, 8, 4))
	require.NoError(t, err)
	b, err := double.Bytes(a, 4)
	require.NoError(t, err)
	require.Equal(t, []byte{255, 255, 255, 255}, b, "poisoned")
	view, err := c.HostBytes(at(h, 10, 90))
	require.NoError(t, err)
	require.Len(t, view, 90)
	cpuView, err := cpu.Slice[uint16](at(h, 10, 90))
	require.NoError(t, err)
	view[0], view[1] = 1, 2
	require.Equal(t, uint16(0x0201), cpuView[0], "the CPU's kernels compute on it")
	_, err = cpu.Bytes(d)
	require.ErrorContains(t, err, "the GPU's device memory, which the host doesn't reach")
	_, err = c.HostBytes(d)
	require.ErrorContains(t, err, "in device memory, want host memory")
	for _, bad := range []struct {
		p    device.Ptr
		want string
	}{
		{device.Ptr{}, "absent"},
		{at(d, 60, 8), "bytes [60, 68) are outside the device arena of 64 bytes"},
		{device.Ptr{Arena: other{}, Len: 8}, "not memory of the CUDA device (cuda.other)"},
	} {
		_, err := Address(bad.p)
		require.ErrorContains(t, err, bad.want)
	}
}

type other struct{}

func (other) Space() graph.Space { return graph.Device }
func (other) Size() int64        { return 100 }
func (other) Touched() int64     { return 0 }

// In random programs of device and host work over all streams, work after a Wait must see all work
// before the Record that it refers to. Within a stream, work runs in order.
func TestRandomProgramsKeepTheirOrder(t *testing.T) {
	for seed := uint64(0); seed < 8; seed++ {
		rng := rand.New(rand.NewPCG(seed, 0))
		c, double := open(t, drivertest.Options{Seed: seed}, Options{Queue: 8})
		mem := alloc(t, c, graph.Host, 1<<10)
		const nStreams, events = 4, 6
		var streams [nStreams]*Stream
		for i := range streams {
			streams[i] = stream(t, c, graph.StreamID(i))
		}
		var evs [events]device.Event
		type counts [nStreams]int
		var recorded [events]counts // the work that must have run once the event is waited for
		var must [nStreams]counts
		for i := range evs {
			evs[i] = event0(t, c)
		}
		var launched counts
		ran := make([]chan int, nStreams) // each holds one int: the number of operations that have run
		for i := range ran {
			ran[i] = make(chan int, 1)
			ran[i] <- 0
		}
		for range 600 {
			s, e := rng.IntN(nStreams), rng.IntN(events)
			switch rng.IntN(5) {
			case 0:
				require.NoError(t, streams[s].Record(evs[e]))
				recorded[e] = must[s]
				recorded[e][s] = launched[s]
			case 1:
				require.NoError(t, streams[s].Wait(evs[e]))
				for i, n := range recorded[e] {
					must[s][i] = max(must[s][i], n)
				}
			default:
				want := must[s]
				want[s] = launched[s]
				launched[s]++
				run := func() error {
					for i := range want {
						n := <-ran[i]
						ran[i] <- n
						if n < want[i] || i == s && n != want[i] {
							return fmt.Errorf("stream %d has run %d, want %d", i, n, want[i])
						}
					}
					ran[s] <- 1 + <-ran[s]
					return nil
				}
				// Each stream writes its own bytes and reads those of the streams that it has
				// waited for.
				touches := []device.Ptr{at(mem, int64(s)*8, 8)}
				k := device.Kernel(&fn{"gpu", touches, run})
				if rng.IntN(2) == 0 {
					k = &hostFn{"host", touches, run}
				}
				require.NoError(t, streams[s].Launch(k))
			}
		}
		for _, s := range streams {
			require.NoError(t, s.Sync(), "seed %d", seed)
		}
		require.Empty(t, double.Faults(), "seed %d", seed)
		require.Equal(t, int64(nStreams*8), mem.Arena.Touched())
	}
}

// Events order a stream's host kernels with device work of other streams, in both directions.
func TestHostKernelsAreInOrderWithDeviceWork(t *testing.T) {
	c, double := open(t, drivertest.Options{}, Options{})
	d, h := alloc(t, c, graph.Device, 400), alloc(t, c, graph.Host, 400)
	view, err := c.HostBytes(h)
	require.NoError(t, err)
	a, b := stream(t, c, graph.Compute), stream(t, c, graph.CopyOut)
	e, back := event0(t, c), event0(t, c)
	down, err := c.Copy("down", h, d)
	require.NoError(t, err)
	up, err := c.Copy("up", d, h)
	require.NoError(t, err)
	inc := onHost("inc", func() {
		time.Sleep(time.Millisecond)
		for i := range view {
			view[i]++
		}
	}, h)
	p, err := c.Poison("start", d)
	require.NoError(t, err)
	require.NoError(t, a.Launch(p))
	for range 20 {
		require.NoError(t, a.Record(e))
		require.NoError(t, b.Wait(e))
		for _, k := range []device.Kernel{down, inc, inc, up} {
			require.NoError(t, b.Launch(k))
		}
		require.NoError(t, b.Record(back))
		require.NoError(t, a.Wait(back))
		require.NoError(t, a.Launch(onGPU("look", func() {}, d)))
	}
	require.NoError(t, a.Sync())
	require.NoError(t, b.Sync())
	require.Equal(t, byte(39), view[17], "255 and forty times 1")
	require.Empty(t, double.Faults())
	require.Positive(t, double.Calls()["cuStreamWaitValue32_v2"])
}

// Without the wait the driver double must report a race. This shows that the tests above can fail.
func TestADroppedWaitIsFound(t *testing.T) {
	for _, drop := range []bool{true, false} {
		runtime.LockOSThread()
		double := drivertest.New(drivertest.Options{})
		c, err := New(0, Options{Driver: double})
		require.NoError(t, err)
		h := alloc(t, c, graph.Host, 40)
		a, b := stream(t, c, graph.Compute), stream(t, c, graph.HostWork)
		e := event0(t, c)
		require.NoError(t, b.Launch(onHost("update", func() {}, h)))
		require.NoError(t, b.Record(e))
		if !drop {
			require.NoError(t, a.Wait(e))
		}
		require.NoError(t, a.Launch(onGPU("read", func() {}, h)))
		require.NoError(t, a.Sync())
		require.NoError(t, b.Sync())
		require.Equal(t, drop, len(double.Faults()) > 0)
		require.NoError(t, c.Close())
		_ = double.Close()
		runtime.UnlockOSThread()
	}
}

func TestTouchedIsWhatRan(t *testing.T) {
	c, _ := open(t, drivertest.Options{}, Options{})
	p, h := alloc(t, c, graph.Device, 1000), alloc(t, c, graph.Host, 1000)
	s := stream(t, c, graph.Compute)
	require.NoError(t, s.Launch(onGPU("k", func() {}, at(p, 100, 50), at(p, 0, 10))))
	require.NoError(t, s.Launch(onHost("h", func() {}, at(h, 0, 77))))
	require.NoError(t, s.Sync())
	require.Equal(t, int64(150), p.Arena.Touched())
	require.Equal(t, int64(77), h.Arena.Touched())
	k, err := c.Copy("c", at(p, 400, 100), at(p, 200, 100))
	require.NoError(t, err)
	require.Equal(t, int64(150), p.Arena.Touched(), "binding touches nothing")
	require.NoError(t, s.Launch(k))
	require.NoError(t, s.Sync())
	require.Equal(t, int64(500), p.Arena.Touched())
	require.NoError(t, s.Launch(&fn{"bad", []device.Ptr{at(p, 0, 900)}, func() error { return errors.New("boom") }}))
	require.Error(t, s.Sync())
	require.Equal(t, int64(500), p.Arena.Touched(), "a failed operation has no result")
}

func TestCopyRefusesWhatItCantMove(t *testing.T) {
	c, _ := open(t, drivertest.Options{}, Options{})
	d := alloc(t, c, graph.Device, 100)
	h := alloc(t, c, graph.Host, 100)
	_, err := c.Copy("x", at(d, 0, 10), at(h, 0, 11))
	require.ErrorContains(t, err, `copy "x": length: destination has 10 bytes, source 11`)
	_, err = c.Copy("x", at(d, 0, 10), at(d, 5, 10))
	require.ErrorContains(t, err, "overlap")
	peer, err := New(4, Options{Driver: c.Driver()})
	require.NoError(t, err)
	q := alloc(t, peer, graph.Device, 10)
	_, err = c.Copy("x", q, at(d, 0, 10))
	require.ErrorContains(t, err, "destination: memory of rank 4, want rank 3's own")
	s := stream(t, c, graph.Compute)
	err = s.Launch(onGPU("reach", func() {}, q))
	require.ErrorContains(t, err, `rank 3, stream compute, operation "reach": operand: memory of rank 4, want rank 3's own`)
	require.ErrorContains(t, s.Launch(foreign{}), `operation "f": not a kernel of the CUDA device (cuda.foreign)`)
	require.ErrorContains(t, s.Wait(event0(t, peer)), "not an event of this context")
	require.ErrorContains(t, s.Record(7), "not an event of this context")
	require.NoError(t, s.Sync())
	require.NoError(t, peer.Close())
}

type foreign struct{}

func (foreign) Label() string         { return "f" }
func (foreign) Touches() []device.Ptr { return nil }

type spans []time.Duration

func (s *spans) Ran(a, b time.Duration) { *s = append(*s, a, b) }

func TestTimer(t *testing.T) {
	c, _ := open(t, drivertest.Options{}, Options{})
	s := stream(t, c, graph.Compute)
	var got spans
	require.NoError(t, s.Time(&got))
	before := device.Now()
	const long = 20 * time.Millisecond
	wait := func() { time.Sleep(long) }
	require.NoError(t, s.Launch(onGPU("k", wait)))
	require.NoError(t, s.Launch(onHost("k", wait)))
	require.NoError(t, s.Launch(onGPU("k", wait)))
	require.NoError(t, s.Sync())
	for range 600 { // more than the context holds at a time
		require.NoError(t, s.Launch(onGPU("k", func() {})))
	}
	require.NoError(t, s.Sync())
	require.Len(t, got, 1206)
	const slack = 10 * time.Millisecond // accuracy of matching the two clocks
	require.Greater(t, got[0], before-slack)
	for i := 0; i < 6; i += 2 {
		require.GreaterOrEqual(t, got[i+1]-got[i], long-time.Millisecond)
	}
	for i := 2; i < len(got); i += 2 {
		require.Greater(t, got[i], got[i-1]-slack)
	}
	require.Less(t, got[len(got)-1], device.Now()+slack)
}

func TestUseAfterClose(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	double := drivertest.New(drivertest.Options{})
	c, err := New(0, Options{Driver: double})
	require.NoError(t, err)
	s := stream(t, c, graph.Compute)
	h := alloc(t, c, graph.Host, 8)
	done := 0
	require.NoError(t, s.Launch(onHost("k", func() { time.Sleep(5 * time.Millisecond); done++ })))
	require.NoError(t, s.Launch(onGPU("k", func() { done++ })))
	require.NoError(t, c.Close())
	require.Equal(t, 2, done, "close runs what is enqueued")
	require.NoError(t, c.Close())
	require.ErrorContains(t, s.Launch(onGPU("k", func() {})), "closed")
	require.ErrorContains(t, s.Sync(), "closed")
	_, err = c.NewStream(graph.Comm)
	require.ErrorContains(t, err, "closed")
	c.Abort(errors.New("a peer failed later"))
	require.Empty(t, c.Running())
	_, err = c.HostBytes(h)
	require.ErrorContains(t, err, "closed")
	_, err = c.Alloc(graph.Device, 8)
	require.ErrorContains(t, err, "closed")
	require.NoError(t, double.Close())
}
