package vlib

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
)

// op3 emits d = a op b, with the instruction's form for a broadcast constant.
func (g *Gen) op3(op, bcst func(...operand.Op), d, a Vec, b Arg) Vec {
	if _, ok := b.(constant); ok && g.AVX512 {
		op = bcst
	}
	for i := range d {
		op(b.half(i), a[i], d[i])
	}
	return d
}

// Add returns a + b.
func (g *Gen) Add(a Vec, b Arg) Vec { return g.op3(VADDPS, VADDPS_BCST, g.New(), a, b) }

// AddTo is d += b.
func (g *Gen) AddTo(d Vec, b Arg) { g.op3(VADDPS, VADDPS_BCST, d, d, b) }

// Sub returns a - b.
func (g *Gen) Sub(a Vec, b Arg) Vec { return g.op3(VSUBPS, VSUBPS_BCST, g.New(), a, b) }

// Mul returns a·b.
func (g *Gen) Mul(a Vec, b Arg) Vec { return g.op3(VMULPS, VMULPS_BCST, g.New(), a, b) }

// MulTo is d *= b.
func (g *Gen) MulTo(d Vec, b Arg) { g.op3(VMULPS, VMULPS_BCST, d, d, b) }

// Div returns a / b.
func (g *Gen) Div(a Vec, b Arg) Vec { return g.op3(VDIVPS, VDIVPS_BCST, g.New(), a, b) }

// Max returns a where a > b, else b (also where either is NaN).
func (g *Gen) Max(a Vec, b Arg) Vec { return g.op3(VMAXPS, VMAXPS_BCST, g.New(), a, b) }

// Min returns a where a < b, else b (also where either is NaN).
func (g *Gen) Min(a Vec, b Arg) Vec { return g.op3(VMINPS, VMINPS_BCST, g.New(), a, b) }

// MaxTo is d = a where a > d.
func (g *Gen) MaxTo(d, a Vec) { g.op3(VMAXPS, VMAXPS_BCST, d, a, d) }

// Sqrt returns √a.
func (g *Gen) Sqrt(a Arg) Vec {
	d := g.New()
	for i, r := range d {
		VSQRTPS(a.half(i), r)
	}
	return d
}

// Neg returns -a.
func (g *Gen) Neg(a Vec) Vec {
	d := g.New()
	c := constant{word(1 << 31)}
	for i, r := range d {
		if g.AVX512 {
			VPXORD_BCST(c.mem, a[i], r)
		} else {
			VXORPS(c.mem, a[i], r)
		}
	}
	return d
}

// Fma231 is d = a·b + d, rounded once.
func (g *Gen) Fma231(d, a Vec, b Arg) { g.op3(VFMADD231PS, VFMADD231PS_BCST, d, a, b) }

// Fma213 is d = a·d + b, rounded once.
func (g *Gen) Fma213(d, a Vec, b Arg) { g.op3(VFMADD213PS, VFMADD213PS_BCST, d, a, b) }

// Fnma231 is d = -(a·b) + d, rounded once.
func (g *Gen) Fnma231(d, a Vec, b Arg) { g.op3(VFNMADD231PS, VFNMADD231PS_BCST, d, a, b) }

// Fnma213 is d = -(a·d) + b, rounded once.
func (g *Gen) Fnma213(d, a Vec, b Arg) { g.op3(VFNMADD213PS, VFNMADD213PS_BCST, d, a, b) }

// zeroUnless returns v where a compares with b, and +0 elsewhere.
func (g *Gen) zeroUnless(v, a Vec, b Arg, predicate uint8) Vec {
	d := g.New()
	if g.AVX512 {
		k := K()
		if c, ok := b.(constant); ok {
			VCMPPS_BCST(operand.Imm(uint64(predicate)), c.mem, a[0], k)
		} else {
			VCMPPS(operand.Imm(uint64(predicate)), b.half(0), a[0], k)
		}
		VMOVAPS_Z(v[0], k, d[0])
		return d
	}
	for i, r := range d {
		VCMPPS(operand.Imm(uint64(predicate)), b.half(i), a[i], r)
		VANDPS(v[i], r, r)
	}
	return d
}

// ZeroWhereNotPositive returns v, and +0 where a <= 0.
func (g *Gen) ZeroWhereNotPositive(v, a Vec) Vec {
	return g.zeroUnless(v, a, g.C(0), notLessEqual)
}
