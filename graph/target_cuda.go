package graph

// CUDAKernels is how the kernels of a GPU (kernels/cuda) cut their work, as far
// as their workspace depends on it.
type CUDAKernels struct {
	// A matrix product's library may sum parts of K on their own, in fp32 in the
	// workspace: at most ProductParts, of ProductDepth or more. It gets what they
	// need, and never more than ProductBytes.
	ProductBytes, ProductParts, ProductDepth int64

	// The head holds the logits of a chunk of rows: as many as HeadBytes takes, in
	// steps of HeadStep rows, at least one step and at most HeadRows. A row of
	// logits is padded to a multiple of LogitPad elements, so that each begins
	// aligned for the library.
	HeadBytes, HeadStep, HeadRows, LogitPad int64

	// Sums over a matrix's rows, by column, are taken over parts of ColumnRows
	// rows or more, at most ColumnParts of them, and the parts added in order.
	ColumnRows, ColumnParts int64

	// Activation is the activation that a product of 16 bits takes before it is rounded, or
	// whose derivative it takes.
	Activation ActKind

	// Epilogues are those that products of 16 bits can have, Default those that they have
	// where nothing else is chosen.
	Epilogues, Default Epilogues

	// NormLanes is the lanes of rows over which a norm's gradients by gain and shift are summed.
	NormLanes int64

	// AttentionTile is the queries, and the keys, of a tile of attention on the tensor
	// cores.
	AttentionTile int64
}

// CUDATarget describes an NVIDIA GPU, whose kernels are in kernels/cuda, and the
// CPU that is its host.
func CUDATarget() Target {
	t := CPUTarget()
	t.Name = "cuda"
	t.Align = 256 // what cuMemAlloc gives
	t.CUDA = CUDAKernels{
		ProductBytes: 32 << 20, ProductParts: 16, ProductDepth: 256,
		HeadBytes: 256 << 20, HeadStep: 256, HeadRows: 2048, LogitPad: 64,
		ColumnRows: 128, ColumnParts: 64,
		NormLanes:     512,
		AttentionTile: 64,
		Activation:    ActGELUTanh,
		Epilogues:     EpilogueDGELU | EpilogueBGrad | EpilogueGELU,
		Default:       EpilogueDGELU,
	}
	return t
}

// cudaWorkspace is Workspace for an operation on the GPU.
func (t Target) cudaWorkspace(p *Program, op *Op) int64 {
	if info, _ := op.Info(); info != nil && info.cudaWork != nil {
		return info.cudaWork(t, p, op)
	}
	return 0
}

// What the kind table's entries need as scratch on a GPU.

func (t Target) linearCUDAWork(p *Program, op *Op) int64 {
	m, n, k, _ := productOf(p, op)
	codes := int64(0)
	if op.Attr.(LinearAttr).Int8 { // and scales, of both factors
		codes = t.align(m*k) + t.align(k*n) + t.align(4*m) + t.align(4*n)
	}
	return codes + t.align(t.CUDA.ProductWork(m, n, k))
}

func (t Target) biasGradCUDAWork(p *Program, op *Op) int64 {
	m, n := matrixOf(p, op.In[0])
	return t.align(t.CUDA.ColumnWork(m, n))
}

// gradWBCUDAWork is a product's, and behind it the sums that its epilogue writes where
// they are to be added; or the product's and then, in its place, that of column sums.
func (t Target) gradWBCUDAWork(p *Program, op *Op) int64 {
	m, n := matrixOf(p, op.In[1])
	return max(t.linearCUDAWork(p, op)+t.align(4*n), t.align(t.CUDA.ColumnWork(m, n)))
}

// attentionGradCUDAWork is Σ dy·y of every query, by head; on the tensor cores also
// what its kernels share. A plan is for any card: one without them leaves that unused.
func (t Target) attentionGradCUDAWork(p *Program, op *Op) int64 {
	a := op.Attr.(AttentionAttr)
	deltas, sums, turns := t.CUDA.TensorAttentionWork(a)
	if !t.CUDA.TensorAttention(a, p.Buf(op.In[0]).DType) {
		return t.align(deltas)
	}
	return t.align(deltas) + t.align(sums) + t.align(turns)
}

// TensorAttention says whether an attention over values of a type is one that the
// kernels for tensor cores take.
func (c *CUDAKernels) TensorAttention(a AttentionAttr, dt DType) bool {
	switch a.HeadDim {
	case 64, 80, 96, 128:
		return dt == BF16 || dt == F16
	}
	return false
}

// TensorAttentionWork returns the bytes that the backward of an attention needs: for
// every query's Σ dy·y; on the tensor cores for the sums of dq in fp32, in whole tiles
// of queries; and for a ticket and the turns of tiles to add to them.
func (c *CUDAKernels) TensorAttentionWork(a AttentionAttr) (deltas, sums, turns int64) {
	heads := a.Batch * a.Heads
	tiles := heads * ((a.Seq + c.AttentionTile - 1) / c.AttentionTile)
	return 4 * heads * a.Seq, 4 * tiles * c.AttentionTile * a.HeadDim, 4 * (tiles + 1)
}

// normGradCUDAWork is the sums of lanes of rows, for gain and shift: see NormLanes.
func (t Target) normGradCUDAWork(p *Program, op *Op) int64 {
	_, n := matrixOf(p, op.In[1])
	if (len(op.Out) < 2 || op.Out[1].Buf == NoBuf) && (len(op.Out) < 3 || op.Out[2].Buf == NoBuf) {
		return 0
	}
	return t.align(2 * 4 * t.CUDA.NormLanes * n)
}

// crossEntropyCUDAWork is every row's loss in f64.
func (t Target) crossEntropyCUDAWork(p *Program, op *Op) int64 {
	n, _ := matrixOf(p, op.In[0])
	return t.align(8 * n)
}

func (t Target) headLossCUDAWork(p *Program, op *Op) int64 {
	c := &t.CUDA
	n, width := matrixOf(p, op.In[0])
	v, _ := matrixOf(p, op.In[1])
	rows := min(n, c.HeadChunk(v))
	product, sums := c.ProductWork(rows, v, width), int64(0)
	if len(op.Out) > 1 && op.Out[1].Buf != NoBuf {
		product = max(product, c.ProductWork(rows, width, v))
	}
	if len(op.Out) > 2 && op.Out[2].Buf != NoBuf {
		product = max(product, c.ProductWork(v, width, rows))
		if c.HeadSums(n, v, p.Buf(op.Out[2].Buf).DType) {
			sums = 4 * v * width
		}
	}
	// Logits (rows, V padded), loss in f64 by row, dw in fp32.
	return t.align(4*rows*c.LogitStride(v)) + t.align(8*rows) + t.align(product) + t.align(sums)
}

// ProductWork returns the bytes of workspace of a product C(m,n) = A(m,k)·B(k,n):
// 0 where K is too short to be cut.
func (c *CUDAKernels) ProductWork(m, n, k int64) int64 {
	parts := min(k/c.ProductDepth, c.ProductParts)
	if parts < 2 {
		return 0
	}
	if m > 0 && n > c.ProductBytes/m { // m·n may not fit an int64
		return c.ProductBytes
	}
	return min(4*m*n*parts, c.ProductBytes)
}

// HeadChunk returns the rows of a chunk of the head over a vocabulary of v.
func (c *CUDAKernels) HeadChunk(v int64) int64 {
	rows := c.HeadBytes / (4 * max(c.LogitStride(v), 1)) / c.HeadStep * c.HeadStep
	return min(max(rows, c.HeadStep), c.HeadRows)
}

// HeadSums says whether the head adds the chunks of n rows' weight gradients, of a type and a
// vocabulary of v, in fp32 in the workspace: in 16 bits each chunk would round the sum.
func (c *CUDAKernels) HeadSums(n, v int64, dt DType) bool { return dt != F32 && n > c.HeadChunk(v) }

// LogitStride returns the elements from one row of v logits to the next.
func (c *CUDAKernels) LogitStride(v int64) int64 { return roundUp(v, c.LogitPad) }

// ColumnWork returns the bytes of workspace of the sums of a (rows, cols) matrix's
// columns: 0 for one part.
func (c *CUDAKernels) ColumnWork(rows, cols int64) int64 {
	parts := c.Columns(rows)
	if parts < 2 {
		return 0
	}
	return 4 * parts * cols
}

// Columns returns the parts into which a sum over rows is cut.
func (c *CUDAKernels) Columns(rows int64) int64 {
	return min(max((rows+c.ColumnRows-1)/c.ColumnRows, 1), c.ColumnParts)
}
