package direct

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// leafAdder adds the ranks' gradient contributions (leaves) from left to right to an f32
// sum, reading them in place.
type leafAdder struct{ k vec.SumLeaves }

// of sets the element type of the addends.
func (a *leafAdder) of(dtype graph.DType) error {
	switch dtype {
	case graph.F32:
		a.k.As = vec.NoHalf
	case graph.BF16:
		a.k.As = vec.BF16
	case graph.F16:
		a.k.As = vec.F16
	default:
		return fmt.Errorf("no sum of %s in the order %s, want f32, bf16 or f16", dtype, graph.SumSequential)
	}
	return nil
}

// sum adds srcs to dst in order. Without accumulate the first source replaces dst. It
// allocates only when it gets more sources than ever before.
func (a *leafAdder) sum(dst []byte, srcs [][]byte, accumulate bool) {
	k := &a.k
	k.Dst, k.Accumulate = elements[float32](dst), accumulate
	k.Srcs, k.Halves = k.Srcs[:0], k.Halves[:0]
	for _, s := range srcs {
		if k.As == vec.NoHalf {
			k.Srcs = append(k.Srcs, elements[float32](s))
		} else {
			k.Halves = append(k.Halves, elements[uint16](s))
		}
	}
	if err := k.Run(nil); err != nil {
		panic(err) // CheckScatter compared the lengths
	}
}
