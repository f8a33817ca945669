package main

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
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
		narrow512("narrowF16", func() {}, func(v int, k reg.OpmaskPhysical, dst operand.Mem) {
			VCVTPS2PH(operand.Imm(0), zmm[v], k, dst)
		})
		narrow512("narrowBF16", func() {
			for i, c := range []uint32{0x7fff, 1, 0x40} {
				MOVL(operand.U32(c), reg.EAX)
				VPBROADCASTD(reg.EAX, zmm[8+i])
			}
		}, func(v int, k reg.OpmaskPhysical, dst operand.Mem) {
			// Integer arithmetic, since VCVTNEPS2BF16 makes subnormals zero.
			VPSRLD(operand.Imm(16), zmm[v], zmm[4])
			VPANDD(zmm[9], zmm[4], zmm[5])
			VPADDD(zmm[8], zmm[v], zmm[6])
			VPADDD(zmm[5], zmm[6], zmm[6])
			VPSRLD(operand.Imm(16), zmm[6], zmm[6])
			VCMPPS(operand.Imm(unordered), zmm[v], zmm[v], reg.K3)
			VPORD(zmm[10], zmm[4], reg.K3, zmm[6])
			VPMOVDW(zmm[6], k, dst)
		})
		return
	}
	loop("narrowF16", "rounds vectors of float32 to binary16, to nearest even.", 4, 2, func() {}, func() {
		VMOVUPS(src, r[0])
		VCVTPS2PH(operand.Imm(0), r[0], dst)
	})
	constant := func(v uint32, to reg.VecPhysical) {
		MOVL(operand.U32(v), reg.EAX)
		VMOVD(reg.EAX, reg.X0)
		VPBROADCASTD(reg.X0, to)
	}
	loop("narrowBF16", "rounds vectors of float32 to bf16, to nearest even; NaNs become quiet.", 4, 2, func() {
		constant(0x7fff, r[4])
		constant(1, r[5])
		constant(0x40, r[6])
	}, func() {
		VMOVUPS(src, r[0])
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
		VMOVDQU(reg.X0, dst)
	})
}

const unordered = 3 // the predicate of VCMPPS

// narrow512 rounds rows of up to 32 float32 to 16 bits.
func narrow512(name string, setup func(), store func(v int, k reg.OpmaskPhysical, dst operand.Mem)) {
	TEXT(name+"AVX512", NOSPLIT, "func(dst, src *byte, dstStride, srcStride, rows, mask int)")
	Load(Param("dst"), reg.RDI)
	Load(Param("src"), reg.RSI)
	Load(Param("dstStride"), reg.R8)
	Load(Param("srcStride"), reg.R9)
	Load(Param("rows"), reg.RCX)
	Load(Param("mask"), reg.RAX)
	KMOVW(reg.EAX, reg.K1)
	SHRQ(operand.Imm(16), reg.RAX)
	KMOVW(reg.EAX, reg.K2)
	setup()
	Label("row")
	VMOVUPS_Z(at(reg.RSI, 0), reg.K1, zmm[0])
	VMOVUPS_Z(at(reg.RSI, 64), reg.K2, zmm[1])
	store(0, reg.K1, at(reg.RDI, 0))
	store(1, reg.K2, at(reg.RDI, 32))
	ADDQ(reg.R9, reg.RSI)
	ADDQ(reg.R8, reg.RDI)
	DECQ(reg.RCX)
	JNZ(operand.LabelRef("row"))
	VZEROUPPER()
	RET()
}
