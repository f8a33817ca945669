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
	for r := 1; r <= maxLeaves/2; r++ {
		leavesOf(r)
	}
	for r := 2; r <= maxLeaves; r++ {
		variants(fmt2("sumTree[%d]", r), fmt2("sumTree%d", r), "func(dst *float32, srcs *[]float32, off, n int)",
			fmt2("is dst = the tree sum of %d slices from element off on (Acc: +=)", r)+full, "dst", func(g *vlib.Gen, put func(vlib.Vec)) {
				dst, p, n := sources(g, r)
				g.LoopBlocks(n, 16, func() {
					g.Fetch(append(p, dst)...)
					put(treeOf(g, p))
				})
				g.Return()
			})
	}
	for i, suffix := range []string{"", "Acc"} {
		name := "sumTreeMany" + suffix
		entries[fmt2("sumTreeMany[%d]", i)] = name
		vlib.BothWithFrame(name, "func(dst *float32, srcs *[]float32, r, off, n int)",
			"is dst = the tree sum of r slices, up to 2^16, from element off on (Acc: +=) for n elements, a multiple of 64.",
			func(g *vlib.Gen) { treeMany(g, i == 1) })
	}
	kernel("blockSum", "blockSum", "func(x *float32) float64", "returns the float64 sum of 256 elements, added up in 16 lanes.", func(g *vlib.Gen) {
		block(g, false)
	})
	kernel("blockSqSum", "blockSqSum", "func(x *float32) float64", "returns the float64 sum of squares of 256 elements, added up in 16 lanes.", func(g *vlib.Gen) {
		block(g, true)
	})
}

// sources loads the arguments of a sum of r slices: where they begin, and the elements.
func sources(g *vlib.Gen, r int) (dst reg.GPVirtual, p []reg.GPVirtual, n reg.GPVirtual) {
	dst = g.Ptr("dst")
	srcs, off, n := g.Ptr("srcs"), g.Ptr("off"), g.Ptr("n")
	for i := range r { // the first word of a slice is its address
		q := GP64()
		MOVQ(operand.Mem{Base: srcs, Disp: 24 * i}, q)
		LEAQ(operand.Mem{Base: q, Index: off, Scale: 4}, q)
		p = append(p, q)
	}
	return dst, p, n
}

// leavesOf makes the sum of r slices from left to right. The sum stays in a register,
// so that dst is read and written once whatever r is.
func leavesOf(r int) {
	for i, suffix := range []string{"", "Acc"} {
		begin := "the first"
		if i == 1 {
			begin = "dst"
		}
		kernel(fmt2("sumLeaves[%d]", r)+fmt2("[%d]", i), fmt2("sumLeaves%d", r)+suffix, "func(dst *float32, srcs *[]float32, off, n int)",
			fmt2("is dst = %d slices added from left to right, element off and up, beginning with ", r)+begin+full, func(g *vlib.Gen) {
				dst, p, n := sources(g, r)
				g.LoopBlocks(n, 16, func() {
					g.Fetch(append(p, dst)...)
					from, rest := dst, p
					if i == 0 {
						from, rest = p[0], p[1:]
					}
					sum := g.Load(g.At(from))
					for _, q := range rest {
						g.AddTo(sum, g.At(q))
					}
					g.Store(sum, g.At(dst))
				})
				g.Return()
			})
	}
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
func treeMany(g *vlib.Gen, acc bool) {
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
		for u, w := range v {
			if acc {
				g.AddTo(w, g.At(dst, u))
			}
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
	for group := range elements / vlib.Lanes {
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
