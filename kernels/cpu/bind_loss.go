package cpu

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

func bindCrossEntropy(b *binding) func() error {
	n, v := b.inShape(0)
	return b.run(&vec.CrossEntropy[float32]{
		N: n, V: v, Logits: in[float32](b, 0), Targets: in[int32](b, 1),
		Loss: out[float64](b, 0), LSE: out[float32](b, 1),
	})
}

func bindCrossEntropyGrad(b *binding) func() error {
	n, v := b.inShape(0)
	hyper := in[float64](b, 3)
	k := &vec.CrossEntropyGrad[float32]{
		N: n, V: v, Logits: in[float32](b, 0), Targets: in[int32](b, 1), LSE: in[float32](b, 2), DLogits: out[float32](b, 0),
	}
	pool := b.pool
	return func() error {
		k.Scale = lossScale(hyper)
		return k.Run(pool)
	}
}

func bindLossSeed(b *binding) func() error {
	hyper, seed := in[float64](b, 0), out[float64](b, 0)
	return func() error {
		seed[0] = float64(lossScale(hyper))
		return nil
	}
}

// lossScale returns the factor of a loss's gradient.
func lossScale(hyper []float64) float32 {
	return float32(float64(hyper[graph.HyperInvCount] * hyper[graph.HyperLossScale]))
}

// headLoss computes the loss of logits x·wᵀ, and its gradients, over chunks of rows. Only one
// chunk's logits are in memory at a time:
//
//	for each chunk of rows of x:
//		logits = x·wᵀ                          (rows, V)
//		loss += Σ of its rows, in order
//		logits = (softmax − onehot)·scale      in place
//		dx = logits·w                          (rows, C)
//		dw (+)= logitsᵀ·x                      (V, C)
//
// Logits and loss are float32 also for 16-bit operands. The gradient of the logits is rounded to 16
// bits for the products that read it, row by row in its own memory. If there are several chunks,
// dw's sum over them is float32 and is rounded once. The sum is in workspace unless dw itself is
// float32.
//
// A chunk is a multiple of the product's K-blocks, or all rows. So dw's blocks are those of one
// product over all rows, and the sum over chunks continues the product's own: neither result
// depends on the size of a chunk. (One exception: AVX-512's dot products of bf16 have blocks of 512
// rows, of which a chunk of 256 is half; headRowsOf depends only on the shape.)
//
// For one slice of the vocabulary (graph.HeadStats, graph.HeadSliceGrad) a chunk has only the
// slice's logits, and computes statistics or the gradient instead of the loss.
type headLoss struct {
	chunks []headChunk
	w      matrix    // (V, C)
	dw     matrix    // (V, C) or absent: output for the sum over chunks
	hyper  []float64 // nil: no gradients
	work   []byte

	before, after vec.Kernel // for a sum in workspace: before loads the old value, after rounds; or nil
	tail          matrix     // rows of dw without a token of the slice
}

type headChunk struct {
	x, dx   matrix    // (rows, C); dx absent if not wanted
	sums    []float32 // (rows, V): the logits
	logits  matrix    // their gradient, as the products read it
	middle  vec.Kernel
	scale   *float32 // of the gradient; nil: none
	forward *gemm.Product
	gradX   *gemm.Product
	gradW   *gemm.Product
}

func (h *headLoss) run(p *pool.Pool) error {
	if h.before != nil {
		if err := h.before.Run(p); err != nil {
			return err
		}
	}
	for i := range h.chunks {
		c := &h.chunks[i]
		if err := c.forward.RunBytes(p, c.x.bytes(), h.w.bytes(), gemm.Bytes(c.sums), nil, h.work); err != nil {
			return err
		}
		if h.hyper != nil && c.scale != nil {
			*c.scale = lossScale(h.hyper)
		}
		if err := c.middle.Run(p); err != nil {
			return err
		}
		if c.dx.there() {
			if err := c.gradX.RunBytes(p, c.logits.bytes(), h.w.bytes(), c.dx.bytes(), nil, h.work); err != nil {
				return err
			}
		}
		if h.dw.there() {
			if err := c.gradW.RunBytes(p, c.logits.bytes(), c.x.bytes(), h.dw.bytes(), nil, h.work); err != nil {
				return err
			}
		}
	}
	clear(h.tail.f32)
	clear(h.tail.u16)
	if h.after != nil {
		return h.after.Run(p)
	}
	return nil
}

// headSpecs returns the products of a chunk of rows of inputs of type t, with dw of type dw.
func headSpecs(rows, c, v int, t, dw gemm.Type, accumulate bool) (forward, gradX, gradW gemm.Spec) {
	forward = gemm.Forward(rows, c, v, true)
	gradX = gemm.InputGradient(rows, c, v, true)
	gradW = gemm.WeightGradient(rows, c, v, true)
	gradW.Accumulate = accumulate
	forward.In, gradX.In, gradW.In = t, t, t
	gradX.Out, gradW.Out = t, dw
	if t != gemm.F32 { // a row of the logits' gradient is the first half of a row of logits
		gradX.LdA, gradW.LdA = 2*v, 2*v
	}
	return forward, gradX, gradW
}

// headRows is the number of rows in a chunk of the head's loss: one K-block of the matrix
// product. More rows would need memory for more logits; fewer would change dw's bits.
const headRows = gemm.KC

// headRowsOf returns the number of rows in a chunk of the head. A chunk has all rows if their
// logits need no more memory than those of headRows rows and a float32 sum of a 16-bit dw. Then the
// sum is not needed, and the table is packed once. The packing memory of the larger products is not
// counted: 5 MB of GPT-2's 218 for 1,024 rows.
func headRowsOf(p *graph.Program, op *graph.Op) int {
	x := p.Buf(op.In[0])
	c := int(x.Shape[len(x.Shape)-1])
	n := int(x.Elems()) / c
	if _, dw := graph.HeadGradients(op); dw != graph.NoBuf && halves[p.Buf(dw).DType] != vec.NoHalf && n <= headRows+c {
		return n
	}
	return min(n, headRows)
}

// headSum returns the type of dw's sum over rows, with or without chunks, and whether the sum is in
// workspace.
func headSum(dw graph.DType, chunks bool) (gemm.Type, bool) {
	if dw != graph.F32 && chunks {
		return gemm.F32, true
	}
	return gemmTypes[dw], false
}

// headWork is scratch for the rows of a chunk of logits.
type headWork struct {
	logits, lse []float32
	rowLoss     []float64
}

// head returns the products of a head with v tokens, over chunks of rows. The gradients dx and dw,
// if the operation has them, are outputs at and at+1. middle returns the kernel between a chunk's
// products, for rows [r0, r1), and the address of its factor.
func (b *binding) head(v int, gradients bool, at int, middle func(r0, r1 int, w headWork) (vec.Kernel, *float32)) func() error {
	n, c := b.inShape(0)
	all, _ := b.inShape(1)
	h := &headLoss{w: b.inMatrix(1).rows(0, v, c)}
	x, t, dwType := b.inMatrix(0), gemmTypes[b.Program.Buf(b.Op.In[0]).DType], gemm.F32
	var dx matrix
	accumulates := false
	if gradients {
		h.hyper, dx, h.dw = in[float64](b, len(b.Op.In)-1), b.outMatrix(at), b.outMatrix(at+1)
		accumulates = b.accum(at + 1)
		if h.dw.there() && v < all {
			if !accumulates { // otherwise they are 0 already
				h.tail = h.dw.rows(v, all, c)
			}
			h.dw = h.dw.rows(0, v, c)
		}
	}
	// With frozen weights and a frozen body, only the loss is computed.
	grads := dx.there() || h.dw.there()
	work := b.work()
	rows := headRowsOf(b.Program, b.Op)
	w := headWork{logits: take[float32](&work, int64(rows)*int64(v)), lse: take[float32](&work, int64(rows)), rowLoss: take[float64](&work, int64(rows))}
	if h.dw.there() {
		var inWork bool
		if dwType, inWork = headSum(b.Program.Buf(b.Op.Out[at+1].Buf).DType, n > rows); inWork {
			sum, as, dw := take[float32](&work, int64(v)*int64(c)), b.asOut(at+1), h.dw.u16
			h.dw, h.after = matrix{f32: sum}, &vec.Narrow{To: as, Src: sum, Dst: dw}
			if accumulates {
				h.before = &vec.Widen{From: as, Src: dw, Dst: sum}
			}
		}
	}
	h.work = work
	for r0 := 0; r0 < n && b.err == nil; r0 += rows {
		r1 := min(r0+rows, n)
		m := r1 - r0
		chunk := headChunk{x: x.rows(r0, r1, c), dx: dx.rows(r0, r1, c), sums: w.logits[:m*v]}
		chunk.middle, chunk.scale = middle(r0, r1, headWork{chunk.sums, w.lse[:m], w.rowLoss[:m]})
		if grads {
			chunk.logits = matrix{f32: chunk.sums}
		}
		forward, gradX, gradW := headSpecs(m, c, v, t, dwType, r0 > 0 || accumulates)
		chunk.forward, chunk.gradX, chunk.gradW = b.matmul(forward, nil), b.matmul(gradX, nil), b.matmul(gradW, nil)
		h.chunks = append(h.chunks, chunk)
	}
	pool := b.pool
	return func() error { return h.run(pool) }
}

func bindHeadLoss(b *binding) func() error {
	v, _ := b.inShape(1)
	targets, loss := in[int32](b, 2), out[float64](b, 0)
	grads := b.Op.Kind == graph.HeadLossGrad
	some := grads && (b.hasOut(1) || b.hasOut(2))
	return b.head(v, grads, 1, func(r0, r1 int, w headWork) (vec.Kernel, *float32) {
		k := &vec.CrossEntropy[float32]{N: r1 - r0, V: v, Logits: w.logits, Targets: targets[r0:r1], LSE: w.lse, Loss: loss, Cap: float32(graph.HeadCap(b.Op))}
		if some {
			k.DLogits, k.RowLoss, k.LowAs = k.Logits, w.rowLoss, b.asIn(0)
		}
		return k, &k.Scale
	})
}

// bindHeadSlice binds the statistics or the gradients of one slice of the vocabulary.
func bindHeadSlice(b *binding) func() error {
	a := attr[graph.SliceAttr](b)
	targets := in[int32](b, 2)
	if b.err != nil || !b.sliceFits(a) {
		return nil
	}
	from, to := a.Range(b.Coord)
	first, v := int(from), int(to-from)
	if b.Op.Kind == graph.HeadStats {
		stats := out[float32](b, 0)
		return b.head(v, false, 0, func(r0, r1 int, w headWork) (vec.Kernel, *float32) {
			return &vec.HeadStats[float32]{N: r1 - r0, V: v, First: first, Logits: w.logits, Targets: targets[r0:r1],
				Stats: stats[r0*graph.HeadStatistics : r1*graph.HeadStatistics]}, nil
		})
	}
	lse := in[float32](b, 3)
	return b.head(v, true, 0, func(r0, r1 int, w headWork) (vec.Kernel, *float32) {
		k := &vec.HeadSliceGrad[float32]{N: r1 - r0, V: v, First: first, Logits: w.logits, Targets: targets[r0:r1], LSE: lse[r0:r1], LowAs: b.asIn(0)}
		return k, &k.Scale
	})
}

func bindHeadLSE(b *binding) func() error {
	a, targets := attr[graph.SliceAttr](b), in[int32](b, 1)
	return b.run(&vec.HeadLSE[float32]{N: len(targets), Each: int(a.Each), Total: int(a.Total), Stats: in[float32](b, 0), Targets: targets,
		LSE: out[float32](b, 1), Loss: out[float64](b, 0)})
}
