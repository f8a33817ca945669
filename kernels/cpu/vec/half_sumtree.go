package vec

import "github.com/spillway-ml/spillway/kernels/cpu/pool"

// HalfSumTree is SumTree, or with All SumTreeAll, of 16-bit elements: their
// float32 values are added in the tree's order, to the value of Dst if
// accumulating, and the sum is rounded once. It computes on the caller's
// goroutine and keeps scratch for its number of buffers.
type HalfSumTree struct {
	As         Half
	Dst        []uint16   // unused with All
	Srcs       [][]uint16 // as long as Dst; Dst may be one of them
	Accumulate bool
	All        bool // the sum replaces every one of Srcs

	wide [][]float32
	sum  []float32
}

// halfSumBlock is the elements that are widened of each buffer at a time.
const halfSumBlock = 1 << 10

// Run adds. It allocates the first time that it has so many buffers.
func (k *HalfSumTree) Run(*pool.Pool) error {
	c := check{op: "sum over ranks"}
	c.half("As", k.As)
	c.sources(len(k.Srcs))
	n := len(k.Dst)
	if k.All && c.err == nil {
		n = len(k.Srcs[0])
	}
	for i, s := range k.Srcs {
		if c.err == nil && len(s) != n {
			c.fail("Srcs[%d] has %d elements, want that of the others = %d", i, len(s), n)
		}
	}
	if c.err != nil {
		return c.err
	}
	if len(k.wide) != len(k.Srcs) {
		k.wide = make([][]float32, len(k.Srcs))
		for i := range k.wide {
			k.wide[i] = make([]float32, halfSumBlock)
		}
		k.sum = make([]float32, halfSumBlock)
	}
	for lo := 0; lo < n; lo += halfSumBlock {
		k.block(lo, min(lo+halfSumBlock, n))
	}
	return nil
}

func (k *HalfSumTree) block(lo, hi int) {
	for i, s := range k.Srcs {
		k.wide[i] = k.wide[i][:hi-lo]
		widen(k.As, k.wide[i], s[lo:hi])
	}
	sum := k.sum[:hi-lo]
	if k.All {
		sumTree(sum, k.wide, 0, false)
		for _, s := range k.Srcs {
			narrow(k.As, s[lo:hi], sum)
		}
		return
	}
	if k.Accumulate {
		widen(k.As, sum, k.Dst[lo:hi])
	}
	sumTree(sum, k.wide, 0, k.Accumulate)
	narrow(k.As, k.Dst[lo:hi], sum)
}
