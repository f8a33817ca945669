package vlib

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// scalar is a float32 in memory that stands for a vector with it in every lane.
// AVX-512 reads it in the instruction; AVX2 loads it before each use.
type scalar struct{ mem operand.Mem }

func (s scalar) half(int) operand.Op {
	y := YMM()
	VBROADCASTSS(s.mem, y)
	return y
}

// Scalars returns the n float32 at base as operands: registers with AVX-512,
// memory with AVX2.
func (g *Gen) Scalars(base reg.Register, n int) []Arg {
	var as []Arg
	for i := range n {
		m := operand.Mem{Base: base, Disp: 4 * i}
		if g.AVX512 {
			as = append(as, g.Broadcast(m))
		} else {
			as = append(as, scalar{m})
		}
	}
	return as
}

// ScalarInMemory is the i-th float32 at base as an operand that takes no register, with
// AVX-512.
func (g *Gen) ScalarInMemory(base reg.Register, i int) Arg {
	return constant{operand.Mem{Base: base, Disp: 4 * i}}
}

// CopyScalar returns a scalar in every lane of a vector that may be overwritten.
func (g *Gen) CopyScalar(a Arg) Vec {
	s, ok := a.(scalar)
	if !ok {
		return g.Copy(a)
	}
	d := g.New()
	for _, r := range d {
		VBROADCASTSS(s.mem, r)
	}
	return d
}
