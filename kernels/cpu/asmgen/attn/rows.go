package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Fields of softmaxArgs.
const (
	sScores = iota
	sM
	sL
	sAlpha
	sC
	sRows
	sVisible
	sVisibleStep
	sScale
)

const tile = 64 // keys of a tile

// masksFor sets the masks of a row's vectors from the count of visible keys in
// n (below 64; kept): AVX-512 in K1..K4.
func masksFor(n reg.Register) {
	MOVQ(n, reg.RCX)
	MOVQ(U32(1), reg.RAX)
	SHLQ(reg.CL, reg.RAX)
	DECQ(reg.RAX)
	for i := range 4 {
		KMOVW(reg.EAX, []reg.Register{reg.K1, reg.K2, reg.K3, reg.K4}[i])
		SHRQ(U8(16), reg.RAX)
	}
}

var opmasks = []reg.OpmaskPhysical{reg.K1, reg.K2, reg.K3, reg.K4}

// softmax updates rows' running maximum and sum by a tile of scores and turns
// the scores into unnormalised probabilities. Rows come in multiples of 16.
// Long function: one kernel, in the order of its instructions.
func softmax(v *vec) {
	name := "softmax" + v.name
	begin(name, "softmaxArgs", "turns a tile of scores into probabilities; see softmaxArgs.")
	per := v.bytes / 4 // floats of a vector
	nv := tile / per   // vectors of a row
	s, out := reg.RSI, reg.RDI
	rows, n, vis, visStep := reg.R8, reg.R9, reg.R10, reg.R11
	full := func(masked bool) string {
		if masked {
			return "Part"
		}
		return "Full"
	}
	loop := func(phase string, body func(masked bool)) {
		MOVQ(field(sScores), s)
		MOVQ(field(sRows), rows)
		MOVQ(field(sVisible), vis)
		MOVQ(field(sVisibleStep), visStep)
		Label(phase)
		CMPQ(vis, U8(tile))
		JB(LabelRef(phase + full(true)))
		body(false)
		JMP(LabelRef(phase + "Next"))
		Label(phase + full(true))
		MOVQ(vis, n)
		body(true)
		Label(phase + "Next")
		ADDQ(visStep, vis)
		ADDQ(U32(tile*4), s)
		DECQ(rows)
		JNE(LabelRef(phase))
	}
	// visibleFrom makes AX the address from which masks of the row's vectors follow each
	// other, for n visible keys: AVX2's.
	visibleFrom := func() {
		LEAQ(table["visible"], reg.RAX)
		SHLQ(U8(2), n)
		SUBQ(n, reg.RAX)
	}

	// 1. The largest score of each row, to c.
	r := v.regs
	MOVQ(field(sC), out)
	if v == zmm {
		VBROADCASTSS(table["-inf"], r[8])
	} else {
		VMOVUPS(table["-inf"], r[8])
	}
	loop("max", func(masked bool) {
		if masked && v == zmm {
			masksFor(n)
			for i := range nv {
				VMOVAPS(r[8], r[i])
				VMOVUPS(mem(s, i*v.bytes), opmasks[i], r[i])
			}
		} else if masked {
			visibleFrom()
			for i := range nv {
				VMOVUPS(mem(reg.RAX, i*v.bytes), reg.Y9)
				VBLENDVPS(reg.Y9, mem(s, i*v.bytes), r[8], r[i])
			}
		} else {
			for i := range nv {
				VMOVUPS(mem(s, i*v.bytes), r[i])
			}
		}
		for w := nv / 2; w > 0; w /= 2 {
			for i := range w {
				VMAXPS(r[i+w], r[i], r[i])
			}
		}
		if v == zmm {
			VEXTRACTF64X4(U8(1), reg.Z0, reg.Y1)
			VMAXPS(reg.Y1, reg.Y0, reg.Y0)
		}
		VEXTRACTF128(U8(1), reg.Y0, reg.X1)
		VMAXPS(reg.X1, reg.X0, reg.X0)
		VPERMILPS(U8(0x4e), reg.X0, reg.X1)
		VMAXPS(reg.X1, reg.X0, reg.X0)
		VPERMILPS(U8(0xb1), reg.X0, reg.X1)
		VMAXPS(reg.X1, reg.X0, reg.X0)
		VMOVSS(reg.X0, mem(out, 0))
		ADDQ(U8(4), out)
	})

	// 2. The new maxima, what to subtract, and α, a row a lane.
	m, alpha := reg.R12, reg.R13
	MOVQ(field(sC), out)
	MOVQ(field(sM), m)
	MOVQ(field(sAlpha), alpha)
	MOVQ(field(sRows), rows)
	konst := loadExp(v, 16)
	scale := r[10]
	VBROADCASTSS(field(sScale), scale)
	Label("state")
	VMULPS(mem(out, 0), scale, r[0])
	VMOVUPS(mem(m, 0), r[1])
	VMAXPS(r[1], r[0], r[2])
	VMOVUPS(r[2], mem(m, 0))
	if v == zmm {
		VBROADCASTSS(table["-inf"], r[8])
		VCMPPS(U8(4), r[8], r[2], reg.K1) // not equal, or NaN
		VMOVAPS_Z(r[2], reg.K1, r[2])
	} else {
		VCMPPS(U8(4), table["-inf"], r[2], r[3])
		VANDPS(r[3], r[2], r[2])
	}
	VMOVUPS(r[2], mem(out, 0))
	VSUBPS(r[2], r[1], r[0])
	exp(v, expRegs{r[0], r[1], r[2], konst}, false, nil)
	VMOVUPS(r[0], mem(alpha, 0))
	ADDQ(U8(v.bytes), out)
	ADDQ(U8(v.bytes), m)
	ADDQ(U8(v.bytes), alpha)
	SUBQ(U8(per), rows)
	JNE(LabelRef("state"))

	// 3. The probabilities, and the lanes of their sums.
	l := reg.R12
	MOVQ(field(sC), out)
	MOVQ(field(sL), l)
	MOVQ(field(sAlpha), alpha)
	loop("exp", func(masked bool) {
		if v == zmm {
			if masked {
				masksFor(n)
			}
			VBROADCASTSS(mem(out, 0), r[8])
			VBROADCASTSS(mem(alpha, 0), r[9])
			VMULPS(mem(l, 0), r[9], r[9])
			for i := range nv {
				x := r[2*i]
				VMULPS(mem(s, i*v.bytes), scale, x)
				VSUBPS(r[8], x, x)
				var only reg.OpmaskPhysical
				if masked {
					only = opmasks[i]
				}
				exp(v, expRegs{x, r[2*i+1], r[11+i], konst}, false, only)
				VADDPS(x, r[9], r[9])
				VMOVUPS(x, mem(s, i*v.bytes))
			}
			VMOVUPS(r[9], mem(l, 0))
		} else {
			VBROADCASTSS(mem(out, 0), reg.Y8)
			VBROADCASTSS(mem(alpha, 0), reg.Y9)
			VMULPS(mem(l, 0), reg.Y9, reg.Y11)
			VMULPS(mem(l, 32), reg.Y9, reg.Y12)
			if masked {
				visibleFrom()
			}
			for i := range nv {
				x := r[3*(i%2)]
				VMULPS(mem(s, i*v.bytes), scale, x)
				VSUBPS(reg.Y8, x, x)
				exp(v, expRegs{x, r[3*(i%2)+1], r[3*(i%2)+2], konst}, false, nil)
				if masked {
					VANDPS(mem(reg.RAX, i*v.bytes), x, x)
				}
				sum := []reg.VecPhysical{reg.Y11, reg.Y12}[i%2]
				VADDPS(x, sum, sum)
				VMOVUPS(x, mem(s, i*v.bytes))
			}
			VMOVUPS(reg.Y11, mem(l, 0))
			VMOVUPS(reg.Y12, mem(l, 32))
		}
		ADDQ(U8(4), out)
		ADDQ(U8(4), alpha)
		ADDQ(U8(64), l)
	})
	end()
}

const gScale = 7 // field of scoreGradArgs

// scoreGrad turns a tile of scores into probabilities and one of dp into ds.
func scoreGrad(v *vec) {
	name := "scoreGrad" + v.name
	begin(name, "scoreGradArgs", "turns scores into probabilities and dp into ds; see scoreGradArgs.")
	s, dp, lse, delta, rows := reg.RSI, reg.RDI, reg.R8, reg.R9, reg.R10
	fields(s, dp, lse, delta, rows)
	r := v.regs
	konst := loadExp(v, 16)
	scale := r[12]
	VBROADCASTSS(field(gScale), scale)
	nv := tile * 4 / v.bytes
	Label("row")
	VBROADCASTSS(mem(lse, 0), r[8])
	VBROADCASTSS(mem(delta, 0), r[9])
	for i := range nv {
		x, n, p := r[0], r[1], r[2]
		if v == zmm {
			x, n, p = r[2*i], r[2*i+1], []reg.VecPhysical{r[10], r[11], r[14], r[15]}[i]
		} else if i%2 == 1 {
			x, n, p = r[3], r[4], r[5]
		}
		VMULPS(mem(s, i*v.bytes), scale, x)
		VSUBPS(r[8], x, x)
		exp(v, expRegs{x, n, p, konst}, true, nil)
		VMOVUPS(x, mem(s, i*v.bytes))
		VMOVUPS(mem(dp, i*v.bytes), n)
		VSUBPS(r[9], n, n)
		VMULPS(n, x, x)
		VMULPS(scale, x, x)
		VMOVUPS(x, mem(dp, i*v.bytes))
	}
	ADDQ(U32(tile*4), s)
	ADDQ(U32(tile*4), dp)
	ADDQ(U8(4), lse)
	ADDQ(U8(4), delta)
	DECQ(rows)
	JNE(LabelRef("row"))
	end()
}

// transpose writes the columns of 64 rows as rows of 64; columns come in
// multiples of 8.
func transpose() {
	begin("transposeAVX", "transposeArgs", "writes the columns of 64 rows as rows of 64; see transposeArgs.")
	in, out, ld, cols := reg.RSI, reg.RDI, reg.R8, reg.R9
	fields(in, out, ld, cols)
	ld3, p, groups := reg.R10, reg.RAX, reg.R11
	LEAQ(idx(ld, ld, 2, 0), ld3)
	y := ymm.regs
	x := []reg.VecPhysical{reg.X0, reg.X1, reg.X2, reg.X3, reg.X4, reg.X5, reg.X6, reg.X7}
	Label("columns")
	MOVQ(in, p)
	MOVQ(U32(8), groups)
	Label("rows")
	// Rows 0..3 in the low and 4..7 in the high halves; columns 0..3, then 4..7.
	LEAQ(idx(p, ld, 4, 0), reg.RCX)
	rows := func(base reg.Register) [4]Mem {
		return [4]Mem{mem(base, 0), idx(base, ld, 1, 0), idx(base, ld, 2, 0), idx(base, ld3, 1, 0)}
	}
	lo, hi := rows(p), rows(reg.RCX)
	for half := range 2 {
		for i := range 4 {
			a, b := lo[i], hi[i]
			a.Disp, b.Disp = 16*half, 16*half
			VMOVUPS(a, x[4*half+i])
			VINSERTF128(U8(1), b, y[4*half+i], y[4*half+i])
		}
	}
	for half := range 2 {
		a, b, c, d := y[4*half], y[4*half+1], y[4*half+2], y[4*half+3]
		VUNPCKLPS(b, a, y[8])
		VUNPCKHPS(b, a, y[9])
		VUNPCKLPS(d, c, y[10])
		VUNPCKHPS(d, c, y[11])
		VUNPCKLPD(y[10], y[8], y[12])
		VUNPCKHPD(y[10], y[8], y[13])
		VUNPCKLPD(y[11], y[9], y[14])
		VUNPCKHPD(y[11], y[9], y[15])
		for i := range 4 {
			VMOVUPS(y[12+i], mem(out, tile*4*(4*half+i)))
		}
	}
	LEAQ(idx(p, ld, 8, 0), p)
	ADDQ(U8(32), out)
	DECQ(groups)
	JNE(LabelRef("rows"))
	ADDQ(U8(32), in)
	ADDQ(U32(tile*4*7), out)
	SUBQ(U8(8), cols)
	JNE(LabelRef("columns"))
	end()
}

// copyRows copies rows; columns come in multiples of 16.
func copyRows() {
	begin("copyAVX", "copyArgs", "copies rows; see copyArgs.")
	in, out, inRow, outRow, rows, cols, n := reg.RSI, reg.RDI, reg.R8, reg.R9, reg.R10, reg.R11, reg.RAX
	fields(in, out, inRow, outRow, rows, cols)
	Label("row")
	XORQ(n, n)
	Label("columns")
	VMOVUPS(idx(in, n, 4, 0), reg.Y0)
	VMOVUPS(idx(in, n, 4, 32), reg.Y1)
	VMOVUPS(reg.Y0, idx(out, n, 4, 0))
	VMOVUPS(reg.Y1, idx(out, n, 4, 32))
	ADDQ(U8(16), n)
	CMPQ(n, cols)
	JB(LabelRef("columns"))
	ADDQ(inRow, in)
	ADDQ(outRow, out)
	DECQ(rows)
	JNE(LabelRef("row"))
	end()
}

// tree16 adds the 16 lanes in lo and hi as a tree, into lane 0 of lo.
func tree16(lo, hi, loX, hiX reg.VecPhysical) {
	VADDPS(hi, lo, lo)
	VEXTRACTF128(U8(1), lo, hiX)
	VADDPS(hiX, loX, loX)
	VPERMILPS(U8(0x4e), loX, hiX)
	VADDPS(hiX, loX, loX)
	VPERMILPS(U8(0xb1), loX, hiX)
	VADDPS(hiX, loX, loX)
}

// finish divides the rows of accumulators by the sums of their lanes.
func finish() {
	begin("finishAVX", "finishArgs", "divides accumulated rows by their sums; see finishArgs.")
	acc, l, sums, rows, cols, n := reg.RSI, reg.RDI, reg.R8, reg.R9, reg.R10, reg.R11
	fields(acc, l, sums, rows, cols)
	Label("row")
	VMOVUPS(mem(l, 0), reg.Y0)
	VMOVUPS(mem(l, 32), reg.Y1)
	tree16(reg.Y0, reg.Y1, reg.X0, reg.X1)
	VMOVSS(reg.X0, mem(sums, 0))
	VBROADCASTSS(reg.X0, reg.Y0)
	MOVQ(cols, n)
	Label("columns")
	for i := range 2 {
		VMOVUPS(mem(acc, 32*i), reg.Y1)
		VDIVPS(reg.Y0, reg.Y1, reg.Y1)
		VMOVUPS(reg.Y1, mem(acc, 32*i))
	}
	ADDQ(U8(64), acc)
	SUBQ(U8(16), n)
	JNE(LabelRef("columns"))
	ADDQ(U8(64), l)
	ADDQ(U8(4), sums)
	DECQ(rows)
	JNE(LabelRef("row"))
	end()
}

// dots is the 16-lane dot product of rows of x and y; columns come in
// multiples of 16.
func dots() {
	begin("dotsAVX", "dotsArgs", "is the 16-lane dot product of rows; see dotsArgs.")
	x, y, out, xRow, yRow, rows, cols, n := reg.RSI, reg.RDI, reg.R8, reg.R9, reg.R10, reg.R11, reg.R12, reg.RAX
	fields(x, y, out, xRow, yRow, rows, cols)
	Label("row")
	VXORPS(reg.Y0, reg.Y0, reg.Y0)
	VXORPS(reg.Y1, reg.Y1, reg.Y1)
	XORQ(n, n)
	Label("columns")
	for i, acc := range []reg.VecPhysical{reg.Y0, reg.Y1} {
		VMOVUPS(idx(x, n, 4, 32*i), reg.Y2)
		VFMADD231PS(idx(y, n, 4, 32*i), reg.Y2, acc)
	}
	ADDQ(U8(16), n)
	CMPQ(n, cols)
	JB(LabelRef("columns"))
	tree16(reg.Y0, reg.Y1, reg.X0, reg.X1)
	VMOVSS(reg.X0, mem(out, 0))
	ADDQ(xRow, x)
	ADDQ(yRow, y)
	ADDQ(U8(4), out)
	DECQ(rows)
	JNE(LabelRef("row"))
	end()
}
