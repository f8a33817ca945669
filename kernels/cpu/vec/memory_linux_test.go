//go:build linux

package vec

import (
	"math"
	"math/rand/v2"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// gen makes the arguments of one case: slices of random values whose memory ends, or begins, at an
// inaccessible page.
type gen struct {
	*rand.Rand
	t    *testing.T
	wild bool // values may be NaN, infinite or subnormal
	maps [][]byte
	fix  int // one more than a dimension that every dim call returns; 0: random
}

func newGen(t *testing.T, seed uint64, wild bool) *gen {
	return &gen{Rand: rand.New(rand.NewPCG(seed, 99)), t: t, wild: wild}
}

func (g *gen) free() {
	for _, m := range g.maps {
		require.NoError(g.t, syscall.Munmap(m))
	}
	g.maps = nil
}

// guarded returns n values of T between guard pages, touching one of them.
func guarded[T any](g *gen, n int) []T {
	page := syscall.Getpagesize()
	var z T
	size := n * int(unsafe.Sizeof(z))
	body := (size + page - 1) / page * page
	m, err := syscall.Mmap(-1, 0, body+2*page, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	require.NoError(g.t, err)
	require.NoError(g.t, syscall.Mprotect(m[:page], syscall.PROT_NONE))
	require.NoError(g.t, syscall.Mprotect(m[page+body:], syscall.PROT_NONE))
	g.maps = append(g.maps, m)
	if n == 0 {
		return []T{}
	}
	off := page
	if g.IntN(4) > 0 {
		off = page + body - size
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&m[off])), n)
}

func (g *gen) value() float32 {
	if g.wild {
		switch g.IntN(40) {
		case 0:
			return float32(math.NaN())
		case 1:
			return float32(math.Inf(1 - 2*g.IntN(2)))
		case 2:
			return math.Float32frombits(g.Uint32() & 0x807fffff) // subnormal or zero
		case 3:
			return math.Float32frombits(g.Uint32())
		case 4:
			return float32(math.Copysign(0, g.Float64()-0.5))
		case 5, 6:
			return float32(g.NormFloat64() * 60)
		}
	}
	return float32(g.NormFloat64() * 2)
}

// floats returns n random values.
func (g *gen) floats(n int) []float32 {
	x := guarded[float32](g, n)
	for i := range x {
		x[i] = g.value()
	}
	return x
}

// positive returns n random values above 0.
func (g *gen) positive(n int) []float32 {
	x := guarded[float32](g, n)
	for i := range x {
		x[i] = float32(g.Float64() + 0.01)
	}
	return x
}

// dim returns a dimension of at most max, often small, odd or near the size of a register.
func (g *gen) dim(max int) int {
	if g.fix > 0 {
		return g.fix - 1
	}
	n := 1 + g.IntN(max)
	switch g.IntN(4) {
	case 0:
		n = 1 + g.IntN(20)
	case 1:
		n = 16 * (1 + g.IntN(5))
	}
	return min(n, max)
}

// classes returns n targets in [low, v).
func (g *gen) classes(n, low, v int) []int32 {
	x := guarded[int32](g, n)
	for i := range x {
		x[i] = int32(low + g.IntN(v-low))
	}
	return x
}
