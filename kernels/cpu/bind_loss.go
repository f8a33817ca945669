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

// lossScale is the factor of a loss's gradient.
func lossScale(hyper []float64) float32 {
	return float32(float64(hyper[graph.HyperInvCount] * hyper[graph.HyperLossScale]))
}

// headLoss is the loss of logits x·wᵀ, and its gradients, over chunks of rows,
// one chunk's logits in memory at a time:
//
//	for each chunk of rows of x:
//		logits = x·wᵀ                          (rows, V)
//		loss += Σ of its rows, in order
//		logits = (softmax − onehot)·scale      in place
//		dx = logits·w                          (rows, C)
//		dw (+)= logitsᵀ·x                      (V, C)
//
// Of 16-bit operands, logits and loss are float32 all the same; the gradient of
// the logits is rounded to 16 bits, row by row over its own memory, for the
// products that read it; and where there are chunks, dw's sum over them is
// float32, in workspace unless the program gives it that type, and is rounded once.
//
// A chunk is a whole number of the product's K-blocks, or all rows, so dw's blocks are
// those of one product over all rows, and the chain over chunks is the product's own:
// neither result depends on the size of a chunk. (Except that AVX-512's dot products of
// bf16 have blocks of 512 rows, of which a chunk of 256 is half; headRowsOf depends on the
// shape alone.)
type headLoss struct {
	chunks []headChunk
	w      matrix    // (V, C)
	dw     matrix    // (V, C) or absent: where the sum over chunks goes
	hyper  []float64 // nil: no gradients
	work   []byte

	before, after vec.Kernel // of a sum in workspace: begins with the old value, is rounded; or nil
}

// matrix is a float32 operand, or a 16-bit one.
type matrix struct {
	f32 []float32
	u16 []uint16
}

func (m matrix) there() bool { return m.f32 != nil || m.u16 != nil }

// rows are rows [r0, r1) of width c.
func (m matrix) rows(r0, r1, c int) matrix {
	if m.u16 != nil {
		return matrix{u16: m.u16[r0*c : r1*c]}
	}
	if m.f32 != nil {
		return matrix{f32: m.f32[r0*c : r1*c]}
	}
	return m
}

func (m matrix) bytes() []byte {
	if m.u16 != nil {
		return gemm.Bytes(m.u16)
	}
	return gemm.Bytes(m.f32)
}

// inMatrix and outMatrix are operands that may be of either type.
func inMatrix(b *binding, i int) matrix {
	if b.asIn(i) != vec.NoHalf {
		return matrix{u16: in[uint16](b, i)}
	}
	return matrix{f32: in[float32](b, i)}
}

func outMatrix(b *binding, i int) matrix {
	if b.hasOut(i) && b.asOut(i) != vec.NoHalf {
		return matrix{u16: out[uint16](b, i)}
	}
	return matrix{f32: out[float32](b, i)}
}

type headChunk struct {
	x, dx   matrix // (rows, C); dx absent if not wanted
	logits  matrix // their gradient, as the products read it
	loss    vec.CrossEntropy[float32]
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
		if err := c.forward.RunBytes(p, c.x.bytes(), h.w.bytes(), gemm.Bytes(c.loss.Logits), nil, h.work); err != nil {
			return err
		}
		if h.hyper != nil {
			c.loss.Scale = lossScale(h.hyper)
		}
		if err := c.loss.Run(p); err != nil {
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
	if h.after != nil {
		return h.after.Run(p)
	}
	return nil
}

// headSpecs are the products of a chunk of rows of inputs of type t, with dw of
// type dw.
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

// headSum is the type of dw's sum over rows, in chunks or not, and whether that is in
// workspace.
func headSum(dw graph.DType, chunks bool) (gemm.Type, bool) {
	if dw != graph.F32 && chunks {
		return gemm.F32, true
	}
	return gemmTypes[dw], false
}

func bindHeadLoss(b *binding) func() error {
	n, c := b.inShape(0)
	v, _ := b.inShape(1)
	x, targets, loss := inMatrix(b, 0), in[int32](b, 2), out[float64](b, 0)
	h := &headLoss{w: inMatrix(b, 1)}
	t, dwType := gemmTypes[b.Program.Buf(b.Op.In[0]).DType], gemm.F32
	var dx matrix
	if b.Op.Kind == graph.HeadLossGrad {
		h.hyper, dx, h.dw = in[float64](b, 3), outMatrix(b, 1), outMatrix(b, 2)
	}
	// Frozen weights over a frozen body: the loss is all there is to compute.
	grads := dx.there() || h.dw.there()
	work := slab(b.work(workspace(b.Program, b.Op)))
	rows := headRowsOf(b.Program, b.Op)
	logits := take[float32](&work, int64(rows)*int64(v))
	lse := take[float32](&work, int64(rows))
	rowLoss := take[float64](&work, int64(rows))
	accumulates := b.accum(2)
	if h.dw.there() {
		var inWork bool
		if dwType, inWork = headSum(b.Program.Buf(b.Op.Out[2].Buf).DType, n > rows); inWork {
			sum, as, dw := take[float32](&work, int64(v)*int64(c)), b.asOut(2), h.dw.u16
			h.dw, h.after = matrix{f32: sum}, &vec.Narrow{To: as, Src: sum, Dst: dw}
			if accumulates {
				h.before = &vec.Widen{From: as, Src: dw, Dst: sum}
			}
		}
	}
	h.work = work
	if b.err != nil {
		return nil
	}
	for r0 := 0; r0 < n; r0 += rows {
		r1 := min(r0+rows, n)
		m := r1 - r0
		chunk := headChunk{x: x.rows(r0, r1, c), dx: dx.rows(r0, r1, c), loss: vec.CrossEntropy[float32]{
			N: m, V: v, Logits: logits[:m*v], Targets: targets[r0:r1], LSE: lse[:m], Loss: loss, Cap: float32(graph.HeadCap(b.Op)),
		}}
		if grads {
			chunk.loss.DLogits, chunk.loss.RowLoss = chunk.loss.Logits, rowLoss[:m]
			chunk.loss.LowAs, chunk.logits = b.asIn(0), matrix{f32: chunk.loss.Logits}
		}
		forward, gradX, gradW := headSpecs(m, c, v, t, dwType, r0 > 0 || accumulates)
		chunk.forward, chunk.gradX, chunk.gradW = b.matmul(forward, nil), b.matmul(gradX, nil), b.matmul(gradW, nil)
		if b.err != nil {
			return nil
		}
		h.chunks = append(h.chunks, chunk)
	}
	pool := b.pool
	return func() error { return h.run(pool) }
}
