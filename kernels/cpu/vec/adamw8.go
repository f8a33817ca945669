package vec

import (
	"math"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// AdamW8 is AdamW whose moments rest in 8 bits: a block's moments are read, the
// float32 update is done, and they are written with a new scale. M and V are codes
// of P's elements, M of the signed map, V of the unsigned one; MScale and VScale have
// a scale for each 256 of them. P begins at a block.
type AdamW8 struct {
	P, G         []float32
	G16          Half16 // the gradient, if G is nil
	M, V         []byte
	MScale       []float32
	VScale       []float32
	GradScale    float32
	LR           float64
	Beta1, Beta2 float64
	Eps          float64
	Decay        float64
	BC1, BC2     float64
	Low          []uint16 // nil, or as long as P
	LowAs        Half

	s adamScalars
}

// Run updates.
func (k *AdamW8) Run(p *pool.Pool) error {
	c := check{op: "8-bit adamw"}
	c.gradient("G", k.G, &k.G16, len(k.P))
	c.size1("M", "that of P", len(k.M), len(k.P))
	c.size1("V", "that of P", len(k.V), len(k.P))
	c.size1("MScale", "the blocks of P", len(k.MScale), Q8Blocks(len(k.P)))
	c.size1("VScale", "the blocks of P", len(k.VScale), Q8Blocks(len(k.P)))
	if !(k.BC1 > 0 && k.BC2 > 0) {
		c.fail("bias corrections BC1 = %g, BC2 = %g, want above 0", k.BC1, k.BC2)
	}
	if k.Low != nil {
		c.half("LowAs", k.LowAs)
		c.size1("Low", "that of P", len(k.Low), len(k.P))
	}
	if c.err != nil {
		return c.err
	}
	k.s = adamScalars{
		gradScale: k.GradScale,
		keep:      float32(1 - float64(k.LR*k.Decay)),
		beta1:     float32(k.Beta1), rest1: float32(1 - k.Beta1),
		beta2: float32(k.Beta2), rest2: float32(1 - k.Beta2),
		root2: float32(1 / math.Sqrt(k.BC2)),
		eps:   float32(k.Eps),
		step:  float32(k.LR / k.BC1),
	}
	run(p, tasks(len(k.P), grain), k)
	return nil
}

// RunIndex is a pool.Task's; call Run.
func (k *AdamW8) RunIndex(i int) {
	s := borrow(3 * Q8Block)
	defer s.giveBack()
	lo, hi := piece(i, grain, len(k.P))
	for ; lo < hi; lo += Q8Block {
		end := min(lo+Q8Block, hi)
		n := end - lo
		m, v, g := s.buf[:n], s.buf[Q8Block:][:n], s.buf[2*Q8Block:][:n]
		block := lo / Q8Block
		Q8Signed.Dequantize(m, k.M[lo:end], k.MScale[block])
		Q8Unsigned.Dequantize(v, k.V[lo:end], k.VScale[block])
		if k.G16.X != nil {
			widen(k.G16.As, g, k.G16.X[lo:end])
		} else {
			g = k.G[lo:end]
		}
		if k.Low == nil {
			adamw(k.P[lo:end], g, m, v, nil, NoHalf, &k.s)
		} else {
			adamw(k.P[lo:end], g, m, v, k.Low[lo:end], k.LowAs, &k.s)
		}
		k.MScale[block] = Q8Signed.Quantize(k.M[lo:end], m)
		k.VScale[block] = Q8Unsigned.Quantize(k.V[lo:end], v)
	}
}
