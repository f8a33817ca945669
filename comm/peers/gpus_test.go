//go:build linux

package peers_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/peers"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
)

// onGPUs returns a job of w ranks on the given number of GPUs. Neighbouring ranks share a GPU.
func onGPUs(t *testing.T, w, gpus int, arena int64) *job {
	return newJobOn(t, drivertest.Options{Devices: gpus, Seed: uint64(w * gpus % 4)}, ranks(w), arena, time.Minute)
}

// spreads are numbers of ranks and of GPUs: one rank on each, or neighbours on one.
var spreads = [][2]int{{2, 2}, {3, 3}, {4, 2}, {5, 3}}

// links returns the bytes sent between each pair of GPUs, if each rank sends each bytes to every
// rank on another GPU.
func links(w, gpus int, each int64) map[[2]int]int64 {
	want := map[[2]int]int64{}
	for a := range w {
		for b := range w {
			if from, to := a*gpus/w, b*gpus/w; from != to {
				want[[2]int{from, to}] += each
			}
		}
	}
	return want
}

// Sums over ranks on several GPUs are made in pieces and have the bits of a sum on one GPU. Each
// byte of a part crosses a link once for each rank on another GPU that needs it.
func TestSumsOverGPUs(t *testing.T) {
	const n = 1504 // elements of a part, whole lines: several pieces, the last one shorter
	for _, s := range spreads {
		w, gpus := s[0], s[1]
		for _, form := range []string{"apart", "in place", "accumulate", "leaves", "some leaves", "all"} {
			t.Run(fmt.Sprintf("%d ranks on %d GPUs/%s", w, gpus, form), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(uint64(w), 5))
				shard, full := int64(n*4), int64(n*4*w)
				j := onGPUs(t, w, gpus, full+shard)
				at := func(r int) (in, out device.Ptr) {
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
				order, from := orderOf(form, w)
				j.run(1, func(r int, g comm.Group) (device.Kernel, error) {
					f, s := at(r)
					if form == "all" {
						return g.AllReduce("ar", f, graph.F32, order)
					}
					return g.ReduceScatter("rs", f, s, graph.F32, order, form == "accumulate" || from != nil, from...)
				})
				sum := sumOver(in)
				for r := range w {
					f, s := at(r)
					want := slices.Clone(sum[r*n : (r+1)*n])
					for i := range want {
						switch form {
						case "accumulate":
							want[i] = old[r][i] + want[i]
						case "leaves", "some leaves":
							want[i] = old[r][i]
							for _, rank := range from {
								want[i] += in[rank][r*n+i]
							}
						}
					}
					if form == "all" {
						s, want = f, sum
					}
					require.Equal(t, want, values[float32](j, s), "rank %d", r)
				}
				each := shard
				if form == "all" {
					each = 2 * shard // the rank's share arrives and its sum leaves
				}
				require.Equal(t, links(w, gpus, each), j.double.Traffic())
			})
		}
	}
}

// Data that is not added goes from arena to arena with one copy.
func TestCopiesOverGPUs(t *testing.T) {
	const n = 50
	for _, s := range spreads {
		w, gpus := s[0], s[1]
		part, full := int64(n*4), int64(n*4*w)
		j := onGPUs(t, w, gpus, 2*full)
		rng := rand.New(rand.NewPCG(uint64(w), 6))
		in := make([][]float32, w)
		for r := range w {
			in[r] = fill(rng, values[float32](j, j.ptr(r, 0, full)))
		}
		moved := int64(0)
		crossed := func(each int64) { // since the last call
			moved += each
			require.Equal(t, links(w, gpus, moved), j.double.Traffic(), s)
		}
		j.run(1, func(r int, g comm.Group) (device.Kernel, error) {
			return g.AllToAll("a2a", j.ptr(r, 0, full), j.ptr(r, full, full), graph.F32)
		})
		crossed(part)
		for r := range w {
			got := values[float32](j, j.ptr(r, full, full))
			for from := range w {
				require.Equal(t, in[from][r*n:(r+1)*n], got[from*n:(from+1)*n])
			}
		}
		j.run(2, func(r int, g comm.Group) (device.Kernel, error) {
			return g.AllGather("ag", j.ptr(r, int64(r)*part, part), j.ptr(r, 0, full), graph.F32)
		})
		crossed(2 * part)
		for r := range w {
			for from := range w {
				require.Equal(t, in[from][from*n:(from+1)*n], values[float32](j, j.ptr(r, int64(from)*part, part)))
			}
		}
		for _, err := range j.all(func(i int, r *rank) error {
			var k device.Kernel
			var err error
			switch i {
			case 0:
				k, err = r.groups[-1].Send("s", j.ptr(i, 0, part), graph.F32, w-1)
			case w - 1:
				k, err = r.groups[-1].Recv("r", j.ptr(i, full, part), graph.F32, 0)
			default:
				return nil
			}
			return errors.Join(err, r.stream.Launch(k), r.stream.Sync())
		}) {
			require.NoError(t, err)
		}
		require.Equal(t, in[0][:n], values[float32](j, j.ptr(w-1, full, part)))
		j.run(1, func(r int, g comm.Group) (device.Kernel, error) {
			return g.Broadcast("bc", j.ptr(r, full, part), graph.F32, w-1)
		})
		for r := range w {
			require.Equal(t, in[0][:n], values[float32](j, j.ptr(r, full, part)))
		}
	}
}

// The error for a missing rank names its GPU.
func TestAMissingRankIsNamedWithItsGPU(t *testing.T) {
	j := newJobOn(t, drivertest.Options{Devices: 3}, ranks(3), 64, 30*time.Millisecond)
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
		require.ErrorContains(t, errs[i], `rank 1 (GPU 1) did not arrive within 30ms; ranks 0 (GPU 0), 2 (GPU 2) waited`)
	}
}

// A failed driver call between GPUs ends the operation on all ranks.
func TestADriverErrorBetweenGPUsEndsTheJob(t *testing.T) {
	for call, nth := range map[string]int{"cuMemcpyPeerAsync": 4, "cuEventRecord": 7, "cuStreamWaitEvent": 8} {
		j := newJobOn(t, drivertest.Options{Devices: 3}, ranks(3), 30000, 10*time.Second)
		j.double.Fail(call, nth, 999)
		for _, err := range j.all(func(i int, r *rank) error {
			k, err := r.groups[-1].AllReduce("ar", j.ptr(i, 0, 30000), graph.F32, graph.SumTree)
			require.NoError(t, err)
			if err := r.stream.Launch(k); err != nil {
				return err
			}
			return r.stream.Sync()
		}) {
			require.ErrorContains(t, err, call+": CUDA_ERROR_UNKNOWN (999)", call)
			require.ErrorContains(t, err, `operation "ar"`)
		}
	}
}

// The scratch memory of a rank beside its arena is computed from the program and is at most
// MostScratch.
func TestScratchOfAProgram(t *testing.T) {
	p := &graph.Program{Mesh: []graph.Axis{{Name: "replicate", Size: 2}, {Name: "shard", Size: 2}}}
	in := p.AddBuffer(graph.Buffer{Name: "in", DType: graph.BF16, Shape: []int64{2000}})
	out := p.AddBuffer(graph.Buffer{Name: "out", DType: graph.BF16, Shape: []int64{1000}})
	big := p.AddBuffer(graph.Buffer{Name: "big", DType: graph.F32, Shape: []int64{30 << 20}})
	scatter := graph.Op{Kind: graph.ReduceScatter, Attr: graph.GroupAttr{Axis: 1}, In: []graph.BufID{in}, Out: []graph.Out{{Buf: out}}}
	all := graph.Op{Kind: graph.AllReduce, Attr: graph.GroupAttr{Axis: -1}, Out: []graph.Out{{Buf: big, Mode: graph.ReadWrite}}}
	p.Sections = []graph.Section{{Phases: []graph.Phase{{Ops: []graph.Op{scatter}}}}}
	require.Zero(t, peers.ScratchBytes(p, nil))
	require.Zero(t, peers.ScratchBytes(p, []int{0, 0, 1, 1}), "the shards' ranks share a GPU")
	require.Equal(t, int64(2*2048), peers.ScratchBytes(p, []int{0, 1, 2, 3}), "two pieces of 1,000 numbers from one rank")
	p.Sections[0].Phases[0].Ops = append(p.Sections[0].Phases[0].Ops, all)
	require.Equal(t, int64(peers.MostScratch), peers.ScratchBytes(p, []int{0, 0, 1, 1}))
}
