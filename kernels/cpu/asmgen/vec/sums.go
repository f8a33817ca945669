package main

import (
	"math/bits"

	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	. "github.com/mmcloughlin/avo/build"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

// maxLeaves is the largest number of buffers summed in registers.
const maxLeaves = 8

func sums() {
	const sig = "func(dst *float32, srcs *[]float32, off, n, acc int)"
	for r := 1; r <= maxLeaves/2; r++ {
		doc := fmt2("is dst = %d slices added from left to right, element off and up, beginning with the first, or, if acc is not 0, with dst,", r)
		kernel(fmt2("sumLeaves[%d]", r), fmt2("sumLeaves%d", r), sig, doc+full, func(g *vlib.Gen) { fewSources(g, r, leavesOf) })
	}
	for r := 2; r <= maxLeaves; r++ {
		doc := fmt2("is dst = the tree sum of %d slices from element off on, or += if acc is not 0,", r)
		kernel(fmt2("sumTree[%d]", r), fmt2("sumTree%d", r), sig, doc+full, func(g *vlib.Gen) { fewSources(g, r, addTree) })
	}
	entries["sumTreeMany"] = "sumTreeMany"
	vlib.BothWithFrame("sumTreeMany", "func(dst *float32, srcs *[]float32, r, off, n, acc int)",
		"is dst = the tree sum of r slices, up to 2^16, from element off on, or += if acc is not 0, for n elements, a multiple of 64.", treeMany)
	kernel("blockSum", "blockSum", "func(x *float32) float64", "returns the float64 sum of 256 elements, added up in 16 lanes.", func(g *vlib.Gen) {
		block(g, false)
	})
	kernel("blockSqSum", "blockSqSum", "func(x *float32) float64", "returns the float64 sum of squares of 256 elements, added up in 16 lanes.", func(g *vlib.Gen) {
		block(g, true)
	})
}

// fewSources sums r slices: sum returns the sum of the current elements of p, and of dst
// if the argument acc is not 0.
func fewSources(g *vlib.Gen, r int, sum func(g *vlib.Gen, p []reg.GPVirtual, dst reg.GPVirtual) vlib.Vec) {
	dst, srcs, off, n := g.Ptr("dst"), g.Ptr("srcs"), g.Ptr("off"), g.Ptr("n")
	var p []reg.GPVirtual
	for i := range r {
		p = append(p, source(srcs, off, i))
	}
	g.LoopBlocks(n, 16, func() {
		g.FetchEach(func(fetch func(base reg.GPVirtual)) {
			next, left := GP64(), GP64()
			Load(Param("srcs"), next)
			MOVQ(operand.U32(uint32(r)), left)
			again := g.Label("source")
			base := GP64()
			MOVQ(dst, base)
			Label(again)
			fetch(base)
			SUBQ(operand.Imm(1), left)
			done := g.Label("fetched")
			JCS(operand.LabelRef(done))
			MOVQ(operand.Mem{Base: next}, base)
			LEAQ(operand.Mem{Base: base, Index: g.Ptr("off"), Scale: 4}, base)
			ADDQ(operand.Imm(24), next)
			JMP(operand.LabelRef(again))
			Label(done)
		})
		g.Store(sum(g, p, dst), g.At(dst))
	})
	g.Return()
}

// source returns the address of element off of slice i.
func source(srcs, off reg.GPVirtual, i int) reg.GPVirtual {
	p := GP64()
	MOVQ(operand.Mem{Base: srcs, Disp: 24 * i}, p) // the first word of a slice is its address
	LEAQ(operand.Mem{Base: p, Index: off, Scale: 4}, p)
	return p
}

// unlessAcc jumps to label if the argument acc is 0.
func unlessAcc(g *vlib.Gen, label string) {
	CMPQ(g.ParamMem("acc"), operand.Imm(0))
	JEQ(operand.LabelRef(label))
}

// leavesOf returns the sum from left to right. It stays in a register, so that dst is
// read and written once however many slices there are.
func leavesOf(g *vlib.Gen, p []reg.GPVirtual, dst reg.GPVirtual) vlib.Vec {
	sum, add := g.Load(g.At(p[0])), g.Label("add")
	unlessAcc(g, add)
	for i, d := range g.Load(g.At(dst)) {
		VADDPS(sum[i], d, sum[i])
	}
	Label(add)
	for _, q := range p[1:] {
		g.AddTo(sum, g.At(q))
	}
	return sum
}

// addTree returns the tree sum, added to dst.
func addTree(g *vlib.Gen, p []reg.GPVirtual, dst reg.GPVirtual) vlib.Vec {
	sum, store := treeOf(g, p), g.Label("store")
	unlessAcc(g, store)
	g.AddTo(sum, g.At(dst))
	Label(store)
	return sum
}

// treeOf returns the tree sum of the current elements of p.
func treeOf(g *vlib.Gen, p []reg.GPVirtual) vlib.Vec {
	if len(p) == 1 {
		return g.Load(g.At(p[0]))
	}
	s := 1 << (bits.Len(uint(len(p)-1)) - 1)
	a := treeOf(g, p[:s])
	if len(p)-s == 1 {
		g.AddTo(a, g.At(p[s]))
	} else {
		g.AddTo(a, treeOf(g, p[s:]))
	}
	return a
}

// treeMany keeps the sums of complete subtrees of a block of 64 elements on the
// stack, as a binary counter: after leaf i, counted from 1, as many subtrees of
// equal size are joined as i has trailing zeros.
func treeMany(g *vlib.Gen) {
	const vecs, bytes, depth = 4, 256, 17
	dst, srcs, r, off, n := g.Ptr("dst"), g.Ptr("srcs"), g.Ptr("r"), g.Ptr("off"), g.Ptr("n")
	frame := AllocLocal(bytes * depth)
	base := GP64()
	LEAQ(frame, base)
	g.LoopBlocks(n, 16*vecs, func() {
		sp, src, i := GP64(), GP64(), GP64()
		MOVQ(base, sp)
		MOVQ(srcs, src)
		XORQ(i, i)
		leaf, join, push := g.Label("leaf"), g.Label("join"), g.Label("push")
		Label(leaf)
		p := GP64()
		MOVQ(operand.Mem{Base: src}, p)
		LEAQ(operand.Mem{Base: p, Index: off, Scale: 4}, p)
		var v []vlib.Vec
		for u := range vecs {
			v = append(v, g.Load(g.At(p, u)))
		}
		INCQ(i)
		t := GP64()
		MOVQ(i, t)
		Label(join)
		TESTQ(operand.U32(1), t)
		JNZ(operand.LabelRef(push))
		SHRQ(operand.Imm(1), t)
		SUBQ(operand.U32(bytes), sp)
		for u, w := range v {
			g.AddTo(w, g.Fixed(sp, 64*u))
		}
		JMP(operand.LabelRef(join))
		Label(push)
		for u, w := range v {
			g.Store(w, g.Fixed(sp, 64*u))
		}
		ADDQ(operand.U32(bytes), sp)
		ADDQ(operand.Imm(24), src)
		CMPQ(i, r)
		JNE(operand.LabelRef(leaf))

		rest, done := g.Label("rest"), g.Label("sum")
		SUBQ(operand.U32(bytes), sp) // v is the last subtree
		Label(rest)
		CMPQ(sp, base)
		JEQ(operand.LabelRef(done))
		SUBQ(operand.U32(bytes), sp)
		for u, w := range v {
			g.AddTo(w, g.Fixed(sp, 64*u))
		}
		JMP(operand.LabelRef(rest))
		Label(done)
		store := g.Label("store")
		unlessAcc(g, store)
		for u, w := range v {
			g.AddTo(w, g.At(dst, u))
		}
		Label(store)
		for u, w := range v {
			g.Store(w, g.At(dst, u))
		}
	})
	g.Return()
}

// block emits the body of a block's sum. The 16 lanes of float64 are 2 zmm or 4
// ymm registers.
func block(g *vlib.Gen, square bool) {
	const elements = 256
	x := g.Ptr("x")
	parts := 4
	newReg := YMM
	if g.AVX512 {
		parts, newReg = 2, ZMM
	}
	width := 16 / parts * 4 // bytes of float32
	var acc []reg.VecVirtual
	for range parts {
		a := newReg()
		if g.AVX512 {
			VPXORQ(a, a, a)
		} else {
			VXORPD(a, a, a)
		}
		acc = append(acc, a)
	}
	const groups = 8 // of 16 elements, a round
	rounds, again := GP64(), g.Label("round")
	MOVQ(operand.U32(elements/vlib.Lanes/groups), rounds)
	Label(again)
	for group := range groups {
		PREFETCHT0(operand.Mem{Base: x, Disp: 4*vlib.Lanes*group + 3072})
		for i, a := range acc {
			v := newReg()
			VCVTPS2PD(operand.Mem{Base: x, Disp: 4*vlib.Lanes*group + width*i}, v)
			if square {
				VFMADD231PD(v, v, a)
			} else {
				VADDPD(v, a, a)
			}
		}
	}
	ADDQ(operand.U32(4*vlib.Lanes*groups), x)
	DECQ(rounds)
	JNZ(operand.LabelRef(again))
	// Lanes l and l+8, l+4, l+2, l+1.
	y := YMM()
	if g.AVX512 {
		VADDPD(acc[1], acc[0], acc[0])
		VEXTRACTF64X4(operand.Imm(1), acc[0], y)
		VADDPD(y, acc[0].AsY(), y)
	} else {
		VADDPD(acc[2], acc[0], acc[0])
		VADDPD(acc[3], acc[1], acc[1])
		VADDPD(acc[1], acc[0], y)
	}
	lo, hi := XMM(), XMM()
	VEXTRACTF128(operand.Imm(1), y, lo)
	VADDPD(lo, y.AsX(), lo)
	VPERMILPD(operand.Imm(1), lo, hi)
	VADDSD(hi, lo, lo)
	b, err := ReturnIndex(0).Resolve()
	if err != nil {
		panic(err)
	}
	VMOVSD(lo, b.Addr)
	g.Return()
}
