package main

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

func int8s() {
	kernel("int8Top", "int8Top", "func(x *float32, n int) float32", "returns the largest magnitude by its bits, NaN above all,"+full, func(g *vlib.Gen) {
		x, n := g.Ptr("x"), g.Ptr("n")
		top := g.Zero()
		g.LoopFull(n, func() { g.MaxBitsTo(top, g.Abs(g.Load(g.At(x)))) })
		g.Result(0, g.MaxBits16(top))
		g.Return()
	})
	kernel("int8Codes", "int8Codes", "func(codes *byte, x *float32, n int, inverse float32)", "rounds products with a factor to bytes"+full, func(g *vlib.Gen) {
		codes, x, n := g.Ptr("codes"), g.Ptr("x"), g.Ptr("n")
		inverse := g.Param("inverse")
		g.LoopFull(n, func() { g.StoreBytes(g.Mul(g.Load(g.At(x)), inverse), g.AtBytes(codes)) })
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
	int8Columns()
}

// columns64 is the columns that a kernel takes down a matrix of 16-bit numbers: two lines
// of a row. Rows do not wait for each other, so that many lines are on their way.
const columns64 = 64

func int8Columns() {
	kernel("int8ColumnTops", "int8ColumnTops", "func(tops, x *uint16, rows, stride int)", "returns the largest magnitude of each of 64 columns by its bits; stride is in bytes.", func(g *vlib.Gen) {
		tops, x, rows, stride := g.Ptr("tops"), g.Ptr("x"), g.Ptr("rows"), g.Ptr("stride")
		magnitude, mask := g.NewReg(), g.RWord(0x7fff7fff)[0]
		top := append(g.Zero(), g.Zero()...)
		width := 2 * columns64 / len(top)
		overRows(g, rows, func() {
			for i, t := range top {
				if at := (operand.Mem{Base: x, Disp: i * width}); g.AVX512 {
					VPANDD(at, mask, magnitude)
				} else {
					VPAND(at, mask, magnitude)
				}
				VPMAXUW(magnitude, t, t)
			}
			ADDQ(stride, x)
		})
		for i, t := range top {
			if at := (operand.Mem{Base: tops, Disp: i * width}); g.AVX512 {
				VMOVDQU32(t, at)
			} else {
				VMOVDQU(t, at)
			}
		}
		g.Return()
	})
	for i, load := range []func(g *vlib.Gen, m vlib.Mem) vlib.Vec{(*vlib.Gen).LoadBF16, (*vlib.Gen).LoadF16} {
		kernel(fmt2("int8ColumnCodes[%d]", i), "int8ColumnCodes"+[]string{"BF16", "F16"}[i], "func(codes *byte, x *uint16, rows, stride int, inverses *float32)", "rounds products of 64 columns with a factor each to bytes; stride is of both, in elements.", func(g *vlib.Gen) {
			codes, x, rows, stride, inverses := g.Ptr("codes"), g.Ptr("x"), g.Ptr("rows"), g.Ptr("stride"), g.Ptr("inverses")
			var by []vlib.Arg
			for u := range columns64 / vlib.Lanes {
				by = append(by, g.Src(g.Fixed(inverses, 64*u)))
			}
			if g.AVX512 { // AVX2 has not registers enough
				for u := range by {
					by[u] = g.Load(g.Fixed(inverses, 64*u))
				}
			}
			overRows(g, rows, func() {
				for u, f := range by {
					g.StoreBytes(g.Mul(load(g, g.Fixed(x, 32*u)), f), g.Fixed(codes, 16*u))
				}
				ADDQ(stride, codes)
				LEAQ(operand.Mem{Base: x, Index: stride, Scale: 2}, x)
			})
			g.Return()
		})
	}
}

// overRows runs body for each of at least one row.
func overRows(g *vlib.Gen, rows reg.GPVirtual, body func()) {
	top := g.Label("row")
	Label(top)
	body()
	DECQ(rows)
	JNZ(operand.LabelRef(top))
}
