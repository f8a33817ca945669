package vlib

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
)

// The 16-bit loads and stores take whole vectors: they ignore masks.

// at16 is the i-th half of a vector of 2-byte elements.
func at16(m Mem, i int) operand.Mem {
	m.Disp += 16 * i
	return operand.Mem(m)
}

// StoreF16 rounds v to binary16, to nearest even, and stores 16 of them.
func (g *Gen) StoreF16(v Vec, m Mem) {
	for i, r := range v {
		VCVTPS2PH(operand.Imm(0), r, at16(m, i))
	}
}

// LoadF16 loads 16 binary16 as float32.
func (g *Gen) LoadF16(m Mem) Vec {
	d := g.New()
	for i, r := range d {
		VCVTPH2PS(at16(m, i), r)
	}
	return d
}

// LoadBF16 loads 16 bfloat16 as float32.
func (g *Gen) LoadBF16(m Mem) Vec {
	d := g.New()
	for i, r := range d {
		VPMOVZXWD(at16(m, i), r)
		VPSLLD(operand.Imm(16), r, r)
	}
	return d
}

// StoreBF16 rounds v to bfloat16 as num.BF16 does and stores 16 of them.
func (g *Gen) StoreBF16(v Vec, m Mem) {
	const unordered = 3
	if g.AVX512 {
		hi, t, k := ZMM(), ZMM(), K()
		VPSRLD(operand.Imm(16), v[0], hi)
		VPANDD_BCST(word(1), hi, t)
		VPADDD_BCST(word(0x7fff), t, t)
		VPADDD(v[0], t, t)
		VPSRLD(operand.Imm(16), t, t)
		VCMPPS(operand.Imm(unordered), v[0], v[0], k)
		VPORD_BCST(word(0x40), hi, k, t)
		VPMOVDW(t, operand.Mem(m))
		return
	}
	var ts Vec
	for _, r := range v {
		hi, t, nan := YMM(), YMM(), YMM()
		VPSRLD(operand.Imm(16), r, hi)
		VPAND(word(1), hi, t)
		VPADDD(word(0x7fff), t, t)
		VPADDD(r, t, t)
		VPSRLD(operand.Imm(16), t, t)
		VPOR(word(0x40), hi, hi)
		VCMPPS(operand.Imm(unordered), r, r, nan)
		VBLENDVPS(nan, hi, t, t)
		ts = append(ts, t)
	}
	VPACKUSDW(ts[1], ts[0], ts[0]) // by 128-bit lanes: words 0-3, 8-11, 4-7, 12-15
	VPERMQ(operand.Imm(0xd8), ts[0], ts[0])
	VMOVDQU(ts[0], operand.Mem(m))
}
