package vec

import (
	"fmt"
	"math/bits"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

const (
	// grain is the number of elements of one task of an elementwise kernel: large
	// against the cost of handing out a task, small against the second-level cache.
	grain = 1 << 14
	// colGrain is the number of columns of one task of a column sum.
	colGrain = 64
)

// run computes n tasks on p; a nil pool computes on the caller's goroutine.
func run(p *pool.Pool, n int, t pool.Task) {
	if p != nil {
		p.Run(n, t)
		return
	}
	for i := range n {
		t.RunIndex(i)
	}
}

// tasks returns the number of pieces of size that cover n.
func tasks(n, size int) int { return (n + size - 1) / size }

// piece returns the i-th piece of size of [0, n).
func piece(i, size, n int) (lo, hi int) { return i * size, min((i+1)*size, n) }

// rowGrain returns the number of rows of one task over rows of the given width.
func rowGrain(cols int) int { return max(1, grain/max(cols, 1)) }

// check collects the first thing wrong with a kernel's arguments.
type check struct {
	op  string
	err error
}

// run computes n tasks on p, unless something is wrong.
func (c *check) run(p *pool.Pool, n int, t pool.Task) error {
	if c.err == nil {
		run(p, n, t)
	}
	return c.err
}

// fail records an error that starts with the kernel's name.
func (c *check) fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf("%s: %s", c.op, fmt.Sprintf(format, args...))
	}
}

// dim refuses a negative dimension.
func (c *check) dim(name string, v int) {
	if v < 0 {
		c.fail("%s is %d, want at least 0", name, v)
	}
}

// positive refuses a dimension below 1.
func (c *check) positive(name string, v int) {
	if v < 1 {
		c.fail("%s is %d, want at least 1", name, v)
	}
}

// size1 refuses a length other than a.
func (c *check) size1(name, shape string, got, a int) {
	if c.err == nil && got != a {
		c.fail("%s has %d elements, want %s = %d", name, got, shape, a)
	}
}

// size2 refuses a length other than a·b.
func (c *check) size2(name, shape string, got, a, b int) {
	if c.err != nil {
		return
	}
	if n, ok := product(a, b); !ok || got != n {
		c.fail("%s has %d elements, want %s = (%d, %d)", name, got, shape, a, b)
	}
}

// size4 refuses a length other than a·b·h·d.
func (c *check) size4(name, shape string, got, a, b, h, d int) {
	if c.err != nil {
		return
	}
	n, ok := product(a, b)
	m, ok2 := product(h, d)
	n, ok3 := product(n, m)
	if !ok || !ok2 || !ok3 || got != n {
		c.fail("%s has %d elements, want %s = (%d, %d, %d, %d)", name, got, shape, a, b, h, d)
	}
}

// product multiplies dimensions; false where the product is no int.
func product(a, b int) (int, bool) {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	return int(lo), a >= 0 && b >= 0 && hi == 0 && int(lo) >= 0
}
