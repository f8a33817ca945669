package graph

// Target describes a device to the passes as plain data: alignment of memory and the scratch
// that kernels need. A test of each kernel package checks that its numbers equal these.
type Target struct {
	Name string

	Align int64 // bytes: offsets of buffers in an arena, and of parts of a workspace, are multiples of it
	Limbs int64 // int64 words of an exact accumulator (the acc of SqSum; two for each parameter in norms)

	Product   ProductBlocks
	Attention AttentionTiles

	// HeadRows is the number of rows in a chunk of HeadLoss and HeadLossGrad, whose logits
	// are in memory at once. It is a multiple of Product.KC, so that the head's weight
	// gradient, accumulated over chunks, has the bits of one product over all rows. A 16-bit
	// gradient needs an f32 sum over chunks: if the logits of all rows take no more memory
	// than that sum and the logits of HeadRows, all rows are one chunk.
	HeadRows int64
	// SumElems is the elements of one partial sum of Sum.
	SumElems int64

	// CUDA describes the kernels of a GPU. The fields above then describe the kernels of the
	// GPU's host, which run the operations of the HostWork stream. If CUDA.ProductBytes is 0
	// the device uses the CPU's kernels: it is the CPU, or a simulated GPU in tests.
	CUDA CUDAKernels
}

// ProductBlocks says how a matrix product C(M,N) = A(M,K)·B(K,N) is cut into blocks. Its
// workspace holds packed copies of one chunk of A and one of B.
type ProductBlocks struct {
	KC                int64 // length of a block along K; it fixes the order of summation
	Rows, Cols, Depth int64 // largest chunk along M, N and K, in elements
	PadRows, PadCols  int64 // packing rounds rows and columns up by at most these
	PadDepth          int64 // packing rounds the depth up to a multiple of this
	DirectRows        int64 // if M is at most this and B's rows are contiguous, B is not packed
}

// AttentionTiles says how attention is cut into tasks. Its workspace is the scratch of the
// tasks that run at a time.
type AttentionTiles struct {
	Keys    int64 // keys in a tile
	Queries int64 // largest number of queries in a block
	Slots   int64 // largest number of tasks at a time
	Lanes   int64 // rows are padded to multiples of this many elements
}

// CPUTarget describes the CPU device, whose kernels are in kernels/cpu.
func CPUTarget() Target {
	return Target{
		Name:  "cpu",
		Align: 64,
		Limbs: 72,
		Product: ProductBlocks{
			KC: 256, Rows: 2184, Cols: 2048, Depth: 1024,
			PadRows: 32, PadCols: 32, PadDepth: 16, DirectRows: 28,
		},
		Attention: AttentionTiles{Keys: 64, Queries: 512, Slots: 32, Lanes: 16},
		HeadRows:  256,
		SumElems:  65536,
	}
}

// Workspace returns the bytes of scratch that an operation needs on the target,
// a multiple of Align; 0 for none. It depends on shapes and attribute alone,
// never on the number of threads. The operation must pass Check.
func (t Target) Workspace(p *Program, op *Op) int64 {
	if t.CUDA.ProductBytes > 0 && op.Stream != HostWork {
		return t.cudaWorkspace(p, op)
	}
	if info, _ := op.Info(); info != nil && info.work != nil {
		return info.work(t, p, op)
	}
	return 0
}

// Scratch of the kind table's operations on the CPU.

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

// gainWork is for the gain 1 + gamma, which kernels for 16-bit values compute in f32.
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

// Lacks names the feature of an operation for which the target has no kernel; "" if it has
// kernels for all of it.
func (t Target) Lacks(op *Op) string {
	if t.CUDA.ProductBytes == 0 || op.Stream == HostWork {
		return ""
	}
	if op.hasStarts() {
		return "rows of several documents"
	}
	switch a := op.Attr.(type) {
	case SliceAttr:
		return "slices of a vocabulary"
	case PosAttr:
		if a.Rows != (SliceAttr{}) {
			return "positions of a part of the rows"
		}
	case DropoutAttr:
		if a.Part != (SliceAttr{}) {
			return "dropout of a part of the rows"
		}
	case CapAttr:
		if a.Cap != 0 {
			return "a soft cap of logits"
		}
	case AttentionAttr:
		switch {
		case a.Cap != 0:
			return "attention with a soft cap"
		case a.Window != 0:
			return "attention with a sliding window"
		}
	case NormAttr:
		if a.PlusOne {
			return "an RMS norm with the gain 1 + weight"
		}
	}
	return ""
}

// hasStarts says whether the operation's rows hold several documents (Builder.Documents).
func (o *Op) hasStarts() bool {
	info, ok := o.Info()
	if !ok || len(o.In) == 0 {
		return false
	}
	ins, _ := info.Operands(o.Attr)
	n := len(o.In)
	return n == len(ins) && ins[n-1].Name == startsIn().Name && o.In[n-1] != NoBuf
}

func (t Target) attentionWork(_ *Program, op *Op) int64 {
	a := op.Attr.(AttentionAttr)
	return t.align(t.attention(a, a.Seq))
}

// attentionCachedWork allows for queries that begin in the middle of a tile of keys.
func (t Target) attentionCachedWork(p *Program, op *Op) int64 {
	a := op.Attr.(AttentionAttr)
	span := a.Seq
	if p.Buffers[op.Out[1].Buf].Shape[1] > a.Seq {
		span += t.Attention.Keys - 1
	}
	return t.align(t.attention(a, span))
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

// embedGradWork is, for a 16-bit gradient, the row indices sorted by token.
func (t Target) embedGradWork(p *Program, op *Op) int64 {
	if !half(p, op.In[1]) {
		return 0
	}
	return t.align(8 * p.Buffers[op.In[0]].Elems())
}

// ropeWork is the cosines and sines of all positions, f32.
func (t Target) ropeWork(_ *Program, op *Op) int64 {
	a := op.Attr.(RopeAttr)
	return t.align(4 * a.Seq * a.HeadDim)
}

func (t Target) sumWork(p *Program, op *Op) int64 {
	return t.align(8 * ((p.Buffers[op.In[0]].Elems() + t.SumElems - 1) / t.SumElems))
}

func (t Target) headLossWork(p *Program, op *Op) int64 {
	n, c := p.Buf(op.In[0]).matrix()
	v, _ := p.Buf(op.In[1]).matrix()
	rows := min(n, t.HeadRows)
	dx, dw := HeadGradients(op)
	if dw != NoBuf && half(p, dw) && n <= t.HeadRows+c {
		rows = n // the logits of all rows take no more than a chunk's and the f32 sum of dw
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
	// Logits (rows, V), their log-sum-exp in f32 and loss in f64 by row.
	return t.align(4*rows*v) + t.align(4*rows) + t.align(8*rows) + sum + product
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

// product is the workspace of a matrix product; transB: B is stored (N,K). in16
// and out16: the factors, or the product, have 16-bit elements.
func (t Target) product(m, n, k int64, transB, in16, out16 bool) int64 {
	if m == 0 || n == 0 || k == 0 {
		return 0
	}
	b := t.Product
	rows, cols, sums := min(m, b.Rows), min(n, b.Cols), int64(0)
	if out16 && k > b.Depth { // sums of a chunk over several passes
		rows, cols = min(m, b.Rows/2), min(n, b.Cols/2)
		sums = t.align(4 * rows * (cols + b.PadCols))
	}
	depth := roundUp(min(k, b.Depth), b.PadDepth)
	packA := t.align(4 * depth * (rows + b.PadRows))
	packB := 4 * depth * (cols + b.PadCols)
	if !in16 && !transB && m <= b.DirectRows {
		packB = 4 * depth * b.PadCols
	}
	return packA + t.align(packB) + sums + t.Align
}

// int8Product is the workspace of a product of int8 codes with a 16-bit result. Packing
// rounds K up to pairs of codes.
func (t Target) int8Product(m, n, k int64) int64 {
	b, pairs := t.Product, (k+1)/2
	cols := min(n, b.Cols)
	if pairs > b.Depth { // as in product
		cols = min(n, b.Cols/2)
	}
	return t.product(m, n, pairs, false, true, true) + t.align(4*(cols+b.PadCols))
}

func (t Target) align(bytes int64) int64 { return roundUp(bytes, t.Align) }

// AddWorkspace returns the program with a workspace for every operation that needs one on
// the target: a new buffer in the operation's memory space, alive while it runs.
//
//	y = linear(x, w)   →   y = linear(x, w) work h.0.attn.c_fc/work
//
// Operations that already have enough workspace are not changed. If ranks have uneven shares,
// the same operation in all micro-steps of a section shares one workspace: a rank that is idle
// in one micro-step then touches no more memory than is planned for another.
func AddWorkspace(p *Program, t Target) *Program {
	q := p.Clone()
	for si := range q.Sections {
		made := map[string]BufID{}
		for pi := range q.Sections[si].Phases {
			ops := q.Sections[si].Phases[pi].Ops
			share := q.Sections[si].Shares != nil && q.Sections[si].Phases[pi].Kind == MicroPhase
			for i := range ops {
				op := &ops[i]
				n := t.Workspace(q, op)
				if n == 0 || op.Work != NoBuf && q.Buffers[op.Work].Bytes() >= n {
					continue
				}
				space := Device
				if op.Stream == HostWork {
					space = Host
				}
				if id, ok := made[op.Name]; ok && share && q.Buffers[id].Bytes() >= n {
					op.Work = id
					continue
				}
				op.Work = q.AddBuffer(Buffer{
					Name: op.Name + "/work", DType: U8, Shape: []int64{n},
					Space: space, Class: Workspace, Life: LifePhase, Unit: op.Unit, Micro: op.Micro,
				})
				made[op.Name] = op.Work
			}
		}
	}
	return q
}

// attention is the scratch of attention whose queries span the given number of positions in
// the tiles of keys.
func (t Target) attention(a AttentionAttr, span int64) int64 {
	q := min(t.Attention.Queries, roundUp(span, t.Attention.Keys))
	d, keys := roundUp(a.HeadDim, t.Attention.Lanes), t.Attention.Keys
	slots := min(a.Batch*a.Heads*((span+q-1)/q), t.Attention.Slots)
	return 4 * slots * (2*q*d + 17*q + 2*keys*d + keys*keys + 2*keys + 16)
}
