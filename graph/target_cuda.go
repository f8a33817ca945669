package graph

// CUDAKernels says how the kernels of a GPU (kernels/cuda) divide their work, as far as the
// size of their workspace depends on it.
type CUDAKernels struct {
	// The library may divide K into up to ProductParts parts, each at least ProductDepth long, and
	// sum them in fp32 in the workspace. The workspace is as large as that needs, but at most
	// ProductBytes.
	ProductBytes, ProductParts, ProductDepth int64

	// The head holds the logits of a chunk of rows. HeadBytes limits the chunk, in steps of
	// HeadStep rows, to at least one step and at most HeadRows. A row of logits is padded to a
	// multiple of LogitPad elements, so that each row is aligned for the library.
	HeadBytes, HeadStep, HeadRows, LogitPad int64

	// The column sums of a matrix are computed over parts of at least ColumnRows rows, at most
	// ColumnParts of them. The parts are added in order.
	ColumnRows, ColumnParts int64

	// Activation is the activation that the epilogue of a 16-bit product can apply before
	// rounding, or whose derivative it can multiply by.
	Activation ActKind

	// Epilogues are those that 16-bit products can do. Default applies if none are chosen.
	Epilogues, Default Epilogues

	// NormLanes is the number of groups of rows over which a norm's gradients of gain and
	// shift are summed separately.
	NormLanes int64

	// AttentionTile is the number of queries, and of keys, in a tile of attention on the
	// tensor cores.
	AttentionTile int64
}

// TensorAttention says whether the kernels for tensor cores can run an attention over values
// of the given type.
func (c *CUDAKernels) TensorAttention(a AttentionAttr, dt DType) bool {
	switch a.HeadDim {
	case 64, 80, 96, 128:
		return dt == BF16 || dt == F16
	}
	return false
}

// TensorAttentionWork returns the bytes that the backward of an attention needs: deltas for
// Σ dy·y of every query; on the tensor cores also sums for dq in fp32, in whole tiles of
// queries, and turns for a ticket counter and the order in which tiles add to dq.
func (c *CUDAKernels) TensorAttentionWork(a AttentionAttr) (deltas, sums, turns int64) {
	heads := a.Batch * a.Heads
	tiles := heads * ((a.Seq + c.AttentionTile - 1) / c.AttentionTile)
	return 4 * heads * a.Seq, 4 * tiles * c.AttentionTile * a.HeadDim, 4 * (tiles + 1)
}

// ProductWork returns the bytes of workspace of a product C(m,n) = A(m,k)·B(k,n), 0 if K is too
// short to be divided.
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

// HeadChunk returns the number of rows in a chunk of the head, for a vocabulary of v.
func (c *CUDAKernels) HeadChunk(v int64) int64 {
	rows := c.HeadBytes / (4 * max(c.LogitStride(v), 1)) / c.HeadStep * c.HeadStep
	return min(max(rows, c.HeadStep), c.HeadRows)
}

// HeadSums says whether the head accumulates the weight gradients of chunks of n rows in fp32 in
// the workspace. It does for a 16-bit dt, since each chunk would otherwise round the sum.
func (c *CUDAKernels) HeadSums(n, v int64, dt DType) bool { return dt != F32 && n > c.HeadChunk(v) }

// LogitStride returns the number of elements from one row of v logits to the next.
func (c *CUDAKernels) LogitStride(v int64) int64 { return roundUp(v, c.LogitPad) }

// ColumnWork returns the bytes of workspace for the column sums of a (rows, cols) matrix, 0 for one
// part.
func (c *CUDAKernels) ColumnWork(rows, cols int64) int64 {
	parts := c.Columns(rows)
	if parts < 2 {
		return 0
	}
	return 4 * parts * cols
}

// Columns returns the number of parts into which a sum over rows is divided.
func (c *CUDAKernels) Columns(rows int64) int64 {
	return min(max((rows+c.ColumnRows-1)/c.ColumnRows, 1), c.ColumnParts)
}
