package interp

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// product computes one matrix product as defined in package gemm. transA and transB say that an
// operand is stored transposed.
func (c *call[T]) product(m, n, k int, a, b, out, bias []T, transA, transB, accum bool) {
	if c.err == nil {
		c.err = gemm.Reference(gemm.Spec{M: m, N: n, K: k, TransA: transA, TransB: transB, Accumulate: accum}, a, b, out, bias, nil)
	}
}

func linear[T num.Float](c *call[T]) {
	x, w, bias, y, pre := c.in(0), c.in(1), c.in(2), c.out(0), c.out(1)
	a := attr[graph.LinearAttr](c)
	if a.Int8 {
		c.int8Product(x, w, y, bias.v, a.TransW)
	} else {
		c.product(x.rows, y.cols, x.cols, x.v, w.v, y.v, bias.v, false, a.TransW, false)
	}
	if a.Act != graph.ActNone { // of what is stored, or would be
		c.round(0, y.v)
	}
	copy(pre.v, y.v)
	if a.Act != graph.ActNone {
		f, _ := act[T](a.Act)
		for i, v := range y.v {
			y.v[i] = f(v)
		}
	}
}

func linearAct[T num.Float](c *call[T]) {
	x, w, bias, y, pre := c.in(0), c.in(1), c.in(2), c.out(0), c.out(1)
	a := attr[graph.LinearAttr](c)
	c.product(x.rows, y.cols, x.cols, x.v, w.v, y.v, bias.v, false, a.TransW, false)
	copy(pre.v, y.v)
	f, _ := act[T](a.Act)
	for i, v := range y.v { // of the sum that pre is rounded from
		y.v[i] = f(v)
	}
}

func linearGradX[T num.Float](c *call[T]) {
	dy, w, dx := c.in(0), c.in(1), c.out(0)
	if a := attr[graph.LinearAttr](c); a.Int8 {
		c.int8Product(dy, w, dx, nil, !a.TransW)
		return
	}
	c.product(dy.rows, dx.cols, dy.cols, dy.v, w.v, dx.v, nil, false, !attr[graph.LinearAttr](c).TransW, c.accum(0))
}

func linearGradAct[T num.Float](c *call[T]) {
	dy, w, pre, d := c.in(0), c.in(1), c.in(2), c.out(0)
	a := attr[graph.LinearAttr](c)
	c.product(dy.rows, d.cols, dy.cols, dy.v, w.v, d.v, nil, false, !a.TransW, false)
	c.round(0, d.v) // as the derivative of what was stored would be
	_, df := act[T](a.Act)
	for i, v := range pre.v {
		switch {
		case df != nil:
			d.v[i] = T(d.v[i] * df(v))
		case !(v > 0):
			d.v[i] = 0
		}
	}
}

func linearGradW[T num.Float](c *call[T]) {
	x, dy, dw := c.in(0), c.in(1), c.out(0)
	if attr[graph.LinearAttr](c).TransW {
		x, dy = dy, x
	}
	c.product(x.cols, dy.cols, x.rows, x.v, dy.v, dw.v, nil, true, false, c.accum(0))
}

func linearGradWB[T num.Float](c *call[T]) {
	linearGradW(c)
	c.columnSums(1, 1)
}

func biasGrad[T num.Float](c *call[T]) { c.columnSums(0, 0) }

func (c *call[T]) columnSums(in, out int) {
	dy, db := c.in(in), c.out(out)
	if !c.accum(out) {
		clear(db.v)
	}
	for i, v := range dy.v {
		db.v[i%dy.cols] += v
	}
}
