package vec

import (
	"sort"

	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// Squares is where the squares of a sum's addends go, exactly, as sums of blocks of 256
// elements (SqSum).
type Squares struct {
	Acc []int64 // (exact.Limbs); nil: nowhere
	// Spans are the elements that count, in order, each from a multiple of 256 on.
	Spans []Range
	At    int // element of Spans that Dst begins with, a multiple of 256
}

// add adds the squares of what is added to elements at and up of Dst.
func (q *Squares) add(acc exact.Accumulator, at int, x []float32) {
	lo := q.At + at
	hi := lo + len(x)
	first := sort.Search(len(q.Spans), func(i int) bool { return q.Spans[i].Hi > lo })
	for _, s := range q.Spans[first:] {
		if s.Lo >= hi {
			return
		}
		addSquares(acc, x[max(s.Lo, lo)-lo:min(s.Hi, hi)-lo])
	}
}

// SumParts adds R vectors that lie one after another, each as long as Dst, element by
// element in float32, and writes the sum to Dst or adds it to Dst:
//
//	Sequential   ((0 + 1) + 2) + …, and from Dst on if accumulating
//	else         SumTree's tree, which is added to Dst if accumulating
//
// The parts are float32, or 16-bit ones, which are widened. Those of ranks lie in the
// memory of each: SumLeaves.
type SumParts struct {
	Dst        []float32
	Parts      []float32 // (R, len(Dst)); nil with Half
	Half       []uint16  // (R, len(Dst)) of type As
	As         Half
	Sequential bool
	Accumulate bool
	Squares    *Squares // of what a sequential sum adds; nil, or without Acc: none

	srcs   [][]float32
	halves [][]uint16
}

// SumLeaves adds R vectors, each as long as Dst and apart from it, to Dst from left to
// right in float32: SumParts, sequential, of parts that lie anywhere.
type SumLeaves struct {
	Dst        []float32
	Srcs       [][]float32 // R of them; nil with Halves
	Halves     [][]uint16  // R of them, of type As
	As         Half
	Accumulate bool     // or Dst begins with the first
	Squares    *Squares // of what is added; nil, or without Acc: none

	parts SumParts
}

// Run adds. It allocates nothing.
func (k *SumLeaves) Run(p *pool.Pool) error {
	c := check{op: "sum of leaves"}
	if k.As != NoHalf {
		c.half("As", k.As)
		leaves(&c, len(k.Dst), k.Halves)
	} else {
		leaves(&c, len(k.Dst), k.Srcs)
	}
	if c.err != nil {
		return c.err
	}
	k.parts = SumParts{Dst: k.Dst, As: k.As, Sequential: true, Accumulate: k.Accumulate, Squares: k.Squares, srcs: k.Srcs, halves: k.Halves}
	run(p, tasks(len(k.Dst), grain), &k.parts)
	return nil
}

// leaves checks that each source has n elements.
func leaves[T float32 | uint16](c *check, n int, srcs [][]T) {
	c.sources(len(srcs))
	for i, s := range srcs {
		if c.err == nil && len(s) != n {
			c.fail("leaf %d has %d elements, want that of Dst = %d", i, len(s), n)
		}
	}
}

// partsBlock is the elements of 16-bit parts that are summed while they are in the
// first-level cache.
const partsBlock = 1 << 11

// Run adds. It allocates the first time that it has so many parts.
func (k *SumParts) Run(p *pool.Pool) error {
	c := check{op: "sum of parts"}
	n, all := len(k.Dst), len(k.Parts)
	if k.As != NoHalf {
		c.half("As", k.As)
		all = len(k.Half)
	}
	c.parts(n, all)
	if c.err != nil || n == 0 {
		return c.err
	}
	k.cut(all / n)
	run(p, tasks(n, grain), k)
	return nil
}

// parts checks the elements of all parts against those of one.
func (c *check) parts(n, all int) {
	switch {
	case n == 0 && all == 0:
	case n == 0 || all%n != 0:
		c.fail("the parts have %d elements, want a multiple of those of Dst = %d", all, n)
	default:
		c.sources(all / n)
	}
}

// cut makes the slices of r parts.
func (k *SumParts) cut(r int) {
	n := len(k.Dst)
	if k.As != NoHalf {
		k.halves = k.halves[:0]
		for i := range r {
			k.halves = append(k.halves, k.Half[i*n:(i+1)*n])
		}
		return
	}
	k.srcs = k.srcs[:0]
	for i := range r {
		k.srcs = append(k.srcs, k.Parts[i*n:(i+1)*n])
	}
}

// RunIndex is a pool.Task's; call Run.
func (k *SumParts) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.Dst))
	if q := k.Squares; q != nil && q.Acc != nil && k.Sequential {
		var limbs [exact.Limbs]int64
		acc := exact.Accumulator(limbs[:])
		for at := lo; at < hi; at += block { // the squares of a block hide the reads of the next one
			end := min(at+block, hi)
			k.sum(at, end, acc)
			for _, s := range k.srcs {
				q.add(acc, at, s[at:end])
			}
		}
		giveTo(q.Acc, acc)
		return
	}
	k.sum(lo, hi, nil)
}

// sum adds elements [lo, hi), and of 16-bit parts the squares to acc, if there is one.
func (k *SumParts) sum(lo, hi int, acc exact.Accumulator) {
	switch {
	case k.As != NoHalf:
		k.wide(lo, hi, acc)
	case k.Sequential:
		sumLeaves(k.Dst[lo:hi], k.srcs, lo, k.Accumulate)
	default:
		sumTree(k.Dst[lo:hi], k.srcs, lo, k.Accumulate)
	}
}

// sumLeaves writes or adds to dst elements lo and up of srcs, one after the other. As
// many as there are kernels for are added while the sum is in a register.
func sumLeaves(dst []float32, srcs [][]float32, lo int, acc bool) {
	for len(srcs) > 0 {
		r := min(len(srcs), len(simd.sumLeaves)-1)
		n := groups[float32](len(dst))
		if n > 0 {
			simd.sumLeaves[r][index(acc)](&dst[0], &srcs[0], lo, n)
		}
		for j := n; j < len(dst); j++ {
			dst[j] = leavesAt(srcs[:r], lo+j, dst[j], acc)
		}
		srcs, acc = srcs[r:], true
	}
}

// leavesAt is the sum of element j, which begins with the first source or, if acc, with
// sum.
func leavesAt(srcs [][]float32, j int, sum float32, acc bool) float32 {
	if !acc {
		sum, srcs = srcs[0][j], srcs[1:]
	}
	for _, s := range srcs {
		sum += s[j]
	}
	return sum
}

// add adds part r to the elements from at on, or begins their sum with it.
func (k *SumParts) add(r, at int, x []float32) {
	y := k.Dst[at : at+len(x)]
	if r == 0 && !k.Accumulate {
		copy(y, x)
		return
	}
	binary(Add, y, y, x, false)
}

// wide is RunIndex of 16-bit parts: one after the other through a block of scratch,
// or a block of each at a time for the tree.
func (k *SumParts) wide(lo, hi int, acc exact.Accumulator) {
	slots := 1
	if !k.Sequential {
		slots = len(k.halves)
	}
	block := max(partsBlock/slots, 64)
	s := borrow(slots * block)
	defer s.giveBack()
	tree := s.list
	for at := lo; at < hi; at += block {
		end := min(at+block, hi)
		tree = tree[:0]
		for r, h := range k.halves {
			slot := r % slots
			x := s.buf[slot*block:][:end-at]
			widen(k.As, x, h[at:end])
			if acc != nil {
				k.Squares.add(acc, at, x)
			}
			if k.Sequential {
				k.add(r, at, x)
			} else {
				tree = append(tree, x)
			}
		}
		if !k.Sequential {
			sumTree(k.Dst[at:end], tree, 0, k.Accumulate)
		}
	}
	s.list = tree[:0]
}

// SumParts64 is SumParts of float64 elements, which are few: losses.
type SumParts64 struct {
	Dst, Parts             []float64
	Sequential, Accumulate bool
}

// Run adds.
func (k *SumParts64) Run(*pool.Pool) error {
	c := check{op: "sum of parts"}
	n := len(k.Dst)
	c.parts(n, len(k.Parts))
	if c.err != nil || n == 0 {
		return c.err
	}
	for i := range k.Dst {
		sum := k.tree(i, 0, len(k.Parts)/n)
		if k.Sequential {
			sum = k.Parts[i]
			if k.Accumulate {
				sum = k.Dst[i] + k.Parts[i]
			}
			for at := n + i; at < len(k.Parts); at += n {
				sum += k.Parts[at]
			}
		} else if k.Accumulate {
			sum = k.Dst[i] + sum
		}
		k.Dst[i] = sum
	}
	return nil
}

// tree is the sum of element i of parts [lo, hi).
func (k *SumParts64) tree(i, lo, hi int) float64 {
	if hi-lo == 1 {
		return k.Parts[lo*len(k.Dst)+i]
	}
	p := lo + split(hi-lo)
	return k.tree(i, lo, p) + k.tree(i, p, hi)
}
