//go:build linux

package peers_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/peers"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
)

// hostSum adds in Go on the driver double.
type hostSum[T comm.Number] struct{ double *drivertest.Driver }

func (h hostSum[T]) Enqueue(_ driver.API, s driver.Stream, dsts, srcs []driver.Address, n int64, accumulate bool) error {
	var zero T
	view := func(list []driver.Address) (out [][]T, err error) {
		for _, a := range list {
			b, err := h.double.Bytes(a, n*int64(unsafe.Sizeof(zero)))
			if err != nil {
				return nil, err
			}
			out = append(out, unsafe.Slice((*T)(unsafe.Pointer(&b[0])), n))
		}
		return out, nil
	}
	to, err := view(dsts)
	if err != nil {
		return err
	}
	from, err := view(srcs)
	if err != nil {
		return err
	}
	return h.double.Run(s, "sum", func() error {
		sum := make([]T, n)
		comm.NewAdder[T](len(from)).Sum(sum, from, false)
		for _, d := range to {
			for i, v := range sum {
				if accumulate {
					d[i] += v
				} else {
					d[i] = v
				}
			}
		}
		return nil
	})
}

// hostLeaves adds f32 values from left to right.
type hostLeaves struct{ double *drivertest.Driver }

func (h hostLeaves) Enqueue(_ driver.API, s driver.Stream, dsts, srcs []driver.Address, n int64, accumulate bool) error {
	var lists [][]float32 // the result, then the sources
	for _, a := range append([]driver.Address{dsts[0]}, srcs...) {
		b, err := h.double.Bytes(a, 4*n)
		if err != nil {
			return err
		}
		lists = append(lists, unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), n))
	}
	return h.double.Run(s, "leaves", func() error {
		sum := lists[0]
		for i, leaf := range lists[1:] {
			for j, v := range leaf {
				if i == 0 && !accumulate {
					sum[j] = v
				} else {
					sum[j] += v
				}
			}
		}
		return nil
	})
}

func hostSums(d *drivertest.Driver) func(int, graph.DType, graph.SumOrder) (peers.Sum, error) {
	return func(_ int, t graph.DType, order graph.SumOrder) (peers.Sum, error) {
		if order == graph.SumSequential {
			return hostLeaves{d}, nil
		}
		switch t {
		case graph.F64:
			return hostSum[float64]{d}, nil
		case graph.I64:
			return hostSum[int64]{d}, nil
		}
		return hostSum[float32]{d}, nil
	}
}

// job holds the ranks of a test, each a goroutine with an arena and a stream.
type job struct {
	t      *testing.T
	double *drivertest.Driver
	world  *peers.World
	ranks  []*rank
}

type rank struct {
	work   chan func()
	ctx    *cuda.Context
	arena  device.Arena
	stream device.Stream
	groups map[int]comm.Group
}

func newJob(t *testing.T, mesh []graph.Axis, arena int64, timeout time.Duration) *job {
	return newJobOn(t, drivertest.Options{Seed: uint64(len(mesh) + int(arena)%3)}, mesh, arena, timeout)
}

// smallScratch makes sums need several pieces.
const smallScratch = 8 << 10

func newJobOn(t *testing.T, o drivertest.Options, mesh []graph.Axis, arena int64, timeout time.Duration) *job {
	j := &job{t: t, double: drivertest.New(o)}
	options := peers.Options{Timeout: timeout, Sum: hostSums(j.double)}
	if o.Devices > 1 {
		w := 1
		for _, a := range mesh {
			w *= a.Size
		}
		options.Scratch = smallScratch
		for i := range w {
			options.GPU = append(options.GPU, i*o.Devices/w)
		}
	}
	var err error
	j.world, err = peers.New(mesh, options)
	require.NoError(t, err)
	for i := range j.world.Size() {
		r, ordinal := &rank{work: make(chan func())}, 0
		if options.GPU != nil {
			ordinal = options.GPU[i]
		}
		go func() {
			runtime.LockOSThread()
			for f := range r.work {
				f()
			}
		}()
		j.ranks = append(j.ranks, r)
		require.NoError(t, r.do(func() (err error) {
			if r.ctx, err = cuda.New(i, cuda.Options{Driver: j.double, Ordinal: ordinal, Poison: true}); err != nil {
				return err
			}
			if r.arena, err = r.ctx.Alloc(graph.Device, arena); err != nil {
				return err
			}
			if r.stream, err = r.ctx.NewStream(graph.Comm); err != nil {
				return err
			}
			j.world.OnError(r.ctx.Abort)
			r.ctx.OnError(j.world.Abort)
			r.groups, err = j.world.Groups(r.ctx)
			return err
		}))
	}
	t.Cleanup(func() {
		for _, r := range j.ranks {
			require.NoError(t, r.do(r.ctx.Close))
			close(r.work)
		}
		require.NoError(t, j.double.Close())
	})
	return j
}

func (r *rank) do(f func() error) error {
	done := make(chan error)
	r.work <- func() { done <- f() }
	return <-done
}

// all runs f on every rank at once and returns their errors.
func (j *job) all(f func(i int, r *rank) error) []error {
	errs := make([]error, len(j.ranks))
	done := make(chan struct{})
	for i, r := range j.ranks {
		r.work <- func() { errs[i] = f(i, r); done <- struct{}{} }
	}
	for range j.ranks {
		<-done
	}
	return errs
}

// run binds an operation on every rank, launches it the given number of times and waits.
func (j *job) run(times int, bind func(i int, g comm.Group) (device.Kernel, error)) {
	j.t.Helper()
	for _, err := range j.all(func(i int, r *rank) error {
		k, err := bind(i, r.groups[-1])
		for range times {
			if err == nil {
				err = r.stream.Launch(k)
			}
		}
		if err != nil {
			return err
		}
		return r.stream.Sync()
	}) {
		require.NoError(j.t, err)
	}
}

func (j *job) ptr(rank int, off, n int64) device.Ptr {
	return device.Ptr{Arena: j.ranks[rank].arena, Off: off, Len: n}
}

func values[T comm.Number](j *job, p device.Ptr) []T {
	a, err := cuda.Address(p)
	require.NoError(j.t, err)
	b, err := j.double.Bytes(a, p.Len)
	require.NoError(j.t, err)
	var zero T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), p.Len/int64(unsafe.Sizeof(zero)))
}

func ranks(w int) []graph.Axis { return []graph.Axis{{Name: "data", Size: w}} }

// fill writes random numbers of very different magnitudes, so that their sum depends on the order.
func fill(rng *rand.Rand, v []float32) []float32 {
	for i := range v {
		v[i] = float32(rng.NormFloat64() * math.Pow(10, float64(rng.IntN(7))))
	}
	return slices.Clone(v)
}

// sumOver returns the tree sum over ranks of in[rank][i] for each i.
func sumOver(in [][]float32) []float32 {
	out := make([]float32, len(in[0]))
	comm.NewAdder[float32](len(in)).Sum(out, in, false)
	return out
}

var worlds = []int{1, 2, 3, 4, 5}

func TestAllGather(t *testing.T) {
	for _, w := range worlds {
		for _, inPlace := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d ranks/in place %v", w, inPlace), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(uint64(w), 1))
				const n = 17
				shard, full := int64(n*4), int64(n*4*w)
				j := newJob(t, ranks(w), full+shard, time.Minute)
				at := func(r int) (device.Ptr, device.Ptr) {
					if inPlace {
						return j.ptr(r, int64(r)*shard, shard), j.ptr(r, 0, full)
					}
					return j.ptr(r, full, shard), j.ptr(r, 0, full)
				}
				var want []float32
				for r := range w {
					s, _ := at(r)
					want = append(want, fill(rng, values[float32](j, s))...)
				}
				j.run(3, func(r int, g comm.Group) (device.Kernel, error) {
					s, f := at(r)
					return g.AllGather("ag", s, f, graph.F32)
				})
				moved := full
				if inPlace {
					moved -= shard
				}
				for r := range w {
					_, f := at(r)
					require.Equal(t, want, values[float32](j, f), "rank %d", r)
					require.Equal(t, comm.Stats{Calls: 3, Sent: 3 * (full - shard), Read: 3 * moved, Written: 3 * moved}, j.ranks[r].groups[-1].Stats())
				}
			})
		}
	}
}

// orderOf returns the order of summation of a form of a reduce-scatter, and the ranks whose leaves
// it adds.
func orderOf(form string, ranks int) (order graph.SumOrder, from []int) {
	step := map[string]int{"leaves": 1, "some leaves": 2}[form]
	if step == 0 {
		return graph.SumTree, nil
	}
	for r := 0; r < ranks; r += step {
		from = append(from, r)
	}
	return graph.SumSequential, from
}

func TestReduceScatter(t *testing.T) {
	for _, w := range worlds {
		for _, form := range []string{"apart", "in place", "accumulate", "leaves", "some leaves"} {
			t.Run(fmt.Sprintf("%d ranks/%s", w, form), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(uint64(w), 2))
				const n = 33
				order, from := orderOf(form, w)
				shard, full := int64(n*4), int64(n*4*w)
				j := newJob(t, ranks(w), full+shard, time.Minute)
				at := func(r int) (device.Ptr, device.Ptr) {
					if form == "in place" {
						return j.ptr(r, 0, full), j.ptr(r, int64(r)*shard, shard)
					}
					return j.ptr(r, 0, full), j.ptr(r, full, shard)
				}
				in, old := make([][]float32, w), make([][]float32, w)
				for r := range w {
					f, s := at(r)
					old[r] = fill(rng, values[float32](j, s))
					in[r] = fill(rng, values[float32](j, f))
				}
				j.run(1, func(r int, g comm.Group) (device.Kernel, error) {
					f, s := at(r)
					return g.ReduceScatter("rs", f, s, graph.F32, order, form == "accumulate" || from != nil, from...)
				})
				sum := sumOver(in)
				var sent int64
				for r := range w {
					f, s := at(r)
					want := slices.Clone(sum[r*n : (r+1)*n])
					if form == "accumulate" {
						for i := range want {
							want[i] = old[r][i] + want[i]
						}
					}
					if from != nil {
						copy(want, old[r])
						for _, rank := range from {
							for i := range want {
								want[i] += in[rank][r*n+i]
							}
						}
					}
					require.Equal(t, want, values[float32](j, s), "rank %d", r)
					if form != "in place" {
						require.Equal(t, in[r], values[float32](j, f), "the input stays")
					}
					sent += j.ranks[r].groups[-1].Stats().Sent
				}
				require.Equal(t, full*int64(w-1), sent)
			})
		}
	}
}

func TestAllReduceOfEveryType(t *testing.T) {
	for _, w := range worlds {
		const n = 300
		rng := rand.New(rand.NewPCG(uint64(w), 3))
		j := newJob(t, ranks(w), n*20+64, time.Minute)
		in := make([][]float32, w)
		var ints [n]int64
		doubles := make([][]float64, w)
		for r := range w {
			in[r] = fill(rng, values[float32](j, j.ptr(r, 0, n*4)))
			doubles[r] = make([]float64, n)
			a, b := values[int64](j, j.ptr(r, n*4, n*8)), values[float64](j, j.ptr(r, n*12, n*8))
			for i := range n {
				a[i] = math.MaxInt64 - int64(r*i) // sums wrap around
				ints[i] += a[i]
				b[i] = rng.NormFloat64() * 1e9
				doubles[r][i] = b[i]
			}
		}
		wantD := make([]float64, n)
		comm.NewAdder[float64](w).Sum(wantD, doubles, false)
		j.run(1, func(r int, g comm.Group) (device.Kernel, error) {
			return g.AllReduce("f", j.ptr(r, 0, n*4), graph.F32, graph.SumTree)
		})
		j.run(1, func(r int, g comm.Group) (device.Kernel, error) {
			return g.AllReduce("i", j.ptr(r, n*4, n*8), graph.I64, graph.SumTree)
		})
		j.run(1, func(r int, g comm.Group) (device.Kernel, error) {
			return g.AllReduce("d", j.ptr(r, n*12, n*8), graph.F64, graph.SumTree)
		})
		want := sumOver(in)
		var sent int64
		for r := range w {
			require.Equal(t, want, values[float32](j, j.ptr(r, 0, n*4)))
			require.Equal(t, ints[:], values[int64](j, j.ptr(r, n*4, n*8)))
			require.Equal(t, wantD, values[float64](j, j.ptr(r, n*12, n*8)))
			for _, v := range values[int64](j, j.ptr(r, n*20, 64)) {
				require.Equal(t, int64(-1), v, "bytes behind the buffers")
			}
			sent += j.ranks[r].groups[-1].Stats().Sent
		}
		require.Equal(t, int64(2*n*4*(w-1)), sent)
	}
	j := newJob(t, ranks(2), 64, time.Minute)
	_, err := j.ranks[0].groups[-1].AllReduce("h", j.ptr(0, 0, 64), graph.I32, graph.SumTree)
	require.ErrorContains(t, err, `rank 0: all_reduce "h": no sum of i32, want f32, f64, i64, bf16 or f16`)
}

func TestBroadcastAllToAllAndPoints(t *testing.T) {
	for _, w := range worlds[1:] {
		rng := rand.New(rand.NewPCG(9, uint64(w)))
		const n = 50
		full := int64(n * 4 * w)
		j := newJob(t, ranks(w), 2*full, time.Minute)
		in := make([][]float32, w)
		for r := range w {
			in[r] = fill(rng, values[float32](j, j.ptr(r, 0, full)))
		}
		j.run(2, func(r int, g comm.Group) (device.Kernel, error) {
			return g.AllToAll("a2a", j.ptr(r, 0, full), j.ptr(r, full, full), graph.F32)
		})
		for r := range w {
			got := values[float32](j, j.ptr(r, full, full))
			for from := range w {
				require.Equal(t, in[from][r*n:(r+1)*n], got[from*n:(from+1)*n])
			}
		}
		j.run(1, func(r int, g comm.Group) (device.Kernel, error) { return g.Barrier("b") })
		// Around the ring, even ranks send first. With an odd number of ranks the last one sends
		// first too.
		for _, err := range j.all(func(i int, r *rank) error {
			send, err1 := r.groups[-1].Send("s", j.ptr(i, 0, full), graph.F32, (i+1)%w)
			recv, err2 := r.groups[-1].Recv("r", j.ptr(i, full, full), graph.F32, (i+w-1)%w)
			list := []device.Kernel{send, recv}
			if i%2 == 1 {
				slices.Reverse(list)
			}
			for range 3 {
				for _, k := range list {
					if err := r.stream.Launch(k); err != nil {
						return err
					}
				}
			}
			return errors.Join(err1, err2, r.stream.Sync())
		}) {
			require.NoError(t, err)
		}
		for r := range w {
			require.Equal(t, in[(r+w-1)%w], values[float32](j, j.ptr(r, full, full)))
		}
		j.run(1, func(r int, g comm.Group) (device.Kernel, error) {
			return g.Broadcast("bc", j.ptr(r, 0, full), graph.F32, w-1)
		})
		for r := range w {
			require.Equal(t, in[w-1], values[float32](j, j.ptr(r, 0, full)))
		}
	}
}

func TestGroupsOfAMesh(t *testing.T) {
	mesh := []graph.Axis{{Name: "replicate", Size: 2}, {Name: "shard", Size: 2}}
	j := newJob(t, mesh, 64, time.Minute)
	for r := range 4 {
		values[float32](j, j.ptr(r, 0, 4))[0] = float32(int(1) << r)
	}
	for axis, want := range [][]float32{{1 + 4, 2 + 8, 1 + 4, 2 + 8}, {15, 15, 15, 15}} {
		for _, err := range j.all(func(i int, r *rank) error {
			k, err := r.groups[axis].AllReduce("ar", j.ptr(i, 0, 4), graph.F32, graph.SumTree)
			if err == nil {
				err = r.stream.Launch(k)
			}
			return errors.Join(err, r.stream.Sync())
		}) {
			require.NoError(t, err)
		}
		for r := range 4 {
			require.Equal(t, want[r], values[float32](j, j.ptr(r, 0, 4))[0])
		}
	}
}

func TestRanksThatDisagree(t *testing.T) {
	j := newJob(t, ranks(2), 64, time.Minute)
	errs := j.all(func(i int, r *rank) error {
		k, err := r.groups[-1].AllReduce(fmt.Sprintf("op%d", i), j.ptr(i, 0, int64(8+8*i)), graph.F32, graph.SumTree)
		require.NoError(t, err)
		return r.stream.Launch(k)
	})
	for _, err := range errs {
		require.ErrorIs(t, err, comm.ErrMismatch)
		require.ErrorContains(t, err, `rank 0 runs all_reduce of 8 bytes of f32 ("op0", call 1), rank 1 runs all_reduce of 16 bytes of f32 ("op1", call 1)`)
	}
}

func TestAMissingRankIsNamed(t *testing.T) {
	j := newJob(t, ranks(3), 64, 30*time.Millisecond)
	errs := j.all(func(i int, r *rank) error {
		if i == 1 {
			return nil
		}
		k, err := r.groups[-1].Barrier("step")
		require.NoError(t, err)
		return r.stream.Launch(k)
	})
	for _, i := range []int{0, 2} {
		require.ErrorIs(t, errs[i], comm.ErrTimeout)
		require.ErrorContains(t, errs[i], `barrier "step" (call 1 of the world group): rank 1 did not arrive within 30ms; ranks 0, 2 waited`)
	}
	require.ErrorContains(t, j.ranks[1].do(j.ranks[1].stream.Sync), "rank 1 did not arrive", "it learns of it")
}

// stuck is GPU work that ends only when gate is closed.
type stuck struct{ gate chan struct{} }

func (stuck) Label() string         { return "stuck" }
func (stuck) Touches() []device.Ptr { return nil }
func (k stuck) Enqueue(api driver.API, s driver.Stream) error {
	return api.(*drivertest.Driver).Run(s, "stuck", func() error { <-k.gate; return nil })
}

// A rank that enqueued an operation which its stream never reaches is named as missing, like one
// that never called.
func TestARankWhoseGPUIsStuckIsNamed(t *testing.T) {
	const timeout = 50 * time.Millisecond
	j := newJobOn(t, drivertest.Options{}, ranks(3), 64, timeout) // two operations at a time
	gate := make(chan struct{})
	errs := j.all(func(i int, r *rank) error {
		for n := range 3 {
			if i == 1 && n == 2 {
				require.NoError(t, r.stream.Launch(stuck{gate}))
			}
			k, err := r.groups[-1].AllReduce(fmt.Sprintf("step %d", n), j.ptr(i, 0, 8), graph.F32, graph.SumTree)
			require.NoError(t, err)
			require.NoError(t, r.stream.Launch(k))
		}
		return r.stream.Sync()
	})
	close(gate)
	for _, err := range errs {
		require.ErrorIs(t, err, comm.ErrTimeout)
		require.ErrorContains(t, err, `all_reduce "step 2" (call 3 of the world group): rank 1 did not arrive within 50ms; ranks 0, 2 waited`)
	}
}

func TestAnAbortReleasesWhoWaits(t *testing.T) {
	j := newJob(t, ranks(2), 64, time.Minute)
	lost := errors.New("lost")
	time.AfterFunc(10*time.Millisecond, func() { j.ranks[1].ctx.Abort(lost) })
	for _, bind := range []func(g comm.Group) (device.Kernel, error){
		func(g comm.Group) (device.Kernel, error) {
			return g.AllReduce("ar", j.ptr(0, 0, 8), graph.F32, graph.SumTree)
		},
		func(g comm.Group) (device.Kernel, error) { return g.Send("s", j.ptr(0, 0, 8), graph.F32, 1) },
		func(g comm.Group) (device.Kernel, error) { return g.Recv("r", j.ptr(0, 0, 8), graph.F32, 1) },
	} {
		require.ErrorIs(t, j.ranks[0].do(func() error {
			k, err := bind(j.ranks[0].groups[-1])
			require.NoError(t, err)
			return j.ranks[0].stream.Launch(k)
		}), lost)
	}
}

// A failed driver call in a collective ends it on all ranks.
func TestADriverErrorEndsTheJob(t *testing.T) {
	for call, nth := range map[string]int{"cuEventRecord": 3, "cuStreamWaitEvent": 2, "cuMemcpyDtoDAsync_v2": 4} {
		j := newJob(t, ranks(3), 300, 10*time.Second)
		j.double.Fail(call, nth, 999)
		began := time.Now()
		named := 0
		for _, err := range j.all(func(i int, r *rank) error {
			k, err := r.groups[-1].AllGather("ag", j.ptr(i, 0, 64), j.ptr(i, 64, 192), graph.F32)
			require.NoError(t, err)
			if err := r.stream.Launch(k); err != nil {
				return err
			}
			return r.stream.Sync()
		}) {
			require.ErrorContains(t, err, call+": CUDA_ERROR_UNKNOWN (999)", call)
			require.ErrorContains(t, err, `operation "ag"`)
			named++
		}
		require.Equal(t, 3, named)
		require.Less(t, time.Since(began), 5*time.Second)
	}
}
