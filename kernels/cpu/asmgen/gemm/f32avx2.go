package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

// The AVX2 kernel keeps 6×16 elements of C in 12 of its 16 registers.
const (
	mr256 = 6
	nr256 = 16
)

func f32AVX2() {
	laneTable = laneMasks()
	for mr := 1; mr <= mr256; mr++ {
		micro256(mr, false)
	}
	for mr := 1; mr <= mr256; mr++ {
		micro256(mr, true)
	}
	byRows("microAVX2", "f32x%dAVX2", mr256)
	byRows("pairsAVX2", "pairx%dAVX2", mr256)
}

// laneMasks is a table of 16 words of ones followed by 16 of zeros: read at
// 4·(16−n) bytes it is a mask of the first n lanes.
func laneMasks() operand.Mem {
	m := GLOBL("laneMasks", RODATA|NOPTR)
	vlib.Words(vlib.LaneWords()...)
	return m
}

var laneTable operand.Mem

// loadMask sets m0 and m1 to the lanes of the low 16 bits of the bit mask
// (contiguous ones from bit 0) in count. It destroys count and tmp.
func loadMask(count, tmp reg.GPPhysical, m0, m1 reg.VecPhysical) {
	POPCNTQ(count, count)
	NEGQ(count)
	LEAQ(laneTable, tmp)
	LEAQ(idx(tmp, count, 4, 64), tmp)
	VMOVUPS(at(tmp, 0), m0)
	VMOVUPS(at(tmp, 32), m1)
}

// micro256 generates the kernel of float32, or of units of two int16.
// Long function: one kernel, in the order of its instructions.
func micro256(mr int, pairs bool) {
	name, holds := fmt.Sprintf("f32x%dAVX2", mr), "a float32"
	add := VADDPS
	if pairs {
		name, holds = fmt.Sprintf("pairx%dAVX2", mr), "two int16 of consecutive k"
		add = VPADDD
	}
	vlib.Text(name, "t *tile", fmt.Sprintf("multiplies t.n slivers of %d rows of A by a sliver of up to %d columns of B. "+
		"A unit is %s.", mr, nr256, holds))
	t, a, b, c := reg.RDI, reg.RSI, reg.R8, reg.RDX
	count, ldb, ldb3, ldc, n, bp, row, ap, next := reg.RCX, reg.R9, reg.R10, reg.R11, reg.R12, reg.R13, reg.RAX, reg.RBX, reg.R15
	acc := func(i, v int) reg.VecPhysical { return ymm[2*i+v] }
	bv := [2]reg.VecPhysical{reg.Y12, reg.Y13}
	bc := [2]reg.VecPhysical{reg.Y14, reg.Y15}

	Load(Param("t"), t)
	MOVQ(at(t, tileA), ap)
	MOVQ(at(t, tileB), b)
	MOVQ(at(t, tileC), c)
	MOVQ(at(t, tileLdb), ldb)
	LEAQ(idx(ldb, ldb, 2, 0), ldb3)
	MOVQ(at(t, tileLdc), ldc)
	MOVQ(at(t, tileN), n)
	MOVQ(at(t, tileNext), next)

	Label("sliver")
	MOVQ(c, row)
	for i := range mr {
		PREFETCHT0(at(row, 0))
		PREFETCHT0(at(row, 60))
		VXORPS(acc(i, 0), acc(i, 0), acc(i, 0))
		VXORPS(acc(i, 1), acc(i, 1), acc(i, 1))
		if i < mr-1 {
			ADDQ(ldc, row)
		}
	}
	MOVQ(ap, a)
	MOVQ(b, bp)
	step := func(u int, b0, b1 operand.Mem) {
		VMOVUPS(b0, bv[0])
		VMOVUPS(b1, bv[1])
		for i := range mr {
			if pairs {
				VBROADCASTSS(at(a, 4*(u*mr256+i)), bc[0])
				VPMADDWD(bv[0], bc[0], bc[1])
				VPADDD(bc[1], acc(i, 0), acc(i, 0))
				VPMADDWD(bv[1], bc[0], bc[0])
				VPADDD(bc[0], acc(i, 1), acc(i, 1))
				continue
			}
			VBROADCASTSS(at(a, 4*(u*mr256+i)), bc[i%2])
			VFMADD231PS(bv[0], bc[i%2], acc(i, 0))
			VFMADD231PS(bv[1], bc[i%2], acc(i, 1))
		}
	}
	MOVQ(at(t, tileK), count)
	SHRQ(operand.Imm(2), count)
	JZ(operand.LabelRef("rest"))
	Label("four")
	PREFETCHT1(at(next, 0))
	ADDQ(operand.Imm(64), next)
	step(0, at(bp, 0), at(bp, 32))
	step(1, idx(bp, ldb, 1, 0), idx(bp, ldb, 1, 32))
	step(2, idx(bp, ldb, 2, 0), idx(bp, ldb, 2, 32))
	step(3, idx(bp, ldb3, 1, 0), idx(bp, ldb3, 1, 32))
	ADDQ(operand.Imm(4*4*mr256), a)
	LEAQ(idx(bp, ldb, 4, 0), bp)
	DECQ(count)
	JNZ(operand.LabelRef("four"))
	Label("rest")
	MOVQ(at(t, tileK), count)
	ANDQ(operand.Imm(3), count)
	JZ(operand.LabelRef("write"))
	Label("one")
	step(0, at(bp, 0), at(bp, 32))
	ADDQ(operand.Imm(4*mr256), a)
	ADDQ(ldb, bp)
	DECQ(count)
	JNZ(operand.LabelRef("one"))

	Label("write")
	rows := func(f func(i int)) {
		MOVQ(c, row)
		for i := range mr {
			f(i)
			if i < mr-1 {
				ADDQ(ldc, row)
			}
		}
	}
	// A masked store takes 12 cycles on AMD's cores.
	MOVQ(at(t, tileMask), count)
	CMPQ(count, operand.U32(1<<nr256-1))
	JNE(operand.LabelRef("edge"))
	CMPQ(at(t, tileAdd), operand.Imm(0))
	JE(operand.LabelRef("bias0"))
	rows(func(i int) {
		for v := range 2 {
			add(at(row, 32*v), acc(i, v), acc(i, v))
		}
	})
	Label("bias0")
	MOVQ(at(t, tileBias), row)
	TESTQ(row, row)
	JZ(operand.LabelRef("store0"))
	for v := range 2 {
		VMOVUPS(at(row, 32*v), bc[v])
		for i := range mr {
			add(bc[v], acc(i, v), acc(i, v))
		}
	}
	Label("store0")
	rows(func(i int) {
		for v := range 2 {
			VMOVUPS(acc(i, v), at(row, 32*v))
		}
	})
	JMP(operand.LabelRef("next"))
	Label("edge")
	loadMask(count, row, bv[0], bv[1])
	CMPQ(at(t, tileAdd), operand.Imm(0))
	JE(operand.LabelRef("bias"))
	rows(func(i int) {
		for v := range 2 {
			VMASKMOVPS(at(row, 32*v), bv[v], bc[v])
			add(acc(i, v), bc[v], acc(i, v))
		}
	})
	Label("bias")
	MOVQ(at(t, tileBias), row)
	TESTQ(row, row)
	JZ(operand.LabelRef("store"))
	for v := range 2 {
		VMASKMOVPS(at(row, 32*v), bv[v], bc[v])
		for i := range mr {
			add(bc[v], acc(i, v), acc(i, v))
		}
	}
	Label("store")
	rows(func(i int) {
		for v := range 2 {
			VMASKMOVPS(acc(i, v), bv[v], at(row, 32*v))
		}
	})
	Label("next")
	LEAQ(idx(row, ldc, 1, 0), c)
	ADDQ(at(t, tileStep), ap)
	DECQ(n)
	JNZ(operand.LabelRef("sliver"))
	VZEROUPPER()
	RET()
}
