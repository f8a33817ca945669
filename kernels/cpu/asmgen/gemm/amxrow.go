package main

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

// What becomes of a tile's sums behind its last block of K.
const (
	rowStore  = iota // they are C
	rowNarrow        // a bias is added, they are rounded to bf16
	rowScale         // int32: scales of row and column, a bias, then rounded to bf16
)

// rowAMX generates a kernel of whole tiles of 32×32: one sliver of A times t.n slivers of
// B, each tile over the whole depth in registers. Sums that go through the second-level
// cache and back cost more than reading A and B once more: it takes 15 bytes a cycle of
// them, and gives 50. The lines of C that a tile will write are asked for while it is
// computed. B, of which a tile uses each byte once, is read past the first-level cache,
// which then keeps A for the next sliver.
func rowAMX(name string, op [2]int, end int) {
	vlib.Text(name, "t *tile",
		"multiplies a sliver of 32 rows of A by t.n slivers of 32 columns of B.")
	// Machine numbers for tileMem.
	const dx, di, r9, r11, r14 = 2, 7, 9, 11, 14
	t, ap, b, c, ldb, aRow, ldo, n := reg.RDI, reg.RBX, reg.R8, reg.RDX, reg.R9, reg.R10, reg.R11, reg.R12
	a, bp, count, aKB, a2, line := reg.RSI, reg.R13, reg.RCX, reg.RAX, reg.R14, reg.R15
	ldc := r9 // sums are as far apart as rows of B
	Load(Param("t"), t)
	emit(loadConfig(di, tileCfg))
	MOVQ(at(t, tileA), ap)
	MOVQ(at(t, tileB), b)
	MOVQ(at(t, tileC), c)
	MOVQ(at(t, tileLdb), ldb)
	MOVQ(at(t, tileRow), aRow)
	MOVQ(at(t, tileN), n)
	if end == rowStore {
		ldc = r11
		MOVQ(at(t, tileLdc), ldo)
	} else {
		MOVQ(at(t, tileLdo), ldo)
		narrowConstants()
	}
	rows := func(r int) (base, disp int) { // of tile row r of the sums
		if r > 0 && end == rowStore {
			return r14, 0
		}
		return dx, 2048 * r
	}
	below := func() { // rows 16 and up of C, where they are not at a constant distance
		if end == rowStore {
			MOVQ(ldo, a2)
			SHLQ(operand.Imm(4), a2)
			ADDQ(c, a2)
		}
	}

	Label("sliver")
	below()
	CMPQ(at(t, tileAdd), operand.Imm(0))
	JE(operand.LabelRef("zero"))
	eachTile(2, 2, func(i, j int) {
		base, disp := rows(i)
		emit(tileLoad(2*i+j, base, ldc, disp+64*j))
	})
	JMP(operand.LabelRef("begin"))
	Label("zero")
	eachTile(2, 2, func(i, j int) { emit(tileZero(2*i + j)) })
	Label("begin")
	first := tileOut
	if end == rowStore {
		first = tileC
	}
	MOVQ(at(t, first), line)
	MOVQ(ldo, a2)
	SHLQ(operand.Imm(5), a2)
	ADDQ(line, a2)
	MOVQ(a2, at(t, tileEnd))
	MOVQ(ap, a)
	MOVQ(aRow, a2)
	SHLQ(operand.Imm(4), a2)
	ADDQ(a, a2)
	MOVQ(b, bp)
	MOVQ(at(t, tileK), count)
	MOVQ(at(t, tileKB), aKB)
	rowBlocks(op, end, t, a, bp, count, aKB, a2, ldo, line)

	below()
	eachTile(2, 2, func(i, j int) {
		base, disp := rows(i)
		emit(tileStore(2*i+j, base, ldc, disp+64*j))
	})
	if end != rowStore {
		finishRow(end, t, c, a, a2, count, ldo, line)
	}
	MOVQ(at(t, tileStepC), a2)
	ADDQ(a2, c)
	if end == rowStore {
		MOVQ(c, at(t, tileC))
	}
	ADDQ(at(t, tileStepB), b)
	DECQ(n)
	JNZ(operand.LabelRef("sliver"))
	emit(tileRelease())
	VZEROUPPER()
	RET()
}

// rowBlocks goes over the blocks of K of a tile, and asks for two of its rows of C in each
// until it has all.
func rowBlocks(op [2]int, end int, t, a, bp, count, aKB, a2, ldo, line reg.GPPhysical) {
	const si, r9, r10, r13, r14 = 6, 9, 10, 13, 14 // of a, the rows' distances, bp and a2
	Label("block")
	emit(tileLoadT1(6, r13, r9, 0))
	emit(tileLoad(4, si, r10, 0))
	emit(dpTiles(op, 0, 4, 6))
	emit(tileLoadT1(7, r13, r9, 64))
	emit(dpTiles(op, 1, 4, 7))
	emit(tileLoad(5, r14, r10, 0))
	emit(dpTiles(op, 2, 5, 6))
	emit(dpTiles(op, 3, 5, 7))
	CMPQ(line, at(t, tileEnd))
	JAE(operand.LabelRef("near"))
	for range 2 {
		emit(prefetchWriteR15(0))
		if end == rowStore { // rows of C need not begin with a line
			emit(prefetchWriteR15(64))
			emit(prefetchWriteR15(124))
		}
		ADDQ(ldo, line)
	}
	Label("near")
	ADDQ(aKB, a)
	ADDQ(aKB, a2)
	ADDQ(operand.U32(16*128), bp)
	DECQ(count)
	JNZ(operand.LabelRef("block"))
}

// finishRow rounds the sums of a tile at c to 16 bits at t.out, and moves t on to the next
// tile. Without t.out the sums wait for more of K.
func finishRow(end int, t, c, a, out, count, ldo, bias reg.GPPhysical) {
	MOVQ(at(t, tileOut), out)
	TESTQ(out, out)
	JZ(operand.LabelRef("wait"))
	MOVQ(c, a)
	KXORW(reg.K6, reg.K6, reg.K6)
	MOVQ(at(t, tileBias), bias)
	TESTQ(bias, bias)
	JZ(operand.LabelRef("unbiased"))
	KXNORW(reg.K6, reg.K6, reg.K6)
	VMOVUPS(at(bias, 0), zmm[16])
	VMOVUPS(at(bias, 64), zmm[17])
	ADDQ(operand.U32(128), bias)
	MOVQ(bias, at(t, tileBias))
	Label("unbiased")
	if end == rowScale {
		MOVQ(at(t, tileColScales), bias)
		VMOVUPS(at(bias, 0), zmm[18])
		VMOVUPS(at(bias, 64), zmm[19])
		ADDQ(operand.U32(128), bias)
		MOVQ(bias, at(t, tileColScales))
		MOVQ(at(t, tileRowScales), bias)
	}
	MOVQ(operand.U32(32), count)
	Label("row")
	VMOVUPS(at(a, 0), zmm[0])
	VMOVUPS(at(a, 64), zmm[1])
	if end == rowScale {
		VBROADCASTSS(at(bias, 0), zmm[20])
		ADDQ(operand.Imm(4), bias)
	}
	for v := range 2 {
		if end == rowScale {
			VCVTDQ2PS(zmm[v], zmm[v])
			VMULPS(zmm[20], zmm[v], zmm[v])
			VMULPS(zmm[18+v], zmm[v], zmm[v])
		}
		VADDPS(zmm[16+v], zmm[v], reg.K6, zmm[v])
	}
	narrowRound()
	VMOVDQU16(zmm[0], at(out, 0))
	ADDQ(operand.U32(128), a)
	ADDQ(ldo, out)
	DECQ(count)
	JNZ(operand.LabelRef("row"))
	ADDQ(operand.Imm(64), at(t, tileOut))
	Label("wait")
}

// prefetchWriteR15 is PREFETCHW disp(R15): 0F 0D /1.
func prefetchWriteR15(disp byte) []byte { return []byte{0x41, 0x0f, 0x0d, 0x4f, disp} }
