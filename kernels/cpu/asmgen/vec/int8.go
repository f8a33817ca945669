package main

import "github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"

func int8s() {
	kernel("int8Top", "int8Top", "func(x *float32, n int) float32", "returns the largest magnitude by its bits, NaN above all,"+full, func(g *vlib.Gen) {
		x, n := g.Ptr("x"), g.Ptr("n")
		top := g.Zero()
		g.LoopFull(n, func() { g.MaxBitsTo(top, g.Abs(g.Load(g.At(x)))) })
		g.Result(0, g.MaxBits16(top))
		g.Return()
	})
	kernel("int8Tops", "int8Tops", "func(tops *uint32, x *float32, n int)", "keeps the larger magnitude of each element by its bits,"+full, func(g *vlib.Gen) {
		tops, x, n := g.Ptr("tops"), g.Ptr("x"), g.Ptr("n")
		g.LoopFull(n, func() {
			top := g.Load(g.At(tops))
			g.MaxBitsTo(top, g.Abs(g.Load(g.At(x))))
			g.Store(top, g.At(tops))
		})
		g.Return()
	})
	kernel("int8Codes", "int8Codes", "func(codes *byte, x *float32, n int, inverse float32)", "rounds products with a factor to bytes"+full, func(g *vlib.Gen) {
		codes, x, n := g.Ptr("codes"), g.Ptr("x"), g.Ptr("n")
		inverse := g.Param("inverse")
		g.LoopFull(n, func() { g.StoreBytes(g.Mul(g.Load(g.At(x)), inverse), g.AtBytes(codes)) })
		g.Return()
	})
	kernel("int8CodesBy", "int8CodesBy", "func(codes *byte, x *float32, n int, inverses *float32)", "rounds products with a factor each to bytes"+full, func(g *vlib.Gen) {
		codes, x, n, inverses := g.Ptr("codes"), g.Ptr("x"), g.Ptr("n"), g.Ptr("inverses")
		g.LoopFull(n, func() { g.StoreBytes(g.Mul(g.Load(g.At(x)), g.At(inverses)), g.AtBytes(codes)) })
		g.Return()
	})
	kernel("int8Read", "int8Read", "func(x *float32, codes *byte, n int, scale float32)", "converts bytes and multiplies them"+full, func(g *vlib.Gen) {
		x, codes, n := g.Ptr("x"), g.Ptr("codes"), g.Ptr("n")
		scale := g.Param("scale")
		g.LoopFull(n, func() {
			v := g.LoadBytes(g.AtBytes(codes))
			g.MulTo(v, scale)
			g.Store(v, g.At(x))
		})
		g.Return()
	})
}
