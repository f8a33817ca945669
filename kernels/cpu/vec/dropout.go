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
	X, Y   []T  // of consecutive samples, Elems elements each
	As     Half // the type of 16-bit elements, which are given as X16 and Y16; else NoHalf
	X16    []uint16
	Y16    []uint16
	Elems  int     // elements of one sample, at most 2^34
	First  int     // where X begins, counted from the first element of Sample
	P      float64 // in [0, 1)
	Seed   uint64
	Site   uint32 // tells apart the dropouts of a model
	Sample uint64 // global index of a sample; the next ones follow

	rounds roundKeys
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
	if k.First < 0 {
		c.fail("First is %d, want at least 0", k.First)
	}
	c.size1("Y", "that of X", len(k.Y)+len(k.Y16), k.len())
	if k.As != NoHalf {
		c.half("As", k.As)
	}
	if c.err == nil {
		k.rounds.schedule(uint32(k.Seed), uint32(k.Seed>>32))
		run(p, dropTasks(k.First, k.len(), k.Elems), k)
	}
	return c.err
}

// len is the number of elements.
func (k *Dropout[T]) len() int { return max(len(k.X), len(k.X16)) }

// dropTasks returns the number of tasks for n elements from first on, of samples of elems each.
func dropTasks(first, n, elems int) int {
	return (tasks(first+n, elems) - first/elems) * tasks(elems, grain)
}

// dropPiece returns what the i-th task has: elements [lo, hi) of a sample, which begins at element
// begin of the n. There may be none.
func dropPiece(i, first, n, elems int) (sample uint64, begin, lo, hi int) {
	per := tasks(elems, grain)
	s := first/elems + i/per
	begin = s*elems - first
	lo, hi = piece(i%per, grain, elems)
	return uint64(s), begin, max(lo, -begin), min(hi, n-begin)
}

// RunIndex is a pool.Task's; call Run.
func (k *Dropout[T]) RunIndex(i int) {
	sample, begin, lo, hi := dropPiece(i, k.First, k.len(), k.Elems)
	if lo >= hi {
		return
	}
	sample += k.Sample
	threshold := uint32(math.Ldexp(k.P, 32))
	counter := [4]uint32{uint32(lo / 64 * 16), k.Site, uint32(sample), uint32(sample >> 32)}
	if k.As == NoHalf {
		drop(k.Y[begin+lo:begin+hi], k.X[begin+lo:begin+hi], lo%64, counter, &k.rounds, threshold, T(1/(1-k.P)))
		return
	}
	s := borrow(halfBlock)
	defer s.giveBack()
	for lo < hi {
		skip := lo % 64
		to := min(lo-skip+halfBlock, hi) // a multiple of 64, if not the end
		a, b := begin+lo, begin+to
		x := s.buf[:b-a]
		widen(k.As, x, k.X16[a:b])
		counter[0] = uint32(lo / 64 * 16)
		drop(x, x, skip, counter, &k.rounds, threshold, float32(1/(1-k.P)))
		narrow(k.As, k.Y16[a:b], x)
		lo = to
	}
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
// the others. The counter is that of a block of 64 elements, of which x begins
// with the one at index skip.
func drop[T num.Float](y, x []T, skip int, counter [4]uint32, keys *roundKeys, threshold uint32, scale T) {
	if skip > 0 {
		n := min(64-skip, len(x))
		dropBlocks(y[:n], x[:n], skip, counter, keys[0], threshold, scale)
		y, x, counter[0] = y[n:], x[n:], counter[0]+16
	}
	if n := len(x) &^ 63; fast[T](n) {
		simd.drop(ptr(y), ptr(x), n, &keys[0][0], counter[0], counter[1], counter[2], counter[3], threshold, float32(scale))
		y, x, counter[0] = y[n:], x[n:], counter[0]+uint32(n/4)
	}
	dropBlocks(y, x, 0, counter, keys[0], threshold, scale)
}

// dropBlocks is drop in plain Go.
func dropBlocks[T num.Float](y, x []T, skip int, counter [4]uint32, key [2]uint32, threshold uint32, scale T) {
	for o := 0; o < skip+len(x); o += 64 {
		for l := range min(16, skip+len(x)-o) {
			c := counter
			c[0] += uint32(o/4 + l)
			for j, w := range num.Philox(c, key) {
				e := o + 16*j + l - skip
				switch {
				case e < 0 || e >= len(x):
				case w >= threshold:
					y[e] = T(x[e] * scale)
				default:
					y[e] = 0
				}
			}
		}
	}
}
