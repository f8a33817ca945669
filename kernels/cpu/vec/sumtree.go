package vec

import (
	"math/bits"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// MaxSources is the largest number of buffers that SumTree adds.
const MaxSources = 1 << 16

// SumTree adds R buffers element by element, in the binary tree over the buffers'
// indices that splits at the largest power of two below the count:
//
//	sum[0, n) = sum[0, p) + sum[p, n), p the largest power of two below n
//
// and writes it to Dst, or adds it to Dst. Each element is read and written once.
// Dst may be one of Srcs. It is the arithmetic of a sum over ranks.
type SumTree struct {
	Dst        []float32
	Srcs       [][]float32 // R of them, as long as Dst
	Accumulate bool
}

// Run adds.
func (k *SumTree) Run(p *pool.Pool) error {
	c := check{op: "sum over ranks"}
	c.sources(len(k.Srcs))
	for i, s := range k.Srcs {
		if c.err == nil && len(s) != len(k.Dst) {
			c.fail("Srcs[%d] has %d elements, want that of Dst = %d", i, len(s), len(k.Dst))
		}
	}
	return c.run(p, tasks(len(k.Dst), grain), k)
}

func (c *check) sources(n int) {
	if n < 1 || n > MaxSources {
		c.fail("%d buffers, want from 1 to %d", n, MaxSources)
	}
}

// RunIndex is a pool.Task's; call Run.
func (k *SumTree) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.Dst))
	sumTree(k.Dst[lo:hi], k.Srcs, lo, k.Accumulate)
}

// sumTree writes or adds to dst the sums of elements lo and up.
func sumTree(dst []float32, srcs [][]float32, lo int, acc bool) {
	n := 0
	switch r := len(srcs); {
	case r == 1:
	case r < len(simd.sumTree):
		if n = groups[float32](len(dst)); n > 0 {
			simd.sumTree[r][index(acc)](&dst[0], &srcs[0], lo, n)
		}
	default:
		if n = len(dst) &^ 63; fast[float32](n) {
			simd.sumTreeMany[index(acc)](&dst[0], &srcs[0], r, lo, n)
		} else {
			n = 0
		}
	}
	for j := n; j < len(dst); j++ {
		set(&dst[j], treeAt(srcs, lo+j), acc)
	}
}

// treeAt is the sum of element j.
func treeAt(srcs [][]float32, j int) float32 {
	if len(srcs) == 1 {
		return srcs[0][j]
	}
	p := split(len(srcs))
	return treeAt(srcs[:p], j) + treeAt(srcs[p:], j)
}

// split returns the largest power of two below n, for n at least 2.
func split(n int) int { return 1 << (bits.Len(uint(n-1)) - 1) }

// SumTreeAll replaces each of R buffers by their tree sum (see SumTree). Each
// element is read once and written once a buffer.
type SumTreeAll struct {
	Bufs [][]float32 // R of them, all as long as the first
}

// allGrain is the number of elements whose sum is copied out while it is in the
// first-level cache.
const allGrain = 1 << 11

// Run adds.
func (k *SumTreeAll) Run(p *pool.Pool) error {
	c := check{op: "sum over ranks"}
	c.sources(len(k.Bufs))
	for i, s := range k.Bufs {
		if c.err == nil && len(s) != len(k.Bufs[0]) {
			c.fail("Bufs[%d] has %d elements, want that of Bufs[0] = %d", i, len(s), len(k.Bufs[0]))
		}
	}
	if c.err == nil {
		run(p, tasks(len(k.Bufs[0]), grain), k)
	}
	return c.err
}

// RunIndex is a pool.Task's; call Run.
func (k *SumTreeAll) RunIndex(i int) {
	sum := k.Bufs[0]
	for lo, hi := piece(i, grain, len(sum)); lo < hi; lo += allGrain {
		end := min(lo+allGrain, hi)
		sumTree(sum[lo:end], k.Bufs, lo, false)
		for _, b := range k.Bufs[1:] {
			copy(b[lo:end], sum[lo:end])
		}
	}
}
