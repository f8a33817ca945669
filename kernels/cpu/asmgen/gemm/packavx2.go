package main

import (
	"fmt"
	"strings"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

// unit256 is what AVX2's packing makes units of 32 bits of: a float32, a 16-bit float
// that is widened to one, or two bytes of consecutive k that are widened to int16.
type unit256 struct {
	name  string
	bytes int  // of a unit as stored
	pairs bool // of bytes: where stored rows are k, two rows hold a row of units
	widen func(from operand.Op, to reg.VecPhysical)
}

var units256 = []unit256{
	{"F32", 4, false, func(from operand.Op, to reg.VecPhysical) { VMOVUPS(from, to) }},
	{"BF16", 2, false, func(from operand.Op, to reg.VecPhysical) {
		VPMOVZXWD(from, to)
		VPSLLD(operand.Imm(16), to, to)
	}},
	{"F16", 2, false, func(from operand.Op, to reg.VecPhysical) { VCVTPH2PS(from, to) }},
	{"S8", 2, true, func(from operand.Op, to reg.VecPhysical) { VPMOVSXBW(from, to) }},
	{"U8", 2, true, func(from operand.Op, to reg.VecPhysical) { VPMOVZXBW(from, to) }},
}

func packAVX2() {
	for _, u := range units256 {
		transpose256(u)
		copy256(u, mr256)
		copy256(u, nr256)
	}
	byUnit("transposeBlocks", "transpose", "dst, src, ds, ss, rows, blocks, lanes")
	for _, width := range []int{mr256, nr256} {
		name := fmt.Sprint("copy", width)
		byUnit(name, name, "dst, src, step, ss, rows, slivers")
	}
}

// byUnit writes a method of type packing that calls the function for its units.
func byUnit(method, function, params string) {
	var cases [][2]string
	for _, u := range units256 {
		cases = append(cases, [2]string{"pack" + u.name, function + u.name + "AVX2"})
	}
	declared := strings.Replace(params, "src,", "src unsafe.Pointer,", 1)
	vlib.Choose("(u packing) "+method+"("+declared+" int)", "u", params, cases)
}

// storeSix writes the first six lanes of a register, which it destroys. A masked store
// takes 12 cycles on AMD's cores.
func storeSix(r reg.VecPhysical, to operand.Mem) {
	x := r.AsX()
	VMOVUPS(x, to)
	VEXTRACTF128(operand.Imm(1), r, x)
	to.Disp += 16
	VMOVLPS(x, to)
}

func transpose256(u unit256) {
	name := "transpose" + u.name + "AVX2"
	vlib.Text(name, "dst, src unsafe.Pointer, dstStride, srcStride, rows, blocks, lanes int",
		"writes unit k of each of up to 8 source rows to dst+k*dstStride, for blocks of 8 units, in 6 or 8 lanes. Lanes of "+
			"missing rows repeat the last. Strides are in bytes.")
	dst, src, ds, ss, blocks, lanes := reg.RDI, reg.RSI, reg.R8, reg.R9, reg.RCX, reg.R12
	row, left, step, zero := reg.RAX, reg.RDX, reg.R10, reg.R11
	params("dst src dstStride srcStride blocks lanes", dst, src, ds, ss, blocks, lanes)
	XORQ(zero, zero)
	Label("block")
	MOVQ(src, row)
	Load(Param("rows"), left)
	MOVQ(ss, step)
	for i := range 8 {
		if i > 0 {
			SUBQ(operand.Imm(1), left)
			CMOVQEQ(zero, step)
			ADDQ(step, row)
		}
		u.widen(at(row, 0), ymm[i])
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
	CMPQ(lanes, operand.Imm(8))
	JNE(operand.LabelRef("six"))
	for k := range 8 {
		VMOVUPS(t[k], at(dst, 0))
		ADDQ(ds, dst)
	}
	JMP(operand.LabelRef("next"))
	Label("six")
	for k := range 8 {
		storeSix(t[k], at(dst, 0))
		ADDQ(ds, dst)
	}
	Label("next")
	ADDQ(operand.Imm(uint64(8*u.bytes)), src)
	DECQ(blocks)
	JNZ(operand.LabelRef("block"))
	VZEROUPPER()
	RET()
}

// copy256 generates the packing where stored rows are k.
func copy256(u unit256, width int) {
	name := fmt.Sprintf("copy%d%sAVX2", width, u.name)
	vlib.Text(name, "dst, src unsafe.Pointer, dstStep, srcStride, rows, slivers int", fmt.Sprintf("writes rows of %d units of "+
		"each sliver, which begin dstStep bytes apart, one after the other. srcStride is the bytes between stored rows.", width))
	dst, src, ds, ss, slivers := reg.RDI, reg.RSI, reg.R8, reg.R9, reg.RCX
	to, from, rows, ahead := reg.RAX, reg.RDX, reg.R10, reg.R11
	params("dst src dstStep srcStride slivers", dst, src, ds, ss, slivers)
	const rowsAtOnce = 16 // of package gemm: a line of each of the next rows is brought nearer
	lane := u.bytes       // bytes between columns as stored
	if u.pairs {
		lane = 1
	}
	Label("sliver")
	MOVQ(dst, to)
	MOVQ(src, from)
	Load(Param("rows"), rows)
	MOVQ(ss, ahead)
	SHLQ(operand.Imm(4), ahead)
	ADDQ(from, ahead)
	Label("row")
	PREFETCHT0(at(ahead, 0))
	ADDQ(ss, ahead)
	switch {
	case u.pairs:
		for i := 0; i < width; i += 8 {
			x, y := ymm[i/4].AsX(), ymm[i/4+1].AsX()
			partial256(at(from, i), min(8, width-i), x)
			partial256(idx(from, ss, 1, i), min(8, width-i), y)
			VPUNPCKLBW(y, x, x)
			u.widen(x, ymm[i/4])
		}
		ADDQ(ss, from)
	case width == mr256 && u.bytes == 4:
		VMOVUPS(at(from, 0), reg.X0)
		VMOVSD(at(from, 16), reg.X2)
	case width == mr256:
		partial256(at(from, 0), 12, reg.X0)
		u.widen(reg.X0, reg.Y0)
	default:
		u.widen(at(from, 0), reg.Y0)
		u.widen(at(from, 8*lane), reg.Y2)
	}
	ADDQ(ss, from)
	switch {
	case width == nr256:
		VMOVUPS(reg.Y0, at(to, 0))
		VMOVUPS(reg.Y2, at(to, 32))
	case u.bytes == 4:
		VMOVUPS(reg.X0, at(to, 0))
		VMOVSD(reg.X2, at(to, 16))
	default:
		storeSix(reg.Y0, at(to, 0))
	}
	ADDQ(operand.Imm(uint64(4*width)), to)
	DECQ(rows)
	JNZ(operand.LabelRef("row"))
	ADDQ(ds, dst)
	ADDQ(operand.Imm(uint64(lane*width)), src)
	DECQ(slivers)
	JNZ(operand.LabelRef("sliver"))
	VZEROUPPER()
	RET()
}

// partial256 loads 6, 8 or 12 bytes.
func partial256(from operand.Mem, bytes int, to reg.Register) {
	rest := from
	switch bytes {
	case 6:
		rest.Disp += 4
		VMOVD(from, to)
		VPINSRW(operand.Imm(2), rest, to, to)
	case 8:
		VMOVQ(from, to)
	case 12:
		rest.Disp += 8
		VMOVQ(from, to)
		VPINSRD(operand.Imm(2), rest, to, to)
	}
}
