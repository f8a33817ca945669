package main

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

// half generates the conversions between float32 and the 16-bit floats, for
// whole vectors: 16 elements with AVX-512, 8 with AVX2.
func half(wide bool) {
	suffix, lanes, r := "AVX2", 8, ymm
	if wide {
		suffix, lanes, r = "AVX512", 16, zmm
	}
	loop := func(name, doc string, srcBytes, dstBytes int, setup, body func()) {
		TEXT(name+suffix, NOSPLIT, "func(dst, src *byte, vectors int)")
		Doc(name + suffix + " " + doc)
		Load(Param("dst"), reg.RDI)
		Load(Param("src"), reg.RSI)
		Load(Param("vectors"), reg.RCX)
		setup()
		TESTQ(reg.RCX, reg.RCX)
		JZ(operand.LabelRef("done"))
		Label("next")
		body()
		ADDQ(operand.Imm(uint64(srcBytes*lanes)), reg.RSI)
		ADDQ(operand.Imm(uint64(dstBytes*lanes)), reg.RDI)
		DECQ(reg.RCX)
		JNZ(operand.LabelRef("next"))
		Label("done")
		VZEROUPPER()
		RET()
	}
	src, dst := at(reg.RSI, 0), at(reg.RDI, 0)
	loop("widenBF16", "converts vectors of bf16 to float32.", 2, 4, func() {}, func() {
		VPMOVZXWD(src, r[0])
		VPSLLD(operand.Imm(16), r[0], r[0])
		VMOVUPS(r[0], dst)
	})
	loop("widenF16", "converts vectors of binary16 to float32.", 2, 4, func() {}, func() {
		VCVTPH2PS(src, r[0])
		VMOVUPS(r[0], dst)
	})
	if wide {
		halves512()
		return
	}
	narrow256("narrowF16", func() {}, func(v int) {
		VCVTPS2PH(operand.Imm(0), r[0], at(reg.RDI, 16*v))
	})
	constant := func(v uint32, to reg.VecPhysical) {
		MOVL(operand.U32(v), reg.EAX)
		VMOVD(reg.EAX, reg.X0)
		VPBROADCASTD(reg.X0, to)
	}
	narrow256("narrowBF16", func() {
		constant(0x7fff, r[4])
		constant(1, r[5])
		constant(0x40, r[6])
	}, func(v int) {
		VPSRLD(operand.Imm(16), r[0], r[1])
		VPAND(r[5], r[1], r[2])
		VPADDD(r[4], r[0], r[3])
		VPADDD(r[2], r[3], r[3])
		VPSRLD(operand.Imm(16), r[3], r[3])
		VCMPPS(operand.Imm(unordered), r[0], r[0], r[7])
		VPOR(r[6], r[1], r[1])
		VBLENDVPS(r[7], r[1], r[3], r[3])
		VEXTRACTI128(operand.Imm(1), r[3], reg.X1)
		VPACKUSDW(reg.X1, reg.X3, reg.X0)
		VMOVDQU(reg.X0, at(reg.RDI, 16*v))
	})
}

// narrow256 rounds rows of 16 float32 to 16 bits, to nearest even; NaNs become quiet.
// round writes ymm0 as half v of a row.
func narrow256(name string, setup func(), round func(v int)) {
	TEXT(name+"AVX2", NOSPLIT, "func(dst, src *byte, dstStride, srcStride, rows int)")
	Load(Param("dst"), reg.RDI)
	Load(Param("src"), reg.RSI)
	Load(Param("dstStride"), reg.R8)
	Load(Param("srcStride"), reg.R9)
	Load(Param("rows"), reg.RCX)
	setup()
	Label("row")
	for v := range 2 {
		VMOVUPS(at(reg.RSI, 32*v), reg.Y0)
		round(v)
	}
	ADDQ(reg.R9, reg.RSI)
	ADDQ(reg.R8, reg.RDI)
	DECQ(reg.RCX)
	JNZ(operand.LabelRef("row"))
	VZEROUPPER()
	RET()
}

// halves512 generates the roundings with AVX-512, of rows of up to 32.
func halves512() {
	narrow512("narrowF16", func() {}, func() {
		VCVTPS2PH(operand.Imm(0), zmm[0], reg.Y0)
		VCVTPS2PH(operand.Imm(0), zmm[1], reg.Y1)
		VINSERTI64X4(operand.Imm(1), reg.Y1, zmm[0], zmm[0])
	})
	narrow512("narrowBF16", narrowConstants, narrowRound)
}

// highWords is the table of narrowRound, one a file.
var highWords *operand.Mem

// narrowConstants loads what narrowRound reads, zmm8 to 12, through EAX.
func narrowConstants() {
	if highWords == nil {
		order := GLOBL("highwords", RODATA|NOPTR)
		vlib.Words(vlib.HighWords()...)
		highWords = &order
	}
	for i, c := range []uint32{0x7fff, 1, 0x400000, 1 << 16} {
		MOVL(operand.U32(c), reg.EAX)
		VPBROADCASTD(reg.EAX, zmm[8+i])
	}
	VMOVDQU32(*highWords, zmm[12])
}

// narrowRound rounds zmm0 and zmm1 to 32 bf16 in zmm0: in integer arithmetic, since
// VCVTNEPS2BF16 makes subnormals zero. What is left are the high words of both.
func narrowRound() {
	for v := range 2 {
		VPTESTMD(zmm[11], zmm[v], reg.K4)
		VPADDD(zmm[8], zmm[v], zmm[4+v])
		VPADDD(zmm[9], zmm[4+v], reg.K4, zmm[4+v])
		VCMPPS(operand.Imm(unordered), zmm[v], zmm[v], reg.K5)
		VPORD(zmm[10], zmm[v], reg.K5, zmm[4+v])
	}
	VMOVDQA32(zmm[12], zmm[0])
	VPERMI2W(zmm[5], zmm[4], zmm[0])
}

const unordered = 3 // the predicate of VCMPPS

// narrow512 rounds rows of up to 32 float32 to 16 bits: round makes zmm0 and zmm1 one
// register of them, in zmm0.
func narrow512(name string, setup, round func()) {
	TEXT(name+"AVX512", NOSPLIT, "func(dst, src *byte, dstStride, srcStride, rows, mask int)")
	Load(Param("dst"), reg.RDI)
	Load(Param("src"), reg.RSI)
	Load(Param("dstStride"), reg.R8)
	Load(Param("srcStride"), reg.R9)
	Load(Param("rows"), reg.RCX)
	setup()
	Load(Param("mask"), reg.RAX)
	KMOVW(reg.EAX, reg.K1)
	KMOVD(reg.EAX, reg.K3)
	SHRQ(operand.Imm(16), reg.RAX)
	KMOVW(reg.EAX, reg.K2)
	Label("row")
	VMOVUPS_Z(at(reg.RSI, 0), reg.K1, zmm[0])
	VMOVUPS_Z(at(reg.RSI, 64), reg.K2, zmm[1])
	round()
	VMOVDQU16(zmm[0], reg.K3, at(reg.RDI, 0))
	ADDQ(reg.R9, reg.RSI)
	ADDQ(reg.R8, reg.RDI)
	DECQ(reg.RCX)
	JNZ(operand.LabelRef("row"))
	VZEROUPPER()
	RET()
}
