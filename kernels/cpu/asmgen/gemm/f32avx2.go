package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
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
	transpose256()
	copy256()
}

// laneMasks is a table of 16 words of ones followed by 16 of zeros: read at
// 4·(16−n) bytes it is a mask of the first n lanes.
func laneMasks() operand.Mem {
	m := GLOBL("laneMasks", RODATA|NOPTR)
	for i := range 16 {
		DATA(4*i, operand.U32(0xffffffff))
	}
	for i := 16; i < 32; i++ {
		DATA(4*i, operand.U32(0))
	}
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
// In one piece: one kernel, in the order of its instructions.
func micro256(mr int, pairs bool) {
	name, holds := fmt.Sprintf("f32x%dAVX2", mr), "a float32"
	add := VADDPS
	if pairs {
		name, holds = fmt.Sprintf("pairx%dAVX2", mr), "two int16 of consecutive k"
		add = VPADDD
	}
	TEXT(name, NOSPLIT, "func(t *byte)")
	Doc(fmt.Sprintf("%s multiplies t.n slivers of %d rows of A by a sliver of up to %d columns of B. A unit is %s.", name, mr, nr256, holds))
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

func transpose256() {
	TEXT("transposeAVX2", NOSPLIT, "func(dst, src *byte, dstStride, srcStride, rows, depth, mask int)")
	Doc("transposeAVX2 writes element k of each of up to 8 source rows to dst+k*dstStride, in the lanes of mask. Strides are in bytes.")
	dst, src, ds, ss, depth := reg.RDI, reg.RSI, reg.R8, reg.R9, reg.RCX
	row, left, step, tmp := reg.RAX, reg.RDX, reg.R10, reg.R11
	Load(Param("dst"), dst)
	Load(Param("src"), src)
	Load(Param("dstStride"), ds)
	Load(Param("srcStride"), ss)
	block := func(tail bool) {
		if tail {
			LEAQ(laneTable, tmp)
			MOVQ(depth, left)
			NEGQ(left)
			LEAQ(idx(tmp, left, 4, 64), tmp)
			VMOVUPS(at(tmp, 0), ymm[15])
		}
		MOVQ(src, row)
		Load(Param("rows"), left)
		MOVQ(ss, step)
		XORQ(tmp, tmp)
		SUBQ(operand.Imm(1), left)
		CMOVQLE(tmp, step)
		for i := range 8 {
			if tail {
				VMASKMOVPS(at(row, 0), ymm[15], ymm[i])
			} else {
				VMOVUPS(at(row, 0), ymm[i])
			}
			if i < 7 {
				ADDQ(step, row)
				SUBQ(operand.Imm(1), left)
				CMOVQLE(tmp, step)
			}
		}
		t := ymm[8:]
		for i := 0; i < 8; i += 2 {
			VUNPCKLPS(ymm[i+1], ymm[i], t[i])
			VUNPCKHPS(ymm[i+1], ymm[i], t[i+1])
		}
		for i := 0; i < 8; i += 4 {
			VUNPCKLPD(t[i+2], t[i], ymm[i])
			VUNPCKHPD(t[i+2], t[i], ymm[i+1])
			VUNPCKLPD(t[i+3], t[i+1], ymm[i+2])
			VUNPCKHPD(t[i+3], t[i+1], ymm[i+3])
		}
		for j := range 4 {
			VPERM2F128(operand.Imm(0x20), ymm[4+j], ymm[j], t[j])
			VPERM2F128(operand.Imm(0x31), ymm[4+j], ymm[j], t[4+j])
		}
		// Columns 0 … 7 are now in t; the low registers are free.
		Load(Param("mask"), left)
		CMPQ(left, operand.Imm(0xff))
	}
	Load(Param("depth"), depth)
	SUBQ(operand.Imm(8), depth)
	JL(operand.LabelRef("tail"))
	Label("full")
	block(false)
	JNE(operand.LabelRef("narrow"))
	for k := range 8 {
		VMOVUPS(ymm[8+k], at(dst, 0))
		ADDQ(ds, dst)
	}
	JMP(operand.LabelRef("stored"))
	Label("narrow")
	for k := range 8 {
		storeSix(8+k, 0, dst)
		ADDQ(ds, dst)
	}
	Label("stored")
	ADDQ(operand.Imm(32), src)
	SUBQ(operand.Imm(8), depth)
	JGE(operand.LabelRef("full"))
	Label("tail")
	ADDQ(operand.Imm(8), depth)
	JZ(operand.LabelRef("done"))
	block(true)
	for _, wide := range []bool{true, false} {
		if wide {
			JNE(operand.LabelRef("narrowTail"))
		} else {
			Label("narrowTail")
		}
		for k := range 7 {
			if wide {
				VMOVUPS(ymm[8+k], at(dst, 0))
			} else {
				storeSix(8+k, 0, dst)
			}
			if k < 6 {
				ADDQ(ds, dst)
				DECQ(depth)
				JZ(operand.LabelRef("done"))
			}
		}
		if wide {
			JMP(operand.LabelRef("done"))
		}
	}
	Label("done")
	VZEROUPPER()
	RET()
}

// storeSix writes the first six lanes of a register, which it destroys.
func storeSix(r, disp int, dst reg.Register) {
	VMOVUPS(ymm[r].AsX(), at(dst, disp))
	VEXTRACTF128(operand.Imm(1), ymm[r], ymm[r].AsX())
	VMOVLPS(ymm[r].AsX(), at(dst, disp+16))
}

func copy256() {
	TEXT("copyAVX2", NOSPLIT, "func(dst, src *byte, dstStride, srcStride, depth, load, store int)")
	Doc("copyAVX2 copies depth rows of up to 16 elements: lanes of load are read, the others are zeros, lanes of store are written. Strides are in bytes.")
	dst, src, ds, ss, depth, mask, tmp := reg.RDI, reg.RSI, reg.R8, reg.R9, reg.RCX, reg.RAX, reg.RDX
	Load(Param("dst"), dst)
	Load(Param("src"), src)
	Load(Param("dstStride"), ds)
	Load(Param("srcStride"), ss)
	Load(Param("depth"), depth)
	Load(Param("load"), mask)
	loadMask(mask, tmp, ymm[8], ymm[9])
	TESTQ(depth, depth)
	JZ(operand.LabelRef("done"))
	Load(Param("store"), mask)
	CMPQ(mask, operand.U32(1<<nr256-1))
	JNE(operand.LabelRef("six"))
	Label("one")
	VMASKMOVPS(at(src, 0), ymm[8], ymm[0])
	VMASKMOVPS(at(src, 32), ymm[9], ymm[1])
	ADDQ(ss, src)
	VMOVUPS(ymm[0], at(dst, 0))
	VMOVUPS(ymm[1], at(dst, 32))
	ADDQ(ds, dst)
	DECQ(depth)
	JNZ(operand.LabelRef("one"))
	JMP(operand.LabelRef("done"))
	Label("six")
	VMASKMOVPS(at(src, 0), ymm[8], ymm[0])
	ADDQ(ss, src)
	storeSix(0, 0, dst)
	ADDQ(ds, dst)
	DECQ(depth)
	JNZ(operand.LabelRef("six"))
	Label("done")
	VZEROUPPER()
	RET()
}
