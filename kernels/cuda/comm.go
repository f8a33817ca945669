package cuda

import (
	"fmt"
	"math/bits"
	"runtime"
	"unsafe"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// MostRanks is the largest number of ranks whose buffers a RankSum can add.
const MostRanks = 64

// RankSum adds buffers of the ranks that share a device, element by element, in
// the order of comm.Adder or from left to right.
type RankSum struct {
	f      driver.Function
	name   string
	blocks int64 // at most
	per    int64 // elements in 16 bytes
	shared int   // bytes of shared memory that a block needs for each level of the tree
	args   rankSumArgs
}

// rankSumArgs are the parameters of sum_ranks_* and sum_leaves_* in comm.cu.
type rankSumArgs struct {
	skip       driver.Address
	src, dst   [MostRanks]driver.Address
	n          int64
	ranks      int32
	outs       int32
	accumulate int32
	aligned    int32 // all buffers start at multiples of 16 bytes
}

// size is the size of the parameters in bytes, without Go's padding after the last one,
// which the kernel's C parameters do not have.
func (a *rankSumArgs) size() uintptr {
	return unsafe.Offsetof(a.aligned) + unsafe.Sizeof(a.aligned)
}

// RankSum returns a kernel that sums f32, f64, i64, bf16 or f16 elements over ranks;
// 16-bit elements are added in f32 and rounded once. In the order SumSequential the elements
// are f32, bf16 or f16, and the only output is one f32 buffer. A RankSum must not be used by
// several goroutines at once.
func (l *Library) RankSum(dtype graph.DType, order graph.SumOrder) (*RankSum, error) {
	name, ok := map[graph.DType]string{graph.F32: "f32", graph.F64: "f64", graph.I64: "i64", graph.BF16: "bf16", graph.F16: "f16"}[dtype]
	if !ok {
		return nil, fmt.Errorf("no sum of %s, want f32, f64, i64, bf16 or f16", dtype)
	}
	kernel, shared := "sum_ranks_", treeLevel(dtype)
	if order == graph.SumSequential {
		if dtype == graph.F64 || dtype == graph.I64 {
			return nil, fmt.Errorf("no sum of %s in the order %s, want f32, bf16 or f16", dtype, order)
		}
		kernel, shared = "sum_leaves_", 0
	}
	f, err := l.function("comm.cu", kernel+name, 0)
	if err != nil {
		return nil, err
	}
	return &RankSum{f: f, name: name, blocks: int64(max(l.o.Device.SMs, 1)) * 16 * threads / treeThreads, per: 16 / dtype.Size(), shared: shared}, nil
}

// treeThreads is TREE_THREADS of common.cuh: the threads of a block that adds in a tree.
// Each thread adds 16 bytes of every addend.
const treeThreads = 64

// treeLevels is how many levels of a tree over n addends keep their partial sums in shared
// memory. treeLevel is the size of one level.
func treeLevels(n int64) int { return bits.Len64(uint64(n / 4)) }

// treeLevel is the size of one tree level in bytes; 16-bit elements are held in f32.
func treeLevel(dtype graph.DType) int { return treeThreads * int(16/dtype.Size()*max(dtype.Size(), 4)) }

// Enqueue adds a kernel to a stream that sums n elements of every rank's buffer, srcs. It
// writes the sum to each of dsts, or adds it to them if accumulate is set. A dst may be one
// of srcs.
func (r *RankSum) Enqueue(api driver.API, s driver.Stream, dsts, srcs []driver.Address, n int64, accumulate bool) error {
	if len(srcs) == 0 || len(srcs) > MostRanks || len(dsts) > MostRanks {
		return fmt.Errorf("sum over %d ranks into %d buffers, want 1 to %d", len(srcs), len(dsts), MostRanks)
	}
	if n == 0 || len(dsts) == 0 {
		return nil
	}
	a := &r.args
	copy(a.src[:], srcs)
	copy(a.dst[:], dsts)
	a.n, a.ranks, a.outs, a.accumulate = n, int32(len(srcs)), int32(len(dsts)), flag(accumulate)
	a.aligned = flag(aligned(16, srcs...) && aligned(16, dsts...))
	const block = treeThreads
	grid := driver.Dim{X: uint32(min((n+block*r.per-1)/(block*r.per), r.blocks)), Y: 1, Z: 1}
	err := api.Launch(r.f, grid, driver.Dim{X: block, Y: 1, Z: 1}, r.shared*treeLevels(int64(len(srcs))), s, unsafe.Pointer(a), a.size())
	runtime.KeepAlive(a)
	return err
}
