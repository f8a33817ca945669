package graph

// Embeddings and matrix products.
var linearKinds = []*Info{
	{
		Kind:       Embed,
		Doc:        "y[n] = table[tokens[n]]; tokens i32 (N), table (V,C), y (N,C). With SliceAttr table has a slice of the vocabulary, and y[n] = 0 for tokens of other slices.",
		Derivative: "dtable[v] = Σ over n with tokens[n]=v of dy[n], in increasing n",
		In:         []Operand{in("tokens", "(N)").typ(isI32), in("table", "(V,C)")},
		Out:        []Operand{out("y", "(N,C)")},
		Attr:       SliceAttr{}, attrOptional: true,
		Saves: []string{"tokens"},
		check: func(c *checker) {
			c.slice(c.in(1))
			tokens, table, y := c.in(0), c.in(1), c.out(0)
			if c.rank(table, 2) {
				c.matrix(y, tokens.elems(), table.cols(), "a row per token, as wide as table")
			}
		},
		bytes: func(c *checker) int64 { return c.in(0).buf.Bytes() + 2*c.out(0).buf.Bytes() },
	},
	{
		Kind: EmbedGrad,
		Doc:  "dtable[v] = Σ over n with tokens[n]=v of dy[n]; tokens i32 (N), dy (N,C), dtable (V,C). With SliceAttr v counts from the slice's first token.",
		In:   []Operand{in("tokens", "(N)").typ(isI32), in("dy", "(N,C)")},
		Out:  []Operand{grad("dtable", "(V,C)")},
		Attr: SliceAttr{}, attrOptional: true,
		check: func(c *checker) {
			c.slice(c.out(0))
			tokens, dy, dtable := c.in(0), c.in(1), c.out(0)
			c.matrix(dy, tokens.elems(), dtable.cols(), "a row per token, as wide as dtable")
			c.rank(dtable, 2)
		},
		flops: func(c *checker) int64 { return c.in(1).elems() },
		work:  Target.embedGradWork,
	},
	{
		Kind:       AddPos,
		Doc:        "y[n] = x[n] + pos[n mod Seq], with starts (N) pos[n mod Seq − starts[n]]; x (N,C), pos (P,C) with P ≥ Seq, or for Seq 1 (C), y (N,C), which may be in place of x.",
		Derivative: "dx = dy; dpos[t] = Σ over rows n at t of dy[n], zero from Seq on",
		In:         []Operand{in("x", "(N,C)"), in("pos", "(P,C)"), startsIn()},
		Out:        []Operand{out("y", "(N,C)").over("x")},
		Attr:       PosAttr{},
		Saves:      []string{"starts"},
		check: func(c *checker) {
			x, pos, y := c.in(0), c.in(1), c.out(0)
			c.positions(x, pos)
			c.same(y, x)
			c.vector(c.in(2), x.rows(), "the number of rows")
		},
		flops: func(c *checker) int64 { return c.out(0).elems() },
	},
	{
		Kind: AddPosGrad,
		Doc:  "dpos[t] = Σ over rows n with n mod Seq = t, with starts (N) n mod Seq − starts[n] = t, of dy[n]; rows from Seq to P are zero. dy (N,C), dpos (P,C).",
		In:   []Operand{in("dy", "(N,C)"), startsIn()},
		Out:  []Operand{grad("dpos", "(P,C)")},
		Attr: PosAttr{},
		check: func(c *checker) {
			c.positions(c.in(0), c.out(0))
			c.vector(c.in(1), c.in(0).rows(), "the number of rows")
		},
		flops: func(c *checker) int64 { return c.in(0).elems() },
	},
	{
		Kind: Linear,
		Doc: "pre = x·w + bias, y = act(pre); x (M,K), w (K,N) or with TransW (N,K), bias (N), y and pre (M,N). " +
			"Without Act there is no pre.",
		Derivative: "with g = dy·act'(pre): dx = g·wᵀ; dw = xᵀ·g (with TransW gᵀ·x); dbias = column sums of g",
		In:         []Operand{in("x", "(M,K)"), in("w", "(K,N)"), optIn("bias", "(N)")},
		Out:        []Operand{out("y", "(M,N)"), out("pre", "(M,N)").opt().stat()},
		Attr:       LinearAttr{},
		Saves:      []string{"x", "w", "pre"},
		check: func(c *checker) {
			pre := c.out(1)
			a := c.op.Attr.(LinearAttr)
			c.linear(a)
			c.same(pre, c.out(0))
			c.activation(a.Act, true)
			c.int8Product(c.in(0), a)
			if pre.ok() && a.Act == ActNone {
				c.failf("operand pre is given without an activation; y is its value already")
			}
		},
		flops:    linearFlops,
		work:     Target.linearWork,
		cudaWork: Target.linearCUDAWork,
	},
	{
		Kind: LinearAct,
		Doc: "sum = x·w + bias, y = act(sum), pre = sum; x (M,K), w (K,N) or with TransW (N,K), bias (N), y and pre (M,N). " +
			"Of 16 bits y and pre are each rounded once: y is not act(pre), so that nothing but this operation makes it again. " +
			"Where a kernel has no such epilogue, the sum may be rounded to pre's type first.",
		Derivative: "with g = dy·act'(pre): dx = g·wᵀ; dw = xᵀ·g (with TransW gᵀ·x); dbias = column sums of g",
		In:         []Operand{in("x", "(M,K)"), in("w", "(K,N)"), optIn("bias", "(N)")},
		Out:        []Operand{out("y", "(M,N)"), out("pre", "(M,N)").stat()},
		Attr:       LinearAttr{},
		Saves:      []string{"x", "w", "pre"},
		check: func(c *checker) {
			a := c.op.Attr.(LinearAttr)
			c.linear(a)
			c.same(c.out(1), c.out(0))
			c.activation(a.Act, false)
			if a.Int8 {
				c.failf("is of int8; products with an activation's epilogue are not")
			}
		},
		flops:    linearFlops,
		work:     Target.linearActWork,
		cudaWork: Target.linearCUDAWork,
	},
	{
		Kind: LinearGradX,
		Doc:  "dx = dy·wᵀ (with TransW dy·w); dy (M,N), w as in linear, dx (M,K).",
		In:   []Operand{in("dy", "(M,N)"), in("w", "(K,N)")},
		Out:  []Operand{acc("dx", "(M,K)")},
		Attr: LinearAttr{},
		check: func(c *checker) {
			dy, w, dx := c.in(0), c.in(1), c.out(0)
			a := c.op.Attr.(LinearAttr)
			k, n := c.weight(w, a.TransW)
			c.matrix(dy, dx.rows(), n, "rows as dx, columns as w's outputs")
			c.matrix(dx, dy.rows(), k, "rows as dy, columns as w's inputs")
			c.noAct(a)
			c.int8Product(dy, a)
		},
		flops:    func(c *checker) int64 { return 2 * c.out(0).elems() * c.in(0).cols() },
		work:     Target.linearWork,
		cudaWork: Target.linearCUDAWork,
	},
	{
		Kind: LinearGradAct,
		Doc: "dpre = (dy·wᵀ)·act'(pre) (with TransW (dy·w)·act'(pre)), the gradient of pre where act(pre) was linear's x; " +
			"dy (M,N), w as in linear, pre and dpre (M,K). The product may be rounded to dpre's type before it is multiplied, or not.",
		In:   []Operand{in("dy", "(M,N)"), in("w", "(K,N)"), in("pre", "(M,K)")},
		Out:  []Operand{out("dpre", "(M,K)")},
		Attr: LinearAttr{},
		check: func(c *checker) {
			dy, w, pre, d := c.in(0), c.in(1), c.in(2), c.out(0)
			a := c.op.Attr.(LinearAttr)
			k, n := c.weight(w, a.TransW)
			c.matrix(dy, d.rows(), n, "rows as dpre, columns as w's outputs")
			c.matrix(d, dy.rows(), k, "rows as dy, columns as w's inputs")
			c.same(pre, d)
			c.activation(a.Act, false)
			if a.Int8 {
				c.failf("is of int8; products with an activation's derivative are not")
			}
		},
		flops: func(c *checker) int64 {
			return 2*c.out(0).elems()*c.in(0).cols() + actFlops*c.out(0).elems()
		},
		work:     Target.linearWork,
		cudaWork: Target.linearCUDAWork,
	},
	{
		Kind:     LinearGradW,
		Doc:      "dw = xᵀ·dy (with TransW dyᵀ·x); x (M,K), dy (M,N), dw shaped as w.",
		In:       []Operand{in("x", "(M,K)"), in("dy", "(M,N)")},
		Out:      []Operand{grad("dw", "(K,N)")},
		Attr:     LinearAttr{},
		check:    (*checker).gradW,
		flops:    func(c *checker) int64 { return 2 * c.in(0).elems() * c.in(1).cols() },
		work:     Target.linearWork,
		cudaWork: Target.linearCUDAWork,
	},
	{
		Kind: LinearGradWB,
		Doc: "dw = xᵀ·dy (with TransW dyᵀ·x), db = Σ over rows of dy; x (M,K), dy (M,N), dw shaped as w, db (N). " +
			"In what order db is summed is the product's to choose.",
		In:   []Operand{in("x", "(M,K)"), in("dy", "(M,N)")},
		Out:  []Operand{grad("dw", "(K,N)"), grad("db", "(N)")},
		Attr: LinearAttr{},
		check: func(c *checker) {
			c.gradW()
			c.vector(c.out(1), c.in(1).cols(), "the columns of dy")
		},
		flops:    func(c *checker) int64 { return 2*c.in(0).elems()*c.in(1).cols() + c.in(1).elems() },
		work:     Target.linearWork,
		cudaWork: Target.gradWBCUDAWork,
	},
	{
		Kind: BiasGrad,
		Doc:  "db = Σ over rows of dy; dy (M,N), db (N).",
		In:   []Operand{in("dy", "(M,N)")},
		Out:  []Operand{grad("db", "(N)")},
		check: func(c *checker) {
			c.rank2(c.in(0))
			c.vector(c.out(0), c.in(0).cols(), "the columns of dy")
		},
		flops:    func(c *checker) int64 { return c.in(0).elems() },
		cudaWork: Target.biasGradCUDAWork,
	},
}

// gradW checks the operands of a weight's gradient: x, dy → dw.
func (c *checker) gradW() {
	x, dy, dw := c.in(0), c.in(1), c.out(0)
	a := c.op.Attr.(LinearAttr)
	k, n := c.weight(dw, a.TransW)
	c.matrix(x, dy.rows(), k, "rows as dy, columns as w's inputs")
	c.matrix(dy, x.rows(), n, "rows as x, columns as w's outputs")
	c.noAct(a)
	if a.Int8 {
		c.failf("is of int8; gradients of weights are not")
	}
}

// positions checks x (N,C) against a position table (P,C).
func (c *checker) positions(x, pos ref) {
	a := c.op.Attr.(PosAttr)
	seq := a.Seq
	if (seq != 1 || len(pos.buf.Shape) != 1) && !c.rank(pos, 2) {
		return
	}
	c.rank2(x)
	c.groups("Seq", seq, x, "the number of rows", x.rows(), a.Rows)
	if c.err == nil && pos.rows() < seq {
		c.failf("operand %s (%s, shape %v): dimension 0 is %d, want at least %d (Seq)", pos.name, pos.buf.Name, pos.buf.Shape, pos.rows(), seq)
	}
	if c.err == nil && x.cols() != pos.cols() {
		c.bad(pos, "dimension 1", pos.cols(), x.cols(), " (the width of "+x.name+")")
	}
}

// weight returns the numbers of input and output columns of a weight matrix.
func (c *checker) weight(w ref, trans bool) (k, n int64) {
	if !c.rank(w, 2) {
		return 1, 1
	}
	k, n = w.buf.Shape[0], w.buf.Shape[1]
	if trans {
		k, n = n, k
	}
	return k, n
}

// linear checks x, w, bias and y of a linear.
func (c *checker) linear(a LinearAttr) {
	x, w, bias, y := c.in(0), c.in(1), c.in(2), c.out(0)
	k, n := c.weight(w, a.TransW)
	c.rank2(x)
	if c.err == nil && x.cols() != k {
		c.bad(w, dimOf(0, 1, a.TransW), k, x.cols(), " (the width of x)")
	}
	c.vector(bias, n, "a bias per column of y")
	c.matrix(y, x.rows(), n, "rows as x, columns as w's outputs")
}

func linearFlops(c *checker) int64 {
	f := 2 * c.out(0).elems() * c.in(0).cols()
	if c.in(2).ok() {
		f += c.out(0).elems()
	}
	if c.op.Attr.(LinearAttr).Act != ActNone {
		f += actFlops * c.out(0).elems()
	}
	return f
}

// int8Product checks that a product of int8 codes has 16-bit operands and a sum that fits.
func (c *checker) int8Product(x ref, a LinearAttr) {
	switch {
	case c.err != nil || !a.Int8:
	case x.buf.DType == F32:
		c.failf("is of int8 with operand %s (%s) of f32, want bf16 or f16", x.name, x.buf.Name)
	case x.cols() > Int8Depth:
		c.failf("sums %d products of int8, whose sum fits 32 bits up to %d", x.cols(), Int8Depth)
	}
}

// Int8Traffic returns the bytes of the int8 codes of both factors of a product, which are
// written once and read once.
func Int8Traffic(p *Program, op *Op) int64 {
	return p.Buf(op.In[0]).Elems() + p.Buf(op.In[1]).Elems()
}

// Scratch of the kernels.

func (t Target) linearWork(p *Program, op *Op) int64 {
	m, n, k, transB := productOf(p, op)
	if op.Attr.(LinearAttr).Int8 { // codes and scales of both factors
		return t.align(m*k) + t.align(k*n) + t.align(4*m) + t.align(4*n) + t.int8Product(m, n, k)
	}
	return t.product(m, n, k, transB, half(p, op.In[0]), half(p, op.Out[0].Buf))
}

// linearActWork adds, for 16-bit elements, the sums in f32 from which y is computed.
func (t Target) linearActWork(p *Program, op *Op) int64 {
	y := op.Out[0].Buf
	if !half(p, y) {
		return t.linearWork(p, op)
	}
	m, n, k, transB := productOf(p, op)
	return t.product(m, n, k, transB, true, false) + t.align(4*p.Buffers[y].Elems())
}

func (t Target) linearCUDAWork(p *Program, op *Op) int64 {
	m, n, k, _ := productOf(p, op)
	codes := int64(0)
	if op.Attr.(LinearAttr).Int8 { // and scales, of both factors
		codes = t.align(m*k) + t.align(k*n) + t.align(4*m) + t.align(4*n)
	}
	return codes + t.align(t.CUDA.ProductWork(m, n, k))
}

// gradWBCUDAWork returns the larger of two needs. If the epilogue computes the column sums, it is
// the product's workspace, followed by the sums if they are to be accumulated. If the sums are
// computed separately, the product and the column sums use the same space, one after the other.
func (t Target) gradWBCUDAWork(p *Program, op *Op) int64 {
	m, n := p.Buf(op.In[1]).matrix()
	return max(t.linearCUDAWork(p, op)+t.align(4*n), t.align(t.CUDA.ColumnWork(m, n)))
}

func (t Target) biasGradCUDAWork(p *Program, op *Op) int64 {
	m, n := p.Buf(op.In[0]).matrix()
	return t.align(t.CUDA.ColumnWork(m, n))
}

// productOf returns the matrix product C(m,n) = A(m,k)·B(k,n) of a linear or of
// one of its gradients; transB: B is stored (n,k).
func productOf(p *Program, op *Op) (m, n, k int64, transB bool) {
	trans := op.Attr.(LinearAttr).TransW
	m, in := p.Buf(op.In[0]).matrix()
	_, out := p.Buf(op.Out[0].Buf).matrix()
	switch op.Kind {
	case Linear, LinearAct: // x (m,in)
		return m, out, in, trans
	case LinearGradX, LinearGradAct: // dy (m,in) here
		return m, out, in, !trans
	}
	_, out = p.Buf(op.In[1]).matrix()
	if trans {
		in, out = out, in
	}
	return in, out, m, false
}

// embedGradWork returns the bytes of the row indices sorted by token, for a 16-bit gradient.
func (t Target) embedGradWork(p *Program, op *Op) int64 {
	if !half(p, op.In[1]) {
		return 0
	}
	return t.align(8 * p.Buffers[op.In[0]].Elems())
}

func dimOf(plain, transposed int, trans bool) string {
	d := plain
	if trans {
		d = transposed
	}
	return [...]string{"dimension 0", "dimension 1"}[d]
}

func (c *checker) noAct(a LinearAttr) {
	if a.Act != ActNone {
		c.failf("attribute has activation %q; a gradient has none", a.Act)
	}
}
