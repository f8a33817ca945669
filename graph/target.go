package graph

// Target describes a device to the passes as plain data: alignment of memory and the scratch
// that kernels need. A test of each kernel package checks that its numbers equal these.
type Target struct {
	Name string

	Align int64 // bytes: offsets of buffers in an arena, and of parts of a workspace, are multiples of it
	Limbs int64 // int64 words of an exact accumulator (one in the acc of SqSum; two for each parameter in norms)

	Product   ProductBlocks
	Attention AttentionTiles

	// HeadRows is the number of rows in a chunk of HeadLoss and HeadLossGrad, whose logits
	// are in memory at once. It is a multiple of Product.KC, so that the head's weight
	// gradient, accumulated over chunks, has the bits of one product over all rows. A 16-bit
	// gradient needs an f32 sum over chunks: if the logits of all rows take no more memory
	// than that sum and the logits of HeadRows, all rows are one chunk.
	HeadRows int64
	// SumElems is the number of elements of one partial sum of Sum.
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

// AttentionTiles says how attention is divided into tasks. Its workspace is the scratch of the
// tasks that run at the same time.
type AttentionTiles struct {
	Keys    int64 // keys in a tile
	Queries int64 // largest number of queries in a block
	Slots   int64 // largest number of tasks at the same time
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

// CUDATarget describes an NVIDIA GPU, whose kernels are in kernels/cuda, and the
// CPU that is its host.
func CUDATarget() Target {
	t := CPUTarget()
	t.Name = "cuda"
	t.Align = 256 // alignment of cuMemAlloc
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

// Epilogues returns the chosen epilogues that the target's products can do; the zero set
// means the target's default.
func (t Target) Epilogues(chosen Epilogues) Epilogues {
	if chosen == 0 {
		chosen = t.CUDA.Default
	}
	return chosen & t.CUDA.Epilogues
}

func (t Target) align(bytes int64) int64 { return roundUp(bytes, t.Align) }

// product returns the workspace of a matrix product. transB: B is stored (N,K). in16 and out16: the
// factors, or the product, have 16-bit elements.
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

// int8Product returns the workspace of a product of int8 codes with a 16-bit result. Packing rounds
// K up to pairs of codes.
func (t Target) int8Product(m, n, k int64) int64 {
	b, pairs := t.Product, (k+1)/2
	cols := min(n, b.Cols)
	if pairs > b.Depth { // as in product
		cols = min(n, b.Cols/2)
	}
	return t.product(m, n, pairs, false, true, true) + t.align(4*(cols+b.PadCols))
}

// attention returns the scratch of attention whose queries span the given number of positions in
// the tiles of keys.
func (t Target) attention(a AttentionAttr, span int64) int64 {
	q := min(t.Attention.Queries, roundUp(span, t.Attention.Keys))
	d, keys := roundUp(a.HeadDim, t.Attention.Lanes), t.Attention.Keys
	slots := min(a.Batch*a.Heads*((span+q-1)/q), t.Attention.Slots)
	return 4 * slots * (2*q*d + 17*q + 2*keys*d + keys*keys + 2*keys + 16)
}
