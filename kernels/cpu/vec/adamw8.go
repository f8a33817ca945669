package vec

import (
	"math"
	"unsafe"

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
	k.s = adamFactors(k.GradScale, k.LR, k.Decay, k.Beta1, k.Beta2, k.Eps, k.BC1, k.BC2)
	run(p, tasks(len(k.P), grain), k)
	return nil
}

// adam8Scalars are what the assembly reads for a block, in its order, and what it
// writes: the bits of the largest magnitudes of the new moments.
type adam8Scalars struct {
	adamScalars
	mScale, vScale float32
	mTop, vTop     uint32
}

// RunIndex is a pool.Task's; call Run.
func (k *AdamW8) RunIndex(i int) {
	s := borrow(3 * Q8Block)
	defer s.giveBack()
	s.adam8.adamScalars = k.s
	lo, hi := piece(i, grain, len(k.P))
	for ; lo < hi; lo += Q8Block {
		k.block(s, lo, min(lo+Q8Block, hi))
	}
}

// block updates a block. What of it the assembly takes is read, updated and measured in
// one sweep, so that the work on bytes hides behind divisions and roots.
func (k *AdamW8) block(s *scratch, lo, hi int) {
	n := hi - lo
	m, v := s.buf[:n], s.buf[Q8Block:][:n]
	g := k.gradient(s.buf[2*Q8Block:][:n], lo, hi)
	block, low, as := lo/Q8Block, k.Low, NoHalf
	if low != nil {
		low, as = low[lo:hi], k.LowAs
	}
	done := groups[float32](n)
	a := &s.adam8
	a.mScale, a.vScale, a.mTop, a.vTop = k.MScale[block], k.VScale[block], 0, 0
	if done > 0 {
		simd.adamw8[as](ptr(k.P[lo:]), ptr(g), &k.M[lo], &k.V[lo], ptr(m), ptr(v), done, &a.gradScale,
			unsafe.SliceData(low), &Q8Signed.t.slope[0], &Q8Unsigned.t.slope[0])
	}
	if done < n {
		Q8Signed.Dequantize(m[done:], k.M[lo+done:hi], a.mScale)
		Q8Unsigned.Dequantize(v[done:], k.V[lo+done:hi], a.vScale)
		if low != nil {
			low = low[done:]
		}
		adamw(k.P[lo+done:hi], g[done:], m[done:], v[done:], low, as, &k.s)
		for i := done; i < n; i++ {
			a.mTop = max(a.mTop, math.Float32bits(m[i])&^(1<<31))
			a.vTop = max(a.vTop, math.Float32bits(v[i])&^(1<<31))
		}
	}
	k.MScale[block] = Q8Signed.write(k.M[lo:hi], m, a.mTop)
	k.VScale[block] = Q8Unsigned.write(k.V[lo:hi], v, a.vTop)
}

// gradient returns the gradient of a block, widened into to if it has 16 bits.
func (k *AdamW8) gradient(to []float32, lo, hi int) []float32 {
	if k.G16.X == nil {
		return k.G[lo:hi]
	}
	widen(k.G16.As, to, k.G16.X[lo:hi])
	return to
}
