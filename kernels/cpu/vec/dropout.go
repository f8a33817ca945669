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

	rounds roundKeys
}

// Run computes the dropout.
func (k *Dropout[T]) Run(p *pool.Pool) error {
	c := check{op: "dropout"}
	c.dropout(k.Elems, k.P, len(k.X), len(k.Y))
	if c.err == nil {
		k.rounds.schedule(uint32(k.Seed), uint32(k.Seed>>32))
		run(p, len(k.X)/k.Elems*tasks(k.Elems, grain), k)
	}
	return c.err
}

// dropout checks a dropout of x elements into y.
func (c *check) dropout(elems int, p float64, x, y int) {
	if elems < 1 || elems > 1<<34 {
		c.fail("Elems is %d, want from 1 to 2^34", elems)
	}
	if !(p >= 0 && p < 1) {
		c.fail("P is %g, want in [0, 1)", p)
	}
	c.size1("Y", "that of X", y, x)
	if c.err == nil && x%elems != 0 {
		c.fail("X has %d elements, want whole samples of Elems = %d", x, elems)
	}
}

// RunIndex is a pool.Task's; call Run.
func (k *Dropout[T]) RunIndex(i int) {
	per := tasks(k.Elems, grain)
	s := i / per
	lo, hi := piece(i%per, grain, k.Elems)
	base, sample := s*k.Elems, k.Sample+uint64(s)
	counter := [4]uint32{uint32(lo / 4), k.Site, uint32(sample), uint32(sample >> 32)}
	drop(k.Y[base+lo:base+hi], k.X[base+lo:base+hi], counter, &k.rounds, uint32(math.Ldexp(k.P, 32)), T(1/(1-k.P)))
}

// roundKeys are the keys of Philox's rounds; the first is the key itself.
type roundKeys [10][2]uint32

func (r *roundKeys) schedule(k0, k1 uint32) {
	for i := range r {
		r[i] = [2]uint32{k0, k1}
		k0 += 0x9E3779B9
		k1 += 0xBB67AE85
	}
}

// drop zeroes the elements whose random word is below the threshold and scales
// the others. The counter is that of the first element, a multiple of 64.
func drop[T num.Float](y, x []T, counter [4]uint32, keys *roundKeys, threshold uint32, scale T) {
	done := 0
	if n := len(x) &^ 63; fast[T](n) {
		simd.drop(ptr(y), ptr(x), n, &keys[0][0], counter[0], counter[1], counter[2], counter[3], threshold, float32(scale))
		done = n
	}
	for o := done; o < len(x); o += 64 {
		for l := range min(16, len(x)-o) {
			c := counter
			c[0] += uint32(o/4 + l)
			for j, w := range num.Philox(c, keys[0]) {
				e := o + 16*j + l
				switch {
				case e >= len(x):
				case w >= threshold:
					y[e] = T(x[e] * scale)
				default:
					y[e] = 0
				}
			}
		}
	}
}
