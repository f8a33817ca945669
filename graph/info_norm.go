package graph

// Normalisations over the last dimension.
var normKinds = []*Info{
	{
		Kind:  LayerNorm,
		Cheap: true,
		Doc: "Layer norm over each row (Ba et al. 2016): mean and rstd = 1/sqrt(var + Eps) with the biased variance, " +
			"y = (x − mean)·rstd·gamma + beta; x, y (N,C), gamma, beta (C), mean, rstd (N).",
		Derivative: "with x̂ = (x−mean)·rstd and g = dy·gamma: dx = rstd·(g − mean_C(g) − x̂·mean_C(g·x̂)); " +
			"dgamma = Σ_N dy·x̂; dbeta = Σ_N dy",
		In:    []Operand{in("x", "(N,C)"), in("gamma", "(C)"), in("beta", "(C)")},
		Out:   []Operand{out("y", "(N,C)"), out("mean", "(N)").typ(isF32).stat(), out("rstd", "(N)").typ(isF32).stat()},
		Attr:  NormAttr{},
		Saves: []string{"x", "gamma", "mean", "rstd"},
		check: (*checker).norm,
		flops: func(c *checker) int64 { return 8 * c.in(0).elems() },
	},
	{
		Kind:     LayerNormGrad,
		cudaWork: Target.normGradCUDAWork,
		Doc:      "Gradients of layernorm; dy, x (N,C), gamma (C), mean, rstd (N), dx (N,C), dgamma, dbeta (C).",
		In:       []Operand{in("dy", "(N,C)"), in("x", "(N,C)"), in("gamma", "(C)"), in("mean", "(N)").typ(isF32), in("rstd", "(N)").typ(isF32)},
		Out:      []Operand{acc("dx", "(N,C)").opt(), grad("dgamma", "(C)").opt(), grad("dbeta", "(C)").opt()},
		Attr:     NormAttr{},
		check:    (*checker).normGrad,
		flops:    func(c *checker) int64 { return 14 * c.in(1).elems() },
	},
	{
		Kind:  RMSNorm,
		Cheap: true,
		Doc: "Root-mean-square norm over each row (Zhang & Sennrich 2019): rstd = 1/sqrt(mean_C(x²) + Eps), y = x·rstd·gamma; " +
			"x, y (N,C), gamma (C), rstd (N). With PlusOne the gain is 1 + gamma.",
		Derivative: "with x̂ = x·rstd and g = dy·gamma: dx = rstd·(g − x̂·mean_C(g·x̂)); dgamma = Σ_N dy·x̂",
		In:         []Operand{in("x", "(N,C)"), in("gamma", "(C)")},
		Out:        []Operand{out("y", "(N,C)"), out("rstd", "(N)").typ(isF32).stat()},
		Attr:       NormAttr{},
		Saves:      []string{"x", "gamma", "rstd"},
		check:      (*checker).norm,
		flops:      func(c *checker) int64 { return 5 * c.in(0).elems() },
		work:       Target.gainWork,
	},
	{
		Kind:     RMSNormGrad,
		cudaWork: Target.normGradCUDAWork,
		Doc:      "Gradients of rmsnorm; dy, x (N,C), gamma (C), rstd (N), dx (N,C), dgamma (C).",
		In:       []Operand{in("dy", "(N,C)"), in("x", "(N,C)"), in("gamma", "(C)"), in("rstd", "(N)").typ(isF32)},
		Out:      []Operand{acc("dx", "(N,C)").opt(), grad("dgamma", "(C)").opt()},
		Attr:     NormAttr{},
		check:    (*checker).normGrad,
		flops:    func(c *checker) int64 { return 10 * c.in(1).elems() },
		work:     Target.gainWork,
	},
}

// norm checks x, the parameters (one element a column), y and the statistics (one element a row).
func (c *checker) norm() {
	x := c.in(0)
	c.rank2(x)
	for i := 1; i < len(c.inOps); i++ {
		c.vector(c.in(i), x.cols(), "the width of x")
	}
	c.same(c.out(0), x)
	for k := 1; k < len(c.outOps); k++ {
		c.vector(c.out(k), x.rows(), "the rows of x")
	}
	c.eps()
}

// normGrad checks dy, x, gamma, the statistics, dx and the gradients of the parameters. At least
// one gradient must be present.
func (c *checker) normGrad() {
	x, some := c.in(1), c.out(0).ok()
	c.rank2(x)
	c.same(c.in(0), x)
	c.vector(c.in(2), x.cols(), "the width of x")
	for i := 3; i < len(c.inOps); i++ {
		c.vector(c.in(i), x.rows(), "the rows of x")
	}
	c.same(c.out(0), x)
	for k := 1; k < len(c.outOps); k++ {
		c.vector(c.out(k), x.cols(), "the width of x")
		some = some || c.out(k).ok()
	}
	if !some {
		c.failf("has no outputs, want at least one of its gradients")
	}
	c.eps()
}

func (c *checker) eps() {
	a := c.op.Attr.(NormAttr)
	if c.err == nil && !(a.Eps >= 0 && a.Eps < 1) {
		c.failf("Eps is %g, want a number in [0, 1)", a.Eps)
	}
}

// gainWork returns the bytes of the gain 1 + gamma, which kernels for 16-bit values compute in f32.
func (t Target) gainWork(p *Program, op *Op) int64 {
	gamma := op.In[1]
	if len(op.In) == 4 { // rmsnorm_grad: dy, x, gamma, rstd
		gamma = op.In[2]
	}
	if !op.Attr.(NormAttr).PlusOne || half(p, gamma) {
		return 0
	}
	return t.align(4 * p.Buffers[gamma].Elems())
}

// normGradCUDAWork returns the bytes of the sums for gain and shift of all lanes; see NormLanes.
func (t Target) normGradCUDAWork(p *Program, op *Op) int64 {
	_, n := p.Buf(op.In[1]).matrix()
	if op.out(1) == NoBuf && op.out(2) == NoBuf {
		return 0
	}
	return t.align(2 * 4 * t.CUDA.NormLanes * n)
}
