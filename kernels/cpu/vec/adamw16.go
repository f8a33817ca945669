package vec

import (
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// AdamW16 is AdamW whose parameters and moments rest in bf16, without a master: they
// are widened, updated in float32 and rounded stochastically (Zamirai et al.,
// "Revisiting BFloat16 Training", 2020), so that updates smaller than a bf16's last
// place are not lost in the mean. The random bits are those of num.Rounding for the
// parameter's element First+i.
type AdamW16 struct {
	P, M, V []uint16
	G       []float32
	G16     Half16 // the gradient, if G is nil
	AdamStep

	Seed, Stream, Update uint64
	First                int64 // even

	s adamScalars
}

// Run updates.
func (k *AdamW16) Run(p *pool.Pool) error {
	c := check{op: "bf16 adamw"}
	c.gradient("G", k.G, &k.G16, len(k.P))
	c.size1("M", "that of P", len(k.M), len(k.P))
	c.size1("V", "that of P", len(k.V), len(k.P))
	k.AdamStep.check(&c)
	if k.First < 0 || k.First%2 != 0 {
		c.fail("First is %d, want an even number", k.First)
	}
	k.s = k.factors()
	return c.run(p, tasks(len(k.P), grain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *AdamW16) RunIndex(i int) {
	const block = halfBlock
	s := borrow(4 * block)
	defer s.giveBack()
	lo, hi := piece(i, grain, len(k.P))
	for ; lo < hi; lo += block {
		end := min(lo+block, hi)
		n := end - lo
		p, m, v, g := s.buf[:n], s.buf[block:][:n], s.buf[2*block:][:n], s.buf[3*block:][:n]
		widen(BF16, p, k.P[lo:end])
		widen(BF16, m, k.M[lo:end])
		widen(BF16, v, k.V[lo:end])
		if k.G16.X != nil {
			widen(k.G16.As, g, k.G16.X[lo:end])
		} else {
			g = k.G[lo:end]
		}
		adamw(p, g, m, v, nil, NoHalf, &k.s)
		for j := 0; j < n; j += 2 {
			even, odd := num.Rounding(k.Seed, k.Stream, uint64(k.First+int64(lo+j))/2, k.Update)
			k.P[lo+j], k.M[lo+j], k.V[lo+j] = num.StochasticBF16(p[j], even[0]), num.StochasticBF16(m[j], even[1]), num.StochasticBF16(v[j], even[2])
			if j+1 < n {
				k.P[lo+j+1], k.M[lo+j+1], k.V[lo+j+1] = num.StochasticBF16(p[j+1], odd[0]), num.StochasticBF16(m[j+1], odd[1]), num.StochasticBF16(v[j+1], odd[2])
			}
		}
	}
}
