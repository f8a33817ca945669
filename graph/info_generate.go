package graph

// Generation with keys and values that are kept from token to token.

var cachedOut = []Operand{out("y", "(Seq,Heads·HeadDim)").typ(isF32), out("keys", "(Capacity,KVHeads·HeadDim)").typ(isF32).mode(modeRW),
	out("values", "(Capacity,KVHeads·HeadDim)").typ(isF32).mode(modeRW)}

var generateKinds = []*Info{
	{
		Kind: RopeAt,
		Doc: "Rope of one row at position key[KeyStart]: the bits of that row of Rope. x, y (1, Heads·HeadDim), key i64 (NumKey); " +
			"y may be in place of x; the attribute's Seq is 1. For generation: it has no derivative.",
		In:   []Operand{in("x", "(1,Heads·HeadDim)").typ(isF32), in("key", "(NumKey)").typ(isI64)},
		Out:  []Operand{out("y", "(1,Heads·HeadDim)").typ(isF32).over("x")},
		Attr: RopeAttr{},
		check: func(c *checker) {
			x, a := c.in(0), c.op.Attr.(RopeAttr)
			c.rope(a)
			c.matrix(x, 1, a.Heads*a.HeadDim, "Heads·HeadDim, one row")
			c.vector(c.in(1), NumKey, "the Key slots")
			if c.err == nil && a.Seq != 1 {
				c.failf("Seq is %d, want 1: it is one row", a.Seq)
			}
			c.same(c.out(0), x)
		},
		flops: func(c *checker) int64 { return 3 * c.out(0).elems() },
		work:  Target.ropeWork,
	},
	{
		Kind: AttentionCached,
		Doc: "Causal attention of Seq rows at the positions from S = key[KeyStart] on, over the S rows before them too: writes their keys " +
			"and values into rows S … of the caches, and gives the bits of those rows of an attention over all. " +
			"Packed: qkv (Seq, (Heads+2·KVHeads)·HeadDim); else q (Seq, Heads·HeadDim), k, v (Seq, KVHeads·HeadDim). y (Seq, Heads·HeadDim), " +
			"keys, values (Capacity, KVHeads·HeadDim). For generation: it has no derivative.",
		In:        []Operand{in("q", "(Seq,Heads·HeadDim)").typ(isF32), in("k", "(Seq,KVHeads·HeadDim)").typ(isF32), in("v", "(Seq,KVHeads·HeadDim)").typ(isF32), in("key", "(NumKey)").typ(isI64)},
		Out:       cachedOut,
		Attr:      AttentionAttr{},
		packedIn:  []Operand{in("qkv", "(Seq,(Heads+2·KVHeads)·HeadDim)").typ(isF32), in("key", "(NumKey)").typ(isI64)},
		packedOut: cachedOut,
		check: func(c *checker) {
			a := c.attention()
			i := c.qkv(a, 0, c.in)
			c.vector(c.in(i), NumKey, "the Key slots")
			c.matrix(c.out(0), a.Seq, a.Heads*a.HeadDim, "Heads·HeadDim, rows Seq")
			keys := c.out(1)
			c.matrix(keys, keys.rows(), a.KVHeads*a.HeadDim, "KVHeads·HeadDim")
			c.same(c.out(2), keys)
			switch {
			case c.err != nil:
			case a.Batch != 1:
				c.failf("Batch is %d, want 1: generation follows one sequence", a.Batch)
			case !a.Causal:
				c.failf("Causal is false, want true: later tokens are not known")
			case keys.rows() < a.Seq:
				c.failf("keys has %d rows, want at least the %d of Seq", keys.rows(), a.Seq)
			}
		},
		flops: func(c *checker) int64 {
			a := c.op.Attr.(AttentionAttr)
			return a.Heads * a.Seq * c.out(1).rows() * (4*a.HeadDim + expFlops)
		},
		work: Target.attentionCachedWork,
	},
}

// Cache adds a buffer of rows that sections of generation share and keep from one
// execution to the next: Merge knows it by its name.
func (b *Builder) Cache(name string, rows, width int64) Value {
	return b.buffer(Buffer{Name: name, DType: F32, Shape: []int64{rows, width}, Class: Activations, Life: LifeRun, Unit: -1})
}

// RopeAt is Rope of one row at position Key[KeyStart].
func (b *Builder) RopeAt(name string, x Value, attr RopeAttr, opts ...Option) Value {
	attr.Seq = 1
	return b.add(name, RopeAt, attr, opds(opd("x", x), opd("key", b.key())), []result{b.like(x)}, opts)
}

// AttentionCached is Attention of rows from position Key[KeyStart] on, which adds
// their keys and values to the caches and attends over all of these so far. With
// k and v none, q is all three side by side.
func (b *Builder) AttentionCached(name string, q, k, v, keys, values Value, attr AttentionAttr) Value {
	attr.Packed = k.None()
	ins := []BufID{b.use(name, "q", q)}
	if !attr.Packed {
		ins = append(ins, b.use(name, "k", k), b.use(name, "v", v))
	}
	ins = append(ins, b.use(name, "key", b.key()))
	caches := []BufID{b.use(name, "keys", keys), b.use(name, "values", values)}
	if b.err != nil {
		return Value{}
	}
	if b.opNames[name] {
		b.failf("%s %q: an operation needs a name that no other has", AttentionCached, name)
		return Value{}
	}
	out := b.buffer(Buffer{Name: name, DType: F32, Shape: b.withCols(q, attr.Heads*attr.HeadDim), Class: Activations, Life: LifePhase, Unit: b.unit})
	op := NewOp(AttentionCached, name, ins, []Out{{out.Buf(), Write}, {caches[0], ReadWrite}, {caches[1], ReadWrite}}, attr)
	op.Unit = b.unit
	return b.append(op)
}
