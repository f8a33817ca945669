package interp

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// slice returns the elements [first, end) of the operation's slice on the rank, and those of all
// slices; 0 without one.
func (c *call[T]) slice() (first, end, total int) {
	a, ok := c.op.Attr.(graph.SliceAttr)
	if !ok {
		return 0, 0, 0
	}
	from, to := a.Range(c.w.ranks[c.rank].coord)
	return int(from), int(to), int(a.Total)
}

// first returns the first element of a slice on the rank.
func (c *call[T]) first(a graph.SliceAttr) int {
	from, _ := a.Range(c.w.ranks[c.rank].coord)
	return int(from)
}

// headSlice defines HeadStats and HeadSliceGrad, with all rows at once.
func headSlice[T num.Float](c *call[T]) {
	x, w, targets := c.in(0), c.in(1), c.inI32(2)
	first, end, _ := c.slice()
	v := end - first
	logits := make([]T, x.rows*v)
	c.product(x.rows, v, x.cols, x.v, w.v[:v*x.cols], logits, nil, false, true, false)
	if c.err != nil {
		return
	}
	if c.op.Kind == graph.HeadStats {
		c.run(&vec.HeadStats[T]{N: x.rows, V: v, First: first, Logits: logits, Targets: targets, Stats: c.out(0).v})
		return
	}
	lse, hyper, dx, dw := c.in(3).v, c.inF64(4), c.out(0), c.out(1)
	scale := T(hyper[graph.HyperInvCount] * hyper[graph.HyperLossScale])
	for n := range x.rows {
		for j := range v {
			p := num.Exp(logits[n*v+j] - lse[n])
			switch {
			case targets[n] < 0:
				p = 0
			case j == int(targets[n])-first:
				p--
			}
			logits[n*v+j] = T(p * scale)
		}
	}
	c.roundAs(c.w.prog.Buf(c.input(0)).DType, logits) // rounded as the products read it
	if dx.v != nil {
		c.product(x.rows, x.cols, v, logits, w.v[:v*x.cols], dx.v, nil, false, false, false)
	}
	if dw.v != nil {
		if !c.accum(1) {
			clear(dw.v[v*x.cols:])
		}
		c.product(v, x.cols, x.rows, logits, x.v, dw.v[:v*x.cols], nil, true, false, c.accum(1))
	}
}

// headLSE defines HeadLSE.
func headLSE[T num.Float](c *call[T]) {
	stats, targets, loss, lse := c.in(0), c.inI32(1), c.outF64(0), c.out(1).v
	each := int(attr[graph.SliceAttr](c).Each)
	if c.err != nil {
		return
	}
	rows := len(targets)
	at := func(slice, n, what int) float64 {
		return float64(stats.v[(slice*rows+n)*graph.HeadStatistics+what])
	}
	for n, t := range targets {
		m, sum := at(0, n, 0), 0.0
		for s := 1; s < stats.rows/rows; s++ {
			m = max(m, at(s, n, 0))
		}
		for s := range stats.rows / rows {
			sum += at(s, n, 1) * num.Exp(at(s, n, 0)-m)
		}
		lse[n] = T(m + num.Log(sum))
		if t >= 0 {
			loss[0] += float64(lse[n]) - at(int(t)/each, n, 2)
		}
	}
}

func lossSeed[T num.Float](c *call[T]) {
	hyper, seed := c.inF64(0), c.outF64(0)
	if c.err == nil {
		seed[0] = float64(T(hyper[graph.HyperInvCount] * hyper[graph.HyperLossScale]))
	}
}
