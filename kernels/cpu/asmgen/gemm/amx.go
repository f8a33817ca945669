package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

// The AMX kernels keep up to 2×2 tiles of C, 32×32 elements. A tile of A is 16
// rows of 16 units of k, read where A lies or from a packed copy; a tile of B
// is 16 units of k of 16 columns, read from the slivers that the AVX-512
// kernels use too. Tiles are configured and released within a call, so that a
// goroutine is never moved while they hold anything.
func amx() {
	for _, k := range []struct {
		name string
		op   [2]int
	}{{"bf16", tdpbf16ps}, {"s8", tdpbssd}, {"u8", tdpbusd}} {
		var cases [][2]string
		for rows := 1; rows <= 2; rows++ {
			for cols := 1; cols <= 2; cols++ {
				name := fmt.Sprintf("%sx%dx%dAMX", k.name, 16*rows, 16*cols)
				microAMX(name, k.op, rows, cols)
				cases = append(cases, [2]string{fmt.Sprintf("[2]bool{%v, %v}", rows == 2, cols == 2), name})
			}
		}
		vlib.Choose(k.name+"AMX(t *tile, rows, cols int)", "[2]bool{rows > 16, cols > 16}", "t", cases)
	}
	rowAMX("bf16RowAMX", tdpbf16ps, rowNarrow)
	rowAMX("bf16RowF32AMX", tdpbf16ps, rowStore)
	rowAMX("s8RowAMX", tdpbssd, rowScale)
	bias512()
	scale512()
}

func microAMX(name string, op [2]int, rows, cols int) {
	vlib.Text(name, "t *tile", fmt.Sprintf("multiplies t.n slivers of up to %d rows of A by a sliver of up to %d "+
		"columns of B, t.times blocks of K one after the other.", 16*rows, 16*cols))
	// Machine numbers for tileMem.
	const dx, si, di, r9, r10, r11, r13, r14 = 2, 6, 7, 9, 10, 11, 13, 14
	// Tiles: C 0 … 3 by 2·row+column, A 4 and 5, B 6 and 7.
	t, ap, b, c, ldc, n, next := reg.RDI, reg.RBX, reg.R8, reg.RDX, reg.R11, reg.R12, reg.R15
	a, bp, count, ldb, aRow, aKB, a2 := reg.RSI, reg.R13, reg.RCX, reg.R9, reg.R10, reg.RAX, reg.R14
	Load(Param("t"), t)
	emit(loadConfig(di, tileCfg))
	MOVQ(at(t, tileLdb), ldb)
	MOVQ(at(t, tileLdc), ldc)
	MOVQ(at(t, tileRow), aRow)

	Label("depth")
	MOVQ(at(t, tileA), ap)
	MOVQ(at(t, tileB), b)
	MOVQ(at(t, tileC), c)
	MOVQ(at(t, tileN), n)

	Label("sliver")
	// Rows 16 … 31 of C and of A.
	MOVQ(ldc, a2)
	SHLQ(operand.Imm(4), a2)
	ADDQ(c, a2)
	CMPQ(at(t, tileAdd), operand.Imm(0))
	JE(operand.LabelRef("zero"))
	eachTile(rows, cols, func(i, j int) { emit(tileLoad(2*i+j, []int{dx, r14}[i], r11, 64*j)) })
	JMP(operand.LabelRef("begin"))
	Label("zero")
	eachTile(rows, cols, func(i, j int) { emit(tileZero(2*i + j)) })
	Label("begin")
	MOVQ(ap, a)
	MOVQ(aRow, a2)
	SHLQ(operand.Imm(4), a2)
	ADDQ(a, a2)
	MOVQ(b, bp)
	MOVQ(at(t, tileK), count)
	MOVQ(at(t, tileKB), aKB)
	MOVQ(at(t, tileNext), next)
	Label("block")
	emit(tileLoad(6, r13, r9, 0))
	emit(tileLoad(4, si, r10, 0))
	emit(dpTiles(op, 0, 4, 6))
	if cols == 2 {
		emit(tileLoad(7, r13, r9, 64))
		emit(dpTiles(op, 1, 4, 7))
	}
	if rows == 2 {
		emit(tileLoad(5, r14, r10, 0))
		emit(dpTiles(op, 2, 5, 6))
		if cols == 2 {
			emit(dpTiles(op, 3, 5, 7))
		}
		ADDQ(aKB, a2)
	}
	for i := range 4 {
		PREFETCHT1(at(next, 64*i))
	}
	ADDQ(operand.U32(256), next)
	ADDQ(aKB, a)
	ADDQ(operand.U32(16*128), bp)
	DECQ(count)
	JNZ(operand.LabelRef("block"))
	MOVQ(next, at(t, tileNext))

	MOVQ(ldc, a2)
	SHLQ(operand.Imm(4), a2)
	ADDQ(c, a2)
	eachTile(rows, cols, func(i, j int) { emit(tileStore(2*i+j, []int{dx, r14}[i], r11, 64*j)) })
	MOVQ(ldc, a)
	SHLQ(operand.Imm(5), a)
	ADDQ(a, c)
	ADDQ(at(t, tileStep), ap)
	DECQ(n)
	JNZ(operand.LabelRef("sliver"))

	nextDepth(t, bp, count, next)
	DECQ(at(t, tileTimes))
	JNZ(operand.LabelRef("depth"))
	emit(tileRelease())
	RET()
}

// eachTile calls f for each tile of C, by row and column.
func eachTile(rows, cols int, f func(i, j int)) {
	for i := range rows {
		for j := range cols {
			f(i, j)
		}
	}
}

// nextDepth moves t to the next block of K, of which bp is where B was read to; count and
// next are scratch. What comes behind that block is brought nearer meanwhile.
func nextDepth(t, bp, count, next reg.GPPhysical) {
	MOVQ(bp, at(t, tileB))
	MOVQ(at(t, tileK), count)
	MOVQ(count, next)
	SHLQ(operand.Imm(11), next)
	ADDQ(bp, next)
	MOVQ(next, at(t, tileNext))
	IMULQ(at(t, tileKB), count)
	ADDQ(count, at(t, tileA))
	MOVQ(operand.U32(1), at(t, tileAdd))
}

// bias512 adds a row vector to rows of up to 32 columns.
func bias512() {
	vlib.Text("biasAVX512", "c, bias unsafe.Pointer, ldc, rows, mask int",
		"adds a vector of up to 32 float32 to each of rows rows; ldc is in bytes.")
	c, b, ldc, rows := reg.RDI, reg.RSI, reg.R8, reg.RCX
	params("c bias ldc rows mask", c, b, ldc, rows, reg.RAX)
	KMOVW(reg.EAX, reg.K1)
	SHRQ(operand.Imm(16), reg.RAX)
	KMOVW(reg.EAX, reg.K2)
	VMOVUPS_Z(at(b, 0), reg.K1, zmm[0])
	VMOVUPS_Z(at(b, 64), reg.K2, zmm[1])
	Label("row")
	VMOVUPS_Z(at(c, 0), reg.K1, zmm[2])
	VMOVUPS_Z(at(c, 64), reg.K2, zmm[3])
	VADDPS(zmm[0], zmm[2], zmm[2])
	VADDPS(zmm[1], zmm[3], zmm[3])
	VMOVUPS(zmm[2], reg.K1, at(c, 0))
	VMOVUPS(zmm[3], reg.K2, at(c, 64))
	ADDQ(ldc, c)
	DECQ(rows)
	JNZ(operand.LabelRef("row"))
	VZEROUPPER()
	RET()
}

// scale512 makes int32 sums of up to 32 columns float32 elements.
func scale512() {
	vlib.Text("scaleAVX512", "c, cols, bias, rowScales unsafe.Pointer, ldc, rows, mask int",
		"makes each int32 c of rows rows, up to 32 columns, float32(c)·row scale·column scale + bias; ldc is in bytes.")
	c, cols, b, scales, ldc, rows := reg.RDI, reg.RSI, reg.RDX, reg.R9, reg.R8, reg.RCX
	params("c cols bias rowScales ldc rows mask", c, cols, b, scales, ldc, rows, reg.RAX)
	KMOVW(reg.EAX, reg.K1)
	SHRQ(operand.Imm(16), reg.RAX)
	KMOVW(reg.EAX, reg.K2)
	VMOVUPS_Z(at(cols, 0), reg.K1, zmm[0])
	VMOVUPS_Z(at(cols, 64), reg.K2, zmm[1])
	VMOVUPS_Z(at(b, 0), reg.K1, zmm[2])
	VMOVUPS_Z(at(b, 64), reg.K2, zmm[3])
	Label("row")
	VBROADCASTSS(at(scales, 0), zmm[6])
	VMOVUPS_Z(at(c, 0), reg.K1, zmm[4])
	VMOVUPS_Z(at(c, 64), reg.K2, zmm[5])
	for i, z := range []int{4, 5} {
		VCVTDQ2PS(zmm[z], zmm[z])
		VMULPS(zmm[6], zmm[z], zmm[z])
		VMULPS(zmm[i], zmm[z], zmm[z])
		VADDPS(zmm[2+i], zmm[z], zmm[z])
	}
	VMOVUPS(zmm[4], reg.K1, at(c, 0))
	VMOVUPS(zmm[5], reg.K2, at(c, 64))
	ADDQ(operand.Imm(4), scales)
	ADDQ(ldc, c)
	DECQ(rows)
	JNZ(operand.LabelRef("row"))
	VZEROUPPER()
	RET()
}
