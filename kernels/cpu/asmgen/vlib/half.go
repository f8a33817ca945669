package vlib

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
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

// highWords is the order of VPERMI2W that takes the high words of two registers.
var highWords operand.Mem

// BF16Rounder rounds 32 float32 at a time to bfloat16, as num.BF16 does, with AVX-512:
// the high words of what is rounded, of two registers at once.
type BF16Rounder struct{ half, one, quiet, lowest, order reg.VecVirtual }

// NewBF16Rounder keeps its constants in registers.
func (g *Gen) NewBF16Rounder() *BF16Rounder {
	if highWords.Symbol.Name == "" {
		highWords = GLOBL("highwords", RODATA|NOPTR)
		Words(HighWords()...)
	}
	r := &BF16Rounder{half: g.RWord(0x7fff)[0], one: g.RWord(1)[0], quiet: g.RWord(0x400000)[0], lowest: g.RWord(1 << 16)[0], order: ZMM()}
	VMOVDQU32(highWords, r.order)
	return r
}

// Store writes a's and then b's numbers.
func (r *BF16Rounder) Store(a, b Vec, m operand.Mem) {
	const unordered = 3
	var ts [2]reg.VecVirtual
	for i, v := range []reg.VecVirtual{a[0], b[0]} {
		odd, nan, t := K(), K(), ZMM()
		VPTESTMD(r.lowest, v, odd)
		VPADDD(r.half, v, t)
		VPADDD(r.one, t, odd, t)
		VCMPPS(operand.Imm(unordered), v, v, nan)
		VPORD(r.quiet, v, nan, t)
		ts[i] = t
	}
	words := ZMM()
	VMOVDQA32(r.order, words)
	VPERMI2W(ts[1], ts[0], words)
	VMOVDQU32(words, m)
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
