//go:build linux

package nccl_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/nccltest"
)

var worlds = []int{1, 2, 3, 5}

func TestAllGather(t *testing.T) {
	for _, w := range worlds {
		for _, inPlace := range []bool{false, true} {
			rng := rand.New(rand.NewPCG(uint64(w), 1))
			const n = 17
			shard, full := int64(n*4), int64(n*4*w)
			j := begin(t, setting{mesh: ranksOf(w), arena: full + shard, seed: uint64(w)})
			at := func(i int, r *rank) device.Ptr {
				if inPlace {
					return r.ptr(int64(i)*shard, shard)
				}
				return r.ptr(full, shard)
			}
			var want []float32
			for i, r := range j.ranks {
				want = append(want, fill(rng, values[float32](j, at(i, r)))...)
			}
			j.run(3, func(i int, r *rank) (device.Kernel, error) {
				return r.groups[-1].AllGather("ag", at(i, r), r.ptr(0, full), graph.F32)
			})
			for _, r := range j.ranks {
				require.Equal(t, want, values[float32](j, r.ptr(0, full)), "%d ranks, in place %v", w, inPlace)
				require.Equal(t, 3*(full-shard), r.groups[-1].Stats().Sent)
			}
		}
	}
}

// Sums have the bits of the tree order, even if they are made in chunks.
func TestReduceScatter(t *testing.T) {
	nccl.Chunk(t, 256)
	for _, w := range worlds {
		for _, form := range []string{"apart", "in place", "accumulate", "leaves"} {
			rng := rand.New(rand.NewPCG(uint64(w), 2))
			const n = 150 // three chunks, the last one shorter
			order := graph.SumTree
			if form == "leaves" {
				order = graph.SumSequential
			}
			shard, full := int64(n*4), int64(n*4*w)
			j := begin(t, setting{mesh: ranksOf(w), arena: full + shard, seed: uint64(w)})
			at := func(i int, r *rank) device.Ptr {
				if form == "in place" {
					return r.ptr(int64(i)*shard, shard)
				}
				return r.ptr(full, shard)
			}
			in, old := make([][]float32, w), make([][]float32, w)
			for i, r := range j.ranks {
				old[i] = fill(rng, values[float32](j, at(i, r)))
				in[i] = fill(rng, values[float32](j, r.ptr(0, full)))
			}
			j.run(1, func(i int, r *rank) (device.Kernel, error) {
				return r.groups[-1].ReduceScatter("rs", r.ptr(0, full), at(i, r), graph.F32, order, form == "accumulate" || form == "leaves")
			})
			sum := sumOver(in)
			for i, r := range j.ranks {
				want := slices.Clone(sum[i*n : (i+1)*n])
				switch form {
				case "accumulate":
					for e := range want {
						want[e] = old[i][e] + want[e]
					}
				case "leaves":
					copy(want, old[i])
					for _, leaf := range in {
						for e := range want {
							want[e] += leaf[i*n+e]
						}
					}
				}
				require.Equal(t, want, values[float32](j, at(i, r)), "%d ranks, %s", w, form)
				if form != "in place" {
					require.Equal(t, in[i], values[float32](j, r.ptr(0, full)), "the input stays")
				}
			}
		}
	}
}

// Small buffers are sent to all ranks at once, large ones by shares. Both give the bits of the tree
// order.
func TestAllReduce(t *testing.T) {
	nccl.Chunk(t, 8<<10)
	for _, w := range worlds {
		for _, n := range []int{1, 300, 2048, 5000} { // f64: 8 B, 2.4 KiB, 16 KiB, 40 KB
			rng := rand.New(rand.NewPCG(uint64(w), uint64(n)))
			j := begin(t, setting{mesh: ranksOf(w), arena: int64(n) * 8, seed: uint64(w)})
			in := make([][]float64, w)
			for i, r := range j.ranks {
				in[i] = fill(rng, values[float64](j, r.ptr(0, int64(n)*8)))
			}
			j.run(1, func(_ int, r *rank) (device.Kernel, error) {
				return r.groups[-1].AllReduce("ar", r.ptr(0, int64(n)*8), graph.F64, graph.SumTree)
			})
			for _, r := range j.ranks {
				require.Equal(t, sumOver(in), values[float64](j, r.ptr(0, int64(n)*8)), "%d ranks, %d elements", w, n)
			}
		}
	}
}

func TestCopies(t *testing.T) {
	for _, w := range worlds {
		const n = 9
		part, whole := int64(n*4), int64(n*4*w)
		rng := rand.New(rand.NewPCG(uint64(w), 4))
		j := begin(t, setting{mesh: ranksOf(w), arena: 2*whole + part, seed: uint64(w)})
		sent := make([][]float32, w)
		var root []float32
		for i, r := range j.ranks {
			sent[i] = fill(rng, values[float32](j, r.ptr(0, whole)))
			own := fill(rng, values[float32](j, r.ptr(2*whole, part)))
			if i == w-1 {
				root = own
			}
		}
		j.run(2, func(_ int, r *rank) (device.Kernel, error) {
			return r.groups[-1].AllToAll("aa", r.ptr(0, whole), r.ptr(whole, whole), graph.F32)
		})
		j.run(1, func(_ int, r *rank) (device.Kernel, error) {
			return r.groups[-1].Broadcast("bc", r.ptr(2*whole, part), graph.F32, w-1)
		})
		j.run(1, func(_ int, r *rank) (device.Kernel, error) { return r.groups[-1].Barrier("b") })
		for i, r := range j.ranks {
			got := values[float32](j, r.ptr(whole, whole))
			for p := range w {
				require.Equal(t, sent[p][i*n:(i+1)*n], got[p*n:(p+1)*n])
			}
			require.Equal(t, root, values[float32](j, r.ptr(2*whole, part)))
		}
		if w < 2 {
			continue
		}
		j.run(1, func(i int, r *rank) (device.Kernel, error) { // from rank 0 to the last
			switch i {
			case 0:
				return r.groups[-1].Send("to the last", r.ptr(0, part), graph.F32, w-1)
			case w - 1:
				return r.groups[-1].Recv("from the first", r.ptr(2*whole, part), graph.F32, 0)
			}
			return nil, nil
		})
		require.Equal(t, sent[0][:n], values[float32](j, j.ranks[w-1].ptr(2*whole, part)))
	}
}

// Each axis has its own communicator, split from the world's. An axis of all ranks uses the
// world's.
func TestMesh(t *testing.T) {
	j := begin(t, setting{mesh: []graph.Axis{{Name: "replica", Size: 3}, {Name: "shard", Size: 2}}, arena: 64, seed: 3})
	require.Equal(t, 12, j.fabric.Calls()["ncclCommSplit"])
	for i, r := range j.ranks {
		values[float32](j, r.ptr(0, 4))[0] = float32(i)
	}
	for axis, want := range map[int][]float32{0: {0 + 2 + 4, 1 + 3 + 5}, 1: {0 + 1, 2 + 3, 4 + 5}} {
		j.run(1, func(i int, r *rank) (device.Kernel, error) {
			return r.groups[axis].Broadcast("keep", r.ptr(0, 4), graph.F32, r.groups[axis].Rank()*0)
		})
		for i, r := range j.ranks {
			values[float32](j, r.ptr(0, 4))[0] = float32(i)
		}
		j.run(1, func(_ int, r *rank) (device.Kernel, error) {
			return r.groups[axis].AllReduce("ar", r.ptr(0, 4), graph.F32, graph.SumTree)
		})
		for i, r := range j.ranks {
			at := i % 2
			if axis == 1 {
				at = i / 2
			}
			require.Equal(t, want[at], values[float32](j, r.ptr(0, 4))[0], "axis %d, rank %d", axis, i)
			values[float32](j, r.ptr(0, 4))[0] = float32(i)
		}
	}
	require.Zero(t, begin(t, setting{mesh: ranksOf(2), arena: 64}).fabric.Calls()["ncclCommSplit"])
}

// A sum over more ranks than one kernel can add is made of subtrees and has the same bits.
func TestManyRanks(t *testing.T) {
	const w, n = 67, 20
	nccl.Chunk(t, 256)
	j := begin(t, setting{mesh: ranksOf(w), arena: (w+1)*n*4 + n*8})
	rng := rand.New(rand.NewPCG(w, 1))
	in, old, wide := make([][]float32, w), make([][]float32, w), make([][]float64, w)
	for i, r := range j.ranks {
		in[i] = fill(rng, values[float32](j, r.ptr(0, w*n*4)))
		old[i] = fill(rng, values[float32](j, r.ptr(w*n*4, n*4)))
		wide[i] = fill(rng, values[float64](j, r.ptr((w+1)*n*4, n*8)))
	}
	bind := func(order graph.SumOrder) func(int, *rank) (device.Kernel, error) {
		return func(_ int, r *rank) (device.Kernel, error) {
			return r.groups[-1].ReduceScatter("rs", r.ptr(0, w*n*4), r.ptr(w*n*4, n*4), graph.F32, order, order == graph.SumSequential)
		}
	}
	j.run(1, bind(graph.SumSequential))
	for i, r := range j.ranks {
		want := old[i]
		for _, leaf := range in {
			for e := range want {
				want[e] += leaf[i*n+e]
			}
		}
		require.Equal(t, want, values[float32](j, r.ptr(w*n*4, n*4)))
		require.Equal(t, in[i], values[float32](j, r.ptr(0, w*n*4)), "the input stays")
	}
	j.run(1, bind(graph.SumTree))
	j.run(1, func(_ int, r *rank) (device.Kernel, error) {
		return r.groups[-1].AllReduce("ar", r.ptr((w+1)*n*4, n*8), graph.F64, graph.SumTree)
	})
	sum := sumOver(in)
	for i, r := range j.ranks {
		require.Equal(t, sum[i*n:(i+1)*n], values[float32](j, r.ptr(w*n*4, n*4)))
		require.Equal(t, in[i], values[float32](j, r.ptr(0, w*n*4)), "the input stays")
		require.Equal(t, sumOver(wide), values[float64](j, r.ptr((w+1)*n*4, n*8)))
	}
	_, err := j.ranks[0].groups[-1].AllReduce("half", j.ranks[0].ptr(0, 4), graph.BF16, graph.SumTree)
	require.ErrorContains(t, err, "a sum of bf16 over 67 ranks")
}

// Calls that stay in progress for a while are waited for.
func TestInProgress(t *testing.T) {
	t.Parallel()
	j := begin(t, setting{mesh: []graph.Axis{{Name: "a", Size: 2}, {Name: "b", Size: 2}}, arena: 64, fabric: nccltest.Options{Looks: 40, Takes: 3 << 20}})
	for i, r := range j.ranks {
		values[float32](j, r.ptr(0, 4))[0] = float32(i)
		require.GreaterOrEqual(t, r.world.Took(i), int64(3<<20)+nccl.ScratchBytes(4))
	}
	j.run(2, func(_ int, r *rank) (device.Kernel, error) {
		return r.groups[0].AllReduce("ar", r.ptr(0, 4), graph.F32, graph.SumTree)
	})
}

// Ranks that cannot share a communicator are refused with the same error on each.
func TestRefused(t *testing.T) {
	for words, o := range map[string]setting{
		"rank 1 (host ": {version: func(r int) int { return 22105 - 100*r }},
		"ranks 0 and 2 both have the GPU Double with UUID 00000000000000000000000000000000 of host": {mesh: ranksOf(3), device: func(r int) int { return r % 2 }},
		"rank 0 (host ": {before: func(f *nccltest.Fabric) { f.Fail("ncclGetUniqueId", 1, 2) }},
		"as told":       {before: func(f *nccltest.Fabric) { f.Fail("ncclCommInitRankConfig", 2, 2) }},
		"as told (1)":   {before: func(f *nccltest.Fabric) { f.Fail("ncclGroupEnd", 3, 1) }},
	} {
		t.Run(words, func(t *testing.T) {
			if o.mesh == nil {
				o.mesh = ranksOf(2)
			}
			o.arena = 64
			_, errs := start(t, o)
			for _, err := range errs {
				require.ErrorContains(t, err, words)
			}
		})
	}
}

// An error that NCCL finds while a rank waits ends the job. The error names the rank and its
// operation.
func TestAsynchronousError(t *testing.T) {
	j := begin(t, setting{mesh: ranksOf(2), arena: 64})
	errs := j.try(1, func(i int, r *rank) (device.Kernel, error) {
		if i == 1 {
			return nil, nil // never launches
		}
		j.fabric.Break(0, nccl.RemoteError, 0)
		return r.groups[-1].AllReduce("gradients", r.ptr(0, 4), graph.F32, graph.SumTree)
	})
	require.ErrorIs(t, errs[0], comm.ErrLost)
	require.ErrorContains(t, errs[0], "ncclCommGetAsyncError: as told (6)")
}

// The watchdog names a rank that does not arrive, and the others' kernels are aborted.
func TestMissingRank(t *testing.T) {
	t.Parallel()
	flights := make(chan string, 3)
	j := begin(t, setting{mesh: ranksOf(3), arena: 64, unseen: true, failed: func(flight string) { flights <- flight }})
	j.run(2, func(_ int, r *rank) (device.Kernel, error) { return r.groups[-1].Barrier("before") })
	go func() { // only after all others have arrived, because a slow rank is not a missing one
		for j.control.shown(0, 0).Call < 3 || j.control.shown(2, 0).Call < 3 {
			select {
			case <-j.control.stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
		j.control.watch(300*time.Millisecond, j.groups)
	}()
	errs := j.try(1, func(i int, r *rank) (device.Kernel, error) {
		if i == 1 {
			return nil, nil
		}
		return r.groups[-1].AllReduce("gradients", r.ptr(0, 4), graph.F32, graph.SumTree)
	})
	for _, i := range []int{0, 2} {
		require.ErrorIs(t, errs[i], comm.ErrTimeout)
		require.ErrorContains(t, errs[i], `all_reduce "gradients" (call 3) of the world group: rank 1 did not arrive within`)
	}
	all := <-flights + <-flights + <-flights
	require.Eventually(t, func() bool { return j.fabric.Calls()["ncclCommAbort"] == 3 }, time.Minute, time.Millisecond, "a rank has its error before its communicator is given back")
	for i, how := range []string{`call 3: all_reduce "gradients", 4 bytes, enqueued \S+ ago, not passed`, `call 2: barrier "before", 0 bytes, enqueued \S+ ago, passed`, `call 3: all_reduce "gradients", 4 bytes, enqueued \S+ ago, not passed`} {
		require.Regexp(t, fmt.Sprintf(`the last operations of rank %d over NCCL:(\n  world group, call \d: barrier .*)*\n  world group, %s`, i, how), all)
	}
}

// After ranks have closed, an error reports no operations of theirs, because the memory that held
// them is freed.
func TestAnErrorAfterTheRanks(t *testing.T) {
	flights := make(chan string, 2)
	j := begin(t, setting{mesh: ranksOf(2), arena: 64, failed: func(flight string) { flights <- flight }})
	j.run(2, func(_ int, r *rank) (device.Kernel, error) { return r.groups[-1].Barrier("before") })
	errs := j.all(func(_ int, r *rank) error {
		ctx := r.ctx
		r.ctx = nil
		return ctx.Close()
	})
	require.NoError(t, errors.Join(errs...))
	for i := range j.ranks { // each rank's last operation was reported, so that none seems to be waited for
		require.Equal(t, watch.Progress{Call: 2}, j.control.shown(i, 0))
	}
	j.control.Abort(errors.New("late"))
	require.Empty(t, flights)
}

// If another transport ends a job while NCCL starts, the start returns.
func TestEndsWhileStarting(t *testing.T) {
	var j *job
	j, errs := start(t, setting{mesh: ranksOf(2), arena: 64, timeout: 300 * time.Millisecond, fabric: nccltest.Options{Looks: 1 << 40}})
	for _, err := range errs {
		require.True(t, errors.Is(err, comm.ErrTimeout), "%v", err)
	}
	require.Error(t, j.control.Err())
}

// The watchdog compares signatures and refuses operations that differ, because NCCL does not notice
// them. The double does.
func TestMismatch(t *testing.T) {
	j := begin(t, setting{mesh: ranksOf(2), arena: 64})
	errs := j.try(1, func(i int, r *rank) (device.Kernel, error) {
		return r.groups[-1].Broadcast("b", r.ptr(0, int64(8+8*i)), graph.F32, 0)
	})
	for i, r := range j.ranks { // one may have waited for its stream before the watchdog's first check
		require.Eventually(t, func() bool { return r.ctx.Err() != nil }, time.Minute, time.Millisecond)
		if errs[i] == nil {
			errs[i] = r.ctx.Err()
		}
		require.ErrorIs(t, errs[i], comm.ErrMismatch)
	}
	require.ErrorContains(t, j.found(), "ncclBroadcast of 8 bytes")
}

// A call that all ranks have entered but that does not end fails at the timeout. Starting the job
// has the same timeout.
func TestStuck(t *testing.T) {
	t.Parallel()
	j := begin(t, setting{mesh: ranksOf(2), arena: 64, timeout: 4 * time.Second, late: true})
	errs := j.try(1, func(i int, r *rank) (device.Kernel, error) {
		return r.groups[0].Broadcast("b", r.ptr(0, int64(8+8*i)), graph.F32, 0) // an axis, which is not watched here
	})
	require.ErrorIs(t, errs[0], comm.ErrTimeout)
	require.ErrorContains(t, errs[0], `in the axis data group: broadcast "b" (call 1): timeout: NCCL has not ended it for`)
	require.ErrorIs(t, errs[1], comm.ErrTimeout, "its stream passed: it is told before")
	require.Error(t, j.found())
}
