//go:build linux

package nccl_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/direct"
	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/algotest"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/nccltest"
)

// hostSum adds in Go on the driver double.
type hostSum struct {
	double *drivertest.Driver
	dtype  graph.DType
	order  graph.SumOrder
}

func (h hostSum) Enqueue(_ driver.API, s driver.Stream, dsts, srcs []driver.Address, n int64, accumulate bool) error {
	if len(srcs) > nccl.MostSources {
		return fmt.Errorf("%d sources", len(srcs))
	}
	view := func(list []driver.Address, size int64) (out [][]byte, err error) {
		for _, a := range list {
			b, e := h.double.Bytes(a, n*size)
			out, err = append(out, b), errors.Join(err, e)
		}
		return out, err
	}
	size := h.dtype.Size()
	if h.order == graph.SumSequential {
		size = graph.F32.Size()
	}
	to, err := view(dsts, size)
	from, e := view(srcs, h.dtype.Size())
	if err = errors.Join(err, e); err != nil {
		return err
	}
	return h.double.Run(s, "sum", func() error {
		adder, err := direct.NewAdder(h.dtype, h.order, len(from))
		if err == nil {
			adder.Sum(to[0], from, accumulate)
		}
		return err
	})
}

// control connects ranks of one process.
type control struct {
	mu      sync.Mutex
	cond    *sync.Cond
	size    int
	said    [][]byte
	come    int
	round   int
	err     error
	hooks   []func(error)
	reports []watch.Report
	stop    chan struct{}
}

func newControl(size, slots int) *control {
	c := &control{size: size, said: make([][]byte, size), reports: make([]watch.Report, size), stop: make(chan struct{})}
	c.cond = sync.NewCond(&c.mu)
	for i := range c.reports {
		c.reports[i] = watch.Report{State: watch.Alive, In: make([]watch.Progress, slots)}
	}
	return c
}

// watch starts the watchdog.
func (c *control) watch(timeout time.Duration, groups []watch.Group) {
	const interval = 10 * time.Millisecond
	m := watch.New(watch.Config{World: c.size, Groups: groups, Interval: interval, Silent: time.Hour, Timeout: timeout})
	go algotest.Watch(m, c.size, interval, c.stop, func(to []watch.Report) {
		c.mu.Lock()
		defer c.mu.Unlock()
		for i := range to {
			c.reports[i].Beat++
			to[i] = c.reports[i]
			to[i].In = slices.Clone(c.reports[i].In)
		}
	}, func(v watch.Verdict) {
		if v.Kind == watch.End {
			c.fail(v.Err)
		}
	})
}

// shown returns a rank's progress in its group of a slot, as last reported.
func (c *control) shown(rank, slot int) watch.Progress {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.reports[rank].In[slot]
}

func (c *control) Gather(rank int, own []byte) ([][]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.said[rank] = own
	round := c.round
	if c.come++; c.come == c.size {
		c.come, c.round = 0, c.round+1
		c.cond.Broadcast()
	}
	for c.round == round && c.err == nil {
		c.cond.Wait()
	}
	return slices.Clone(c.said), c.err
}

func (c *control) Show(rank, slot int, p watch.Progress) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reports[rank].In[slot] = p
}

func (c *control) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = err
	hooks := c.hooks
	c.cond.Broadcast()
	c.mu.Unlock()
	for _, f := range hooks {
		f(err)
	}
}

func (c *control) Abort(err error) { c.fail(fmt.Errorf("%w: %w", comm.ErrAborted, err)) }

func (c *control) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *control) OnError(f func(error)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hooks = append(c.hooks, f)
}

// job holds the ranks of a test, each a thread with a GPU, an arena and a stream.
type job struct {
	t       *testing.T
	double  *drivertest.Driver
	fabric  *nccltest.Fabric
	control *control
	groups  []watch.Group
	ranks   []*rank
}

type rank struct {
	work   chan func()
	world  *nccl.World
	ctx    *cuda.Context
	arena  device.Arena
	stream device.Stream
	groups map[int]comm.Group
}

func (r *rank) do(f func() error) error {
	done := make(chan error)
	r.work <- func() { done <- f() }
	return <-done
}

// all runs f on every rank at once and returns their errors.
func (j *job) all(f func(i int, r *rank) error) []error {
	errs := make([]error, len(j.ranks))
	var wg sync.WaitGroup
	for i, r := range j.ranks {
		wg.Go(func() { errs[i] = r.do(func() error { return f(i, r) }) })
	}
	wg.Wait()
	return errs
}

type setting struct {
	mesh    []graph.Axis
	arena   int64
	timeout time.Duration
	seed    uint64
	fabric  nccltest.Options
	device  func(rank int) int // nil: one for each rank
	version func(rank int) int // nil: 2.21.5
	before  func(*nccltest.Fabric)
	failed  func(flight string)
	unseen  bool // the test starts the watchdog itself
	late    bool // only the world tells a rank's context about the job's error
}

func ranksOf(w int) []graph.Axis { return []graph.Axis{{Name: "data", Size: w}} }

// start creates a job and returns each rank's error from Groups.
func start(t *testing.T, o setting) (*job, []error) {
	t.Helper()
	size := 1
	for _, a := range o.mesh {
		size *= a.Size
	}
	if o.timeout == 0 {
		o.timeout = time.Minute
	}
	j := &job{t: t, double: drivertest.New(drivertest.Options{Devices: size, Seed: o.seed})}
	j.fabric = nccltest.New(j.double, o.fabric)
	if o.before != nil {
		o.before(j.fabric)
	}
	all := make([]int, size)
	for i := range all {
		all[i] = i
	}
	j.groups = []watch.Group{{Name: "world", Ranks: all}}
	for i := range o.mesh { // calls on an axis are not watched in these tests
		j.groups = append(j.groups, watch.Group{Name: "axis", Slot: i + 1})
	}
	j.control = newControl(size, len(o.mesh)+1)
	if !o.unseen {
		j.control.watch(o.timeout, j.groups)
	}
	for range size {
		r := &rank{work: make(chan func())}
		go func() {
			runtime.LockOSThread()
			for f := range r.work {
				f()
			}
		}()
		j.ranks = append(j.ranks, r)
	}
	t.Cleanup(j.end)
	return j, j.all(func(i int, r *rank) (err error) {
		ordinal, version := i, 22105
		if o.device != nil {
			ordinal = o.device(i)
		}
		if o.version != nil {
			version = o.version(i)
		}
		if r.ctx, err = cuda.New(i, cuda.Options{Driver: j.double, Ordinal: ordinal, Poison: true}); err != nil {
			return err
		}
		r.world, err = nccl.New(o.mesh, nccl.Options{API: j.fabric.Library(version), Control: j.control, Timeout: o.timeout, Failed: o.failed,
			Sum: func(_ int, t graph.DType, order graph.SumOrder) (nccl.Sum, error) {
				return hostSum{j.double, t, order}, nil
			}})
		if err != nil {
			return err
		}
		if r.groups, err = r.world.Groups(r.ctx); err != nil {
			return err
		}
		if !o.late {
			r.groups[-1].OnError(r.ctx.Abort)
		}
		r.ctx.OnError(r.groups[-1].Abort)
		if r.arena, err = r.ctx.Alloc(graph.Device, o.arena); err != nil {
			return err
		}
		r.stream, err = r.ctx.NewStream(graph.Comm)
		return err
	})
}

// begin is start for a job that must start without error.
func begin(t *testing.T, o setting) *job {
	t.Helper()
	j, errs := start(t, o)
	require.NoError(t, errors.Join(errs...))
	return j
}

func (j *job) end() {
	for _, err := range j.all(func(_ int, r *rank) error {
		if r.ctx == nil {
			return nil
		}
		return r.ctx.Close()
	}) {
		require.NoError(j.t, err)
	}
	for _, r := range j.ranks {
		close(r.work)
	}
	close(j.control.stop)
	require.NoError(j.t, j.fabric.Close())
	require.NoError(j.t, j.double.Close())
}

// run binds an operation on every rank, launches it the given number of times and waits.
func (j *job) run(times int, bind func(i int, r *rank) (device.Kernel, error)) {
	j.t.Helper()
	require.NoError(j.t, errors.Join(j.try(times, bind)...))
}

func (j *job) try(times int, bind func(i int, r *rank) (device.Kernel, error)) []error {
	return j.all(func(i int, r *rank) error {
		k, err := bind(i, r)
		if k == nil && err == nil {
			return nil
		}
		for range times {
			if err == nil {
				err = r.stream.Launch(k)
			}
		}
		if err != nil {
			return err
		}
		return r.stream.Sync()
	})
}

// found waits for an error that the double finds. A stream may reach its call after the job's end.
func (j *job) found() (err error) {
	require.Eventually(j.t, func() bool { err = j.fabric.Found(); return err != nil }, time.Minute, time.Millisecond)
	return err
}

func (r *rank) ptr(off, n int64) device.Ptr { return device.Ptr{Arena: r.arena, Off: off, Len: n} }

// values returns a range of a rank's memory as a slice.
func values[T any](j *job, p device.Ptr) []T {
	a, err := cuda.Address(p)
	require.NoError(j.t, err)
	b, err := j.double.Bytes(a, p.Len)
	require.NoError(j.t, err)
	var zero T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), p.Len/int64(unsafe.Sizeof(zero)))
}

// fill writes random numbers of very different magnitudes, so that their sum depends on the order.
func fill[T float32 | float64](rng *rand.Rand, v []T) []T {
	for i := range v {
		v[i] = T(rng.NormFloat64() * math.Pow(10, float64(rng.IntN(7))))
	}
	return slices.Clone(v)
}

// sumOver returns the tree sum over ranks of in[rank][i] for each i.
func sumOver[T comm.Number](in [][]T) []T {
	out := make([]T, len(in[0]))
	comm.NewAdder[T](len(in)).Sum(out, in, false)
	return out
}
