package main

import (
	"github.com/mmcloughlin/avo/operand"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

func convert() {
	kernel("narrow[0]", "narrowBF16", "func(dst *uint16, src *float32, n int)", "rounds to bfloat16 for n elements, a multiple of 32.", func(g *vlib.Gen) {
		dst, src, n := g.Ptr("dst"), g.Ptr("src"), g.Ptr("n")
		if g.AVX512 {
			r := g.NewBF16Rounder()
			g.LoopBlocks(n, 2*vlib.Lanes, func() {
				r.Store(g.Load(g.At(src)), g.Load(g.At(src, 1)), operand.Mem(g.At16(dst)))
			})
		} else {
			g.LoopFull(n, func() { g.StoreBF16(g.Load(g.At(src)), g.At16(dst)) })
		}
		g.Return()
	})
	kernel("narrow[1]", "narrowF16", "func(dst *uint16, src *float32, n int)", "rounds to binary16"+full, func(g *vlib.Gen) {
		dst, src, n := g.Ptr("dst"), g.Ptr("src"), g.Ptr("n")
		g.LoopFull(n, func() { g.StoreF16(g.Load(g.At(src)), g.At16(dst)) })
		g.Return()
	})
	kernel("widen[0]", "widenBF16", "func(dst *float32, src *uint16, n int)", "converts from bfloat16"+full, func(g *vlib.Gen) {
		dst, src, n := g.Ptr("dst"), g.Ptr("src"), g.Ptr("n")
		g.LoopFull(n, func() { g.Store(g.LoadBF16(g.At16(src)), g.At(dst)) })
		g.Return()
	})
	kernel("widen[1]", "widenF16", "func(dst *float32, src *uint16, n int)", "converts from binary16"+full, func(g *vlib.Gen) {
		dst, src, n := g.Ptr("dst"), g.Ptr("src"), g.Ptr("n")
		g.LoopFull(n, func() { g.Store(g.LoadF16(g.At16(src)), g.At(dst)) })
		g.Return()
	})
}
