package main

import (
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	. "github.com/mmcloughlin/avo/build"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

// columns are sums down the columns: 64 columns at a time in four accumulators,
// and up to 16 under a mask.
func columns() {
	columnKernel("colSum", "func(y, x *float32, rows, stride, cols int)", "is y[c] += Σ x[r,c]", func(g *vlib.Gen) columnBody {
		x := g.Ptr("x")
		return columnBody{
			cells: func() func(a vlib.Vec, disp int) {
				return func(a vlib.Vec, disp int) { g.AddTo(a, g.Src(g.Fixed(x, disp))) }
			},
			next: func(stride reg.GPVirtual) { ADDQ(stride, x) },
		}
	})
	columnKernel("normCols", "func(y, dy, x, mean, rstd *float32, rows, stride, cols int)", "is y[c] += Σ dy[r,c]·((x[r,c]-mean[r])·rstd[r])",
		func(g *vlib.Gen) columnBody {
			dy, x, mean, rstd := g.Ptr("dy"), g.Ptr("x"), g.Ptr("mean"), g.Ptr("rstd")
			return columnBody{
				cells: func() func(a vlib.Vec, disp int) {
					m, s := g.Broadcast(operand.Mem{Base: mean}), g.Broadcast(operand.Mem{Base: rstd})
					return func(a vlib.Vec, disp int) {
						h := g.Sub(g.Load(g.Fixed(x, disp)), m)
						g.MulTo(h, s)
						g.MulTo(h, g.Src(g.Fixed(dy, disp)))
						g.AddTo(a, h)
					}
				},
				next: func(stride reg.GPVirtual) {
					ADDQ(stride, dy)
					ADDQ(stride, x)
					ADDQ(operand.Imm(4), mean)
					ADDQ(operand.Imm(4), rstd)
				},
			}
		})
	columnKernel("rmsCols", "func(y, dy, x, rstd *float32, rows, stride, cols int)", "is y[c] += Σ dy[r,c]·(x[r,c]·rstd[r])",
		func(g *vlib.Gen) columnBody {
			dy, x, rstd := g.Ptr("dy"), g.Ptr("x"), g.Ptr("rstd")
			return columnBody{
				cells: func() func(a vlib.Vec, disp int) {
					s := g.Broadcast(operand.Mem{Base: rstd})
					return func(a vlib.Vec, disp int) {
						h := g.Mul(s, g.Src(g.Fixed(x, disp)))
						g.MulTo(h, g.Src(g.Fixed(dy, disp)))
						g.AddTo(a, h)
					}
				},
				next: func(stride reg.GPVirtual) {
					ADDQ(stride, dy)
					ADDQ(stride, x)
					ADDQ(operand.Imm(4), rstd)
				},
			}
		})
}

// columnBody is what a column kernel does in a row: cells prepares the row and
// returns what adds 16 columns from a byte offset on; next moves to the next row.
type columnBody struct {
	cells func() func(a vlib.Vec, disp int)
	next  func(stride reg.GPVirtual)
}

func columnKernel(name, signature, doc string, body func(g *vlib.Gen) columnBody) {
	kernel(name+"64", name+"64", signature, doc+" for r < rows (at least 1) and 64 columns; stride in elements, cols unused.", func(g *vlib.Gen) {
		columnLoop(g, body, 4)
		g.Return()
	})
	kernel(name+"16", name+"16", signature, doc+" for r < rows (at least 1) and cols columns, 1 to 16; stride in elements.", func(g *vlib.Gen) {
		g.Masked(g.Ptr("cols"), func() { columnLoop(g, body, 1) })
		g.Return()
	})
}

func columnLoop(g *vlib.Gen, body func(g *vlib.Gen) columnBody, vecs int) {
	y, rows, stride := g.Ptr("y"), g.Ptr("rows"), g.Ptr("stride")
	SHLQ(operand.Imm(2), stride)
	b := body(g)
	var acc []vlib.Vec
	for i := range vecs {
		acc = append(acc, g.Load(g.Fixed(y, 64*i)))
	}
	top := g.Label("row")
	Label(top)
	cell := b.cells()
	for i, a := range acc {
		cell(a, 64*i)
	}
	b.next(stride)
	DECQ(rows)
	JNZ(operand.LabelRef(top))
	for i, a := range acc {
		g.Store(a, g.Fixed(y, 64*i))
	}
}
