package graph

// classLoss is the number of elements of a classifier's loss: the sum, and the number of targets
// with the largest logit.
const classLoss = 2

// CountsClasses says whether the second element of the program's Loss counts correctly predicted
// classes. It does if the only loss is a CrossEntropy with one target a row: a class, not a next
// token.
func (p *Program) CountsClasses() bool { return p.Loss != NoBuf && p.Buf(p.Loss).Elems() == classLoss }

// Losses. A loss accumulates the sum over counted targets into its f64 output. The gradient applies
// the mean's 1/count once, through Hyper.

var lossKinds = []*Info{
	{
		Kind: CrossEntropy,
		Doc: "loss += Σ over rows with targets[n] ≠ −1 of lse[n] − logits[n, targets[n]]; lse = log Σ_V exp(logits). " +
			"logits (N,V), targets i32 (N), loss f64 (1), lse (N). A loss of (2) also counts: loss[1] += the rows with targets[n] ≠ −1 whose largest logit, " +
			"the first of equal ones, is that of their target.",
		Derivative: "dlogits = (softmax(logits) − onehot(targets))·InvCount·LossScale, zero in rows with target −1",
		In:         []Operand{in("logits", "(N,V)").typ(isF32), in("targets", "(N)").typ(isI32)},
		Out:        []Operand{acc("loss", "(1)").typ(isF64).mode(modeA), out("lse", "(N)").typ(isF32).stat()},
		Saves:      []string{"logits", "targets", "lse"},
		check: func(c *checker) {
			c.logits(c.in(0), c.in(1))
			if loss := c.out(0); c.err != nil || loss.elems() != classLoss {
				c.vector(loss, 1, "a scalar, or with a count of right classes 2")
			}
			c.vector(c.out(1), c.in(0).rows(), "the rows of logits")
		},
		flops:    func(c *checker) int64 { return (expFlops + 2) * c.in(0).elems() },
		cudaWork: Target.crossEntropyCUDAWork,
	},
	{
		Kind: LossSeed,
		Doc:  "seed = hyper[InvCount] · hyper[LossScale], the derivative by Loss of what the optimizer gets the gradient of; hyper f64 (NumHyper), seed f64 (1).",
		In:   []Operand{in("hyper", "(NumHyper)").typ(isF64)},
		Out:  []Operand{{Name: "seed", Shape: "(1)", Types: isF64, Modes: modeW}},
		check: func(c *checker) {
			c.vector(c.in(0), NumHyper, "NumHyper")
			c.vector(c.out(0), 1, "a scalar")
		},
	},
	{
		Kind: CrossEntropyGrad,
		Doc: "dlogits = (exp(logits − lse) − onehot(targets))·InvCount·LossScale, zero in rows with target −1; may be in place of logits. " +
			"logits, dlogits (N,V), targets i32 (N), lse (N), hyper f64 (NumHyper).",
		In: []Operand{in("logits", "(N,V)").typ(isF32), in("targets", "(N)").typ(isI32), in("lse", "(N)").typ(isF32), in("hyper", "(NumHyper)").typ(isF64)},
		Out: []Operand{
			out("dlogits", "(N,V)").typ(isF32).over("logits")},
		check: func(c *checker) {
			c.logits(c.in(0), c.in(1))
			c.vector(c.in(2), c.in(0).rows(), "the rows of logits")
			c.vector(c.in(3), NumHyper, "the Hyper slots")
			c.same(c.out(0), c.in(0))
		},
		flops: func(c *checker) int64 { return (expFlops + 2) * c.in(0).elems() },
	},
	{
		Kind: HeadLoss,
		Doc: "The cross-entropy of logits x·wᵀ, which are held for a chunk of rows only: loss += Σ over rows with targets[n] ≠ −1 of " +
			"lse[n] − logits[n, targets[n]]. x (N,C), w (V,C), targets i32 (N), loss f64 (1). With Cap they are the logits after softcap.",
		Derivative: "replaced at its place by head_loss_grad: with g = (softmax(logits) − onehot)·InvCount·LossScale, dx = g·w, dw = gᵀ·x",
		In:         []Operand{in("x", "(N,C)"), in("w", "(V,C)"), in("targets", "(N)").typ(isI32)},
		Out:        []Operand{acc("loss", "(1)").typ(isF64).mode(modeA)},
		Attr:       CapAttr{}, attrOptional: true,
		check:    (*checker).head,
		flops:    (*checker).headFlops,
		work:     Target.headLossWork,
		cudaWork: Target.headLossCUDAWork,
	},
	{
		Kind: HeadLossGrad,
		Doc: "Loss and gradients of head_loss in one sweep over chunks of rows. x, dx (N,C), w, dw (V,C), targets i32 (N), hyper f64 (NumHyper), " +
			"loss f64 (1). Absent gradients are not computed.",
		In: []Operand{in("x", "(N,C)"), in("w", "(V,C)"), in("targets", "(N)").typ(isI32), in("hyper", "(NumHyper)").typ(isF64)},
		Out: []Operand{acc("loss", "(1)").typ(isF64).mode(modeA),
			out("dx", "(N,C)").opt(), grad("dw", "(V,C)").opt()},
		Attr: CapAttr{}, attrOptional: true,
		check: func(c *checker) {
			c.head()
			c.vector(c.in(3), NumHyper, "the Hyper slots")
			c.same(c.out(1), c.in(0))
			c.same(c.out(2), c.in(1))
		},
		flops:    (*checker).headFlops,
		work:     Target.headLossWork,
		cudaWork: Target.headLossCUDAWork,
	},
	{
		Kind: HeadStats,
		Doc: "Statistics of the logits x·wᵀ of one slice of the vocabulary, of which the rows of w are: by row the largest logit, Σ exp(logit − largest) " +
			"and the logit of the target, 0 where it is in another slice or −1. x (N,C), w (Each,C), targets i32 (N), stats (N,HeadStatistics).",
		In:   []Operand{in("x", "(N,C)"), in("w", "(Each,C)"), in("targets", "(N)").typ(isI32)},
		Out:  []Operand{out("stats", "(N,HeadStatistics)").typ(isF32)},
		Attr: SliceAttr{},
		check: func(c *checker) {
			c.headIn()
			c.matrix(c.out(0), c.in(0).rows(), HeadStatistics, "a row of statistics per row of x")
		},
		flops: (*checker).headFlops,
		work:  Target.headLossWork,
	},
	{
		Kind: HeadLSE,
		Doc: "Combines the statistics of all slices of a vocabulary, one slice after the other: lse = log Σ exp(logits), loss += Σ over rows with targets[n] ≠ −1 of " +
			"lse[n] − the target's logit. stats (S·N,HeadStatistics), targets i32 (N), loss f64 (1), lse (N).",
		In:   []Operand{in("stats", "(S·N,HeadStatistics)").typ(isF32), in("targets", "(N)").typ(isI32)},
		Out:  []Operand{acc("loss", "(1)").typ(isF64).mode(modeA), out("lse", "(N)").typ(isF32)},
		Attr: SliceAttr{},
		check: func(c *checker) {
			n, a := c.in(1).elems(), c.op.Attr.(SliceAttr)
			c.slice(ref{})
			c.divides("the number of targets", n, c.in(0), "the number of rows", c.in(0).rows())
			if c.err == nil && (c.in(0).rows()/n-1)*a.Each >= a.Total {
				c.failf("operand stats (%s) has %d slices of %d, more than %d elements have", c.in(0).buf.Name, c.in(0).rows()/n, a.Each, a.Total)
			}
			c.matrix(c.in(0), c.in(0).rows(), HeadStatistics, "statistics of a row")
			c.vector(c.out(0), 1, "a scalar")
			c.vector(c.out(1), n, "the rows")
		},
		flops: func(c *checker) int64 { return (expFlops + 2) * c.in(0).rows() },
	},
	{
		Kind: HeadSliceGrad,
		Doc: "The gradients of one slice of the vocabulary: with g = (exp(x·wᵀ − lse) − onehot)·InvCount·LossScale, 0 in rows with target −1, dx = g·w, dw = gᵀ·x. " +
			"x, dx (N,C), w, dw (Each,C), targets i32 (N), lse (N), hyper f64 (NumHyper). Absent gradients are not computed; rows of dw that no token has are 0.",
		In:   []Operand{in("x", "(N,C)"), in("w", "(Each,C)"), in("targets", "(N)").typ(isI32), in("lse", "(N)").typ(isF32), in("hyper", "(NumHyper)").typ(isF64)},
		Out:  []Operand{out("dx", "(N,C)").opt(), grad("dw", "(Each,C)").opt()},
		Attr: SliceAttr{},
		check: func(c *checker) {
			c.headIn()
			c.vector(c.in(3), c.in(0).rows(), "the rows of x")
			c.vector(c.in(4), NumHyper, "the Hyper slots")
			c.same(c.out(0), c.in(0))
			c.same(c.out(1), c.in(1))
		},
		flops: (*checker).headFlops,
		work:  Target.headLossWork,
	},
	{
		Kind: SelectRow,
		Doc:  "y = x[key[KeyRow]]; x (N,C), key i64 (NumKey), y (1,C). For generation: it has no derivative.",
		In:   []Operand{in("x", "(N,C)"), in("key", "(NumKey)").typ(isI64)},
		Out:  []Operand{out("y", "(1,C)")},
		check: func(c *checker) {
			c.rank2(c.in(0))
			c.vector(c.in(1), NumKey, "the Key slots")
			c.matrix(c.out(0), 1, c.in(0).cols(), "one row of x")
		},
		bytes: func(c *checker) int64 { return 2 * c.out(0).buf.Bytes() },
	},
}

func (c *checker) logits(logits, targets ref) {
	c.rank2(logits)
	c.vector(targets, logits.rows(), "a target per row of logits")
}

func (c *checker) head() {
	c.headIn()
	c.vector(c.out(0), 1, "a scalar")
	c.cap(HeadCap(c.op), true)
}

// headIn checks x, w and targets of a head, or of a slice of one.
func (c *checker) headIn() {
	x, w := c.in(0), c.in(1)
	c.rank2(x)
	if c.rank(w, 2) && w.cols() != x.cols() {
		c.bad(w, "dimension 1", w.cols(), x.cols(), " (the width of x)")
	}
	c.slice(w)
	c.vector(c.in(2), x.rows(), "a target per row of x")
}

// HeadGradients returns the buffers of the gradients that an operation of the head computes, NoBuf
// for none.
func HeadGradients(op *Op) (dx, dw BufID) {
	at := 1 // after the loss
	switch op.Kind {
	case HeadStats:
		return NoBuf, NoBuf
	case HeadSliceGrad:
		at = 0
	}
	return op.out(at), op.out(at + 1)
}

// HeadCap returns the soft cap of the logits of a HeadLoss or HeadLossGrad; 0 for none.
func HeadCap(op *Op) float64 {
	a, _ := op.Attr.(CapAttr)
	return a.Cap
}

// headFlops counts the product for the logits, and one for each gradient.
func (c *checker) headFlops() int64 {
	products, logits := int64(1), c.in(0).rows()*c.in(1).rows()
	dx, dw := HeadGradients(c.op)
	for _, grad := range []BufID{dx, dw} {
		if grad != NoBuf {
			products++
		}
	}
	return logits * (2*products*c.in(0).cols() + expFlops + 2)
}

func (t Target) headLossWork(p *Program, op *Op) int64 {
	n, c := p.Buf(op.In[0]).matrix()
	v, _ := p.Buf(op.In[1]).matrix()
	rows := min(n, t.HeadRows)
	dx, dw := HeadGradients(op)
	if dw != NoBuf && half(p, dw) && n <= t.HeadRows+c {
		rows = n // the logits of all rows need no more memory than those of a chunk and the f32 sum of dw
	}
	in16, sum := half(p, op.In[0]), int64(0)
	product := t.product(rows, v, c, true, in16, false)
	if dx != NoBuf {
		product = max(product, t.product(rows, c, v, false, in16, in16))
	}
	if dw != NoBuf {
		out16 := half(p, dw)
		if out16 && n > rows { // dw is summed over chunks in f32
			out16, sum = false, t.align(4*v*c)
		}
		product = max(product, t.product(v, c, rows, false, in16, out16))
	}
	// Logits (rows, V), log-sum-exp in f32 and loss in f64 for each row.
	return t.align(4*rows*v) + t.align(4*rows) + t.align(8*rows) + sum + product
}

func (t Target) headLossCUDAWork(p *Program, op *Op) int64 {
	c := &t.CUDA
	n, width := p.Buf(op.In[0]).matrix()
	v, _ := p.Buf(op.In[1]).matrix()
	rows := min(n, c.HeadChunk(v))
	product, sums := c.ProductWork(rows, v, width), int64(0)
	dx, dw := op.out(1), op.out(2)
	if dx != NoBuf {
		product = max(product, c.ProductWork(rows, width, v))
	}
	if dw != NoBuf {
		product = max(product, c.ProductWork(v, width, rows))
		if c.HeadSums(n, v, p.Buf(dw).DType) {
			sums = 4 * v * width
		}
	}
	// Logits (rows, V padded), loss in f64 for each row, dw in fp32.
	return t.align(4*rows*c.LogitStride(v)) + t.align(8*rows) + t.align(product) + t.align(sums)
}

// crossEntropyCUDAWork returns the bytes of the loss of every row, in f64.
func (t Target) crossEntropyCUDAWork(p *Program, op *Op) int64 {
	n, _ := p.Buf(op.In[0]).matrix()
	return t.align(8 * n)
}
