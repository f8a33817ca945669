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
	P, G   []float32
	G16    Half16 // the gradient, if G is nil
	M, V   []byte
	MScale []float32
	VScale []float32
	AdamStep
	Low   []uint16 // nil, or as long as P
	LowAs Half

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
	k.AdamStep.check(&c)
	if k.Low != nil {
		c.half("LowAs", k.LowAs)
		c.size1("Low", "that of P", len(k.Low), len(k.P))
	}
	k.s = k.factors()
	return c.run(p, tasks(len(k.P), grain), k)
}

// adam8Scalars are what the assembly reads for a block, in its order, and what it
// writes: the bits of the largest magnitudes of the new moments. The inverses are of the
// block before; the rest is scratch.
type adam8Scalars struct {
	adamScalars
	mFactor, vFactor   float32 // scales times betas
	mTop, vTop         uint32
	mInverse, vInverse float32 // of its scales, a quarter
	_                  [4][8]float32
}

// RunIndex is a pool.Task's; call Run.
func (k *AdamW8) RunIndex(i int) {
	s := borrow(5 * Q8Block)
	defer s.giveBack()
	s.adam8.adamScalars = k.s
	lo, hi := piece(i, grain, len(k.P))
	behind := false
	for ; lo < hi; lo += Q8Block {
		behind = k.block(s, lo, min(lo+Q8Block, hi), behind)
	}
	if behind {
		k.write(s, lo-Q8Block, lo)
	}
}

// moments8 are a block's new moments in scratch: blocks take turns, so that those of the
// one before are there while the next is updated.
func moments8(s *scratch, lo, n int) (m, v []float32) {
	turn := s.buf[lo/Q8Block%2*2*Q8Block:]
	return turn[:n], turn[Q8Block:][:n]
}

// block updates a block. What of it the assembly takes is read, updated and measured in
// one sweep. Where behind says so, the codes of the block before are still to be
// written: the assembly does it beside the update, so that work on bytes hides behind
// divisions and roots. It tells whether this block's are left to the next in turn.
func (k *AdamW8) block(s *scratch, lo, hi int, behind bool) bool {
	n := hi - lo
	m, v := moments8(s, lo, n)
	g := k.gradient(s.buf[4*Q8Block:][:n], lo, hi)
	block, low, as := lo/Q8Block, k.Low, NoHalf
	if low != nil {
		low, as = low[lo:hi], k.LowAs
	}
	a := &s.adam8
	a.mFactor, a.vFactor, a.mTop, a.vTop = float32(k.MScale[block]*a.beta1), float32(k.VScale[block]*a.beta2), 0, 0
	both := simd.adamw8Behind[as]
	switch {
	case behind && n == Q8Block && a.ordinary():
		before, _ := moments8(s, lo-Q8Block, Q8Block)
		both(ptr(k.P[lo:]), ptr(g), &k.M[lo], &k.V[lo], ptr(m), ptr(before), &a.gradScale,
			unsafe.SliceData(low), &Q8Signed.t.slope[0], &Q8Unsigned.t.slope[0])
	default:
		if behind {
			k.write(s, lo-Q8Block, lo)
		}
		k.update(a, g, m, v, lo, hi, low, as)
	}
	if both != nil && n == Q8Block && ordinary8(a.mTop) && ordinary8(a.vTop) {
		k.MScale[block], k.VScale[block] = math.Float32frombits(a.mTop), math.Float32frombits(a.vTop)
		a.mInverse, a.vInverse = 1/k.MScale[block]/4, 1/k.VScale[block]/4
		return true
	}
	k.MScale[block] = Q8Signed.write(k.M[lo:hi], m, a.mTop)
	k.VScale[block] = Q8Unsigned.write(k.V[lo:hi], v, a.vTop)
	return false
}

// ordinary tells whether the tables of both maps may take their factors.
func (a *adam8Scalars) ordinary() bool { return !q8Tiny(a.mFactor) && !q8Tiny(a.vFactor) }

// ordinary8 tells whether the inverse of a scale with these bits may multiply at once.
func ordinary8(top uint32) bool {
	if top == 0 || top >= 0xff<<23 {
		return false
	}
	up, _ := q8Inverse(math.Float32frombits(top))
	return up == 1
}

// write writes the codes of a block whose scales are known.
func (k *AdamW8) write(s *scratch, lo, hi int) {
	m, v := moments8(s, lo, hi-lo)
	Q8Signed.write(k.M[lo:hi], m, math.Float32bits(k.MScale[lo/Q8Block]))
	Q8Unsigned.write(k.V[lo:hi], v, math.Float32bits(k.VScale[lo/Q8Block]))
}

// update updates a block alone, into m and v.
func (k *AdamW8) update(a *adam8Scalars, g, m, v []float32, lo, hi int, low []uint16, as Half) {
	n := hi - lo
	done := 0
	if a.ordinary() {
		done = groups[float32](n)
	}
	if done > 0 {
		simd.adamw8[as](ptr(k.P[lo:]), ptr(g), &k.M[lo], &k.V[lo], ptr(m), ptr(v), done, &a.gradScale,
			unsafe.SliceData(low), &Q8Signed.t.slope[0], &Q8Unsigned.t.slope[0])
	}
	if done == n {
		return
	}
	Q8Signed.decayed(m[done:], k.M[lo+done:hi], a.mFactor)
	Q8Unsigned.decayed(v[done:], k.V[lo+done:hi], a.vFactor)
	decayed := k.s
	decayed.beta1, decayed.beta2 = 1, 1
	if low != nil {
		low = low[done:]
	}
	adamw(k.P[lo+done:hi], g[done:], m[done:], v[done:], low, as, &decayed)
	for i := done; i < n; i++ {
		a.mTop = max(a.mTop, math.Float32bits(m[i])&^(1<<31))
		a.vTop = max(a.vTop, math.Float32bits(v[i])&^(1<<31))
	}
}

// gradient returns the gradient of a block, widened into to if it has 16 bits.
func (k *AdamW8) gradient(to []float32, lo, hi int) []float32 {
	if k.G16.X == nil {
		return k.G[lo:hi]
	}
	widen(k.G16.As, to, k.G16.X[lo:hi])
	return to
}
