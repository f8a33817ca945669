package main

import (
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	. "github.com/mmcloughlin/avo/build"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

// dropout emits Dropout over blocks of 64 elements: 16 Philox calls, one a lane,
// of which word j serves elements 16j to 16j+15.
func dropout() {
	iota := GLOBL("lane", RODATA|NOPTR)
	vlib.Words(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
	kernel("drop", "drop", "func(y, x *float32, n int, keys *uint32, c0, c1, c2, c3, threshold uint32, scale float32)",
		"is y = x·scale where kept, else 0, for n elements, a multiple of 64.", func(g *vlib.Gen) {
			y, x, n, k := g.Ptr("y"), g.Ptr("x"), g.Ptr("n"), g.Ptr("keys")
			scale := g.Param("scale")
			m0, m1 := g.RWord(0xD2511F53), g.RWord(0xCD9E8D57)
			counter := GP32()
			Load(Param("c0"), counter)
			odd := K()
			if g.AVX512 {
				bits := GP32()
				MOVL(operand.U32(0xaaaa), bits)
				KMOVW(bits, odd)
			}
			g.LoopBlocks(n, 64, func() {
				for half := range len(scale) {
					c := [4]reg.VecVirtual{g.NewReg(), g.NewReg(), g.NewReg(), g.NewReg()}
					x0 := XMM()
					VMOVD(counter, x0)
					VPBROADCASTD(x0, c[0])
					VPADDD(iota.Offset(32*half), c[0], c[0])
					for i := 1; i < 4; i++ {
						VBROADCASTSS(g.ParamMem(fmt2("c%d", i)), c[i])
					}
					const rounds, atOnce = 10, 2
					word, left, again := GP64(), GP64(), g.Label("rounds")
					MOVQ(k, word)
					MOVQ(operand.U32(rounds/atOnce), left)
					Label(again)
					was := c
					for round := range atOnce {
						h0, l0 := mul32(g, c[0], m0[half], odd)
						h1, l1 := mul32(g, c[2], m1[half], odd)
						c[0] = xor3(g, h1, c[1], operand.Mem{Base: word, Disp: 8 * round})
						c[2] = xor3(g, h0, c[3], operand.Mem{Base: word, Disp: 8*round + 4})
						c[1], c[3] = l1, l0
					}
					for i, w := range c {
						VMOVAPS(w, was[i])
					}
					c = was
					ADDQ(operand.Imm(8*atOnce), word)
					DECQ(left)
					JNZ(operand.LabelRef(again))
					for j, w := range c {
						at := g.At(x, j)
						at.Disp += 32 * half
						v := g.NewReg()
						VMULPS(operand.Mem(at), scale[half], v)
						d := g.NewReg()
						VBROADCASTSS(g.ParamMem("threshold"), d)
						if g.AVX512 {
							keep := K()
							VPCMPUD(operand.Imm(5), d, w, keep) // w >= d
							VMOVAPS_Z(v, keep, v)
						} else {
							VPMAXUD(w, d, d)
							VPCMPEQD(w, d, d)
							VANDPS(d, v, v)
						}
						to := g.At(y, j)
						to.Disp += 32 * half
						VMOVUPS(v, operand.Mem(to))
					}
				}
				ADDL(operand.Imm(16), counter)
			})
			g.Return()
		})
}

// mul32 returns the high and low words of the products of 32-bit lanes.
func mul32(g *vlib.Gen, a, m reg.VecVirtual, odd reg.OpmaskVirtual) (hi, lo reg.VecVirtual) {
	even, shifted, odds := g.NewReg(), g.NewReg(), g.NewReg()
	VPMULUDQ(a, m, even)
	VPSRLQ(operand.Imm(32), a, shifted)
	VPMULUDQ(shifted, m, odds)
	hi, lo = g.NewReg(), g.NewReg()
	VPSHUFD(operand.Imm(0xf5), even, hi) // the high words to the even lanes
	VPSHUFD(operand.Imm(0xa0), odds, lo) // the low words to the odd lanes
	if g.AVX512 {
		VPBLENDMD(odds, hi, odd, hi)
		VPBLENDMD(lo, even, odd, lo)
	} else {
		VPBLENDD(operand.Imm(0xaa), odds, hi, hi)
		VPBLENDD(operand.Imm(0xaa), lo, even, lo)
	}
	return hi, lo
}

// xor3 is a ^ b ^ the word at m.
func xor3(g *vlib.Gen, a, b reg.VecVirtual, m operand.Mem) reg.VecVirtual {
	d := g.NewReg()
	if g.AVX512 {
		VPXORD_BCST(m, a, d)
		VPXORD(b, d, d)
		return d
	}
	VPBROADCASTD(m, d)
	VPXOR(a, d, d)
	VPXOR(b, d, d)
	return d
}
