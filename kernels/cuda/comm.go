package cuda

import (
	"fmt"
	"runtime"
	"unsafe"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// MostRanks is how many ranks a RankSum adds.
const MostRanks = 64

// RankSum adds buffers of the ranks that share a device, element by element, in
// the order of comm.Adder or from left to right.
type RankSum struct {
	f      driver.Function
	name   string
	blocks int64 // at most
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
}

// size is the bytes of the parameters: C leaves no room after the last.
func (a *rankSumArgs) size() uintptr {
	return unsafe.Offsetof(a.accumulate) + unsafe.Sizeof(a.accumulate)
}

// RankSum returns a sum of f32, f64, i64, bf16 or f16 elements; 16 bits are added
// in f32 and rounded once. In the order SumSequential it is of f32, bf16 or f16 and goes
// to one buffer of f32. One is for one goroutine.
func (l *Library) RankSum(dtype graph.DType, order graph.SumOrder) (*RankSum, error) {
	name, ok := map[graph.DType]string{graph.F32: "f32", graph.F64: "f64", graph.I64: "i64", graph.BF16: "bf16", graph.F16: "f16"}[dtype]
	if !ok {
		return nil, fmt.Errorf("no sum of %s, want f32, f64, i64, bf16 or f16", dtype)
	}
	kernel := "sum_ranks_"
	if order == graph.SumSequential {
		if dtype == graph.F64 || dtype == graph.I64 {
			return nil, fmt.Errorf("no sum of %s in the order %s, want f32, bf16 or f16", dtype, order)
		}
		kernel = "sum_leaves_"
	}
	f, err := l.function("comm.cu", kernel+name, 0)
	if err != nil {
		return nil, err
	}
	return &RankSum{f: f, name: name, blocks: int64(max(l.o.Device.SMs, 1)) * 16}, nil
}

// Enqueue adds the sum of n elements at srcs, one for each rank, to a stream. It
// goes to every one of dsts, or is added to what is there. A dst may be one of
// the srcs.
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
	a.n, a.ranks, a.outs, a.accumulate = n, int32(len(srcs)), int32(len(dsts)), 0
	if accumulate {
		a.accumulate = 1
	}
	grid := driver.Dim{X: uint32(min((n+threads-1)/threads, r.blocks)), Y: 1, Z: 1}
	err := api.Launch(r.f, grid, driver.Dim{X: threads, Y: 1, Z: 1}, 0, s, unsafe.Pointer(a), a.size())
	runtime.KeepAlive(a)
	return err
}
