package interp

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// newtonSchulz computes the iteration as its definition is written, with a separate matrix for each
// step.
func newtonSchulz[T num.Float](c *call[T]) {
	x, y, a := c.in(0), c.out(0), attr[graph.NewtonSchulzAttr](c)
	if c.err != nil {
		return
	}
	if a.Axis >= 0 && c.w.ranks[c.rank].coord[a.Axis] != a.Owner {
		clear(y.v)
		return
	}
	squares := exact.Accumulator(make([]int64, exact.Limbs))
	for lo := 0; lo < len(x.v); lo += 256 {
		var lanes [16]float64
		for i, v := range x.v[lo:min(lo+256, len(x.v))] {
			lanes[i%16] += float64(float64(v) * float64(v))
		}
		addLanes(squares, &lanes)
	}
	k := min(x.rows, x.cols)
	now, next, gram, square := make([]T, len(x.v)), make([]T, len(x.v)), make([]T, k*k), make([]T, k*k)
	inverse := T(1 / (root(squares) + 1e-7))
	for i, v := range x.v {
		now[i] = T(inverse * v)
	}
	by := graph.NewtonSchulzCoefficients
	for step := range graph.NewtonSchulzSteps {
		tall := x.rows > x.cols
		c.product(k, k, max(x.rows, x.cols), now, now, gram, nil, tall, !tall, false)
		c.product(k, k, k, gram, gram, square, nil, false, false, false)
		for i, g := range gram {
			square[i] = T(T(by[2])*square[i]) + T(T(by[1])*g)
			if i%k == i/k {
				square[i] += T(by[0])
			}
			if step == graph.NewtonSchulzSteps-1 {
				square[i] = T(T(a.Factor) * square[i])
			}
		}
		if tall {
			c.product(x.rows, x.cols, k, now, square, next, nil, false, false, false)
		} else {
			c.product(x.rows, x.cols, k, square, now, next, nil, false, false, false)
		}
		now, next = next, now
	}
	for i, v := range now {
		y.v[i] = v + 0
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
		p.v[i] = num.Fma(-T(hyper[graph.HyperLR]), num.Fma(T(decayOf(a, e)), p.v[i], u.v[i]), p.v[i])
	})
	c.low(a.Shard, p.v, 1)
}
