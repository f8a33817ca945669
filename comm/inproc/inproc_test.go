package inproc_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/inproc"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

var worlds = []int{1, 2, 3, 4, 5, 8}

// job holds the ranks of a test, each with an arena and a stream.
type job struct {
	t       *testing.T
	world   *inproc.World
	ctx     []*cpu.Context
	arena   []device.Arena
	streams []device.Stream
}

func newJob(t *testing.T, mesh []graph.Axis, arena int64, timeout time.Duration) *job {
	w, err := inproc.New(mesh, inproc.Options{Timeout: timeout})
	require.NoError(t, err)
	j := &job{t: t, world: w}
	checker := cpu.NewChecker()
	for r := range w.Size() {
		c := cpu.New(r, cpu.Options{Poison: true, Checker: checker})
		a, err := c.Alloc(graph.Device, arena)
		require.NoError(t, err)
		s, err := c.NewStream(graph.Comm)
		require.NoError(t, err)
		w.OnError(c.Abort)
		c.OnError(w.Abort)
		j.ctx, j.arena, j.streams = append(j.ctx, c), append(j.arena, a), append(j.streams, s)
	}
	t.Cleanup(func() {
		for _, c := range j.ctx {
			require.NoError(t, c.Close())
		}
	})
	return j
}

func ranks(w int) []graph.Axis { return []graph.Axis{{Name: "data", Size: w}} }

func (j *job) ptr(rank int, off, n int64) device.Ptr {
	return device.Ptr{Arena: j.arena[rank], Off: off, Len: n}
}

func (j *job) group(rank, axis int) comm.Group {
	g, err := j.world.Group(rank, axis)
	require.NoError(j.t, err)
	return g
}

func floats(t *testing.T, p device.Ptr) []float32 {
	v, err := cpu.Slice[float32](p)
	require.NoError(t, err)
	return v
}

// launch binds and launches one operation on every rank.
func (j *job) launch(bind func(rank int, g comm.Group) (device.Kernel, error)) {
	for r, s := range j.streams {
		k, err := bind(r, j.group(r, -1))
		require.NoError(j.t, err)
		require.NoError(j.t, s.Launch(k))
	}
}

func (j *job) sync() {
	for _, s := range j.streams {
		require.NoError(j.t, s.Sync())
	}
}

// errs returns the error that ends each rank. A rank that waits for nothing gets it slightly later
// than the others.
func (j *job) errs() []error {
	errs := make([]error, len(j.streams))
	for i, s := range j.streams {
		for begin := time.Now(); errs[i] == nil && time.Since(begin) < 20*time.Second; time.Sleep(time.Millisecond) {
			errs[i] = s.Sync()
		}
	}
	return errs
}

// fill writes random numbers of very different magnitudes, so that their sum depends on the order.
func fill(rng *rand.Rand, v []float32) []float32 {
	for i := range v {
		v[i] = float32(rng.NormFloat64() * math.Pow(10, float64(rng.IntN(7))))
	}
	return slices.Clone(v)
}

func treeSum(v []float32) float32 {
	if len(v) == 1 {
		return v[0]
	}
	p := 1
	for 2*p < len(v) {
		p *= 2
	}
	return treeSum(v[:p]) + treeSum(v[p:])
}

// sumOver returns the tree sum over ranks of in[rank][i] for each i.
func sumOver(in [][]float32) []float32 {
	out, column := make([]float32, len(in[0])), make([]float32, len(in))
	for i := range out {
		for r := range in {
			column[r] = in[r][i]
		}
		out[i] = treeSum(column)
	}
	return out
}

func TestAllGather(t *testing.T) {
	for _, w := range worlds {
		for _, n := range []int64{1, 17, 3000} {
			for _, inPlace := range []bool{false, true} {
				t.Run(fmt.Sprintf("%d ranks/%d elements/in place %v", w, n, inPlace), func(t *testing.T) {
					rng := rand.New(rand.NewPCG(uint64(w), uint64(n)))
					shard, full := n*4, n*4*int64(w)
					j := newJob(t, ranks(w), full+shard, time.Minute)
					var want []float32
					at := func(r int) (device.Ptr, device.Ptr) {
						if inPlace {
							return j.ptr(r, int64(r)*shard, shard), j.ptr(r, 0, full)
						}
						return j.ptr(r, full, shard), j.ptr(r, 0, full)
					}
					for r := range w {
						s, _ := at(r)
						want = append(want, fill(rng, floats(t, s))...)
					}
					for range 3 { // launch the same kernels again
						j.launch(func(r int, g comm.Group) (device.Kernel, error) {
							s, f := at(r)
							return g.AllGather("ag", s, f, graph.F32)
						})
					}
					j.sync()
					for r := range w {
						_, f := at(r)
						require.Equal(t, want, floats(t, f), "rank %d", r)
						st := j.group(r, -1).Stats()
						moved := full
						if inPlace {
							moved -= shard
						}
						require.Equal(t, comm.Stats{Calls: 3, Sent: 3 * (full - shard), Read: 3 * moved, Written: 3 * moved}, st, "one read and one write a byte")
					}
				})
			}
		}
	}
}

func TestReduceScatter(t *testing.T) {
	for _, w := range worlds {
		for _, n := range []int64{1, 17, 3000} {
			for _, form := range []string{"apart", "in place", "accumulate"} {
				t.Run(fmt.Sprintf("%d ranks/%d elements/%s", w, n, form), func(t *testing.T) {
					rng := rand.New(rand.NewPCG(uint64(w), uint64(n)))
					shard, full := n*4, n*4*int64(w)
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
						old[r] = fill(rng, floats(t, s))
						in[r] = fill(rng, floats(t, f))
					}
					j.launch(func(r int, g comm.Group) (device.Kernel, error) {
						f, s := at(r)
						return g.ReduceScatter("rs", f, s, graph.F32, graph.SumTree, form == "accumulate")
					})
					j.sync()
					sum := sumOver(in)
					var read, written, sent int64
					for r := range w {
						f, s := at(r)
						want := sum[int64(r)*n : int64(r+1)*n]
						if form == "accumulate" {
							want = slices.Clone(want)
							for i := range want {
								want[i] = old[r][i] + want[i]
							}
						}
						require.Equal(t, want, floats(t, s), "rank %d", r)
						if form != "in place" {
							require.Equal(t, in[r], floats(t, f), "the input stays")
						}
						st := j.group(r, -1).Stats()
						read, written, sent = read+st.Read, written+st.Written, sent+st.Sent
					}
					require.Equal(t, full*int64(w-1), sent)
					switch {
					case form == "accumulate":
						require.Equal(t, []int64{full * int64(w+1), full}, []int64{read, written})
					case form == "in place" && w == 1:
						require.Equal(t, []int64{0, 0}, []int64{read, written})
					default:
						require.Equal(t, []int64{full * int64(w), full}, []int64{read, written}, "each input byte read once, each output byte written once")
					}
				})
			}
		}
	}
}

func TestAllReduce(t *testing.T) {
	for _, w := range worlds {
		for _, n := range []int64{1, 17, 300, 5000} {
			t.Run(fmt.Sprintf("%d ranks/%d elements", w, n), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(uint64(w), uint64(n)))
				j := newJob(t, ranks(w), n*4+64, time.Minute)
				in := make([][]float32, w)
				for r := range w {
					in[r] = fill(rng, floats(t, j.ptr(r, 0, n*4)))
				}
				j.launch(func(r int, g comm.Group) (device.Kernel, error) {
					return g.AllReduce("ar", j.ptr(r, 0, n*4), graph.F32, graph.SumTree)
				})
				j.sync()
				want := sumOver(in)
				var st comm.Stats
				for r := range w {
					require.Equal(t, want, floats(t, j.ptr(r, 0, n*4)), "rank %d", r)
					b, err := cpu.Bytes(j.ptr(r, n*4, 64))
					require.NoError(t, err)
					for _, v := range b {
						require.Equal(t, byte(0xFF), v, "bytes behind the buffer")
					}
					one := j.group(r, -1).Stats()
					st.Sent, st.Read, st.Written = st.Sent+one.Sent, st.Read+one.Read, st.Written+one.Written
				}
				require.Equal(t, 2*n*4*int64(w-1), st.Sent)
				if w > 1 {
					require.Equal(t, n*4*int64(w), st.Read, "one read a byte")
					require.Equal(t, n*4*int64(w), st.Written, "one write a byte")
				}
			})
		}
	}
}

func TestAllReduceOfOtherTypes(t *testing.T) {
	const w, n = 3, 40
	j := newJob(t, ranks(w), 2*n*8, time.Minute)
	var ints [n]int64
	var doubles [n]float64
	for i := range n {
		column := [w]float64{}
		for r := range w {
			a, err := cpu.Slice[int64](j.ptr(r, 0, n*8))
			require.NoError(t, err)
			b, err := cpu.Slice[float64](j.ptr(r, n*8, n*8))
			require.NoError(t, err)
			a[i] = math.MaxInt64 - int64(r*i) // sums wrap around
			ints[i] += a[i]
			b[i] = math.Pow(-1.7, float64(r*30+i))
			column[r] = b[i]
		}
		doubles[i] = (column[0] + column[1]) + column[2]
	}
	j.launch(func(r int, g comm.Group) (device.Kernel, error) {
		return g.AllReduce("i", j.ptr(r, 0, n*8), graph.I64, graph.SumTree)
	})
	j.launch(func(r int, g comm.Group) (device.Kernel, error) {
		return g.AllReduce("d", j.ptr(r, n*8, n*8), graph.F64, graph.SumTree)
	})
	j.sync()
	for r := range w {
		a, _ := cpu.Slice[int64](j.ptr(r, 0, n*8))
		b, _ := cpu.Slice[float64](j.ptr(r, n*8, n*8))
		require.Equal(t, ints[:], a)
		require.Equal(t, doubles[:], b)
		require.Zero(t, j.group(r, -1).Stats().Sent, "losses and norms are not counted as communication")
	}
	_, err := j.group(0, -1).AllReduce("h", j.ptr(0, 0, 64), graph.I32, graph.SumTree)
	require.ErrorContains(t, err, `rank 0: all_reduce "h": no sum of i32, want f32, f64, i64, bf16 or f16`)
}

// Sums of 16-bit floats equal the float32 sums of their values, rounded once, for any number of
// ranks and length. Infinities and NaN reach every rank.
func TestSumsOf16Bits(t *testing.T) {
	formats := map[graph.DType]struct {
		narrow func(float32) uint16
		widen  func(uint16) float32
	}{graph.BF16: {num.BF16, num.FromBF16}, graph.F16: {num.F16, num.FromF16}}
	for dt, f := range formats {
		for _, w := range worlds {
			for _, n := range []int64{1, 17, 3000} {
				for _, form := range []string{"all", "scatter", "in place", "accumulate"} {
					rng := rand.New(rand.NewPCG(uint64(w), uint64(n)))
					shard, full := n*2, n*2*int64(w)
					j := newJob(t, ranks(w), full+shard, time.Minute)
					at := func(r int) (device.Ptr, device.Ptr) {
						if form == "in place" {
							return j.ptr(r, 0, full), j.ptr(r, int64(r)*shard, shard)
						}
						return j.ptr(r, 0, full), j.ptr(r, full, shard)
					}
					in, old := make([][]float32, w), make([][]float32, w)
					draw := func(p device.Ptr) (wide []float32) {
						bits, err := cpu.Slice[uint16](p)
						require.NoError(t, err)
						for i := range bits {
							bits[i] = f.narrow(float32(rng.NormFloat64() * math.Pow(10, float64(rng.IntN(5)))))
							if rng.IntN(50) == 0 {
								bits[i] = f.narrow(float32(math.Inf(1 - 2*rng.IntN(2))))
							}
							wide = append(wide, f.widen(bits[i]))
						}
						return wide
					}
					for r := range w {
						whole, part := at(r)
						old[r] = draw(part)
						in[r] = draw(whole)
					}
					j.launch(func(r int, g comm.Group) (device.Kernel, error) {
						whole, part := at(r)
						if form == "all" {
							return g.AllReduce("ar", whole, dt, graph.SumTree)
						}
						return g.ReduceScatter("rs", whole, part, dt, graph.SumTree, form == "accumulate")
					})
					j.sync()
					sum := sumOver(in)
					for r := range w {
						whole, part := at(r)
						want := sum[int64(r)*n:][:n]
						if form == "all" {
							part, want = whole, sum
						}
						got, err := cpu.Slice[uint16](part)
						require.NoError(t, err)
						for i, v := range want {
							if form == "accumulate" {
								v = old[r][i] + v
							}
							if x := f.widen(got[i]); v != v {
								require.True(t, x != x, "want NaN")
							} else {
								require.Equal(t, f.widen(f.narrow(v)), x, "%v, %d ranks, %s, rank %d, element %d", dt, w, form, r, i)
							}
						}
					}
				}
			}
		}
	}
}

func TestBroadcastAndAllToAll(t *testing.T) {
	for _, w := range worlds {
		t.Run(fmt.Sprintf("%d ranks", w), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(9, uint64(w)))
			n := int64(50)
			full := n * 4 * int64(w)
			j := newJob(t, ranks(w), 2*full, time.Minute)
			in := make([][]float32, w)
			for r := range w {
				in[r] = fill(rng, floats(t, j.ptr(r, 0, full)))
			}
			j.launch(func(r int, g comm.Group) (device.Kernel, error) {
				return g.AllToAll("a2a", j.ptr(r, 0, full), j.ptr(r, full, full), graph.F32)
			})
			j.sync()
			for r := range w {
				got := floats(t, j.ptr(r, full, full))
				for from := range w {
					require.Equal(t, in[from][int64(r)*n:int64(r+1)*n], got[int64(from)*n:int64(from+1)*n])
				}
			}
			root := w - 1
			j.launch(func(r int, g comm.Group) (device.Kernel, error) {
				return g.Broadcast("bc", j.ptr(r, 0, full), graph.F32, root)
			})
			j.launch(func(r int, g comm.Group) (device.Kernel, error) { return g.Barrier("b") })
			j.sync()
			for r := range w {
				require.Equal(t, in[root], floats(t, j.ptr(r, 0, full)))
			}
		})
	}
}

func TestSendRecvRing(t *testing.T) {
	const w, n = 4, 100
	rng := rand.New(rand.NewPCG(3, 3))
	j := newJob(t, ranks(w), 2*n*4, time.Minute)
	in := make([][]float32, w)
	for r := range w {
		in[r] = fill(rng, floats(t, j.ptr(r, 0, n*4)))
	}
	for range 2 {
		for r, s := range j.streams {
			g := j.group(r, -1)
			send, err := g.Send("to the next", j.ptr(r, 0, n*4), graph.F32, (r+1)%w)
			require.NoError(t, err)
			recv, err := g.Recv("from the last", j.ptr(r, n*4, n*4), graph.F32, (r+w-1)%w)
			require.NoError(t, err)
			order := []device.Kernel{send, recv}
			if r%2 == 1 { // in a ring of blocking calls some ranks must receive first
				slices.Reverse(order)
			}
			for _, k := range order {
				require.NoError(t, s.Launch(k))
			}
		}
	}
	j.sync()
	for r := range w {
		require.Equal(t, in[(r+w-1)%w], floats(t, j.ptr(r, n*4, n*4)))
		require.Equal(t, int64(2*n*4), j.group(r, -1).Stats().Sent)
	}
	_, err := j.group(1, -1).Send("x", j.ptr(1, 0, 4), graph.F32, 1)
	require.ErrorContains(t, err, "the peer of rank 1 is 1, want another of 4 ranks")
}

// On a mesh of 2 × 3, shards are gathered along one axis and summed along the other.
func TestMeshAxes(t *testing.T) {
	mesh := []graph.Axis{{Name: "replicate", Size: 2}, {Name: "shard", Size: 3}}
	j := newJob(t, mesh, 4*16, time.Minute)
	for r := range 6 {
		copy(floats(t, j.ptr(r, 0, 4)), []float32{float32(r + 1)})
	}
	for r, s := range j.streams {
		ag, err := j.group(r, 1).AllGather("ag", j.ptr(r, 0, 4), j.ptr(r, 16, 12), graph.F32)
		require.NoError(t, err)
		ar, err := j.group(r, 0).AllReduce("ar", j.ptr(r, 0, 4), graph.F32, graph.SumTree)
		require.NoError(t, err)
		require.NoError(t, s.Launch(ag))
		require.NoError(t, s.Launch(ar))
	}
	j.sync()
	for r := range 6 {
		c := comm.Coord(mesh, r)
		require.Equal(t, c[1], j.group(r, 1).Rank())
		require.Equal(t, c[0], j.group(r, 0).Rank())
		first := float32(c[0]*3 + 1)
		require.Equal(t, []float32{first, first + 1, first + 2}, floats(t, j.ptr(r, 16, 12)))
		require.Equal(t, []float32{float32(c[1]+1) + float32(c[1]+4)}, floats(t, j.ptr(r, 0, 4)))
	}
	_, err := j.world.Group(6, 0)
	require.ErrorContains(t, err, "rank 6 of 6")
	_, err = j.world.Group(0, 2)
	require.ErrorContains(t, err, "axis 2 of 2")
	_, err = inproc.New([]graph.Axis{{Name: "x", Size: 0}}, inproc.Options{})
	require.ErrorContains(t, err, "axis 0 (x) has size 0")
}

func TestNoAllocationPerCall(t *testing.T) {
	const w = 3
	j := newJob(t, ranks(w), 4096, time.Minute)
	var kernels [w][]device.Kernel
	for r := range w {
		g := j.group(r, -1)
		ar, err := g.AllReduce("ar", j.ptr(r, 0, 1200), graph.F32, graph.SumTree)
		require.NoError(t, err)
		ag, err := g.AllGather("ag", j.ptr(r, int64(r)*400, 400), j.ptr(r, 0, 1200), graph.F32)
		require.NoError(t, err)
		rs, err := g.ReduceScatter("rs", j.ptr(r, 0, 1200), j.ptr(r, 2048, 400), graph.F32, graph.SumTree, true)
		require.NoError(t, err)
		kernels[r] = []device.Kernel{ar, ag, rs}
	}
	run := func() {
		for r, s := range j.streams {
			for _, k := range kernels[r] {
				_ = s.Launch(k)
			}
		}
		for _, s := range j.streams {
			_ = s.Sync()
		}
	}
	run()
	require.Zero(t, alloctest.PerRun(50, run))
	require.NoError(t, j.world.Err())
}

func TestManyCallsStayInOrder(t *testing.T) {
	const w, calls = 4, 1500 // two launches each: below the stream's queue, since one goroutine launches for all ranks
	j := newJob(t, ranks(w), 64, time.Minute)
	for r := range w {
		clear(floats(t, j.ptr(r, 0, 64)))
		floats(t, j.ptr(r, 0, 64))[0] = 1
	}
	for r, s := range j.streams {
		g := j.group(r, -1)
		sum, err := g.ReduceScatter("sum", j.ptr(r, 0, 64), j.ptr(r, int64(r)*16, 16), graph.F32, graph.SumTree, false)
		require.NoError(t, err)
		root, err := g.Broadcast("root", j.ptr(r, 0, 64), graph.F32, 1)
		require.NoError(t, err)
		for range calls {
			require.NoError(t, s.Launch(sum))
			require.NoError(t, s.Launch(root))
		}
	}
	j.sync()
	for r := range w {
		require.Equal(t, int64(2*calls), j.group(r, -1).Stats().Calls)
		require.Equal(t, floats(t, j.ptr(1, 0, 64)), floats(t, j.ptr(r, 0, 64)))
	}
}

// When an operation is complete on a rank, all peers have read its input. Later operations may
// overwrite it, even if the peers are slow.
func TestInputsAreFreeWhenTheOperationIsDone(t *testing.T) {
	const w, n = 4, 1 << 18
	j := newJob(t, ranks(w), (w+1)*n, time.Minute)
	for round := range 10 {
		for r, s := range j.streams {
			v := floats(t, j.ptr(r, 0, n))
			for i := range v {
				v[i] = float32(round*w + r)
			}
			ag, err := j.group(r, -1).AllGather("ag", j.ptr(r, 0, n), j.ptr(r, n, w*n), graph.F32)
			require.NoError(t, err)
			reuse, err := j.ctx[r].Poison("reuse", j.ptr(r, 0, n))
			require.NoError(t, err)
			require.NoError(t, s.Launch(ag))
			require.NoError(t, s.Launch(reuse))
		}
		j.sync()
		for r := range w {
			v := floats(t, j.ptr(r, n, w*n))
			for i := 0; i < len(v); i++ {
				if v[i] != float32(round*w+i/(n/4)) {
					t.Fatalf("round %d, rank %d: element %d is %v", round, r, i, v[i])
				}
			}
		}
	}
}
