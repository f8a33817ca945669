package vlib

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Abs clears the signs of v, in place, and returns it.
func (g *Gen) Abs(v Vec) Vec {
	for _, r := range v {
		if g.AVX512 {
			VPANDD_BCST(word(0x7fffffff), r, r)
		} else {
			VPAND(word(0x7fffffff), r, r)
		}
	}
	return v
}

// MaxBitsTo is d = a where a's bits, as a number, are larger.
func (g *Gen) MaxBitsTo(d, a Vec) {
	for i := range d {
		VPMAXUD(a[i], d[i], d[i])
	}
}

// MaxBits16 returns the lane whose bits, as a number, are largest, in lane 0.
func (g *Gen) MaxBits16(v Vec) reg.VecVirtual { return g.fold(v, VPMAXUD) }

// AtBytes addresses the current 16 elements of an array of bytes.
func (g *Gen) AtBytes(base reg.Register) Mem { return Mem{Base: base, Index: g.index, Scale: 1} }

// StoreBytes rounds v, of magnitudes up to 127, to the nearest whole numbers, ties to
// even, and stores 16 bytes.
func (g *Gen) StoreBytes(v Vec, m Mem) {
	for _, r := range v {
		VCVTPS2DQ(r, r)
	}
	if g.AVX512 {
		VPMOVDB(v[0], operand.Mem(m))
		return
	}
	VPACKSSDW(v[1], v[0], v[0]) // by 128-bit lanes: words 0-3, 8-11, 4-7, 12-15
	VPERMQ(operand.Imm(0xd8), v[0], v[0])
	high := XMM()
	VEXTRACTI128(operand.Imm(1), v[0], high)
	VPACKSSWB(high, v[0].AsX(), high)
	VMOVDQU(high, operand.Mem(m))
}

// LoadBytes loads 16 signed bytes as float32.
func (g *Gen) LoadBytes(m Mem) Vec {
	d := g.New()
	for i, r := range d {
		at := m
		at.Disp += 8 * i
		VPMOVSXBD(operand.Mem(at), r)
		VCVTDQ2PS(r, r)
	}
	return d
}
