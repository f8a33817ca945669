package interp

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

func crossEntropy[T num.Float](c *call[T]) {
	x := c.in(0)
	c.run(&vec.CrossEntropy[T]{
		N: x.rows, V: x.cols, Logits: x.v, Targets: c.inI32(1), Loss: c.outF64(0), LSE: c.out(1).v,
	})
}

func crossEntropyGrad[T num.Float](c *call[T]) {
	x, hyper := c.in(0), c.inF64(3)
	if c.err != nil {
		return
	}
	c.run(&vec.CrossEntropyGrad[T]{
		N: x.rows, V: x.cols, Logits: x.v, Targets: c.inI32(1), LSE: c.in(2).v, DLogits: c.out(0).v,
		Scale: T(hyper[graph.HyperInvCount] * hyper[graph.HyperLossScale]),
	})
}

// headLoss computes with the logits of all rows. The chunks of the bound kernel must give the same
// bits.
func headLoss[T num.Float](c *call[T]) {
	x, w, targets, loss := c.in(0), c.in(1), c.inI32(2), c.outF64(0)
	logits, lse := make([]T, x.rows*w.rows), make([]T, x.rows)
	c.product(x.rows, w.rows, x.cols, x.v, w.v, logits, nil, false, true, false)
	c.run(&vec.CrossEntropy[T]{N: x.rows, V: w.rows, Logits: logits, Targets: targets, Loss: loss, LSE: lse, Cap: T(graph.HeadCap(c.op))})
	if c.op.Kind == graph.HeadLoss || c.err != nil {
		return
	}
	hyper, dx, dw := c.inF64(3), c.out(1), c.out(2)
	if c.err != nil {
		return
	}
	c.run(&vec.CrossEntropyGrad[T]{
		N: x.rows, V: w.rows, Logits: logits, Targets: targets, LSE: lse, DLogits: logits, Cap: T(graph.HeadCap(c.op)),
		Scale: T(hyper[graph.HyperInvCount] * hyper[graph.HyperLossScale]),
	})
	c.roundAs(c.w.prog.Buf(c.input(0)).DType, logits) // rounded as the products read it
	if dx.v != nil {
		c.product(x.rows, x.cols, w.rows, logits, w.v, dx.v, nil, false, false, false)
	}
	if dw.v != nil {
		c.product(w.rows, x.cols, x.rows, logits, x.v, dw.v, nil, true, false, c.accum(2))
	}
}

func sumParts[T num.Float](c *call[T]) {
	order := attr[graph.SumPartsAttr](c).Order
	if c.err != nil {
		return
	}
	if c.w.prog.Buf(c.output(0)).DType == graph.F64 {
		addParts(c.outF64(0), c.inF64(0), order, c.accum(0))
		return
	}
	sum, parts := c.out(0).v, c.in(0).v
	if len(c.op.Out) > 1 {
		acc := c.outI64(1)
		for at := 0; at < len(parts) && c.err == nil; at += len(sum) {
			c.squares(graph.ShardAttr{Unit: c.op.Unit, Axis: -1, Len: int64(len(sum))}, parts[at:at+len(sum)], func(int) []int64 { return acc })
		}
	}
	addParts(sum, parts, order, c.accum(0))
}

// addParts adds the vectors of len(dst) elements that are adjacent in parts.
func addParts[E float32 | float64](dst, parts []E, order graph.SumOrder, accum bool) {
	n := len(dst)
	var srcs [][]E
	for at := 0; at < len(parts); at += n {
		srcs = append(srcs, parts[at:at+n])
	}
	for i := range dst {
		switch {
		case order != graph.SumSequential:
			v := treeSum(srcs, i)
			if accum {
				v = dst[i] + v
			}
			dst[i] = v
			continue
		case accum:
			dst[i] += srcs[0][i]
		default:
			dst[i] = srcs[0][i]
		}
		for _, s := range srcs[1:] {
			dst[i] += s[i]
		}
	}
}
