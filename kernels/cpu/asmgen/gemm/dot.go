package main

import (
	"math/bits"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

func bf16AVX512() {
	for mr := 1; mr <= mr512; mr++ {
		micro512(mr, bf16, false)
	}
	byRows("bf16AVX512", "bf16x%dAVX512", mr512)
	interleave512("interleave16AVX512", 2)
}

func int8AVX512() {
	for mr := 1; mr <= mr512; mr++ {
		micro512(mr, int8, false)
	}
	byRows("int8AVX512", "int8x%dAVX512", mr512)
	interleave512("interleave8AVX512", 4)
	flip512()
	offset512()
}

// interleaveAhead is how many units further on source rows are brought nearer:
// what package gemm packs of a sliver before it goes to the next one.
const interleaveAhead = 8

// interleave512 packs rows of k: unit u of column c holds rows g·u … g·u+g−1 of
// that column.
func interleave512(name string, g int) {
	vlib.Text(name, "dst, src unsafe.Pointer, dstStride, srcStride, units, load, store int",
		"joins the elements of consecutive source rows in units of 32 bits, up to 32 columns"+byMasks)
	dst, src, ds, ss, units, mask, ahead := reg.RDI, reg.RSI, reg.R8, reg.R9, reg.RCX, reg.RAX, reg.R10
	params("dst src dstStride srcStride units", dst, src, ds, ss, units)
	MOVQ(ss, ahead)
	SHLQ(operand.Imm(uint64(bits.TrailingZeros(uint(interleaveAhead*g)))), ahead)
	ADDQ(src, ahead)
	Load(Param("load"), mask)
	KMOVW(reg.EAX, reg.K1)
	SHRQ(operand.Imm(16), mask)
	KMOVW(reg.EAX, reg.K2)
	Load(Param("store"), mask)
	KMOVW(reg.EAX, reg.K3)
	SHRQ(operand.Imm(16), mask)
	KMOVW(reg.EAX, reg.K4)
	load, half := VPMOVZXWD_Z, 32
	if g == 4 {
		load, half = VPMOVZXBD_Z, 16
	}
	unit := func(vectors int) {
		for i := range g {
			load(at(src, 0), reg.K1, zmm[i])
			PREFETCHT0(at(ahead, 0))
			if vectors == 2 {
				load(at(src, half), reg.K2, zmm[8+i])
			}
			ADDQ(ss, src)
			ADDQ(ss, ahead)
			for v := 0; v < vectors && i > 0; v++ {
				VPSLLD(operand.Imm(uint64(32/g*i)), zmm[8*v+i], zmm[8*v+i])
			}
		}
		for v := 0; v < 8*vectors; v += 8 {
			VPORD(zmm[v+1], zmm[v], zmm[v])
			if g == 4 {
				const orAll = 0xfe
				VPTERNLOGD(operand.Imm(orAll), zmm[v+3], zmm[v+2], zmm[v])
			}
		}
		VMOVUPS(zmm[0], reg.K3, at(dst, 0))
		if vectors == 2 {
			VMOVUPS(zmm[8], reg.K4, at(dst, 64))
		}
		ADDQ(ds, dst)
		DECQ(units)
	}
	TESTQ(mask, mask)
	JZ(operand.LabelRef("narrow"))
	Label("wide")
	unit(2)
	JNZ(operand.LabelRef("wide"))
	VZEROUPPER()
	RET()
	Label("narrow")
	unit(1)
	JNZ(operand.LabelRef("narrow"))
	VZEROUPPER()
	RET()
}

// flip512 makes signed bytes unsigned by adding 128 to each.
func flip512() {
	vlib.Text("flipAVX512", "p unsafe.Pointer, words int",
		"adds 128 to each byte of words 32-bit words.")
	p, n := reg.RDI, reg.RCX
	params("p words", p, n)
	MOVL(operand.U32(0x80808080), reg.EAX)
	VPBROADCASTD(reg.EAX, zmm[1])
	SUBQ(operand.Imm(16), n)
	JL(operand.LabelRef("tail"))
	Label("full")
	VPXORD(at(p, 0), zmm[1], zmm[0])
	VMOVUPS(zmm[0], at(p, 0))
	ADDQ(operand.Imm(64), p)
	SUBQ(operand.Imm(16), n)
	JGE(operand.LabelRef("full"))
	Label("tail")
	ADDQ(operand.Imm(16), n)
	JZ(operand.LabelRef("done"))
	MOVL(operand.U32(1), reg.EAX)
	SHLL(reg.CL, reg.EAX)
	DECL(reg.EAX)
	KMOVW(reg.EAX, reg.K1)
	VMOVUPS_Z(at(p, 0), reg.K1, zmm[0])
	VPXORD(zmm[0], zmm[1], zmm[0])
	VMOVUPS(zmm[0], reg.K1, at(p, 0))
	Label("done")
	VZEROUPPER()
	RET()
}

// offset512 computes what the flip of A added to each column of the product.
func offset512() {
	vlib.Text("offsetAVX512", "dst, b unsafe.Pointer, units int",
		"writes -128 times the sums of the columns of a sliver of B to 32 int32.")
	dst, b, n := reg.RDI, reg.RSI, reg.RCX
	params("dst b units", dst, b, n)
	MOVL(operand.U32(0x01010101), reg.EAX)
	VPBROADCASTD(reg.EAX, zmm[2])
	VPXORD(zmm[0], zmm[0], zmm[0])
	VPXORD(zmm[1], zmm[1], zmm[1])
	VPXORD(zmm[3], zmm[3], zmm[3])
	Label("unit")
	VPDPBUSD(at(b, 0), zmm[2], zmm[0])
	VPDPBUSD(at(b, 64), zmm[2], zmm[1])
	ADDQ(operand.Imm(128), b)
	DECQ(n)
	JNZ(operand.LabelRef("unit"))
	for v := range 2 {
		VPSLLD(operand.Imm(7), zmm[v], zmm[v])
		VPSUBD(zmm[v], zmm[3], zmm[v])
		VMOVUPS(zmm[v], at(dst, 64*v))
	}
	VZEROUPPER()
	RET()
}
