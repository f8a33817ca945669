// Command attn generates the assembly of package kernels/cpu/attn: go generate
// in that package runs it.
//
// Every kernel takes a pointer to a struct of 8-byte fields; the offsets here
// and the structs in kernels_amd64.go are the same list.
package main

import (
	"fmt"
	"math"
	"slices"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

func main() {
	constants()
	for w := 1; w <= 4; w++ {
		product(zmm, w)
	}
	product(ymm, 2)
	for _, v := range []*vec{zmm, ymm} {
		softmax(v)
		scoreGrad(v)
	}
	transpose()
	copyRows()
	finish()
	dots()
	vlib.Finish("attn")
}

// vec is a width of vector registers.
type vec struct {
	name  string
	bytes int
	regs  []reg.VecPhysical
}

var zmm = &vec{"AVX512", 64, []reg.VecPhysical{
	reg.Z0, reg.Z1, reg.Z2, reg.Z3, reg.Z4, reg.Z5, reg.Z6, reg.Z7,
	reg.Z8, reg.Z9, reg.Z10, reg.Z11, reg.Z12, reg.Z13, reg.Z14, reg.Z15,
	reg.Z16, reg.Z17, reg.Z18, reg.Z19, reg.Z20, reg.Z21, reg.Z22, reg.Z23,
	reg.Z24, reg.Z25, reg.Z26, reg.Z27, reg.Z28, reg.Z29, reg.Z30, reg.Z31}}

var ymm = &vec{"AVX2", 32, []reg.VecPhysical{
	reg.Y0, reg.Y1, reg.Y2, reg.Y3, reg.Y4, reg.Y5, reg.Y6, reg.Y7,
	reg.Y8, reg.Y9, reg.Y10, reg.Y11, reg.Y12, reg.Y13, reg.Y14, reg.Y15}}

func mem(base reg.Register, disp int) Mem { return Mem{Base: base, Disp: disp} }

func idx(base, index reg.Register, scale uint8, disp int) Mem {
	return Mem{Base: base, Index: index, Scale: scale, Disp: disp}
}

// begin starts a kernel and leaves its argument struct's address in BX.
func begin(name, args, doc string) {
	vlib.Text(name, "args *"+args, doc)
	Load(Param("args"), reg.RBX)
}

// fields loads the first fields of the argument struct.
func fields(to ...reg.Register) {
	for i, r := range to {
		MOVQ(field(i), r)
	}
}

func field(i int) Mem { return mem(reg.RBX, 8*i) }

func end() {
	VZEROUPPER()
	RET()
}

// The float32 constants, each over 32 bytes so that AVX2 can take it from
// memory.
var table = map[string]Mem{}

func constants() {
	at := GLOBL("consts", RODATA|NOPTR)
	var words []uint32
	u := func(name string, w uint32) {
		table[name] = at.Offset(4 * len(words))
		words = append(words, slices.Repeat([]uint32{w}, 8)...)
	}
	f := func(name string, v float32) { u(name, math.Float32bits(v)) }
	f("log2e", 1.44269504088896341)
	f("-ln2hi", -0.693359375)
	f("-ln2lo", 2.12194440e-4)
	f("p0", 1.9875691500e-4)
	f("p1", 1.3981999507e-3)
	f("p2", 8.3334519073e-3)
	f("p3", 4.1665795894e-2)
	f("p4", 1.6666665459e-1)
	f("p5", 5.0000001201e-1)
	f("one", 1)
	f("lo", -103.97)
	f("hi", 88.72284)
	u("+inf", 0x7f800000)
	u("-inf", 0xff800000)
	u("bias", 127)
	for range tile / 8 {
		u("ones", 0xffffffff)
	}
	for range tile / 8 {
		u("zeros", 0)
	}
	vlib.Words(words...)
	table["visible"] = table["ones"].Offset(32)
}

// expRegs are the registers of exp: an argument in x gives its exponential in x.
type expRegs struct {
	x, n, p reg.VecPhysical
	konst   map[string]reg.VecPhysical // zmm: the constants, loaded by loadExp
}

func loadExp(v *vec, first int) map[string]reg.VecPhysical {
	k := map[string]reg.VecPhysical{}
	if v == ymm {
		return k
	}
	for i, name := range []string{"log2e", "-ln2hi", "-ln2lo", "p0", "p1", "p2", "p3", "p4", "p5", "one", "lo", "hi", "+inf"} {
		k[name] = v.regs[first+i]
		VBROADCASTSS(table[name], k[name])
	}
	return k
}

// exp is num.Exp. With over, arguments above 88.7 are expected too. An AVX-512
// caller may name a mask of the lanes to compute; the others become +0.
func exp(v *vec, e expRegs, over bool, only reg.OpmaskPhysical) {
	c := func(name string) Op {
		if r, ok := e.konst[name]; ok {
			return r
		}
		return table[name]
	}
	x, n, p := e.x, e.n, e.p
	VMULPS(c("log2e"), x, n)
	if v == zmm {
		VRNDSCALEPS(U8(8), n, n)
		if only != nil {
			VCMPPS(U8(5), c("lo"), x, only, reg.K6) // not less than: NaN too
		} else {
			VCMPPS(U8(5), c("lo"), x, reg.K6)
		}
		if over {
			VCMPPS(U8(30), c("hi"), x, reg.K7) // greater than
		}
		VFMADD231PS(c("-ln2hi"), n, x)
		VMOVAPS(c("p0"), p)
		VFMADD231PS(c("-ln2lo"), n, x)
		for _, name := range []string{"p1", "p2", "p3", "p4", "p5"} {
			VFMADD213PS(c(name), x, p)
		}
		r2 := v.regs[31]
		VMULPS(x, x, r2)
		VFMADD213PS(x, r2, p)
		VADDPS(c("one"), p, p)
		VSCALEFPS_Z(n, p, reg.K6, x)
		if over {
			VMOVAPS(c("+inf"), reg.K7, x)
		}
		return
	}
	// AVX2: the argument is kept on a scratch register until the end.
	keep, t := reg.Y14, reg.Y15
	VROUNDPS(U8(8), n, n)
	VMOVAPS(x, keep)
	VFMADD231PS(c("-ln2hi").(Mem), n, x)
	VMOVUPS(c("p0"), p)
	VFMADD231PS(c("-ln2lo").(Mem), n, x)
	for _, name := range []string{"p1", "p2", "p3", "p4", "p5"} {
		VFMADD213PS(c(name), x, p)
	}
	VMULPS(x, x, t)
	VFMADD213PS(x, t, p)
	VADDPS(c("one"), p, p)
	VCVTPS2DQ(n, n)
	VPSRAD(U8(1), n, t)
	VPSUBD(t, n, n)
	VPADDD(c("bias"), t, t)
	VPSLLD(U8(23), t, t)
	VPADDD(c("bias"), n, n)
	VPSLLD(U8(23), n, n)
	VMULPS(t, p, p)
	VMULPS(n, p, x)
	VCMPPS(U8(5), c("lo"), keep, t)
	VANDPS(t, x, x)
	if over {
		VCMPPS(U8(30), c("hi"), keep, t)
		VMOVUPS(c("+inf"), p)
		VBLENDVPS(t, p, x, x)
	}
}

// Fields of productArgs.
const (
	pA = iota
	pB
	pC
	pAlpha
	pARow
	pAK
	pBK
	pCRow
	pABlock
	pBBlock
	pBlocks
	pK
	pKStep
	pHead
	pTail
	pInit
	pPre
	pPreRow
)

// product is a dense tile product, blocks of 4 rows by w vectors:
//
//	c[r] = init[r] + Σ_k a[r,k]·b[k], an fma chain over k
//
// a[r,k] lies at a + r·aRow + k·aK, so that either side of a tile can be the
// rows. The rows of a block may begin or end their chains one k apart, as a
// causal tile on the diagonal needs: with head h < 3, steps h, h+1 … 2 take rows
// 0..step only; with tail, three steps follow the k common ones, which take rows
// 1.., 2.. and 3. Chains stop after k steps, also within the head.
//
// With pre, each block also prefetches (to L2) 4 rows of what comes next, 256
// bytes a row with AVX-512 and 64 with AVX2; pre moves on in the struct.
//
// Long function: one kernel, in the order of its instructions.
func product(v *vec, w int) {
	name := "product" + v.name
	if v == zmm {
		name += fmt.Sprint("W", w)
	}
	begin(name, "productArgs", fmt.Sprintf("computes blocks of 4 rows by %d floats of a tile product.", w*v.bytes/4))
	const rows = 4
	acc := func(r, j int) reg.VecPhysical { return v.regs[r*w+j] }
	bv := func(j int) reg.VecPhysical { return v.regs[rows*w+j] }
	bc := func(r int) reg.VecPhysical {
		if v == ymm {
			return v.regs[rows*w+w+r%4]
		}
		return v.regs[rows*w+w+r]
	}
	a, b, c := reg.RSI, reg.RDI, reg.RDX
	aRow, aK, bK, cRow := reg.R8, reg.R9, reg.R10, reg.R11
	k, blocks, pa, pb, n, a3 := reg.R12, reg.R13, reg.RAX, reg.RCX, reg.R15, reg.RBP
	AllocLocal(8)
	for _, l := range []struct {
		i int
		r reg.Register
	}{{pA, a}, {pB, b}, {pC, c}, {pARow, aRow}, {pAK, aK}, {pBK, bK}, {pCRow, cRow}, {pK, k}, {pBlocks, blocks}} {
		MOVQ(field(l.i), l.r)
	}
	LEAQ(idx(aRow, aRow, 2, 0), a3)
	rowsOf := func(base, one, three reg.Register) [4]Mem {
		return [4]Mem{mem(base, 0), idx(base, one, 1, 0), idx(base, one, 2, 0), idx(base, three, 1, 0)}
	}
	step := func(from, to int) { // rows [from, to)
		for j := range w {
			VMOVUPS(mem(pb, j*v.bytes), bv(j))
		}
		at := rowsOf(pa, aRow, a3)
		for r := from; r < to; r++ {
			VBROADCASTSS(at[r], bc(r))
			for j := range w {
				VFMADD231PS(bv(j), bc(r), acc(r, j))
			}
		}
		ADDQ(aK, pa)
		ADDQ(bK, pb)
	}

	Label("block")
	MOVQ(field(pPre), pa)
	TESTQ(pa, pa)
	JE(LabelRef("init"))
	MOVQ(field(pPreRow), pb)
	for range rows {
		for line := 0; line < 256; line += 64 {
			if line < 64 || v == zmm {
				PREFETCHT1(mem(pa, line))
			}
		}
		ADDQ(pb, pa)
	}
	MOVQ(pa, field(pPre))
	Label("init")
	LEAQ(idx(cRow, cRow, 2, 0), n)
	at := rowsOf(c, cRow, n)
	CMPQ(field(pInit), U8(1))
	JB(LabelRef("zero"))
	for r := range rows {
		for j := range w {
			m := at[r]
			m.Disp = j * v.bytes
			VMOVUPS(m, acc(r, j))
		}
	}
	JE(LabelRef("start"))
	MOVQ(field(pAlpha), pa)
	for r := range rows {
		VBROADCASTSS(mem(pa, 4*r), bc(r))
		for j := range w {
			VMULPS(bc(r), acc(r, j), acc(r, j))
		}
	}
	ADDQ(U8(16), pa)
	MOVQ(pa, field(pAlpha))
	JMP(LabelRef("start"))
	Label("zero")
	for r := range rows {
		for j := range w {
			if v == zmm {
				VPXORD(acc(r, j), acc(r, j), acc(r, j))
			} else {
				VXORPS(acc(r, j), acc(r, j), acc(r, j))
			}
		}
	}
	Label("start")
	MOVQ(a, pa)
	MOVQ(b, pb)
	MOVQ(k, n)
	CMPQ(field(pHead), U8(1))
	JB(LabelRef("head0"))
	JE(LabelRef("head1"))
	CMPQ(field(pHead), U8(2))
	JE(LabelRef("head2"))
	JMP(LabelRef("common"))
	for h := range 3 {
		Label(fmt.Sprint("head", h))
		TESTQ(n, n)
		JE(LabelRef("store"))
		step(0, h+1)
		DECQ(n)
	}
	Label("common")
	SUBQ(U8(4), n)
	JB(LabelRef("rest"))
	Label("four")
	for range 4 {
		step(0, rows)
	}
	SUBQ(U8(4), n)
	JAE(LabelRef("four"))
	Label("rest")
	ADDQ(U8(4), n)
	JE(LabelRef("tail"))
	Label("one")
	step(0, rows)
	DECQ(n)
	JNE(LabelRef("one"))
	Label("tail")
	CMPQ(field(pTail), U8(0))
	JE(LabelRef("store"))
	for r := 1; r < rows; r++ {
		step(r, rows)
	}
	Label("store")
	LEAQ(idx(cRow, cRow, 2, 0), n)
	for r := range rows {
		for j := range w {
			m := at[r]
			m.Disp = j * v.bytes
			VMOVUPS(acc(r, j), m)
		}
	}
	ADDQ(field(pABlock), a)
	ADDQ(field(pBBlock), b)
	ADDQ(field(pKStep), k)
	LEAQ(idx(c, cRow, 4, 0), c)
	DECQ(blocks)
	JNE(LabelRef("block"))
	end()
}
