package main

import (
	"fmt"
	"math/bits"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

// The AVX-512 kernel keeps 14×32 elements of C in 28 registers, B in two and
// broadcasts of A in two. B's sliver (KC×32, 32 KiB) stays in the first-level
// cache while slivers of A stream from the second.
const (
	mr512 = 14
	nr512 = 32
)

func f32AVX512() {
	for mr := 1; mr <= mr512; mr++ {
		micro512(mr, f32, false)
	}
	micro512(mr512, f32, true)
	byRows("microAVX512", "f32x%dAVX512", mr512)
	transpose512()
	copy512()
}

// A unit is what a lane of the micro-kernels holds of one row of A or column of
// B: 32 bits.
type unit struct {
	name, holds string
	dot         func(b, a, acc reg.VecPhysical) // acc += a·b
	add         func(ops ...operand.Op)
}

var (
	f32  = unit{"f32", "a float32", func(b, a, acc reg.VecPhysical) { VFMADD231PS(b, a, acc) }, VADDPS}
	bf16 = unit{"bf16", "two bf16 of consecutive k", dpbf16, VADDPS}
	int8 = unit{"int8", "four bytes of consecutive k, unsigned in A and signed in B", func(b, a, acc reg.VecPhysical) { VPDPBUSD(b, a, acc) }, VPADDD}
)

// micro512 generates the kernel of a unit. One that packs reads B where it lies
// and writes its sliver on the way: the copy's loads and stores run beside the
// products.
// Long function: one kernel, in the order of its instructions.
func micro512(mr int, u unit, packs bool) {
	name, and := fmt.Sprintf("%sx%dAVX512", u.name, mr), ""
	if packs {
		name, and = fmt.Sprintf("%sx%dPackAVX512", u.name, mr), fmt.Sprintf(", %d of which it also writes to t.to", nr512)
	}
	vlib.Text(name, "t *tile", fmt.Sprintf("multiplies t.n slivers of %d rows of A by a sliver of up to %d columns of B%s. "+
		"A unit is %s.", mr, nr512, and, u.holds))
	t, a, b, c := reg.RDI, reg.RSI, reg.R8, reg.RDX
	count, ldb, ldc, n, bp, row, ap, next, to := reg.RCX, reg.R9, reg.R11, reg.R12, reg.R13, reg.RAX, reg.RBX, reg.R15, reg.R10
	acc := func(i, v int) reg.VecPhysical { return zmm[2*i+v] }
	bv := [2]reg.VecPhysical{reg.Z28, reg.Z29}
	bc := [2]reg.VecPhysical{reg.Z30, reg.Z31}
	km := [2]reg.OpmaskPhysical{reg.K1, reg.K2}

	Load(Param("t"), t)
	MOVQ(at(t, tileA), ap)
	MOVQ(at(t, tileB), b)
	MOVQ(at(t, tileC), c)
	MOVQ(at(t, tileLdb), ldb)
	MOVQ(at(t, tileLdc), ldc)
	MOVQ(at(t, tileN), n)
	MOVQ(at(t, tileNext), next)
	MOVQ(at(t, tileMask), row)
	KMOVW(reg.EAX, km[0])
	SHRQ(operand.Imm(16), row)
	KMOVW(reg.EAX, km[1])

	Label("sliver")
	MOVQ(c, row)
	for i := range mr {
		PREFETCHT0(at(row, 0))
		PREFETCHT0(at(row, 64))
		VPXORD(acc(i, 0), acc(i, 0), acc(i, 0))
		VPXORD(acc(i, 1), acc(i, 1), acc(i, 1))
		if i < mr-1 {
			ADDQ(ldc, row)
		}
	}
	MOVQ(ap, a)
	MOVQ(b, bp)
	if packs {
		MOVQ(at(t, tileTo), to)
	}
	step := func(k int, b0, b1 operand.Mem) {
		VMOVUPS(b0, bv[0])
		VMOVUPS(b1, bv[1])
		if packs {
			VMOVUPS(bv[0], at(to, 4*nr512*k))
			VMOVUPS(bv[1], at(to, 4*nr512*k+64))
		}
		for i := range mr {
			VBROADCASTSS(at(a, 4*(k*mr512+i)), bc[i%2])
			u.dot(bv[0], bc[i%2], acc(i, 0))
			u.dot(bv[1], bc[i%2], acc(i, 1))
		}
	}
	// Two steps a round: with four, on an Intel core, the kernel does 2 % less. An odd
	// depth begins with the second.
	MOVQ(at(t, tileK), count)
	INCQ(count)
	SHRQ(operand.Imm(1), count)
	JC(operand.LabelRef("two"))
	SUBQ(ldb, bp)
	SUBQ(operand.Imm(4*mr512), a)
	if packs {
		SUBQ(operand.Imm(4*nr512), to)
	}
	JMP(operand.LabelRef("second"))
	Label("two")
	PREFETCHT1(at(next, 0))
	ADDQ(at(t, tileAhead), next)
	step(0, at(bp, 0), at(bp, 64))
	Label("second")
	step(1, idx(bp, ldb, 1, 0), idx(bp, ldb, 1, 64))
	ADDQ(operand.Imm(2*4*mr512), a)
	if packs {
		ADDQ(operand.U32(2*4*nr512), to)
	}
	LEAQ(idx(bp, ldb, 2, 0), bp)
	DECQ(count)
	JNZ(operand.LabelRef("two"))

	rows := func(f func(i int)) {
		MOVQ(c, row)
		for i := range mr {
			f(i)
			if i < mr-1 {
				ADDQ(ldc, row)
			}
		}
	}
	CMPQ(at(t, tileAdd), operand.Imm(0))
	JE(operand.LabelRef("bias"))
	rows(func(i int) {
		for v := range 2 {
			VMOVUPS_Z(at(row, 64*v), km[v], bc[v])
			u.add(acc(i, v), bc[v], acc(i, v))
		}
	})
	Label("bias")
	MOVQ(at(t, tileBias), row)
	TESTQ(row, row)
	JZ(operand.LabelRef("store"))
	for v := range 2 {
		VMOVUPS_Z(at(row, 64*v), km[v], bv[v])
		for i := range mr {
			u.add(bv[v], acc(i, v), acc(i, v))
		}
	}
	Label("store")
	rows(func(i int) {
		for v := range 2 {
			VMOVUPS(acc(i, v), km[v], at(row, 64*v))
		}
	})
	LEAQ(idx(row, ldc, 1, 0), c)
	ADDQ(at(t, tileStep), ap)
	DECQ(n)
	JNZ(operand.LabelRef("sliver"))
	VZEROUPPER()
	RET()
}

// transpose512 moves rows of a source into columns of a sliver, 16×16 elements
// at a time. Lanes of rows that do not exist repeat the last one.
func transpose512() {
	vlib.Text("transposeAVX512", "dst, src unsafe.Pointer, dstStride, srcStride, rows, depth, mask int",
		"writes element k of each of up to 16 source rows to dst+k*dstStride, in the lanes of mask. Lanes of missing rows "+
			"repeat the last. Strides are in bytes.")
	dst, src, ds, ss, depth := reg.RDI, reg.RSI, reg.R8, reg.R9, reg.RCX
	row, left, step, tmp := reg.RAX, reg.RDX, reg.R10, reg.R11
	params("dst src dstStride srcStride depth mask", dst, src, ds, ss, depth, tmp)
	KMOVW(reg.R11L, reg.K1)
	MOVL(operand.U32(1<<16-1), reg.R11L)
	KMOVW(reg.R11L, reg.K2)
	TESTQ(depth, depth)
	JZ(operand.LabelRef("done"))
	Label("block")
	CMPQ(depth, operand.Imm(16))
	JGE(operand.LabelRef("load"))
	MOVL(operand.U32(1), reg.R11L)
	SHLQ(reg.CL, tmp)
	DECQ(tmp)
	KMOVW(reg.R11L, reg.K2)
	Label("load")
	MOVQ(src, row)
	Load(Param("rows"), left)
	MOVQ(ss, step)
	XORQ(tmp, tmp)
	SUBQ(operand.Imm(1), left)
	CMOVQLE(tmp, step)
	for i := range 16 {
		VMOVUPS_Z(at(row, 0), reg.K2, zmm[i])
		PREFETCHT0(at(row, 256))
		if i < 15 {
			ADDQ(step, row)
			SUBQ(operand.Imm(1), left)
			CMOVQLE(tmp, step)
		}
	}
	t := zmm[16:]
	for i := 0; i < 16; i += 2 {
		VUNPCKLPS(zmm[i+1], zmm[i], t[i])
		VUNPCKHPS(zmm[i+1], zmm[i], t[i+1])
	}
	for i := 0; i < 16; i += 4 {
		VUNPCKLPD(t[i+2], t[i], zmm[i])
		VUNPCKHPD(t[i+2], t[i], zmm[i+1])
		VUNPCKLPD(t[i+3], t[i+1], zmm[i+2])
		VUNPCKHPD(t[i+3], t[i+1], zmm[i+3])
	}
	// zmm[4g+j] holds, in 128-bit part q, column 4q+j of rows 4g … 4g+3.
	for j := range 4 {
		VSHUFF32X4(operand.Imm(0x88), zmm[4+j], zmm[j], t[j])
		VSHUFF32X4(operand.Imm(0xdd), zmm[4+j], zmm[j], t[4+j])
		VSHUFF32X4(operand.Imm(0x88), zmm[12+j], zmm[8+j], t[8+j])
		VSHUFF32X4(operand.Imm(0xdd), zmm[12+j], zmm[8+j], t[12+j])
	}
	for j := range 4 {
		VSHUFF32X4(operand.Imm(0x88), t[8+j], t[j], zmm[j])
		VSHUFF32X4(operand.Imm(0x88), t[12+j], t[4+j], zmm[4+j])
		VSHUFF32X4(operand.Imm(0xdd), t[8+j], t[j], zmm[8+j])
		VSHUFF32X4(operand.Imm(0xdd), t[12+j], t[4+j], zmm[12+j])
	}
	for k := range 16 {
		VMOVUPS(zmm[k], reg.K1, at(dst, 0))
		ADDQ(ds, dst)
		DECQ(depth)
		JZ(operand.LabelRef("done"))
	}
	ADDQ(operand.Imm(64), src)
	JMP(operand.LabelRef("block"))
	Label("done")
	VZEROUPPER()
	RET()
}

// copyAhead is how many source rows further on are brought nearer: what package
// gemm packs of a sliver before it goes to the next one.
const copyAhead = 16

// copy512 moves rows of up to 32 elements into a sliver.
func copy512() {
	vlib.Text("copyAVX512", "dst, src unsafe.Pointer, dstStride, srcStride, depth, load, store int",
		"copies depth rows of up to 32 elements"+byMasks)
	dst, src, ds, ss, depth, mask, ahead := reg.RDI, reg.RSI, reg.R8, reg.R9, reg.RCX, reg.RAX, reg.R10
	params("dst src dstStride srcStride depth", dst, src, ds, ss, depth)
	MOVQ(ss, ahead)
	SHLQ(operand.Imm(uint64(bits.TrailingZeros(copyAhead))), ahead)
	ADDQ(src, ahead)
	Load(Param("load"), mask)
	KMOVW(reg.EAX, reg.K1)
	SHRQ(operand.Imm(16), mask)
	KMOVW(reg.EAX, reg.K2)
	Load(Param("store"), mask)
	KMOVW(reg.EAX, reg.K3)
	SHRQ(operand.Imm(16), mask)
	KMOVW(reg.EAX, reg.K4)
	row := func(v int) {
		VMOVUPS_Z(at(src, 0), reg.K1, zmm[2*v])
		VMOVUPS_Z(at(src, 64), reg.K2, zmm[2*v+1])
		PREFETCHT0(at(ahead, 0))
		PREFETCHT0(at(ahead, 64))
		ADDQ(ss, src)
		ADDQ(ss, ahead)
		VMOVUPS(zmm[2*v], reg.K3, at(dst, 0))
		VMOVUPS(zmm[2*v+1], reg.K4, at(dst, 64))
		ADDQ(ds, dst)
	}
	SUBQ(operand.Imm(4), depth)
	JL(operand.LabelRef("rest"))
	Label("four")
	for v := range 4 {
		row(v)
	}
	SUBQ(operand.Imm(4), depth)
	JGE(operand.LabelRef("four"))
	Label("rest")
	ADDQ(operand.Imm(4), depth)
	JZ(operand.LabelRef("done"))
	Label("one")
	row(0)
	DECQ(depth)
	JNZ(operand.LabelRef("one"))
	Label("done")
	VZEROUPPER()
	RET()
}
