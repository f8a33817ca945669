package vec

import (
	"math"

	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// Dropout keeps each element with probability 1-P, scaled by 1/(1-P), and zeroes
// the others. Which ones is a pure function of the seed, the site, the sample's
// global index and the element's index in its sample, whatever the split over
// ranks, so the gradient is the same kernel on DY. Y may be X.
//
// The random word of element e is word e/16 mod 4 of Philox4x32-10 with the
// counter (e/64·16 + e mod 16, site, sample low, sample high) and the key (seed
// low, seed high); an element is kept if its word is at least P·2^32.
type Dropout[T num.Float] struct {
	X, Y   []T     // whole samples, Elems elements each
	Elems  int     // elements of one sample, at most 2^34
	P      float64 // in [0, 1)
	Seed   uint64
	Site   uint32 // tells apart the dropouts of a model
	Sample uint64 // global index of X's first sample; the next ones follow
}

// Run computes the dropout.
func (k *Dropout[T]) Run(p *pool.Pool) error {
	c := check{op: "dropout"}
	if k.Elems < 1 || k.Elems > 1<<34 {
		c.fail("Elems is %d, want from 1 to 2^34", k.Elems)
	}
	if !(k.P >= 0 && k.P < 1) {
		c.fail("P is %g, want in [0, 1)", k.P)
	}
	c.size1("Y", "that of X", len(k.Y), len(k.X))
	if c.err == nil && len(k.X)%k.Elems != 0 {
		c.fail("X has %d elements, want whole samples of Elems = %d", len(k.X), k.Elems)
	}
	if c.err == nil {
		run(p, len(k.X)/k.Elems*tasks(k.Elems, grain), k)
	}
	return c.err
}

// RunIndex is a pool.Task's; call Run.
func (k *Dropout[T]) RunIndex(i int) {
	per := tasks(k.Elems, grain)
	s := i / per
	lo, hi := piece(i%per, grain, k.Elems)
	base := s * k.Elems
	key := dropKey{
		counter: uint32(lo / 4), site: k.Site, sample: k.Sample + uint64(s), seed: k.Seed,
		drop: uint32(math.Ldexp(k.P, 32)),
	}
	drop(k.Y[base+lo:base+hi], k.X[base+lo:base+hi], &key, T(1/(1-k.P)))
}

// dropKey is what the random words of consecutive elements depend on. The first
// element is a multiple of 64.
type dropKey struct {
	counter, site uint32
	sample, seed  uint64
	drop          uint32 // words below are dropped
}

func drop[T num.Float](y, x []T, k *dropKey, scale T) {
	key := [2]uint32{uint32(k.seed), uint32(k.seed >> 32)}
	for o := 0; o < len(x); o += 64 {
		for l := range min(16, len(x)-o) {
			r := num.Philox([4]uint32{k.counter + uint32(o/4+l), k.site, uint32(k.sample), uint32(k.sample >> 32)}, key)
			for j, w := range r {
				e := o + 16*j + l
				switch {
				case e >= len(x):
				case w >= k.drop:
					y[e] = T(x[e] * scale)
				default:
					y[e] = 0
				}
			}
		}
	}
}
