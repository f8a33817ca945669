package graph

// Attention kernels never hold the complete (Seq, Seq) matrix of scores.

// packed is the operand with queries, keys and values side by side in one matrix.
var packed = in("qkv", "(N,(Heads+2·KVHeads)·HeadDim)")

var attentionKinds = []*Info{
	{
		Kind:  Attention,
		Cheap: true,
		Doc: "Multi-head attention (Vaswani et al. 2017) with KVHeads shared by groups of heads (Ainslie et al. 2023), streaming softmax: " +
			"y = softmax(Scale·q·kᵀ + mask)·v for each sample and head; lse is the log-sum-exp of each row of scores. " +
			"Packed: qkv (N, (Heads+2·KVHeads)·HeadDim), queries, keys, values side by side; " +
			"else q (N, Heads·HeadDim), k, v (N, KVHeads·HeadDim). y (N, Heads·HeadDim), lse (Batch·Heads·Seq), N = Batch·Seq. " +
			"With starts (N), of Causal attention alone, row n sees no key before row starts[n] of its Seq.",
		Derivative: "with P = exp(scores − lse), D = Σ dy·y: dv = Pᵀ·dy; dS = P·(dy·vᵀ − D)·Scale; dq = dS·k; dk = dSᵀ·q, " +
			"keys and values summed over the heads of their group",
		In:        []Operand{in("q", "(N,Heads·HeadDim)"), in("k", "(N,KVHeads·HeadDim)"), in("v", "(N,KVHeads·HeadDim)"), startsIn()},
		Out:       []Operand{out("y", "(N,Heads·HeadDim)"), out("lse", "(Batch·Heads·Seq)").typ(isF32).stat()},
		Attr:      AttentionAttr{},
		Saves:     []string{"qkv", "q", "k", "v", "y", "lse", "starts"},
		packedIn:  []Operand{packed, startsIn()},
		packedOut: []Operand{out("y", "(N,Heads·HeadDim)"), out("lse", "(Batch·Heads·Seq)").typ(isF32).stat()},
		check: func(c *checker) {
			a := c.attention()
			c.starts(c.in(c.qkv(a, 0, c.in)))
			n := a.Batch * a.Seq
			c.matrix(c.out(0), n, a.Heads*a.HeadDim, "Heads·HeadDim")
			c.vector(c.out(1), n*a.Heads, "Batch·Heads·Seq")
		},
		flops: func(c *checker) int64 { return c.op.Attr.(AttentionAttr).flops(2) },
		work:  Target.attentionWork,
	},
	{
		Kind: AttentionGrad,
		Doc:  "Gradients of attention. Packed: qkv, y, lse, dy, [starts] → dqkv; else q, k, v, y, lse, dy, [starts] → dq, dk, dv; each gradient shaped as its input.",
		In: []Operand{in("q", "(N,Heads·HeadDim)"), in("k", "(N,KVHeads·HeadDim)"), in("v", "(N,KVHeads·HeadDim)"),
			in("y", "(N,Heads·HeadDim)"), in("lse", "(Batch·Heads·Seq)").typ(isF32), in("dy", "(N,Heads·HeadDim)"), startsIn()},
		Out:       []Operand{out("dq", "(N,Heads·HeadDim)"), out("dk", "(N,KVHeads·HeadDim)"), out("dv", "(N,KVHeads·HeadDim)")},
		Attr:      AttentionAttr{},
		packedIn:  []Operand{packed, in("y", "(N,Heads·HeadDim)"), in("lse", "(Batch·Heads·Seq)").typ(isF32), in("dy", "(N,Heads·HeadDim)"), startsIn()},
		packedOut: []Operand{out("dqkv", "(N,(Heads+2·KVHeads)·HeadDim)")},
		check: func(c *checker) {
			a := c.attention()
			i := c.qkv(a, 0, c.in)
			n := a.Batch * a.Seq
			c.matrix(c.in(i), n, a.Heads*a.HeadDim, "Heads·HeadDim")
			c.vector(c.in(i+1), n*a.Heads, "Batch·Heads·Seq")
			c.matrix(c.in(i+2), n, a.Heads*a.HeadDim, "Heads·HeadDim")
			c.starts(c.in(i + 3))
			c.qkv(a, 0, c.out)
		},
		flops:    func(c *checker) int64 { return c.op.Attr.(AttentionAttr).flops(5) },
		work:     Target.attentionGradWork,
		cudaWork: Target.attentionGradCUDAWork,
	},
}

func (c *checker) attention() AttentionAttr {
	a := c.op.Attr.(AttentionAttr)
	c.within("Batch", a.Batch, 1<<31)
	c.within("Seq", a.Seq, 1<<31)
	c.within("Heads", a.Heads, 1<<24)
	c.within("KVHeads", a.KVHeads, 1<<24)
	c.within("HeadDim", a.HeadDim, 1<<24)
	if c.err == nil && a.Heads%a.KVHeads != 0 {
		c.failf("Heads %d is not a multiple of KVHeads %d", a.Heads, a.KVHeads)
	}
	if c.err == nil && !(a.Scale > 0) {
		c.failf("Scale is %g, want a positive number", a.Scale)
	}
	c.cap(a.Cap, true)
	if c.err == nil && (a.Window < 0 || a.Window > 0 && !a.Causal) {
		c.failf("Window is %d rows of attention with Causal %v, want 0, or a positive number with Causal", a.Window, a.Causal)
	}
	return a
}

// starts checks the operand that gives the starts of documents.
func (c *checker) starts(r ref) {
	a := c.op.Attr.(AttentionAttr)
	c.vector(r, a.Batch*a.Seq, "Batch·Seq")
	if c.err == nil && r.ok() && !a.Causal {
		c.failf("operand starts (%s) with Causal false: only causal attention is confined to documents", r.buf.Name)
	}
}

// qkv checks the queries, keys and values (or their gradients), starting with operand i, and
// returns the index after them.
func (c *checker) qkv(a AttentionAttr, i int, get func(int) ref) int {
	n := a.Batch * a.Seq
	if a.Packed {
		c.matrix(get(i), n, (a.Heads+2*a.KVHeads)*a.HeadDim, "(Heads+2·KVHeads)·HeadDim, rows Batch·Seq")
		return i + 1
	}
	c.matrix(get(i), n, a.Heads*a.HeadDim, "Heads·HeadDim, rows Batch·Seq")
	c.matrix(get(i+1), n, a.KVHeads*a.HeadDim, "KVHeads·HeadDim, rows Batch·Seq")
	c.matrix(get(i+2), n, a.KVHeads*a.HeadDim, "KVHeads·HeadDim, rows Batch·Seq")
	return i + 3
}

// flops counts the operations of the given number of matrix products of (Seq, HeadDim) by
// (HeadDim, Seq) for each head, and of the exponentials. A causal mask halves the products.
func (a AttentionAttr) flops(products int64) int64 {
	pairs := a.Batch * a.Heads * a.Seq * a.Seq
	if a.Causal {
		pairs = a.Batch * a.Heads * (a.Seq * (a.Seq + 1) / 2)
	}
	if w := a.Window; w > 0 && w < a.Seq {
		pairs = a.Batch * a.Heads * (w*(w+1)/2 + (a.Seq-w)*w)
	}
	return pairs * (2*products*a.HeadDim + expFlops)
}

func (t Target) attentionWork(_ *Program, op *Op) int64 {
	a := op.Attr.(AttentionAttr)
	return t.align(t.attention(a, a.Seq))
}

func (t Target) attentionGradWork(p *Program, op *Op) int64 {
	a := op.Attr.(AttentionAttr)
	q := min(t.Attention.Queries, roundUp(a.Seq, t.Attention.Keys))
	d, keys := roundUp(a.HeadDim, t.Attention.Lanes), t.Attention.Keys
	slots, sums := min(a.Batch*a.KVHeads, t.Attention.Slots), int64(0)
	if half(p, op.In[0]) { // dk and dv of a head in f32
		sums = 2 * a.Seq * a.HeadDim
	}
	return t.align(4 * slots * (3*q*d + q + 5*keys*d + 2*keys*keys + 16 + sums))
}

// attentionGradCUDAWork returns the bytes for Σ dy·y of every query and head, and on tensor cores
// the two other areas of TensorAttentionWork. A plan must fit any card; a card without tensor cores
// leaves these areas unused.
func (t Target) attentionGradCUDAWork(p *Program, op *Op) int64 {
	a := op.Attr.(AttentionAttr)
	deltas, sums, turns := t.CUDA.TensorAttentionWork(a)
	if !t.CUDA.TensorAttention(a, p.Buf(op.In[0]).DType) {
		return t.align(deltas)
	}
	return t.align(deltas) + t.align(sums) + t.align(turns)
}
