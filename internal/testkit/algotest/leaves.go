package algotest

import (
	"fmt"
	"math"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// CheckLeaves runs reduce-scatters in the order SumSequential as one rank of a group; all other
// ranks must call it too. It returns an error if one gives other bits than adding the parts of all
// ranks, or of some, from left to right. The longest needs all of arena.
func CheckLeaves(g comm.Group, arena device.Arena, stream device.Stream) error {
	r := &rank{g: g, arena: arena, stream: stream}
	w := int64(g.Size())
	for _, t := range []graph.DType{graph.F32, graph.BF16, graph.F16} {
		most := (arena.Size() - 16 - accBytes) / (t.Size()*w + graph.F32.Size())
		for _, each := range []int64{1, 17, min(3000, most), most} {
			for _, accumulate := range []bool{false, true} {
				if each > 3000 && (t == graph.F16 || !accumulate) {
					continue // as for the other 16-bit type
				}
				for _, from := range [][]int{nil, everyOther(0, int(w)), everyOther(int(w)/2, int(w)), {int(w) - 1}} {
					if from != nil && (each == 1 || each > 17 && !(t == graph.F32 && accumulate)) {
						continue // as for all ranks
					}
					if err := r.leaves(t, each, accumulate, from); err != nil {
						return fmt.Errorf("%s, %d elements a rank, accumulating %v, of ranks %v: %w", t, each, accumulate, from, err)
					}
				}
			}
		}
	}
	return nil
}

// accBytes is the size of an accumulator of squares.
const accBytes = 8 * exact.Limbs

// everyOther lists every other rank, starting with first.
func everyOther(first, ranks int) (list []int) {
	for r := first; r < ranks; r += 2 {
		list = append(list, r)
	}
	return list
}

// leaf returns number i of a rank, as bits of the type and as a float32 value.
func leaf(t graph.DType, rank int, i int64) (bits uint32, wide float32) {
	v := Number(rank, i)
	switch t {
	case graph.BF16:
		h := num.BF16(v)
		return uint32(h), num.FromBF16(h)
	case graph.F16:
		h := num.F16(v)
		return uint32(h), num.FromF16(h)
	}
	return math.Float32bits(v), v
}

func (r *rank) leaves(t graph.DType, each int64, accumulate bool, from []int) error {
	w, self := int64(r.g.Size()), r.g.Rank()
	full, shard := r.ptr(0, t.Size()*w*each), r.ptr((t.Size()*w*each+7)/8*8, graph.F32.Size()*each)
	sum, err := cpu.Slice[float32](shard)
	if err != nil {
		return err
	}
	own := int64(self) * each
	copy(sum, Numbers(99, 0, each))
	want := make([]float32, each)
	added := from
	if from == nil {
		for rank := range int(w) {
			added = append(added, rank)
		}
	}
	for i := range want {
		for k, rank := range added {
			_, v := leaf(t, rank, own+int64(i))
			switch {
			case k == 0 && accumulate:
				want[i] = sum[i] + v
			case k == 0:
				want[i] = v
			default:
				want[i] += v
			}
		}
	}
	if err := write(full, t, func(i int) uint32 { bits, _ := leaf(t, self, int64(i)); return bits }); err != nil {
		return err
	}
	if !accumulate {
		if err := r.run(r.g.ReduceScatter("leaves", full, shard, t, graph.SumSequential, accumulate, from...)); err != nil {
			return err
		}
	} else if err := r.squared(t, full, shard, added, from); err != nil {
		return err
	}
	for i, v := range want {
		if math.Float32bits(sum[i]) != math.Float32bits(v) {
			return fmt.Errorf("rank %d: element %d is %v, want %v", self, i, sum[i], v)
		}
	}
	return nil
}

// squared checks a sum that also adds up the squares of its addends, except for elements that do
// not count.
func (r *rank) squared(t graph.DType, full, shard device.Ptr, added, from []int) error {
	each := shard.Len / graph.F32.Size()
	at := r.ptr((shard.Off+shard.Len+7)/8*8, accBytes)
	acc, err := cpu.Slice[int64](at)
	if err != nil {
		return err
	}
	clear(acc)
	spans := [][2]int{{0, int(min(each, 200))}}
	if each > 512 {
		spans = append(spans, [2]int{512, int(each) - 3})
	}
	sum := make(exact.Accumulator, exact.Limbs)
	for _, s := range spans {
		for i := s[0]; i < s[1]; i++ {
			for _, rank := range added {
				_, v := leaf(t, rank, int64(r.g.Rank())*each+int64(i))
				sum.Add(float64(v) * float64(v))
			}
		}
	}
	if err := r.run(r.g.ReduceLeaves("leaves", full, shard, t, true, comm.Squares{Acc: at, Spans: spans}, from...)); err != nil {
		return err
	}
	want := sum.Float64()
	if got := exact.Accumulator(acc).Float64(); math.Abs(got-want) > 1e-13*want { // its blocks are rounded
		return fmt.Errorf("rank %d: the squares sum to %v, want %v", r.g.Rank(), got, want)
	}
	return nil
}

func write(to device.Ptr, t graph.DType, bits func(i int) uint32) error {
	if t == graph.F32 {
		v, err := cpu.Slice[float32](to)
		for i := range v {
			v[i] = math.Float32frombits(bits(i))
		}
		return err
	}
	v, err := cpu.Slice[uint16](to)
	for i := range v {
		v[i] = uint16(bits(i))
	}
	return err
}
