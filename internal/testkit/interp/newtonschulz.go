package interp

import (
	"math"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// newtonSchulz is the iteration as its definition is written, each matrix apart.
func newtonSchulz[T num.Float](c *call[T]) {
	x, y, a := c.in(0), c.out(0), attr[graph.NewtonSchulzAttr](c)
	if c.err != nil {
		return
	}
	if a.Axis >= 0 && c.w.ranks[c.rank].coord[a.Axis] != a.Owner {
		clear(y.v)
		return
	}
	squares := 0.0
	for lo := 0; lo < len(x.v); lo += graph.NewtonSchulzPiece {
		s := 0.0
		for _, v := range x.v[lo:min(lo+graph.NewtonSchulzPiece, len(x.v))] {
			s += float64(v) * float64(v)
		}
		squares += s
	}
	k := min(x.rows, x.cols)
	now, next, gram, square := make([]T, len(x.v)), make([]T, len(x.v)), make([]T, k*k), make([]T, k*k)
	for i, v := range x.v {
		now[i] = T(float64(v) / (math.Sqrt(squares) + 1e-7))
	}
	by := graph.NewtonSchulzCoefficients
	for range graph.NewtonSchulzSteps {
		tall := x.rows > x.cols
		c.product(k, k, max(x.rows, x.cols), now, now, gram, nil, tall, !tall, false)
		c.product(k, k, k, gram, gram, square, nil, false, false, false)
		for i, g := range gram {
			square[i] = T(T(by[1])*g) + T(T(by[2])*square[i])
		}
		for i, v := range now {
			next[i] = T(by[0]) * v
		}
		if tall {
			c.product(x.rows, x.cols, k, now, square, next, nil, false, false, true)
		} else {
			c.product(x.rows, x.cols, k, square, now, next, nil, false, false, true)
		}
		now, next = next, now
	}
	for i, v := range now {
		y.v[i] = T(T(a.Factor)*v) + 0
	}
}

func muonMomentum[T num.Float](c *call[T]) {
	g, coef, m, d, a := c.in(0), c.in(1), c.out(0), c.out(1), attr[graph.UpdateAttr](c)
	if c.err != nil {
		return
	}
	c.shard(a.Shard, func(i int, _ element) {
		h := T(coef.v[0] * g.v[i])
		m.v[i] = T(graph.MuonMomentum*m.v[i]) + h
		d.v[i] = T(graph.MuonMomentum*m.v[i]) + h
	})
}

func muonApply[T num.Float](c *call[T]) {
	u, hyper, p, a := c.in(0), c.inF64(1), c.out(0), attr[graph.UpdateAttr](c)
	if c.err != nil {
		return
	}
	c.shard(a.Shard, func(i int, e element) {
		p.v[i] -= T(T(hyper[graph.HyperLR]) * (u.v[i] + T(T(decayOf(a, e))*p.v[i])))
	})
	c.low(a.Shard, p.v, 1)
}
