package graph

// The Builder has one method for each forward operation. InfoOf gives the shapes and formulas.
// Where it gives rows (N), an activation may have any number of leading dimensions.

// Embed returns the rows of table (V,C) that tokens (i32) name: (tokens, C).
func (b *Builder) Embed(name string, tokens, table Value) Value {
	return b.add(name, Embed, nil, opds(opd("tokens", tokens), opd("table", table)),
		[]result{y(max(1, b.view(tokens).elems()), b.colsOf(table))}, nil)
}

// AddPos adds row n mod seq of pos (P,C) to row n of x (N,C).
func (b *Builder) AddPos(name string, x, pos Value, seq int64, opts ...Option) Value {
	return b.add(name, AddPos, PosAttr{Seq: seq}, b.inDocuments(opd("x", x), opd("pos", pos)), []result{b.like(x)}, opts)
}

// Documents declares that each row of the batch holds several documents, for the operations that
// follow. For each position of a row, starts (N) gives the position at which its document begins.
// AddPos and Rope count positions from that start, and Attention sees nothing before it.
func (b *Builder) Documents(starts Value) { b.starts = starts }

// inDocuments returns the operands, with the Documents starts appended if there are any.
func (b *Builder) inDocuments(ins ...operandValue) []operandValue {
	if b.starts.None() {
		return ins
	}
	return append(ins, opd("starts", b.starts))
}

// Linear returns x·w + bias; w is (K,N), or (N,K) with TransW; bias (N) may be the zero Value.
// attr.Act must be ActNone: Fuse joins a linear with the activation that follows it.
func (b *Builder) Linear(name string, x, w, bias Value, attr LinearAttr) Value {
	if attr.Act != ActNone {
		b.failf("%s: a linear is built without activation; add an Activation, and Fuse joins them", name)
	}
	n := b.colsOf(w)
	if attr.TransW {
		n = b.rowsOf(w)
	}
	return b.add(name, Linear, attr,
		[]operandValue{opd("x", x), opd("w", w), {name: "bias", v: bias, optional: true}},
		[]result{y(b.withCols(x, n)...)}, nil)
}

// LayerNorm normalises the rows of x.
func (b *Builder) LayerNorm(name string, x, gamma, beta Value, eps float64) Value {
	rows := b.rowsOf(x)
	return b.add(name, LayerNorm, NormAttr{Eps: eps}, opds(opd("x", x), opd("gamma", gamma), opd("beta", beta)),
		[]result{b.like(x), {suffix: "mean", shape: []int64{rows}}, {suffix: "rstd", shape: []int64{rows}}}, nil)
}

// RMSNorm normalises the rows of x by their root mean square.
func (b *Builder) RMSNorm(name string, x, gamma Value, eps float64) Value {
	return b.rmsNorm(name, x, gamma, NormAttr{Eps: eps})
}

// RMSNormPlusOne does the same as RMSNorm with the gain 1 + gamma.
func (b *Builder) RMSNormPlusOne(name string, x, gamma Value, eps float64) Value {
	return b.rmsNorm(name, x, gamma, NormAttr{Eps: eps, PlusOne: true})
}

func (b *Builder) rmsNorm(name string, x, gamma Value, a NormAttr) Value {
	return b.add(name, RMSNorm, a, opds(opd("x", x), opd("gamma", gamma)),
		[]result{b.like(x), {suffix: "rstd", shape: []int64{b.rowsOf(x)}}}, nil)
}

// SoftCap returns limit·tanh(x/limit).
func (b *Builder) SoftCap(name string, x Value, limit float64, opts ...Option) Value {
	return b.add(name, SoftCap, CapAttr{limit}, opds(opd("x", x)), []result{b.like(x)}, opts)
}

// Activation applies act to every element.
func (b *Builder) Activation(name string, x Value, act ActKind) Value {
	return b.add(name, Activation, ActAttr{act}, opds(opd("x", x)), []result{b.like(x)}, nil)
}

// SwiGLU returns silu(gate)·up.
func (b *Builder) SwiGLU(name string, gate, up Value) Value {
	return b.add(name, SwiGLU, nil, opds(opd("gate", gate), opd("up", up)), []result{b.like(gate)}, nil)
}

// Softmax normalises over the last dimension.
func (b *Builder) Softmax(name string, x Value) Value {
	return b.add(name, Softmax, nil, opds(opd("x", x)), []result{b.like(x)}, nil)
}

// Rope rotates pairs of elements of each head by an angle that depends on their position.
func (b *Builder) Rope(name string, x Value, attr RopeAttr, opts ...Option) Value {
	return b.add(name, Rope, attr, b.inDocuments(opd("x", x)), []result{b.like(x)}, opts)
}

// RopeAt does the same as Rope, with a position for each row: positions is i32 (N).
func (b *Builder) RopeAt(name string, x, positions Value, attr RopeAttr, opts ...Option) Value {
	attr.Seq = b.rowsOf(x)
	return b.add(name, RopeAt, attr, opds(opd("x", x), opd("positions", positions)), []result{b.like(x)}, opts)
}

// Attention takes queries, keys and values as three operands; AttentionPacked takes one matrix with
// all three side by side. Both set attr.Packed.
func (b *Builder) Attention(name string, q, k, v Value, attr AttentionAttr) Value {
	attr.Packed = false
	return b.attention(name, b.inDocuments(opd("q", q), opd("k", k), opd("v", v)), attr)
}

// AttentionPacked does the same as Attention for qkv (N, (Heads+2·KVHeads)·HeadDim).
func (b *Builder) AttentionPacked(name string, qkv Value, attr AttentionAttr) Value {
	attr.Packed = true
	return b.attention(name, b.inDocuments(opd("qkv", qkv)), attr)
}

func (b *Builder) attention(name string, ins []operandValue, a AttentionAttr) Value {
	q := ins[0].v
	if b.err == nil && (a.Heads < 1 || a.Heads > 1<<24 || a.HeadDim < 1 || a.HeadDim > 1<<24) {
		b.failf("%s: Heads is %d and HeadDim %d, want 1 to %d", name, a.Heads, a.HeadDim, 1<<24)
	}
	if b.err != nil {
		return Value{}
	}
	return b.add(name, Attention, a, ins, []result{
		y(b.withCols(q, a.Heads*a.HeadDim)...),
		{suffix: "lse", shape: []int64{b.rowsOf(q) * a.Heads}},
	}, nil)
}

// Cache adds a buffer of keys or values for generation, (slots, rows, width). Sections of
// generation share it, and its contents last from one run to the next. Merge matches caches
// by name.
func (b *Builder) Cache(name string, slots, rows, width int64) Value {
	return b.buffer(Buffer{Name: name, DType: F32, Shape: []int64{slots, rows, width}, Class: Activations, Life: LifeRun, Unit: -1})
}

// AttentionCached computes Attention for new tokens at positions i32 (N). It appends their keys and
// values to the caches and attends over all cached ones. If k and v are the zero Value, q holds
// queries, keys and values side by side.
func (b *Builder) AttentionCached(name string, q, k, v, positions, keys, values Value, attr AttentionAttr) Value {
	attr.Packed = k.None()
	ins := opds(opd("q", q))
	if !attr.Packed {
		ins = append(ins, opd("k", k), opd("v", v))
	}
	ins = append(ins, opd("positions", positions), opd("key", b.key()))
	return b.add(name, AttentionCached, attr, ins,
		[]result{y(b.withCols(q, attr.Heads*attr.HeadDim)...), {over: opd("keys", keys)}, {over: opd("values", values)}}, nil)
}

// Dropout zeroes elements of x with probability p and scales the others by 1/(1−p).
// batch is the number of samples in x. Each call has its own Site, and so its own mask.
func (b *Builder) Dropout(name string, x Value, p float64, batch int64, opts ...Option) Value {
	elems := b.view(x).elems()
	if b.err == nil && (batch < 1 || elems%batch != 0) {
		b.failf("%s: %d elements are not a multiple of a batch of %d samples", name, elems, batch)
	}
	if b.err != nil {
		return Value{}
	}
	b.sites++
	return b.add(name, Dropout, DropoutAttr{P: p, Site: b.sites, Elems: elems / batch},
		opds(opd("x", x), opd("key", b.key())), []result{b.like(x)}, opts)
}

// Add returns a + b elementwise.
func (b *Builder) Add(name string, x, z Value, opts ...Option) Value {
	return b.add(name, Add, nil, opds(opd("a", x), opd("b", z)), []result{b.like(x)}, opts)
}

// Sub returns a − b elementwise.
func (b *Builder) Sub(name string, x, z Value, opts ...Option) Value {
	return b.add(name, Sub, nil, opds(opd("a", x), opd("b", z)), []result{b.like(x)}, opts)
}

// Mul returns a·b elementwise.
func (b *Builder) Mul(name string, x, z Value, opts ...Option) Value {
	return b.add(name, Mul, nil, opds(opd("a", x), opd("b", z)), []result{b.like(x)}, opts)
}

// Scale returns factor·x.
func (b *Builder) Scale(name string, x Value, factor float64, opts ...Option) Value {
	return b.add(name, Scale, ScaleAttr{factor}, opds(opd("x", x)), []result{b.like(x)}, opts)
}

// Im2Col gathers the windows of x (B,H,W,C) as rows (B·OH·OW, KH·KW·C).
func (b *Builder) Im2Col(name string, x Value, a ConvAttr) Value {
	s := b.image(name, x, a)
	if s == nil {
		return Value{}
	}
	rows, cols := s[0]*a.OutSize(s[1], a.KH)*a.OutSize(s[2], a.KW), a.KH*a.KW*s[3]
	return b.add(name, Im2Col, a, opds(opd("x", x)), []result{y(rows, cols)}, nil)
}

// image returns the shape of x (B,H,W,C) if the windows of a fit into it.
func (b *Builder) image(name string, x Value, a ConvAttr) []int64 {
	s := b.Shape(x)
	if b.err == nil && len(s) != 4 {
		b.failf("%s: operand x has shape %v, want 4 dimensions (B,H,W,C)", name, s)
	}
	if b.err == nil && (a.KH < 1 || a.KW < 1 || a.KH > maxWindow || a.KW > maxWindow || a.Pad < 0 || a.Pad > maxWindow ||
		a.OutSize(s[1], a.KH) < 1 || a.OutSize(s[2], a.KW) < 1) {
		b.failf("%s: a window of (%d, %d), stride %d, padding %d does not fit an image of (%d, %d)", name, a.KH, a.KW, a.Stride, a.Pad, s[1], s[2])
	}
	if b.err != nil {
		return nil
	}
	return s
}

// Conv2D convolves x (B,H,W,C) with w (O, KH·KW·C), window elements in order (kh, kw, c), and adds
// bias (O) or None: (B,OH,OW,O). It adds the operations name.cols (Im2Col) and name (Linear).
func (b *Builder) Conv2D(name string, x, w, bias Value, a ConvAttr) Value {
	cols := b.Im2Col(name+".cols", x, a)
	v := b.Linear(name, cols, w, bias, LinearAttr{TransW: true})
	if b.err != nil {
		return Value{}
	}
	s := b.Shape(x)
	return b.Reshape(name+".image", v, s[0], a.OutSize(s[1], a.KH), a.OutSize(s[2], a.KW), b.colsOf(v))
}

// MaxPool returns the maximum of each window of x (B,H,W,C): (B,OH,OW,C).
func (b *Builder) MaxPool(name string, x Value, a ConvAttr) Value {
	s := b.image(name, x, a)
	if s == nil {
		return Value{}
	}
	return b.add(name, MaxPool, a, opds(opd("x", x)), []result{y(s[0], a.OutSize(s[1], a.KH), a.OutSize(s[2], a.KW), s[3])}, nil)
}

// Reshape returns a view of x with another shape and the same number of elements. It adds no
// operation.
func (b *Builder) Reshape(name string, x Value, shape ...int64) Value {
	id := b.use(name, "x", x)
	if b.err != nil {
		return Value{}
	}
	base := b.p.Buffers[id]
	v := b.buffer(Buffer{Name: name, DType: base.DType, Shape: shape, Space: base.Space, Class: base.Class, Life: base.Life, Unit: base.Unit, View: &View{Base: id}})
	if b.err == nil && b.view(v).elems() != base.Elems() {
		b.failf("%s: shape %v has %d elements, want the %d of %s %v", name, shape, b.view(v).elems(), base.Elems(), base.Name, base.Shape)
	}
	if b.err != nil {
		return Value{}
	}
	return b.valueOf(v.Buf())
}

// SelectRow returns row Key[KeyRow] of x (N,C) as (1,C).
func (b *Builder) SelectRow(name string, x Value) Value {
	return b.add(name, SelectRow, nil, opds(opd("x", x), opd("key", b.key())), []result{y(1, b.colsOf(x))}, nil)
}

// CrossEntropy adds the loss of logits (N,V) against targets i32 (N) to the
// program's Loss, and returns Loss.
func (b *Builder) CrossEntropy(name string, logits, targets Value) Value {
	ins := []BufID{b.use(name, "logits", logits), b.use(name, "targets", targets)}
	lse := b.buffer(Buffer{Name: name + ".lse", DType: F32, Shape: []int64{b.rowsOf(logits)}, Class: Activations, Unit: b.unit})
	first := b.p.Loss == NoBuf
	loss := b.lossOp(name, CrossEntropy, nil, ins, Out{lse.Buf(), Write})
	if b.err == nil && first && ins[1] == b.p.Targets && b.p.Buffers[ins[1]].Shape[1] == 1 {
		b.p.Buffers[b.p.Loss].Shape[0] = classLoss
	}
	return loss
}

// HeadLoss adds the loss of the logits x·wᵀ, w (V,C), against targets i32 (N) to the
// program's Loss, and returns Loss. Only a chunk of the logits' rows is in memory at once.
func (b *Builder) HeadLoss(name string, x, w, targets Value) Value {
	return b.lossOp(name, HeadLoss, nil, []BufID{b.use(name, "x", x), b.use(name, "w", w), b.use(name, "targets", targets)})
}

// CappedHeadLoss does the same as HeadLoss for the logits after SoftCap.
func (b *Builder) CappedHeadLoss(name string, x, w, targets Value, limit float64) Value {
	return b.lossOp(name, HeadLoss, CapAttr{limit}, []BufID{b.use(name, "x", x), b.use(name, "w", w), b.use(name, "targets", targets)})
}

// SumLoss adds the sum over all elements of x to the program's Loss, and returns Loss. Training
// minimises the mean over the step's targets, or over its samples if there are no targets.
func (b *Builder) SumLoss(name string, x Value) Value {
	return b.lossOp(name, Sum, nil, []BufID{b.use(name, "x", x)})
}

func (b *Builder) lossOp(name string, kind Kind, attr any, ins []BufID, outs ...Out) Value {
	loss := b.loss()
	if b.err == nil {
		b.p.Buffers[b.p.Loss].Shape[0] = 1 // with several losses, none counts classes
	}
	if !b.free(kind, name) {
		return Value{}
	}
	op := b.op(kind, name, attr)
	op.In, op.Out = ins, append([]Out{{loss.Buf(), Accum}}, outs...)
	return b.append(op)
}

// Logits marks v (1,V) as the program's Logits, whose contents outlive the phase.
func (b *Builder) Logits(v Value) {
	id := b.use("logits", "v", v)
	if b.err != nil {
		return
	}
	b.p.Logits = id
	b.p.Buffers[b.root(id)].Life = LifeStep
	b.p.Buffers[id].Life = LifeStep
}
