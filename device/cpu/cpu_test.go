package cpu

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
)

// fn is a kernel that runs a function.
type fn struct {
	label   string
	touches []device.Ptr
	run     func() error
}

func (f *fn) Label() string         { return f.label }
func (f *fn) Touches() []device.Ptr { return f.touches }
func (f *fn) Run() error            { return f.run() }

func do(label string, f func(), touches ...device.Ptr) *fn {
	return &fn{label, touches, func() error { f(); return nil }}
}

func open(t *testing.T, o Options) *Context {
	c := New(3, o)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func alloc(t *testing.T, c *Context, space graph.Space, n int64) device.Ptr {
	a, err := c.Alloc(space, n)
	require.NoError(t, err)
	return device.Ptr{Arena: a, Len: n}
}

func stream(t *testing.T, c *Context, id graph.StreamID) device.Stream {
	s, err := c.NewStream(id)
	require.NoError(t, err)
	return s
}

func event0(t *testing.T, c *Context) device.Event {
	e, err := c.NewEvent()
	require.NoError(t, err)
	return e
}

func TestCapacityIsAWall(t *testing.T) {
	var o Options
	o.Capacity[graph.Device] = 1000
	c := open(t, o)
	alloc(t, c, graph.Device, 600)
	alloc(t, c, graph.Host, 1<<20)
	_, err := c.Alloc(graph.Device, 401)
	require.EqualError(t, err, "rank 3: allocate 401 bytes of device memory: the capacity is 1000 bytes, of which 600 are in use")
	alloc(t, c, graph.Device, 400)
	_, err = c.Alloc(graph.Disk, 1)
	require.ErrorContains(t, err, "allocate 1 bytes of disk memory: the rank was given no folder for it (Config.Disk DIR)")
	_, err = c.Alloc(graph.Host, 0)
	require.ErrorContains(t, err, "positive")
}

func TestSliceChecksRangeAndAlignment(t *testing.T) {
	c := open(t, Options{Poison: true})
	p := alloc(t, c, graph.Device, 64)
	f, err := Slice[float32](device.Ptr{Arena: p.Arena, Off: 8, Len: 12})
	require.NoError(t, err)
	require.Len(t, f, 3)
	require.True(t, f[0] != f[0], "poison is NaN")
	for _, bad := range []struct {
		p    device.Ptr
		want string
	}{
		{device.Ptr{}, "absent"},
		{device.Ptr{Arena: p.Arena, Off: 60, Len: 8}, "bytes [60, 68) are outside the device arena of 64 bytes"},
		{device.Ptr{Arena: p.Arena, Off: -4, Len: 4}, "outside"},
		{device.Ptr{Arena: p.Arena, Off: 4, Len: -4}, "outside"},
		{device.Ptr{Arena: p.Arena, Off: 1 << 62, Len: 1 << 62}, "outside"},
		{device.Ptr{Arena: p.Arena, Off: 4, Len: 8}, "elements of 8 bytes"},
		{device.Ptr{Arena: p.Arena, Off: 8, Len: 12}, "elements of 8 bytes"},
		{device.Ptr{Arena: other{}, Len: 8}, "not memory of the CPU device (cpu.other)"},
	} {
		_, err := Slice[float64](bad.p)
		require.ErrorContains(t, err, bad.want)
	}
	empty, err := Slice[float32](device.Ptr{Arena: p.Arena, Off: 64})
	require.NoError(t, err)
	require.Empty(t, empty)
}

type other struct{}

func (other) Space() graph.Space { return graph.Device }
func (other) Size() int64        { return 100 }
func (other) Touched() int64     { return 0 }

func TestStreamsAreOrderedByEventsOnly(t *testing.T) {
	c := open(t, Options{Queue: 4})
	a, b := stream(t, c, graph.Compute), stream(t, c, graph.Comm)
	e := event0(t, c)
	gate := make(chan struct{})
	var mu sync.Mutex
	var order []string
	note := func(s string) *fn {
		return do(s, func() { mu.Lock(); order = append(order, s); mu.Unlock() })
	}
	require.NoError(t, a.Launch(do("gate", func() { <-gate })))
	require.NoError(t, a.Launch(note("a")))
	require.NoError(t, a.Record(e))
	require.NoError(t, b.Launch(note("b before")))
	require.NoError(t, b.Wait(e))
	require.NoError(t, b.Launch(note("b after")))
	for { // b runs what is before the wait while a is held
		mu.Lock()
		n := len(order)
		mu.Unlock()
		if n == 1 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	close(gate)
	require.NoError(t, b.Sync())
	require.Equal(t, []string{"b before", "a", "b after"}, order)
}

// A Wait refers to the latest Record before it. Recording the event again later, on the same or
// another stream, does not change what it waits for.
func TestEventRecordedAgain(t *testing.T) {
	c := open(t, Options{})
	a, b, d := stream(t, c, graph.Compute), stream(t, c, graph.Comm), stream(t, c, graph.CopyIn)
	e := event0(t, c)
	require.NoError(t, b.Wait(e), "never recorded: no wait")
	gate1, gate2 := make(chan struct{}), make(chan struct{})
	var first, second bool
	see := func(label string, ok func() bool) *fn {
		return &fn{label: label, run: func() error {
			if !ok() {
				return errors.New("too early or too late")
			}
			return nil
		}}
	}
	require.NoError(t, a.Launch(do("first", func() { <-gate1; first = true })))
	require.NoError(t, a.Record(e))
	require.NoError(t, b.Wait(e))
	require.NoError(t, b.Launch(see("waiter", func() bool { return first && !second })))
	require.NoError(t, a.Launch(do("second", func() { <-gate2; second = true })))
	require.NoError(t, d.Record(e)) // done at once: must not release b
	require.NoError(t, d.Sync())
	require.NoError(t, a.Record(e))
	require.NoError(t, d.Wait(e))
	require.NoError(t, d.Launch(see("late waiter", func() bool { return second })))
	time.Sleep(5 * time.Millisecond)
	require.Zero(t, b.(*Stream).passed.Load())
	close(gate1)
	require.NoError(t, b.Sync())
	close(gate2)
	require.NoError(t, d.Sync())
}

// In random programs over all streams, work after a Wait must see all work before the Record that
// it refers to.
func TestRandomProgramsKeepTheirOrder(t *testing.T) {
	seed := rand.Uint64()
	defer func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	}()
	rng := rand.New(rand.NewPCG(seed, 0))
	c := open(t, Options{Queue: 8})
	var streams [graph.NumStreams]device.Stream
	for i := range streams {
		streams[i] = stream(t, c, graph.StreamID(i))
	}
	const events = 6
	var evs [events]device.Event
	type mark struct{ counts [graph.NumStreams]int }
	var recorded [events]mark // the work that must have run once the event is waited for
	var must [graph.NumStreams]mark
	var ran [graph.NumStreams]struct {
		sync.Mutex
		n int
	}
	for i := range evs {
		evs[i] = event0(t, c)
	}
	var launched [graph.NumStreams]int
	for range 3000 {
		s, e := rng.IntN(len(streams)), rng.IntN(events)
		switch rng.IntN(4) {
		case 0:
			require.NoError(t, streams[s].Record(evs[e]))
			recorded[e] = must[s]
			recorded[e].counts[s] = launched[s]
		case 1:
			require.NoError(t, streams[s].Wait(evs[e]))
			for i, n := range recorded[e].counts {
				must[s].counts[i] = max(must[s].counts[i], n)
			}
		default:
			want := must[s]
			launched[s]++
			require.NoError(t, streams[s].Launch(&fn{label: "k", run: func() error {
				for i := range want.counts {
					ran[i].Lock()
					n := ran[i].n
					ran[i].Unlock()
					if i != s && n < want.counts[i] {
						return fmt.Errorf("stream %d has run %d of %d", i, n, want.counts[i])
					}
				}
				ran[s].Lock()
				ran[s].n++
				ran[s].Unlock()
				return nil
			}}))
		}
	}
	for _, s := range streams {
		require.NoError(t, s.Sync())
	}
}

func TestTouchedIsWhatRan(t *testing.T) {
	c := open(t, Options{})
	p := alloc(t, c, graph.Device, 1000)
	s := stream(t, c, graph.Compute)
	at := func(off, n int64) device.Ptr { return device.Ptr{Arena: p.Arena, Off: off, Len: n} }
	during := int64(-1)
	require.NoError(t, s.Launch(do("k", func() { during = p.Arena.Touched() }, at(100, 50), at(0, 10))))
	require.NoError(t, s.Sync())
	require.Zero(t, during, "recorded when it has run")
	require.Equal(t, int64(150), p.Arena.Touched())
	k, err := c.Copy("c", at(400, 100), at(200, 100))
	require.NoError(t, err)
	require.Equal(t, int64(150), p.Arena.Touched(), "binding touches nothing")
	require.NoError(t, s.Launch(k))
	require.NoError(t, s.Sync())
	require.Equal(t, int64(500), p.Arena.Touched())
	boom := &fn{"bad", []device.Ptr{at(0, 900)}, func() error { return errors.New("boom") }}
	require.NoError(t, s.Launch(boom))
	require.Error(t, s.Sync())
	require.Equal(t, int64(500), p.Arena.Touched(), "a failed operation has no result")
}

func TestCopyBetweenSpaces(t *testing.T) {
	c := open(t, Options{})
	d, h := alloc(t, c, graph.Device, 100), alloc(t, c, graph.Host, 100)
	s := stream(t, c, graph.CopyIn)
	b, err := c.HostBytes(h)
	require.NoError(t, err)
	for i := range b {
		b[i] = byte(i)
	}
	k, err := c.Copy("up", d, h)
	require.NoError(t, err)
	require.NoError(t, s.Launch(k))
	require.NoError(t, s.Sync())
	got, _ := Bytes(d)
	require.Equal(t, b, got)

	_, err = c.HostBytes(d)
	require.ErrorContains(t, err, "in device memory, want host memory")
	_, err = c.Copy("x", device.Ptr{Arena: d.Arena, Len: 10}, device.Ptr{Arena: h.Arena, Len: 11})
	require.ErrorContains(t, err, `copy "x": length: destination has 10 bytes, source 11`)
	_, err = c.Copy("x", device.Ptr{Arena: d.Arena, Len: 10}, device.Ptr{Arena: d.Arena, Off: 5, Len: 10})
	require.ErrorContains(t, err, "overlap")
	peer := open(t, Options{})
	q := alloc(t, peer, graph.Device, 10)
	_, err = c.Copy("x", q, device.Ptr{Arena: d.Arena, Len: 10})
	require.ErrorContains(t, err, "destination: memory of rank 3, want rank 3's own")
}

func TestForeignKernelsAndMemoryAreRefused(t *testing.T) {
	c := open(t, Options{})
	s := stream(t, c, graph.Compute)
	require.ErrorContains(t, s.Launch(foreign{}), `operation "f": not a kernel of the CPU device (cpu.foreign)`)
	peer := New(4, Options{})
	defer peer.Close()
	q := alloc(t, peer, graph.Device, 10)
	err := s.Launch(do("reach", func() {}, q))
	var oe *device.OpError
	require.ErrorAs(t, err, &oe)
	require.ErrorContains(t, err, `rank 3, stream compute, operation "reach": operand: memory of rank 4, want rank 3's own`)
	e := event0(t, peer)
	require.ErrorContains(t, s.Wait(e), "not an event of this context")
	require.ErrorContains(t, s.Record(7), "not an event of this context")
	require.NoError(t, s.Sync())
}

type foreign struct{}

func (foreign) Label() string         { return "f" }
func (foreign) Touches() []device.Ptr { return nil }

func TestErrorsAreStickyAndNameTheOperation(t *testing.T) {
	c := open(t, Options{Queue: 2})
	a, b := stream(t, c, graph.Compute), stream(t, c, graph.Comm)
	e := event0(t, c)
	hooked := make(chan error, 2)
	c.OnError(func(err error) { hooked <- err })
	boom := errors.New("boom")
	ran := false
	require.NoError(t, a.Launch(&fn{label: "h.0/ln", run: func() error { time.Sleep(10 * time.Millisecond); return boom }}))
	require.NoError(t, a.Record(e))
	require.NoError(t, b.Wait(e))
	_ = b.Launch(do("after", func() { ran = true }))
	for _, s := range []device.Stream{b, a} {
		err := s.Sync()
		require.ErrorIs(t, err, boom)
		require.EqualError(t, err, `rank 3, stream compute, operation "h.0/ln": boom`)
	}
	require.ErrorIs(t, a.Launch(do("more", func() { ran = true })), boom)
	require.ErrorIs(t, a.Record(e), boom)
	require.ErrorIs(t, a.Wait(e), boom)
	c.Abort(errors.New("later"))
	require.ErrorIs(t, a.Sync(), boom)
	require.False(t, ran)
	require.ErrorIs(t, <-hooked, boom)
	require.Empty(t, hooked, "called once")
}

func TestPanicNamesOperationAndLine(t *testing.T) {
	c := open(t, Options{})
	s := stream(t, c, graph.Compute)
	var none []int
	require.NoError(t, s.Launch(do("h.1/gelu", func() { _ = none[len(none)+2] })))
	err := s.Sync()
	require.ErrorContains(t, err, `operation "h.1/gelu": broken invariant: the kernel panicked at cpu_test.go:`)
	require.ErrorContains(t, err, "index out of range [2]")
}

func TestOverrunHitsTheGuardPage(t *testing.T) {
	c := open(t, Options{})
	size := int64(os.Getpagesize())
	p := alloc(t, c, graph.Device, size)
	b, err := Bytes(p)
	require.NoError(t, err)
	s := stream(t, c, graph.Compute)
	require.NoError(t, s.Launch(do("overrun", func() { *beyond(b, len(b)) = 1 })))
	require.ErrorContains(t, s.Sync(), `operation "overrun": broken invariant: the kernel panicked at `)
}

// Stray writes are detected although arenas are reused: Close reports writes before the arena, and
// the next Alloc of its memory reports writes after Close.
func TestReusedArenasTellOfStrayWrites(t *testing.T) {
	const size = 3*reuseStep + 8 // a size that no other test uses
	arena := func() (*Context, []byte) {
		c := New(0, Options{Poison: true})
		b, err := Bytes(alloc(t, c, graph.Device, size))
		require.NoError(t, err)
		require.True(t, poisoned(b))
		return c, b
	}
	before := func(b []byte) *byte { return (*byte)(unsafe.Add(unsafe.Pointer(&b[0]), -1)) }
	c, b := arena()
	b[0], b[size-1] = 1, 1
	require.NoError(t, c.Close())
	c, again := arena()
	require.Same(t, &b[0], &again[0])
	require.NoError(t, c.Close())
	b[7] = 1
	_, err := New(0, Options{Poison: true}).Alloc(graph.Device, size)
	require.ErrorContains(t, err, "memory of a closed context was written")
	c, b = arena()
	*before(b) = 1
	require.ErrorContains(t, c.Close(), "memory before the arena was written")
}

func TestAbortReleasesWaits(t *testing.T) {
	c := open(t, Options{Queue: 1})
	a, b := stream(t, c, graph.Compute), stream(t, c, graph.Comm)
	e := event0(t, c)
	gate := make(chan struct{})
	defer close(gate)
	require.NoError(t, a.Launch(do("stuck", func() { <-gate })))
	require.NoError(t, a.Record(e))
	require.NoError(t, b.Wait(e))
	lost := errors.New("rank 1 is lost")
	time.AfterFunc(10*time.Millisecond, func() { c.Abort(lost) })
	require.ErrorIs(t, b.Sync(), lost)
	require.ErrorIs(t, a.Sync(), lost, "Sync does not wait for the kernel that is stuck")
}

func TestCheckerCatchesAWriteOutsideTheOperands(t *testing.T) {
	checker := NewChecker()
	c, peer := open(t, Options{Checker: checker}), open(t, Options{Checker: checker})
	p, q := alloc(t, c, graph.Device, 256), alloc(t, peer, graph.Device, 256)
	host := alloc(t, c, graph.Host, 64)
	mine, _ := Bytes(p)
	other, _ := Bytes(q)
	view, err := c.HostBytes(device.Ptr{Arena: host.Arena, Len: 32})
	require.NoError(t, err)
	s := stream(t, c, graph.Compute)
	part := device.Ptr{Arena: p.Arena, Off: 64, Len: 64}
	require.NoError(t, s.Launch(do("fine", func() { mine[64], mine[127] = 1, 2; view[3] = 1 }, part)))
	require.NoError(t, s.Sync())

	s2 := stream(t, peer, graph.Compute)
	require.NoError(t, s2.Launch(do("stray", func() { other[0] = 9 }, device.Ptr{Arena: q.Arena, Off: 8, Len: 8})))
	require.ErrorContains(t, s2.Sync(), `operation "stray": broken invariant: it wrote to rank 3's device arena outside the ranges that it declares`)
	require.NoError(t, s.Launch(do("reach", func() { other[100] = 9 }, part)))
	require.ErrorContains(t, s.Sync(), `operation "reach": broken invariant`)
}

type spans []time.Duration

func (s *spans) Ran(a, b time.Duration) { *s = append(*s, a, b) }

func TestTimer(t *testing.T) {
	c := open(t, Options{})
	s := stream(t, c, graph.Compute)
	var got spans
	require.NoError(t, s.(device.Timed).Time(&got))
	before := device.Now()
	require.NoError(t, s.Launch(do("k", func() { time.Sleep(3 * time.Millisecond) })))
	require.NoError(t, s.Launch(do("k", func() {})))
	require.NoError(t, s.Sync())
	require.Len(t, got, 4)
	require.GreaterOrEqual(t, got[0], before)
	require.GreaterOrEqual(t, got[1]-got[0], 3*time.Millisecond)
	require.GreaterOrEqual(t, got[2], got[1])
}

func TestLaunchAllocatesNothing(t *testing.T) {
	c := open(t, Options{})
	p := alloc(t, c, graph.Device, 64)
	a, b := stream(t, c, graph.Compute), stream(t, c, graph.Comm)
	e := event0(t, c)
	k := do("k", func() {}, p)
	run := func() {
		for range 20 {
			_ = a.Launch(k)
			_ = a.Record(e)
			_ = b.Wait(e)
			_ = b.Launch(k)
		}
		_ = b.Sync()
	}
	run()
	require.Zero(t, alloctest.PerRun(100, run))
}

func TestUseAfterClose(t *testing.T) {
	c := New(0, Options{})
	s := stream(t, c, graph.Compute)
	done := false
	require.NoError(t, s.Launch(do("k", func() { time.Sleep(5 * time.Millisecond); done = true })))
	require.NoError(t, c.Close())
	require.True(t, done, "close runs what is enqueued")
	require.NoError(t, c.Close())
	require.ErrorContains(t, s.Launch(do("k", func() {})), "closed")
	require.ErrorContains(t, s.Sync(), "closed")
	_, err := c.NewStream(graph.Comm)
	require.ErrorContains(t, err, "closed")
}
