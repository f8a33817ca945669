package vlib

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// fold combines lanes in the fixed tree: l with l+8, l+4, l+2, l+1. The result is
// in lane 0 of the returned register.
func (g *Gen) fold(v Vec, op func(...operand.Op)) reg.VecVirtual {
	y := YMM()
	if g.AVX512 {
		VEXTRACTF64X4(operand.Imm(1), v[0], y)
		op(y, v[0].AsY(), y)
	} else {
		op(v[1], v[0], y)
	}
	x, t := XMM(), XMM()
	VEXTRACTF128(operand.Imm(1), y, x)
	op(x, y.AsX(), x)
	VMOVHLPS(x, x, t)
	op(t, x, x)
	VMOVSHDUP(x, t)
	op(t, x, x)
	return x
}

// Sum returns the sum of the lanes in the fixed tree, in lane 0.
func (g *Gen) Sum(v Vec) reg.VecVirtual { return g.fold(v, VADDPS) }

// Max16 returns the largest lane, in lane 0.
func (g *Gen) Max16(v Vec) reg.VecVirtual { return g.fold(v, VMAXPS) }

// Splat returns lane 0 of x in every lane. On AVX2 the result is no destination.
func (g *Gen) Splat(x reg.VecVirtual) Vec {
	if g.AVX512 {
		z := ZMM()
		VBROADCASTSS(x.AsX(), z)
		return Vec{z}
	}
	y := YMM()
	VBROADCASTSS(x.AsX(), y)
	return Vec{y, y}
}

// Result stores lane 0 as the i-th result of the function.
func (g *Gen) Result(i int, x reg.VecVirtual) {
	b, err := ReturnIndex(i).Resolve()
	VMOVSS(x.AsX(), paramAddr(b, err))
}
