package cpu

import (
	"math"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// span is the part of a segment that a rank holds.
type span struct {
	param  int // index among the distinct parameters of the unit's segments, in their order
	lo, hi int // elements of the rank's buffer
	decay  bool
}

// blockElems is what the starts of parameters, segments and shards are multiples
// of, so that no 256-element block of a norm is split.
const blockElems = 256

// spans returns the trainable parts of the unit that the rank holds, and for
// each distinct parameter of the unit whether it is trainable.
func (b *binding) spans(a graph.ShardAttr) (spans []span, trainable []bool) {
	p := b.Program
	index := int64(0)
	if a.Axis >= 0 {
		if a.Axis >= len(b.Coord) {
			b.failf("shard lies along mesh axis %d, the rank has %d coordinates", a.Axis, len(b.Coord))
			return nil, nil
		}
		index = int64(b.Coord[a.Axis])
	}
	from := a.From(index)
	if from%blockElems != 0 {
		b.failf("the shard starts at element %d of unit %s, want a multiple of %d", from, p.Units[a.Unit].Name, blockElems)
	}
	number := map[int]int{}
	for i, s := range p.Units[a.Unit].Segments {
		if s.Param < 0 || s.Param >= len(p.Params) {
			b.failf("segment %d of unit %s: the program has no parameter %d", i, p.Units[a.Unit].Name, s.Param)
			return nil, nil
		}
		param := &p.Params[s.Param]
		if s.Flat%blockElems != 0 || s.Start%blockElems != 0 || s.Flat < 0 || s.Start < 0 || s.Len < 0 {
			b.failf("segment of %s in unit %s: starts at element %d of the parameter and %d of the unit, want multiples of %d",
				param.Name, p.Units[a.Unit].Name, s.Start, s.Flat, blockElems)
			return nil, nil
		}
		j, ok := number[s.Param]
		if !ok {
			j = len(trainable)
			number[s.Param] = j
			trainable = append(trainable, !param.Frozen)
		}
		lo, hi := max(s.Flat, from), min(s.Flat+s.Len, from+a.Len)
		if lo < hi && !param.Frozen {
			spans = append(spans, span{param: j, lo: int(lo - from), hi: int(hi - from), decay: param.Decay})
		}
	}
	return spans, trainable
}

// wholeParams refuses units that hold a part of a parameter only: a norm over
// the unit's segments would not be the parameter's.
func (b *binding) wholeParams(unit int) {
	p := b.Program
	held := map[int]int64{}
	for _, s := range p.Units[unit].Segments {
		held[s.Param] += s.Len
	}
	for i, n := range held {
		if i >= 0 && i < len(p.Params) && n != p.Params[i].Elems() {
			b.failf("unit %s holds %d of the %d elements of %s; norms by parameter need all of them in one unit",
				p.Units[unit].Name, n, p.Params[i].Elems(), p.Params[i].Name)
			return
		}
	}
}

func bindSqSum(b *binding) func() error {
	spans, _ := b.spans(attr[graph.ShardAttr](b))
	g, acc := in[float32](b, 0), out[int64](b, 0)
	if b.err != nil {
		return nil
	}
	var sums []vec.SqSum
	for _, s := range spans {
		sums = append(sums, vec.SqSum{X: g[s.lo:s.hi], Acc: acc})
	}
	pool := b.pool
	return func() error { return runSums(sums, pool) }
}

func runSums(sums []vec.SqSum, p *pool.Pool) error {
	for i := range sums {
		if err := sums[i].Run(p); err != nil {
			return err
		}
	}
	return nil
}

// normSums prepares the squares of p and g by parameter: norms is
// (params, 2, exact.Limbs), p's first.
func normSums(spans []span, p, g []float32, norms []int64) []vec.SqSum {
	var sums []vec.SqSum
	for _, s := range spans {
		sums = append(sums,
			vec.SqSum{X: p[s.lo:s.hi], Acc: accumulator(norms, s.param, 0)},
			vec.SqSum{X: g[s.lo:s.hi], Acc: accumulator(norms, s.param, 1)})
	}
	return sums
}

func accumulator(norms []int64, param, which int) []int64 {
	at := (2*param + which) * exact.Limbs
	return norms[at : at+exact.Limbs]
}

func (b *binding) normsLen(norms []int64, params int) {
	if want := 2 * params * exact.Limbs; b.err == nil && len(norms) != want {
		b.failf("operand norms has %d elements, want %d: 2 accumulators of %d for each of the unit's %d parameters", len(norms), want, exact.Limbs, params)
	}
}

// norm is the root of an exact sum of squares.
func norm(acc []int64) float64 { return math.Sqrt(exact.Accumulator(acc).Float64()) }

func bindClipCoef(b *binding) func() error {
	limit := attr[graph.ClipAttr](b).Max
	acc, hyper := in[int64](b, 0), in[float64](b, 1)
	coef, gradNorm := out[float32](b, 0), out[float64](b, 1)
	if _, err := exact.Of(acc); err != nil && b.err == nil {
		b.failf("operand acc: %w", err)
	}
	return func() error {
		scale := hyper[graph.HyperLossScale]
		n := norm(acc) / scale
		c := 1 / scale
		if limit > 0 {
			c *= math.Min(1, limit/(n+1e-6)) // NaN stays NaN
		}
		coef[0], gradNorm[0] = float32(c), n
		return nil
	}
}

// update is what optimizers share.
type update struct {
	attr      graph.UpdateAttr
	spans     []span
	trainable []bool // by distinct parameter of the unit
	coef      []float32
	hyper     []float64
}

func (b *binding) update() update {
	u := update{attr: attr[graph.UpdateAttr](b)}
	u.spans, u.trainable = b.spans(u.attr.Shard)
	return u
}

func (u *update) decay(s span) float64 {
	if s.decay {
		return u.attr.Decay
	}
	return 0
}

func (u *update) lr() float64 { return u.hyper[graph.HyperLR] }

func bindAdamW(b *binding) func() error {
	u := b.update()
	g := in[float32](b, 0)
	u.coef, u.hyper = in[float32](b, 1), in[float64](b, 2)
	p, m, v := out[float32](b, 0), out[float32](b, 1), out[float32](b, 2)
	if b.err != nil {
		return nil
	}
	low, as := b.low(3)
	if b.err != nil {
		return nil
	}
	var parts []vec.AdamW
	for _, s := range u.spans {
		k := vec.AdamW{Moments: u.moments(s, p, g, m, v)}
		if low != nil {
			k.Low, k.LowAs = low[s.lo:s.hi], as
		}
		parts = append(parts, k)
	}
	pool := b.pool
	return func() error {
		for i := range parts {
			u.setMoments(&parts[i].Moments)
			if err := parts[i].Run(pool); err != nil {
				return err
			}
		}
		return nil
	}
}

func (u *update) moments(s span, p, g, m, v []float32) vec.Moments {
	return vec.Moments{
		P: p[s.lo:s.hi], G: g[s.lo:s.hi], M: m[s.lo:s.hi], V: v[s.lo:s.hi],
		Beta1: u.attr.Beta1, Beta2: u.attr.Beta2, Eps: u.attr.Eps, Decay: u.decay(s),
	}
}

// setMoments takes what changes by step.
func (u *update) setMoments(m *vec.Moments) {
	m.GradScale, m.LR = u.coef[0], u.lr()
	m.BC1, m.BC2 = u.hyper[graph.HyperBC1], u.hyper[graph.HyperBC2]
}

func bindSGD(b *binding) func() error {
	u := b.update()
	g := in[float32](b, 0)
	u.coef, u.hyper = in[float32](b, 1), in[float64](b, 2)
	p, m := out[float32](b, 0), out[float32](b, 1)
	if b.err != nil {
		return nil
	}
	parts := u.momenta(p, g, m)
	copies := b.copies(u.spans, p, 2)
	if b.err != nil {
		return nil
	}
	pool := b.pool
	return func() error {
		for i := range parts {
			k := &parts[i]
			k.GradScale, k.Rate, k.Step = float64(u.coef[0]), 1, u.lr()
			if err := k.Run(pool); err != nil {
				return err
			}
		}
		return runCopies(copies, pool)
	}
}

func (u *update) momenta(p, g, m []float32) []vec.Momentum {
	var parts []vec.Momentum
	for _, s := range u.spans {
		parts = append(parts, vec.Momentum{
			P: p[s.lo:s.hi], G: g[s.lo:s.hi], B: m[s.lo:s.hi],
			Decay: u.decay(s), Momentum: u.attr.Beta1, Nesterov: u.attr.Nesterov,
		})
	}
	return parts
}

func bindLAMBDirection(b *binding) func() error {
	u := b.update()
	p := in[float32](b, 0)
	u.coef, u.hyper = in[float32](b, 1), in[float64](b, 2)
	g, m, v, norms := out[float32](b, 0), out[float32](b, 1), out[float32](b, 2), out[int64](b, 3)
	b.wholeParams(u.attr.Shard.Unit)
	b.normsLen(norms, len(u.trainable))
	if b.err != nil {
		return nil
	}
	var parts []vec.LAMBDirection
	for _, s := range u.spans {
		parts = append(parts, vec.LAMBDirection{Moments: u.moments(s, p, g, m, v)})
	}
	sums := normSums(u.spans, p, g, norms)
	pool := b.pool
	return func() error {
		for i := range parts {
			u.setMoments(&parts[i].Moments)
			if err := parts[i].Run(pool); err != nil {
				return err
			}
		}
		return runSums(sums, pool)
	}
}

func bindParamNorms(b *binding) func() error {
	u := b.update()
	p, g, norms := in[float32](b, 0), in[float32](b, 1), out[int64](b, 0)
	b.wholeParams(u.attr.Shard.Unit)
	b.normsLen(norms, len(u.trainable))
	if b.err != nil {
		return nil
	}
	sums := normSums(u.spans, p, g, norms)
	pool := b.pool
	return func() error { return runSums(sums, pool) }
}

func bindLAMBApply(b *binding) func() error {
	u := b.update()
	g, norms := in[float32](b, 0), in[int64](b, 1)
	u.hyper = in[float64](b, 3)
	p := out[float32](b, 0)
	b.normsLen(norms, len(u.trainable))
	if b.err != nil {
		return nil
	}
	var parts []vec.LAMBApply
	for _, s := range u.spans {
		parts = append(parts, vec.LAMBApply{P: p[s.lo:s.hi], U: g[s.lo:s.hi]})
	}
	copies := b.copies(u.spans, p, 1)
	if b.err != nil {
		return nil
	}
	pool := b.pool
	return func() error {
		for i, s := range u.spans {
			k := &parts[i]
			k.LR = u.lr()
			k.Ratio = vec.LAMBRatio(norm(accumulator(norms, s.param, 0)), norm(accumulator(norms, s.param, 1)))
			if err := k.Run(pool); err != nil {
				return err
			}
		}
		return runCopies(copies, pool)
	}
}

func bindLARSApply(b *binding) func() error {
	u := b.update()
	g, norms := in[float32](b, 0), in[int64](b, 1)
	u.coef, u.hyper = in[float32](b, 2), in[float64](b, 3)
	p, m := out[float32](b, 0), out[float32](b, 1)
	b.normsLen(norms, len(u.trainable))
	if b.err != nil {
		return nil
	}
	parts := u.momenta(p, g, m)
	copies := b.copies(u.spans, p, 2)
	if b.err != nil {
		return nil
	}
	pool := b.pool
	return func() error {
		lr, coef := u.lr(), float64(u.coef[0])
		for i, s := range u.spans {
			k := &parts[i]
			normP, normG := norm(accumulator(norms, s.param, 0)), float64(norm(accumulator(norms, s.param, 1))*coef)
			k.GradScale = coef
			if u.attr.Clip {
				k.Rate, k.Step = vec.LARCRatio(normP, normG, k.Decay, u.attr.Trust, lr), lr
			} else {
				k.Rate, k.Step = lr*vec.LARSRatio(normP, normG, k.Decay, u.attr.Trust), 1
			}
			if err := k.Run(pool); err != nil {
				return err
			}
		}
		return runCopies(copies, pool)
	}
}

// bindNovoGrad updates the second moment of every trainable parameter of the
// unit, also of those that lie on other ranks: v is the same on all.
func bindNovoGrad(b *binding) func() error {
	u := b.update()
	g, norms := in[float32](b, 0), in[int64](b, 1)
	u.coef, u.hyper = in[float32](b, 2), in[float64](b, 3)
	p, m, v := out[float32](b, 0), out[float32](b, 1), out[float32](b, 2)
	b.normsLen(norms, len(u.trainable))
	if b.err != nil {
		return nil
	}
	parts := u.momenta(p, g, m)
	copies := b.copies(u.spans, p, 3)
	if b.err != nil {
		return nil
	}
	pool := b.pool
	return func() error {
		coef := float64(u.coef[0])
		for j, on := range u.trainable {
			if on {
				n := float64(norm(accumulator(norms, j, 1)) * coef)
				v[j] = float32(vec.NovoGradMoment(float64(v[j]), float64(n*n), u.attr.Beta2, v[j] == 0))
			}
		}
		for i, s := range u.spans {
			k := &parts[i]
			k.GradScale = coef / (math.Sqrt(float64(v[s.param])) + u.attr.Eps)
			k.Rate, k.Step = 1, u.lr()
			if err := k.Run(pool); err != nil {
				return err
			}
		}
		return runCopies(copies, pool)
	}
}
