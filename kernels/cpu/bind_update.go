package cpu

import (
	"math"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// spans returns the trainable parts of the unit that the rank holds; see
// kernels.Binding.
func (b *binding) spans(a graph.ShardAttr) ([]kernels.Span, []bool) {
	spans, trainable, err := b.Spans(a)
	if err != nil {
		b.failf("%w", err)
	}
	return spans, trainable
}

func (b *binding) wholeParams(unit int) {
	if err := b.WholeParams(unit); err != nil {
		b.failf("%w", err)
	}
}

func bindSqSum(b *binding) func() error {
	spans, _ := b.spans(attr[graph.ShardAttr](b))
	g, acc := b.gradient(0), out[int64](b, 0)
	if b.err != nil {
		return nil
	}
	var sums []vec.SqSum
	for _, s := range spans {
		k := vec.SqSum{Acc: acc}
		k.X, k.X16 = g.part(s)
		sums = append(sums, k)
	}
	pool := b.pool
	return func() error { return runEach(sums, pool, nil) }
}

// kernelOf is a pointer to a kernel.
type kernelOf[K any] interface {
	*K
	runner
}

// runEach runs kernels in sequence. set, which may be nil, gives a kernel the values that change
// with the step.
func runEach[K any, P kernelOf[K]](list []K, p *pool.Pool, set func(i int, k P)) error {
	for i := range list {
		k := P(&list[i])
		if set != nil {
			set(i, k)
		}
		if err := k.Run(p); err != nil {
			return err
		}
	}
	return nil
}

// runUpdate does the same as runEach for an update's kernels, and then copies their results.
func runUpdate[K any, P kernelOf[K]](list []K, copies []vec.Narrow, p *pool.Pool, set func(i int, k P)) error {
	if err := runEach(list, p, set); err != nil {
		return err
	}
	return runEach(copies, p, nil)
}

// gradient is a gradient operand, in float32 or in a 16-bit compute type.
type gradient struct {
	f32  []float32
	half vec.Half16
}

func (b *binding) gradient(i int) gradient {
	if dt := b.Program.Buf(b.Op.In[i]).DType; halves[dt] != vec.NoHalf {
		return gradient{half: vec.Half16{X: in[uint16](b, i), As: halves[dt]}}
	}
	return gradient{f32: in[float32](b, i)}
}

// part returns the gradient of a span.
func (g *gradient) part(s kernels.Span) ([]float32, vec.Half16) {
	if g.half.X != nil {
		return nil, vec.Half16{X: g.half.X[s.Lo:s.Hi], As: g.half.As}
	}
	return g.f32[s.Lo:s.Hi], vec.Half16{}
}

// normSums prepares the squares of p and g by parameter: norms is
// (params, 2, exact.Limbs), p's first.
func normSums(spans []kernels.Span, p []float32, g gradient, norms []int64) []vec.SqSum {
	var sums []vec.SqSum
	for _, s := range spans {
		of := vec.SqSum{Acc: accumulator(norms, s.Param, 1)}
		of.X, of.X16 = g.part(s)
		sums = append(sums, vec.SqSum{X: p[s.Lo:s.Hi], Acc: accumulator(norms, s.Param, 0)}, of)
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

// norm returns the root of an exact sum of squares.
func norm(acc []int64) float64 { return math.Sqrt(exact.Accumulator(acc).Float64()) }

func paramNorm(norms []int64, param, which int) float64 {
	return norm(accumulator(norms, param, which))
}

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

// update holds the operands and spans that all optimizers use.
type update struct {
	attr      graph.UpdateAttr
	spans     []kernels.Span
	trainable []bool // by distinct parameter of the unit
	coef      []float32
	hyper     []float64
}

func (b *binding) update() update {
	u := update{attr: attr[graph.UpdateAttr](b)}
	u.spans, u.trainable = b.spans(u.attr.Shard)
	return u
}

func (u *update) decay(s kernels.Span) float64 {
	if s.Decay {
		return u.attr.Decay
	}
	return 0
}

func (u *update) lr() float64 { return u.hyper[graph.HyperLR] }

func bindAdamW(b *binding) func() error {
	u := b.update()
	g := b.gradient(0)
	u.coef, u.hyper = in[float32](b, 1), in[float64](b, 2)
	switch b.Program.Buf(b.Op.Out[1].Buf).DType {
	case graph.U8:
		return bindAdamW8(b, u, g)
	case graph.BF16:
		return bindAdamW16(b, u, g)
	}
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
			k.Low, k.LowAs = low[s.Lo:s.Hi], as
		}
		parts = append(parts, k)
	}
	pool := b.pool
	return func() error { return runEach(parts, pool, func(_ int, k *vec.AdamW) { u.set(&k.AdamStep) }) }
}

// bindAdamW8 does the same as bindAdamW with 8-bit moments. Spans must start at multiples of
// vec.Q8Block.
func bindAdamW8(b *binding, u update, g gradient) func() error {
	p, m, v := out[float32](b, 0), out[uint8](b, 1), out[uint8](b, 2)
	ms, vs := out[float32](b, 4), out[float32](b, 5)
	low, as := b.low(3)
	if b.err != nil {
		return nil
	}
	var parts []vec.AdamW8
	for _, s := range u.spans {
		if s.Lo%vec.Q8Block != 0 {
			b.failf("a parameter's part begins at element %d, want a multiple of %d", s.Lo, vec.Q8Block)
			return nil
		}
		lo, hi := s.Lo/vec.Q8Block, (s.Hi+vec.Q8Block-1)/vec.Q8Block
		k := vec.AdamW8{P: p[s.Lo:s.Hi], M: m[s.Lo:s.Hi], V: v[s.Lo:s.Hi], MScale: ms[lo:hi], VScale: vs[lo:hi],
			AdamStep: u.step(s)}
		k.G, k.G16 = g.part(s)
		if low != nil {
			k.Low, k.LowAs = low[s.Lo:s.Hi], as
		}
		parts = append(parts, k)
	}
	pool := b.pool
	return func() error { return runEach(parts, pool, func(_ int, k *vec.AdamW8) { u.set(&k.AdamStep) }) }
}

// bindAdamW16 does the same as bindAdamW with parameters, states and gradient in bf16.
func bindAdamW16(b *binding, u update, g gradient) func() error {
	p, m, v := out[uint16](b, 0), out[uint16](b, 1), out[uint16](b, 2)
	if b.err != nil {
		return nil
	}
	var parts []vec.AdamW16
	for _, s := range u.spans {
		k := vec.AdamW16{P: p[s.Lo:s.Hi], M: m[s.Lo:s.Hi], V: v[s.Lo:s.Hi], Stream: num.Stream(b.Program.Params[s.ID].Name), First: s.First,
			AdamStep: u.step(s)}
		k.G, k.G16 = g.part(s)
		parts = append(parts, k)
	}
	pool := b.pool
	return func() error {
		return runEach(parts, pool, func(_ int, k *vec.AdamW16) {
			u.set(&k.AdamStep)
			k.Seed, k.Update = uint64(u.hyper[graph.HyperSeed]), uint64(u.hyper[graph.HyperUpdate])
		})
	}
}

func (u *update) moments(s kernels.Span, p []float32, g gradient, m, v []float32) vec.Moments {
	k := vec.Moments{P: p[s.Lo:s.Hi], M: m[s.Lo:s.Hi], V: v[s.Lo:s.Hi], AdamStep: u.step(s)}
	k.G, k.G16 = g.part(s)
	return k
}

// step returns the factors of a span's update, except those that set gives.
func (u *update) step(s kernels.Span) vec.AdamStep {
	return vec.AdamStep{Beta1: u.attr.Beta1, Beta2: u.attr.Beta2, Eps: u.attr.Eps, Decay: u.decay(s)}
}

// set copies the values that change by step (such as the learning rate) to k.
func (u *update) set(k *vec.AdamStep) {
	k.GradScale, k.LR = u.coef[0], u.lr()
	k.BC1, k.BC2 = u.hyper[graph.HyperBC1], u.hyper[graph.HyperBC2]
}

func bindSGD(b *binding) func() error {
	u := b.update()
	g := b.gradient(0)
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
		return runUpdate(parts, copies, pool, func(_ int, k *vec.Momentum) {
			k.GradScale, k.Rate, k.Step = float64(u.coef[0]), 1, u.lr()
		})
	}
}

func (u *update) momenta(p []float32, g gradient, m []float32) []vec.Momentum {
	var parts []vec.Momentum
	for _, s := range u.spans {
		k := vec.Momentum{
			P: p[s.Lo:s.Hi], B: m[s.Lo:s.Hi],
			Decay: u.decay(s), Momentum: u.attr.Beta1, Nesterov: u.attr.Nesterov,
		}
		k.G, k.G16 = g.part(s)
		parts = append(parts, k)
	}
	return parts
}

func bindLAMBDirection(b *binding) func() error {
	u := b.update()
	p := in[float32](b, 0)
	u.coef, u.hyper = in[float32](b, 1), in[float64](b, 2)
	g := gradient{f32: out[float32](b, 0)} // the direction replaces it
	m, v, norms := out[float32](b, 1), out[float32](b, 2), out[int64](b, 3)
	b.wholeParams(u.attr.Shard.Unit)
	b.normsLen(norms, len(u.trainable))
	if b.err != nil {
		return nil
	}
	var parts []vec.LAMBDirection
	for _, s := range u.spans {
		parts = append(parts, vec.LAMBDirection{Moments: u.moments(s, p, g, m, v)})
	}
	sums := normSums(kernels.Adapted(u.attr, u.spans), p, g, norms)
	pool := b.pool
	return func() error {
		if err := runEach(parts, pool, func(_ int, k *vec.LAMBDirection) { u.set(&k.AdamStep) }); err != nil {
			return err
		}
		return runEach(sums, pool, nil)
	}
}

func bindParamNorms(b *binding) func() error {
	u := b.update()
	p, g, norms := in[float32](b, 0), b.gradient(1), out[int64](b, 0)
	b.wholeParams(u.attr.Shard.Unit)
	b.normsLen(norms, len(u.trainable))
	if b.err != nil {
		return nil
	}
	sums := normSums(kernels.Adapted(u.attr, u.spans), p, g, norms)
	pool := b.pool
	return func() error { return runEach(sums, pool, nil) }
}

func bindLAMBApply(b *binding) func() error {
	u := b.update()
	g, norms := b.gradient(0), in[int64](b, 1)
	u.hyper = in[float64](b, 3)
	p := out[float32](b, 0)
	b.normsLen(norms, len(u.trainable))
	if b.err != nil {
		return nil
	}
	var parts []vec.LAMBApply
	for _, s := range u.spans {
		k := vec.LAMBApply{P: p[s.Lo:s.Hi]}
		k.U, k.U16 = g.part(s)
		parts = append(parts, k)
	}
	copies := b.copies(u.spans, p, 1)
	if b.err != nil {
		return nil
	}
	pool := b.pool
	return func() error {
		return runUpdate(parts, copies, pool, func(i int, k *vec.LAMBApply) {
			k.LR = u.lr()
			k.Ratio = vec.LAMBRatio(paramNorm(norms, u.spans[i].Param, 0), paramNorm(norms, u.spans[i].Param, 1))
		})
	}
}

func bindLARSApply(b *binding) func() error {
	u := b.update()
	g, norms := b.gradient(0), in[int64](b, 1)
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
		return runUpdate(parts, copies, pool, func(i int, k *vec.Momentum) {
			param := u.spans[i].Param
			normP, normG := paramNorm(norms, param, 0), float64(paramNorm(norms, param, 1)*coef)
			k.GradScale = coef
			if u.attr.Clip {
				k.Rate, k.Step = vec.LARCRatio(normP, normG, k.Decay, u.attr.Trust, lr), lr
			} else {
				k.Rate, k.Step = lr*vec.LARSRatio(normP, normG, k.Decay, u.attr.Trust, u.attr.Unadapted()), 1
			}
		})
	}
}

// bindNovoGrad updates the second moments of all trainable parameters of the unit, even of those in
// other ranks' shards: v is the same on all ranks.
func bindNovoGrad(b *binding) func() error {
	u := b.update()
	g, norms := b.gradient(0), in[int64](b, 1)
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
				n := float64(paramNorm(norms, j, 1) * coef)
				v[j] = float32(vec.NovoGradMoment(float64(v[j]), float64(n*n), u.attr.Beta2, v[j] == 0))
			}
		}
		return runUpdate(parts, copies, pool, func(i int, k *vec.Momentum) {
			k.GradScale = coef / (math.Sqrt(float64(v[u.spans[i].Param])) + u.attr.Eps)
			k.Rate, k.Step = 1, u.lr()
		})
	}
}
