package vec

import (
	"math"
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// The optimizers below update a range of a shard in one sweep over memory. Their
// scalars are given per call in float64, combined in float64 and rounded to
// float32 once; the elements' arithmetic is float32. GradScale multiplies every
// gradient first: the clip coefficient over the loss scale.

// Half16 is 16-bit elements in place of float32 ones: a gradient that rests in
// the compute type.
type Half16 struct {
	X  []uint16
	As Half
}

// widened calls f for elements [from, to) of plain, or, where there are 16-bit ones in their
// place, for blocks [lo, hi) of them and their float32 values.
func (h *Half16) widened(plain []float32, from, to int, f func(lo, hi int, x []float32)) {
	if h.X == nil {
		f(from, to, plain[from:to])
		return
	}
	s := borrow(halfBlock)
	defer s.giveBack()
	for lo := from; lo < to; lo += halfBlock {
		hi := min(lo+halfBlock, to)
		widen(h.As, s.buf[:hi-lo], h.X[lo:hi])
		f(lo, hi, s.buf[:hi-lo])
	}
}

// gradient refuses a gradient that is not n elements of one of the two kinds.
func (c *check) gradient(name string, g []float32, half *Half16, n int) {
	if half.X == nil {
		c.size1(name, "that of P", len(g), n)
		return
	}
	c.half(name+"16.As", half.As)
	c.size1(name+"16", "that of P", len(half.X), n)
}

// AdamStep has the factors of a step of Adam and its kin.
type AdamStep struct {
	GradScale    float32
	LR           float64
	Beta1, Beta2 float64
	Eps          float64
	Decay        float64 // weight decay of this range
	BC1, BC2     float64 // bias corrections 1 - Beta1^t and 1 - Beta2^t
}

func (k *AdamStep) check(c *check) {
	if !(k.BC1 > 0 && k.BC2 > 0) {
		c.fail("bias corrections BC1 = %g, BC2 = %g, want above 0", k.BC1, k.BC2)
	}
}

// Moments are the arguments that AdamW and LAMBDirection share.
type Moments struct {
	P, G, M, V []float32 // parameter, gradient, first and second moment
	G16        Half16    // the gradient, if G is nil; of AdamW alone
	AdamStep
}

func (k *Moments) check(c *check) {
	n := len(k.P)
	c.gradient("G", k.G, &k.G16, n)
	c.size1("M", "that of P", len(k.M), n)
	c.size1("V", "that of P", len(k.V), n)
	k.AdamStep.check(c)
}

// AdamW is Adam with decoupled weight decay (Kingma and Ba, 2015; Loshchilov and
// Hutter, 2019), in PyTorch's order of operations:
//
//	P = P·(1 - LR·Decay)
//	M = Beta1·M + (1-Beta1)·G
//	V = Beta2·V + (1-Beta2)·G²
//	P = P - LR/BC1 · M / (√V/√BC2 + Eps)
//
// With Low not nil the new parameter is also written there, rounded to 16 bits.
type AdamW struct {
	Moments
	Low   []uint16 // nil, or as long as P
	LowAs Half

	s adamScalars
}

// adamScalars are AdamW's factors, in the order that the assembly reads them.
type adamScalars struct {
	gradScale, keep, beta1, rest1, beta2, rest2, root2, eps, step float32
}

// factors are the same whatever the moments rest in.
func (k *AdamStep) factors() adamScalars {
	return adamScalars{
		gradScale: k.GradScale,
		keep:      float32(1 - float64(k.LR*k.Decay)),
		beta1:     float32(k.Beta1), rest1: float32(1 - k.Beta1),
		beta2: float32(k.Beta2), rest2: float32(1 - k.Beta2),
		root2: float32(1 / math.Sqrt(k.BC2)),
		eps:   float32(k.Eps),
		step:  float32(k.LR / k.BC1),
	}
}

// Run updates.
func (k *AdamW) Run(p *pool.Pool) error {
	c := check{op: "adamw"}
	k.Moments.check(&c)
	if k.Low != nil {
		c.half("LowAs", k.LowAs)
		c.size1("Low", "that of P", len(k.Low), len(k.P))
	}
	k.s = k.factors()
	return c.run(p, tasks(len(k.P), grain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *AdamW) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.P))
	k.G16.widened(k.G, lo, hi, k.block)
}

func (k *AdamW) block(lo, hi int, g []float32) {
	if k.Low == nil {
		adamw(k.P[lo:hi], g, k.M[lo:hi], k.V[lo:hi], nil, NoHalf, &k.s)
		return
	}
	adamw(k.P[lo:hi], g, k.M[lo:hi], k.V[lo:hi], k.Low[lo:hi], k.LowAs, &k.s)
}

func adamw(p, g, m, v []float32, low []uint16, as Half, s *adamScalars) {
	if n := groups[float32](len(p)); n > 0 {
		simd.adamw[as](ptr(p), ptr(g), ptr(m), ptr(v), n, &s.gradScale, unsafe.SliceData(low))
		p, g, m, v = p[n:], g[n:], m[n:], v[n:]
		if low != nil {
			low = low[n:]
		}
	}
	for i, x := range p {
		d, mi, vi := s.moments(g[i], m[i], v[i])
		m[i], v[i] = mi, vi
		p[i] = num.Fma(-s.step, mi/d, float32(x*s.keep))
	}
	if low != nil {
		narrow(as, low, p)
	}
}

// moments returns the denominator and the new moments.
func (s *adamScalars) moments(g, m, v float32) (d, mi, vi float32) {
	g = float32(g * s.gradScale)
	mi = num.Fma(s.rest1, g, float32(s.beta1*m))
	vi = num.Fma(s.rest2, float32(g*g), float32(s.beta2*v))
	return num.Fma(num.Sqrt(vi), s.root2, s.eps), mi, vi
}

// LAMBDirection is the elementwise part of LAMB (You et al., "Large batch
// optimization for deep learning", 2020): it updates the moments as AdamW does and
// replaces G by the direction
//
//	U = M/BC1 / (√V/√BC2 + Eps) + Decay·P
//
// whose norm, with that of P, gives the trust ratio of LAMBApply. LR is unused.
type LAMBDirection struct {
	Moments
	s adamScalars
}

// Run updates.
func (k *LAMBDirection) Run(p *pool.Pool) error {
	c := check{op: "lamb direction"}
	k.Moments.check(&c)
	if k.G16.X != nil {
		c.fail("G16 is set; the direction replaces a float32 gradient")
	}
	k.s = k.factors()
	k.s.step, k.s.keep = float32(1/k.BC1), float32(k.Decay)
	return c.run(p, tasks(len(k.P), grain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *LAMBDirection) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.P))
	lambDirection(k.P[lo:hi], k.G[lo:hi], k.M[lo:hi], k.V[lo:hi], &k.s)
}

func lambDirection(p, g, m, v []float32, s *adamScalars) {
	if n := groups[float32](len(p)); n > 0 {
		simd.lambDirection(ptr(p), ptr(g), ptr(m), ptr(v), n, &s.gradScale)
		p, g, m, v = p[n:], g[n:], m[n:], v[n:]
	}
	for i, x := range p {
		d, mi, vi := s.moments(g[i], m[i], v[i])
		m[i], v[i] = mi, vi
		g[i] = num.Fma(s.keep, x, float32(mi*s.step)/d)
	}
}

// LAMBApply is P = P - LR·Ratio·U for one parameter's range.
type LAMBApply struct {
	P, U  []float32
	U16   Half16 // the direction, if U is nil
	LR    float64
	Ratio float64 // LAMBRatio of the parameter's norms
	step  float32
}

// LAMBRatio returns the trust ratio ‖P‖/‖U‖, and 1 where either norm is 0.
func LAMBRatio(normP, normU float64) float64 {
	if normP > 0 && normU > 0 {
		return normP / normU
	}
	return 1
}

// Run updates.
func (k *LAMBApply) Run(p *pool.Pool) error {
	c := check{op: "lamb apply"}
	c.gradient("U", k.U, &k.U16, len(k.P))
	k.step = float32(k.LR * k.Ratio)
	return c.run(p, tasks(len(k.P), grain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *LAMBApply) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.P))
	k.U16.widened(k.U, lo, hi, k.block)
}

func (k *LAMBApply) block(lo, hi int, u []float32) { axpy(k.P[lo:hi], u, -k.step) }

// axpy is y = y + f·x, fused.
func axpy(y, x []float32, f float32) {
	if m := groups[float32](len(x)); m > 0 {
		simd.axpy(ptr(y), ptr(x), m, f)
		y, x = y[m:], x[m:]
	}
	for i, v := range x {
		y[i] = num.Fma(f, v, y[i])
	}
}

// Momentum is the elementwise part of SGD, LARS, LARC and NovoGrad, which differ
// in how Rate, Step and GradScale follow from the learning rate and from norms:
//
//	D = Rate·(GradScale·G + Decay·P)
//	B = Momentum·B + D
//	P = P - Step·B, with Nesterov P - Step·(D + Momentum·B)
//
//	SGD:      Rate = 1, Step = LR. As PyTorch's (B starts at 0).
//	LARS:     Rate = LR·LARSRatio, Step = 1 (You, Gitman and Ginsburg, 2017)
//	LARC:     Rate = min(LARSRatio/LR, 1), Step = LR (the clipped form of NVIDIA's apex)
//	NovoGrad: GradScale divided by √v + Eps of the parameter (NovoGradMoment),
//	          Rate = 1, Momentum = Beta1, Step = LR (Ginsburg et al., 2019)
//
// Without a buffer (B nil) B is D and Momentum must be 0.
type Momentum struct {
	P, G, B   []float32 // parameter, gradient, momentum or nil
	G16       Half16    // the gradient, if G is nil
	GradScale float64
	Decay     float64
	Rate      float64
	Momentum  float64
	Step      float64
	Nesterov  bool

	s momentumScalars
}

// momentumScalars are in the order that the assembly reads them.
type momentumScalars struct{ gradScale, decay, rate, momentum, step float32 }

// LARSRatio returns the local learning rate of a parameter over the global one:
// trust·‖P‖ / (‖G‖ + decay·‖P‖), and unadapted where either norm is 0.
func LARSRatio(normP, normG, decay, trust, unadapted float64) float64 {
	if normP > 0 && normG > 0 {
		return trust * normP / (normG + float64(decay*normP))
	}
	return unadapted
}

// LARCRatio returns LARC's clipped ratio: min(LARSRatio/lr, 1), and 1 where
// either norm is 0.
func LARCRatio(normP, normG, decay, trust, lr float64) float64 {
	if normP > 0 && normG > 0 {
		return math.Min(LARSRatio(normP, normG, decay, trust, 1)/lr, 1)
	}
	return 1
}

// NovoGradMoment returns a parameter's second moment after a step whose gradient
// has the given square norm: that norm at the first step (v 0), then
// beta2·v + (1-beta2)·norm².
func NovoGradMoment(v, sqNormG, beta2 float64, first bool) float64 {
	if first {
		return sqNormG
	}
	return float64(beta2*v) + float64((1-beta2)*sqNormG)
}

// Run updates.
func (k *Momentum) Run(p *pool.Pool) error {
	c := check{op: "momentum update"}
	c.gradient("G", k.G, &k.G16, len(k.P))
	if k.B != nil {
		c.size1("B", "that of P", len(k.B), len(k.P))
	} else if k.Momentum != 0 {
		c.fail("B is nil and Momentum is %g, want a buffer or 0", k.Momentum)
	}
	k.s = momentumScalars{float32(k.GradScale), float32(k.Decay), float32(k.Rate), float32(k.Momentum), float32(k.Step)}
	return c.run(p, tasks(len(k.P), grain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *Momentum) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.P))
	k.G16.widened(k.G, lo, hi, k.block)
}

func (k *Momentum) block(lo, hi int, g []float32) {
	if k.B == nil {
		momentumUpdate(k.P[lo:hi], g, nil, &k.s, false)
		return
	}
	momentumUpdate(k.P[lo:hi], g, k.B[lo:hi], &k.s, k.Nesterov)
}

func momentumUpdate(p, g, b []float32, s *momentumScalars, nesterov bool) {
	if n := groups[float32](len(p)); n > 0 {
		kind := 0
		if b != nil {
			kind = 1 + index(nesterov)
		}
		simd.momentum[kind](ptr(p), ptr(g), unsafe.SliceData(b), n, &s.gradScale)
		p, g = p[n:], g[n:]
		if b != nil {
			b = b[n:]
		}
	}
	for i, x := range p {
		d := float32(s.rate * num.Fma(s.decay, x, float32(g[i]*s.gradScale)))
		u := d
		if b != nil {
			u = num.Fma(s.momentum, b[i], d)
			b[i] = u
			if nesterov {
				u = num.Fma(s.momentum, u, d)
			}
		}
		p[i] = num.Fma(-s.step, u, x)
	}
}
