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
// A chunk is a whole number of the product's K-blocks, so dw's blocks are those
// of one product over all rows, and the chain over chunks is the product's own:
// neither result depends on the size of a chunk.
type headLoss struct {
	chunks []headChunk
	w      []float32 // (V, C)
	dw     []float32 // (V, C) or nil
	hyper  []float64 // nil: no gradients
	work   []byte
}

type headChunk struct {
	x, dx   []float32 // (rows, C); dx nil if not wanted
	loss    vec.CrossEntropy[float32]
	forward *gemm.Product
	gradX   *gemm.Product
	gradW   *gemm.Product
}

func (h *headLoss) run(p *pool.Pool) error {
	for i := range h.chunks {
		c := &h.chunks[i]
		if err := c.forward.Run(p, c.x, h.w, c.loss.Logits, nil, h.work); err != nil {
			return err
		}
		if h.hyper != nil {
			c.loss.Scale = lossScale(h.hyper)
		}
		if err := c.loss.Run(p); err != nil {
			return err
		}
		if c.dx != nil {
			if err := c.gradX.Run(p, c.loss.DLogits, h.w, c.dx, nil, h.work); err != nil {
				return err
			}
		}
		if h.dw != nil {
			if err := c.gradW.Run(p, c.loss.DLogits, c.x, h.dw, nil, h.work); err != nil {
				return err
			}
		}
	}
	return nil
}

// headSpecs are the products of a chunk of rows.
func headSpecs(rows, c, v int, accumulate bool) (forward, gradX, gradW gemm.Spec) {
	forward = gemm.Forward(rows, c, v, true)
	gradX = gemm.InputGradient(rows, c, v, true)
	gradW = gemm.WeightGradient(rows, c, v, true)
	gradW.Accumulate = accumulate
	return forward, gradX, gradW
}

func bindHeadLoss(b *binding) func() error {
	n, c := b.inShape(0)
	v, _ := b.inShape(1)
	x, targets, loss := in[float32](b, 0), in[int32](b, 2), out[float64](b, 0)
	h := &headLoss{w: in[float32](b, 1)}
	var dx []float32
	if b.Op.Kind == graph.HeadLossGrad {
		h.hyper, dx, h.dw = in[float64](b, 3), out[float32](b, 1), out[float32](b, 2)
	}
	// Frozen weights over a frozen body: the loss is all there is to compute.
	grads := dx != nil || h.dw != nil
	work := slab(b.work(workspace(b.Program, b.Op)))
	rows := min(n, headRows)
	logits := take[float32](&work, int64(rows)*int64(v))
	lse := take[float32](&work, int64(rows))
	rowLoss := take[float64](&work, int64(rows))
	h.work = work
	if b.err != nil {
		return nil
	}
	for r0 := 0; r0 < n; r0 += headRows {
		r1 := min(r0+headRows, n)
		m := r1 - r0
		chunk := headChunk{x: x[r0*c : r1*c], loss: vec.CrossEntropy[float32]{
			N: m, V: v, Logits: logits[:m*v], Targets: targets[r0:r1], LSE: lse[:m], Loss: loss,
		}}
		if grads {
			chunk.loss.DLogits, chunk.loss.RowLoss = chunk.loss.Logits, rowLoss[:m]
		}
		if dx != nil {
			chunk.dx = dx[r0*c : r1*c]
		}
		forward, gradX, gradW := headSpecs(m, c, v, r0 > 0 || b.accum(2))
		var err [3]error
		chunk.forward, err[0] = gemm.New(forward)
		chunk.gradX, err[1] = gemm.New(gradX)
		chunk.gradW, err[2] = gemm.New(gradW)
		for _, e := range err {
			if e != nil {
				b.failf("%w", e)
				return nil
			}
		}
		h.chunks = append(h.chunks, chunk)
	}
	pool := b.pool
	return func() error { return h.run(pool) }
}
