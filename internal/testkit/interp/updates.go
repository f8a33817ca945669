package interp

import (
	"math"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// Optimizers, an element at a time, by the formulas of package vec. Factors are
// combined in float64 and rounded once.

// element is one trainable element of a rank's shard.
type element struct {
	param int   // index among the distinct parameters of the unit's segments
	at    int64 // element of the parameter
	decay bool
}

// shard calls f for every trainable element i of the rank's shard, in order.
func (c *call[T]) shard(a graph.ShardAttr, f func(i int, e element)) {
	p := c.w.prog
	from := a.From(0)
	if a.Axis >= 0 {
		from = a.From(int64(c.w.ranks[c.rank].coord[a.Axis]))
	}
	index := params(p, a.Unit)
	if a.Once > 0 && c.w.ranks[c.rank].coord[a.Once-1] > 0 {
		return
	}
	for i := range a.Len {
		for _, s := range p.Units[a.Unit].Segments {
			if at := from + i - s.Flat; at >= 0 && at < s.Len && !p.Params[s.Param].Frozen {
				f(int(i), element{index[s.Param], s.Start + at, p.Params[s.Param].Decay})
			}
		}
	}
}

// nameOf returns the name of a unit's distinct parameter.
func (c *call[T]) nameOf(unit, param int) string {
	for p, i := range params(c.w.prog, unit) {
		if i == param {
			return c.w.prog.Params[p].Name
		}
	}
	return ""
}

// params numbers the distinct parameters of a unit's segments.
func params(p *graph.Program, unit int) map[int]int {
	index := map[int]int{}
	for _, s := range p.Units[unit].Segments {
		if _, ok := index[s.Param]; !ok {
			index[s.Param] = len(index)
		}
	}
	return index
}

// squares adds the squares of x to exact accumulators, which acc returns by parameter. Each
// 256-element block of a parameter is added as one float64, a tree over 16 lanes.
func (c *call[T]) squares(a graph.ShardAttr, x []T, acc func(param int) []int64) {
	c.squaresOf(a, x, acc, func(element) bool { return true })
}

// normSquares is squares for only the parameters whose norms the update needs.
func (c *call[T]) normSquares(a graph.UpdateAttr, x []T, acc func(param int) []int64) {
	c.squaresOf(a.Shard, x, acc, func(e element) bool { return e.decay || a.AdaptAll })
}

func (c *call[T]) squaresOf(a graph.ShardAttr, x []T, acc func(param int) []int64, counts func(element) bool) {
	type block struct {
		param int
		n     int64
	}
	lanes := map[block]*[16]float64{}
	c.shard(a, func(i int, e element) {
		if !counts(e) {
			return
		}
		b := block{e.param, e.at / 256}
		if lanes[b] == nil {
			lanes[b] = new([16]float64)
		}
		v := float64(x[i])
		lanes[b][e.at%16] += float64(v * v)
	})
	for b, l := range lanes {
		addLanes(acc(b.param), l)
	}
}

// addLanes adds the tree over the lanes of a block.
func addLanes(acc exact.Accumulator, l *[16]float64) {
	for h := 8; h > 0; h /= 2 {
		for i := range h {
			l[i] += l[i+h]
		}
	}
	acc.Add(l[0])
}

// squareBlock adds the squares of a block of 256 values.
func squareBlock(acc exact.Accumulator, x []float32) {
	var lanes [16]float64
	for i, v := range x {
		lanes[i%16] += float64(float64(v) * float64(v))
	}
	addLanes(acc, &lanes)
}

func sqSum[T num.Float](c *call[T]) {
	g, acc := c.in(0), c.outI64(0)
	a := attr[graph.ShardAttr](c)
	if c.err == nil {
		c.squares(a, g.v, func(int) []int64 { return acc })
	}
}

// norms returns the accumulators in all, with shape (params, 2, exact.Limbs), for p (which 0) or g
// (which 1).
func norms(all []int64, which int) func(param int) []int64 {
	return func(param int) []int64 { return all[(2*param+which)*exact.Limbs:][:exact.Limbs] }
}

func root(acc []int64) float64 { return math.Sqrt(exact.Accumulator(acc).Float64()) }

func clipCoef[T num.Float](c *call[T]) {
	acc, hyper, coef, norm := c.inI64(0), c.inF64(1), c.out(0), c.outF64(1)
	limit := attr[graph.ClipAttr](c).Max
	if c.err != nil {
		return
	}
	norm[0] = root(acc) / hyper[graph.HyperLossScale]
	f := 1 / hyper[graph.HyperLossScale]
	if limit > 0 {
		f *= math.Min(1, limit/(norm[0]+1e-6))
	}
	coef.v[0] = T(f)
}

func decayOf(a graph.UpdateAttr, e element) float64 {
	if e.decay {
		return a.Decay
	}
	return 0
}

// adam updates the moments and returns the denominator of the step.
func adam[T num.Float](a graph.UpdateAttr, hyper []float64, g T, m, v *T) (denominator T) {
	*m = num.Fma(T(1-a.Beta1), g, T(T(a.Beta1)**m))
	*v = num.Fma(T(1-a.Beta2), T(g*g), T(T(a.Beta2)**v))
	return num.Fma(num.Sqrt(*v), T(1/math.Sqrt(hyper[graph.HyperBC2])), T(a.Eps))
}

func adamW[T num.Float](c *call[T]) {
	g, coef, hyper := c.in(0), c.in(1), c.inF64(2)
	p, m, v := c.out(0), c.out(1), c.out(2)
	a := attr[graph.UpdateAttr](c)
	if c.err != nil {
		return
	}
	lr := hyper[graph.HyperLR]
	c.shard(a.Shard, func(i int, e element) {
		d := adam(a, hyper, T(g.v[i]*coef.v[0]), &m.v[i], &v.v[i])
		kept := T(p.v[i] * T(1-float64(lr*decayOf(a, e))))
		p.v[i] = num.Fma(-T(lr/hyper[graph.HyperBC1]), m.v[i]/d, kept)
		if a.Stochastic {
			even, odd := num.Rounding(uint64(hyper[graph.HyperSeed]), num.Stream(c.nameOf(a.Shard.Unit, e.param)), uint64(e.at)/2, uint64(hyper[graph.HyperUpdate]))
			if e.at%2 == 1 {
				even = odd
			}
			for k, x := range []*T{&p.v[i], &m.v[i], &v.v[i]} {
				*x = T(num.FromBF16(num.StochasticBF16(float32(*x), even[k])))
			}
		}
	})
	c.low(a.Shard, p.v, 3)
}

func lambDirection[T num.Float](c *call[T]) {
	p, coef, hyper := c.in(0), c.in(1), c.inF64(2)
	g, m, v, sq := c.out(0), c.out(1), c.out(2), c.outI64(3)
	a := attr[graph.UpdateAttr](c)
	if c.err != nil {
		return
	}
	c.shard(a.Shard, func(i int, e element) {
		d := adam(a, hyper, T(g.v[i]*coef.v[0]), &m.v[i], &v.v[i])
		g.v[i] = num.Fma(T(decayOf(a, e)), p.v[i], T(m.v[i]*T(1/hyper[graph.HyperBC1]))/d)
	})
	c.normSquares(a, p.v, norms(sq, 0))
	c.normSquares(a, g.v, norms(sq, 1))
}

func paramNorms[T num.Float](c *call[T]) {
	p, g, sq := c.in(0), c.in(1), c.outI64(0)
	a := attr[graph.UpdateAttr](c)
	if c.err != nil {
		return
	}
	c.normSquares(a, p.v, norms(sq, 0))
	c.normSquares(a, g.v, norms(sq, 1))
}

func lambApply[T num.Float](c *call[T]) {
	u, sq, hyper, p := c.in(0), c.inI64(1), c.inF64(3), c.out(0)
	a := attr[graph.UpdateAttr](c)
	if c.err != nil {
		return
	}
	c.shard(a.Shard, func(i int, e element) {
		ratio, np, nu := 1.0, root(norms(sq, 0)(e.param)), root(norms(sq, 1)(e.param))
		if np > 0 && nu > 0 {
			ratio = np / nu
		}
		p.v[i] = num.Fma(-T(hyper[graph.HyperLR]*ratio), u.v[i], p.v[i])
	})
	c.low(a.Shard, p.v, 1)
}

// momentum makes one step of SGD and related rules on one element.
func momentum[T num.Float](a graph.UpdateAttr, e element, g T, p, b *T, gradScale, rate, step float64) {
	d := T(T(rate) * num.Fma(T(decayOf(a, e)), *p, T(g*T(gradScale))))
	*b = num.Fma(T(a.Beta1), *b, d)
	u := *b
	if a.Nesterov {
		u = num.Fma(T(a.Beta1), *b, d)
	}
	*p = num.Fma(-T(step), u, *p)
}

func sgd[T num.Float](c *call[T]) {
	g, coef, hyper, p, b := c.in(0), c.in(1), c.inF64(2), c.out(0), c.out(1)
	a := attr[graph.UpdateAttr](c)
	if c.err != nil {
		return
	}
	c.shard(a.Shard, func(i int, e element) {
		momentum(a, e, g.v[i], &p.v[i], &b.v[i], float64(coef.v[0]), 1, hyper[graph.HyperLR])
	})
	c.low(a.Shard, p.v, 2)
}

func larsApply[T num.Float](c *call[T]) {
	g, sq, coef, hyper, p, b := c.in(0), c.inI64(1), c.in(2), c.inF64(3), c.out(0), c.out(1)
	a := attr[graph.UpdateAttr](c)
	if c.err != nil {
		return
	}
	lr, f := hyper[graph.HyperLR], float64(coef.v[0])
	c.shard(a.Shard, func(i int, e element) {
		np, ng := root(norms(sq, 0)(e.param)), float64(root(norms(sq, 1)(e.param))*f)
		ratio := a.Unadapted()
		if np > 0 && ng > 0 {
			ratio = a.Trust * np / (ng + float64(decayOf(a, e)*np))
			if a.Clip {
				ratio = math.Min(ratio/lr, 1)
			}
		}
		if a.Clip {
			momentum(a, e, g.v[i], &p.v[i], &b.v[i], f, ratio, lr)
		} else {
			momentum(a, e, g.v[i], &p.v[i], &b.v[i], f, lr*ratio, 1)
		}
	})
	c.low(a.Shard, p.v, 2)
}

func novoGrad[T num.Float](c *call[T]) {
	g, sq, coef, hyper, p, m, v := c.in(0), c.inI64(1), c.in(2), c.inF64(3), c.out(0), c.out(1), c.out(2)
	a := attr[graph.UpdateAttr](c)
	if c.err != nil {
		return
	}
	f := float64(coef.v[0])
	for k, j := range params(c.w.prog, a.Shard.Unit) {
		if c.w.prog.Params[k].Frozen {
			continue
		}
		n := float64(root(norms(sq, 1)(j)) * f)
		if v.v[j] == 0 {
			v.v[j] = T(n * n)
		} else {
			v.v[j] = T(float64(a.Beta2*float64(v.v[j])) + float64((1-a.Beta2)*float64(n*n)))
		}
	}
	c.shard(a.Shard, func(i int, e element) {
		scale := f / (math.Sqrt(float64(v.v[e.param])) + a.Eps)
		momentum(a, e, g.v[i], &p.v[i], &m.v[i], scale, 1, hyper[graph.HyperLR])
	})
	c.low(a.Shard, p.v, 3)
}
