// Package algotest compares the algorithms of collectives with a transport's own collectives, on
// that transport.
package algotest

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
)

// ArenaBytes is the memory of a rank that Check needs.
const ArenaBytes = scratchAt + scratchBytes

const (
	mostBytes    = 40 << 10 // of an operand
	resultAt     = mostBytes
	scratchAt    = 2 * mostBytes
	scratchBytes = 16 << 10 // several chunks of the largest
)

// rank is one rank's part of a check.
type rank struct {
	g      comm.Group
	arena  device.Arena
	stream device.Stream
	random *rand.Rand
}

// Check runs every algorithm as one rank of a group; all other ranks must call it too. It returns
// an error if an algorithm that adds in the tree's order gives other bits than the transport. arena
// has ArenaBytes.
func Check(g comm.Group, arena device.Arena, stream device.Stream) error {
	r := &rank{g, arena, stream, rand.New(rand.NewPCG(7, uint64(g.Rank())))}
	for _, a := range []algo.Name{algo.Tree, algo.Halving, algo.Hierarchical, algo.Ring, algo.Server, algo.Auto} {
		for perHost := 1; perHost <= 4; perHost *= 2 {
			if perHost > 1 && a != algo.Hierarchical || g.Size()%perHost != 0 {
				continue
			}
			o := algo.Options{Algorithm: a, PerHost: perHost, Scratch: r.ptr(scratchAt, scratchBytes), Link: algo.Cluster}
			w, err := algo.Wrap(g, o)
			if err != nil {
				return err
			}
			for _, dtype := range []graph.DType{graph.F32, graph.BF16, graph.F16, graph.F64, graph.I64} {
				for _, each := range []int64{1, 37, 600} {
					if each > 1 && a != algo.Tree && dtype != graph.F32 && dtype != graph.BF16 {
						continue // rounds do not depend on the type
					}
					if err := r.compare(w, dtype, each, a == algo.Ring && dtype != graph.I64); err != nil {
						return fmt.Errorf("%s, %d a host, %s: %w", a, perHost, dtype, err)
					}
				}
			}
		}
	}
	return nil
}

func (r *rank) ptr(off, n int64) device.Ptr { return device.Ptr{Arena: r.arena, Off: off, Len: n} }

func (r *rank) run(k device.Kernel, err error) error {
	if err != nil {
		return err
	}
	if err := r.stream.Launch(k); err != nil {
		return err
	}
	return r.stream.Sync()
}

// compare runs each operation with w and with the transport, on the same inputs.
func (r *rank) compare(w comm.Group, dtype graph.DType, each int64, near bool) error {
	size, ranks, i := dtype.Size(), int64(w.Size()), int64(w.Rank())
	full, shard := r.ptr(0, each*size*ranks), r.ptr(resultAt, each*size)
	odd := r.ptr(0, (each*ranks+each%3)*size)
	for _, op := range r.operations(full, shard, odd, r.ptr(i*each*size, each*size), dtype) {
		mem, err := cpu.Bytes(r.ptr(0, scratchAt))
		if err != nil {
			return err
		}
		r.fill(dtype, mem[:(odd.Len+7)/8*8])
		r.fill(dtype, mem[resultAt:][:(shard.Len+7)/8*8])
		before := bytes.Clone(mem)
		if err := r.run(op.bind(r.g)); err != nil {
			return err
		}
		want := bytes.Clone(mem)
		copy(mem, before)
		sent := w.Stats().Sent
		if err := r.run(op.bind(w)); err != nil {
			return err
		}
		if got := w.Stats().Sent - sent; ranks > 1 && got == 0 && op.counts && (dtype == graph.F32 || dtype == graph.BF16) {
			return fmt.Errorf("%s of %d elements a rank: nothing counts as sent", op.name, each)
		}
		if near {
			if err := r.close(dtype, mem, want); err != nil {
				return fmt.Errorf("%s of %d elements a rank: %w", op.name, each, err)
			}
			continue
		}
		if !bytes.Equal(mem, want) {
			at := 0
			for mem[at] == want[at] {
				at++
			}
			return fmt.Errorf("%s of %d elements a rank: rank %d has other bits from byte %d on", op.name, each, i, at)
		}
	}
	return nil
}

type operation struct {
	name   string
	counts bool
	bind   func(g comm.Group) (device.Kernel, error)
}

func (r *rank) operations(full, shard, odd, own device.Ptr, dtype graph.DType) []operation {
	return []operation{
		{"all_reduce", true, func(g comm.Group) (device.Kernel, error) { return g.AllReduce("ar", odd, dtype, graph.SumTree) }},
		{"reduce_scatter", true, func(g comm.Group) (device.Kernel, error) {
			return g.ReduceScatter("rs", full, shard, dtype, graph.SumTree, false)
		}},
		{"reduce_scatter, accumulating", true, func(g comm.Group) (device.Kernel, error) {
			return g.ReduceScatter("rs", full, shard, dtype, graph.SumTree, true)
		}},
		{"reduce_scatter in place", true, func(g comm.Group) (device.Kernel, error) {
			return g.ReduceScatter("rs", full, own, dtype, graph.SumTree, false)
		}},
		{"all_gather", true, func(g comm.Group) (device.Kernel, error) { return g.AllGather("ag", shard, full, dtype) }},
		{"all_gather in place", true, func(g comm.Group) (device.Kernel, error) { return g.AllGather("ag", own, full, dtype) }},
	}
}

// fill writes numbers of very different magnitudes, so that their sums depend on the order.
func (r *rank) fill(dtype graph.DType, mem []byte) {
	for i := 0; i < len(mem); i += 8 {
		var bits uint64
		switch v := (r.random.Float64() - 0.5) * math.Exp2(float64(r.random.IntN(24))-12); dtype {
		case graph.F64, graph.I64:
			bits = math.Float64bits(v)
		case graph.F32:
			bits = uint64(math.Float32bits(float32(v)))<<32 | uint64(math.Float32bits(float32(3*v)))
		case graph.BF16:
			bits = uint64(math.Float32bits(float32(v))) >> 16 * 0x0001000100010001
		case graph.F16: // exponents of 8 to 23, whose sums are finite
			bits = (uint64(8+r.random.IntN(16))<<10 | r.random.Uint64()&0x83ff) * 0x0001000100010001
		}
		for b := range 8 {
			mem[i+b] = byte(bits >> (8 * b))
		}
	}
}

// close compares sums in another order, in f64 and f32, with a tolerance of a millionth of the
// largest addend.
func (r *rank) close(dtype graph.DType, got, want []byte) error {
	if dtype != graph.F32 {
		return nil
	}
	for i := 0; i+4 <= len(got); i += 4 {
		read := func(b []byte) float64 {
			return float64(math.Float32frombits(uint32(b[i]) | uint32(b[i+1])<<8 | uint32(b[i+2])<<16 | uint32(b[i+3])<<24))
		}
		if a, b := read(got), read(want); math.Abs(a-b) > 1e-6*8*3*4096 {
			return fmt.Errorf("element %d is %v, want about %v", i/4, a, b)
		}
	}
	return nil
}
