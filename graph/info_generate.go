package graph

// Text generation. Keys and values are cached from one token to the next.

var (
	positionsIn = in("positions", "(N)").typ(isI32)
	cachedOut   = []Operand{out("y", "(N,Heads·HeadDim)"), out("keys", "(Slots,Capacity,KVHeads·HeadDim)").mode(modeRW),
		out("values", "(Slots,Capacity,KVHeads·HeadDim)").mode(modeRW)}
)

var generateKinds = []*Info{
	{
		Kind: RopeAt,
		Doc: "Rope of rows at positions of their own: row n has the bits of Rope at positions[n]. x, y (N, Heads·HeadDim), positions i32 (N); " +
			"y may be in place of x; the attribute's Seq is N. For generation: it has no derivative.",
		In:   []Operand{in("x", "(N,Heads·HeadDim)"), positionsIn},
		Out:  []Operand{out("y", "(N,Heads·HeadDim)").over("x")},
		Attr: RopeAttr{},
		check: func(c *checker) {
			x, a := c.in(0), c.op.Attr.(RopeAttr)
			c.rope(a)
			c.matrix(x, a.Seq, a.Heads*a.HeadDim, "Heads·HeadDim, rows Seq")
			c.vector(c.in(1), a.Seq, "a position for each row")
			c.same(c.out(0), x)
		},
		flops: func(c *checker) int64 { return 3 * c.out(0).elems() },
		work:  Target.ropeWork,
	},
	{
		Kind: AttentionCached,
		Doc: "Causal attention of Batch sequences, each of Seq rows at the positions from S on, over the S rows before them too: S is " +
			"positions[b·Seq] of sequence b. Writes their keys and values into rows S … of slot key[KeySlot] + b of the caches, and gives the bits of " +
			"those rows of an attention over all. " +
			"Packed: qkv (N, (Heads+2·KVHeads)·HeadDim); else q (N, Heads·HeadDim), k, v (N, KVHeads·HeadDim), N = Batch·Seq. y (N, Heads·HeadDim), " +
			"positions i32 (N), key i64 (NumKey), keys, values (Slots, Capacity, KVHeads·HeadDim). For generation: it has no derivative.",
		In: []Operand{in("q", "(N,Heads·HeadDim)"), in("k", "(N,KVHeads·HeadDim)"), in("v", "(N,KVHeads·HeadDim)"), positionsIn,
			in("key", "(NumKey)").typ(isI64)},
		Out:       cachedOut,
		Attr:      AttentionAttr{},
		packedIn:  []Operand{in("qkv", "(N,(Heads+2·KVHeads)·HeadDim)"), positionsIn, in("key", "(NumKey)").typ(isI64)},
		packedOut: cachedOut,
		check: func(c *checker) {
			a := c.attention()
			i := c.qkv(a, 0, c.in)
			c.vector(c.in(i), a.Batch*a.Seq, "a position for each row")
			c.vector(c.in(i+1), NumKey, "the Key slots")
			c.matrix(c.out(0), a.Batch*a.Seq, a.Heads*a.HeadDim, "Heads·HeadDim, rows Batch·Seq")
			keys := c.out(1)
			if c.rank(keys, 3) {
				c.matrix(keys, keys.rows(), a.KVHeads*a.HeadDim, "KVHeads·HeadDim")
				c.same(c.out(2), keys)
			}
			switch {
			case c.err != nil:
			case !a.Causal:
				c.failf("Causal is false, want true: later tokens are not known")
			case keys.buf.Shape[0] < a.Batch:
				c.failf("keys has %d slots, want at least the %d of Batch", keys.buf.Shape[0], a.Batch)
			case keys.buf.Shape[1] < a.Seq:
				c.failf("keys has %d rows a slot, want at least the %d of Seq", keys.buf.Shape[1], a.Seq)
			}
		},
		flops: func(c *checker) int64 {
			a := c.op.Attr.(AttentionAttr)
			return a.Batch * a.Heads * a.Seq * c.out(1).buf.Shape[1] * (4*a.HeadDim + expFlops)
		},
		work: Target.attentionCachedWork,
	},
}

// attentionCachedWork allows for queries that start in the middle of a tile of keys.
func (t Target) attentionCachedWork(p *Program, op *Op) int64 {
	a := op.Attr.(AttentionAttr)
	span := a.Seq
	if p.Buffers[op.Out[1].Buf].Shape[1] > a.Seq {
		span += t.Attention.Keys - 1
	}
	return t.align(t.attention(a, span))
}
