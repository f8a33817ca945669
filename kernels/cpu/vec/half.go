package vec

import (
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// 16-bit forms: what a kernel reads is widened a block at a time into scratch
// that stays in the first-level cache, the float32 functions of this package
// compute on it, and what they wrote is rounded once. Memory sees 16 bits alone.

// Kernel is a kernel of this package.
type Kernel interface{ Run(p *pool.Pool) error }

// Steps are kernels that run one after the other.
type Steps []Kernel

// Run runs them.
func (s Steps) Run(p *pool.Pool) error {
	for _, k := range s {
		if err := k.Run(p); err != nil {
			return err
		}
	}
	return nil
}

// halfBlock is the elements of an operand that are widened at a time: 8 KiB of
// float32, so that the few operands of a kernel share the first-level cache.
const halfBlock = 1 << 11

// scratch is a goroutine's float32 copies of 16-bit operands.
type scratch struct {
	buf   []float32
	list  [][]float32 // of pieces of buf
	adam8 adam8Scalars
	tile
}

// spare holds scratch between tasks: of at most so many goroutines as compute at
// a time. It grows with the widest row that a kernel has.
var spare = make(chan *scratch, 256)

// borrow returns scratch of at least n elements of any content; give it back.
func borrow(n int) *scratch {
	var s *scratch
	select {
	case s = <-spare:
	default:
		s = new(scratch)
	}
	if len(s.buf) < n {
		s.buf = make([]float32, n)
	}
	return s
}

func (s *scratch) giveBack() {
	s.tile = tile{}
	select {
	case spare <- s:
	default:
	}
}

// tile is what a 16-bit form's body computes on: rows [lo, hi) of the operands
// as float32, rows without gaps.
type tile struct {
	lo, hi int
	in     [3][]float32
	out    [2][]float32
	vec    [2][]float32 // a row each, the same for all
}

// HalfRows is a kernel over rows of 16-bit operands that do not depend on each
// other. A row of one element makes it an elementwise kernel. An output may be
// an input.
type HalfRows struct {
	plusOne bool // the rows' operands are 1 more than they say
	name    string
	as      Half
	n, c    int
	in      [3][]uint16 // (n, c); nil where there are fewer
	out     [2][]uint16 // (n, c); nil: not wanted
	acc     bool        // the body adds to what the outputs hold
	vec     [2][]uint16 // (c)
	body    func(t *tile)
}

// Run computes.
func (k *HalfRows) Run(p *pool.Pool) error {
	c := check{op: k.name}
	c.half("As", k.as)
	c.dim("N", k.n)
	c.positive("C", k.c)
	for _, x := range k.in {
		if x != nil {
			c.size2("an input", "(N, C)", len(x), k.n, k.c)
		}
	}
	for _, y := range k.out {
		if y != nil {
			c.size2("an output", "(N, C)", len(y), k.n, k.c)
		}
	}
	for _, v := range k.vec {
		if v != nil {
			c.size1("a row's operand", "C", len(v), k.c)
		}
	}
	return c.run(p, tasks(k.n, rowGrain(k.c)), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *HalfRows) RunIndex(i int) {
	rows := max(1, halfBlock/k.c)
	size := rows * k.c
	s := borrow(len(k.in)*size + len(k.out)*size + len(k.vec)*k.c)
	defer s.giveBack()
	rest := s.buf
	take := func(n int) []float32 {
		p := rest[:n]
		rest = rest[n:]
		return p
	}
	for j, v := range k.vec {
		if v != nil {
			s.vec[j] = take(k.c)
			widen(k.as, s.vec[j], v)
			if k.plusOne {
				plusOne(s.vec[j], s.vec[j])
			}
		}
	}
	lo, hi := piece(i, rowGrain(k.c), k.n)
	room := rest
	for ; lo < hi; lo += rows {
		s.lo, s.hi, rest = lo, min(lo+rows, hi), room
		a, b := s.lo*k.c, s.hi*k.c
		for j, x := range k.in {
			if x != nil {
				s.in[j] = take(b - a)
				widen(k.as, s.in[j], x[a:b])
			}
		}
		for j, y := range k.out {
			if y == nil {
				continue
			}
			s.out[j] = take(b - a)
			if k.acc {
				widen(k.as, s.out[j], y[a:b])
			}
		}
		k.body(&s.tile)
		for j, y := range k.out {
			if y != nil {
				narrow(k.as, y[a:b], s.out[j])
			}
		}
	}
}

// HalfColumns is a sum over the rows of 16-bit operands, by column, in float32
// and in increasing row order. The sum is rounded once, or stays float32.
type HalfColumns struct {
	name  string
	as    Half
	n, c  int
	in    [2][]uint16 // (n, c); nil where there are fewer
	out   []uint16    // (c), or nil
	out32 []float32   // (c), instead
	acc   bool        // continues from what the output holds
	body  func(sum []float32, t *tile)
}

// Columns of a task, and rows widened at a time: 768 bytes of a row, which is long
// enough for the processor to see that it goes on, 24 KiB of float32 for two operands.
const halfColumns, halfColumnRows = 384, 8

// Run computes.
func (k *HalfColumns) Run(p *pool.Pool) error {
	c := check{op: k.name}
	c.half("As", k.as)
	c.dim("N", k.n)
	c.dim("C", k.c)
	for _, x := range k.in {
		if x != nil {
			c.size2("an input", "(N, C)", len(x), k.n, k.c)
		}
	}
	c.size1("the output", "C", max(len(k.out), len(k.out32)), k.c)
	return c.run(p, tasks(k.c, halfColumns), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *HalfColumns) RunIndex(i int) {
	lo, hi := piece(i, halfColumns, k.c)
	w := hi - lo
	s := borrow(halfColumns * (1 + len(k.in)*halfColumnRows))
	defer s.giveBack()
	sum := s.buf[:w]
	if k.out == nil {
		sum = k.out32[lo:hi]
	}
	switch {
	case !k.acc:
		clear(sum)
	case k.out != nil:
		widen(k.as, sum, k.out[lo:hi])
	}
	for r := 0; r < k.n; r += halfColumnRows {
		s.lo, s.hi = r, min(r+halfColumnRows, k.n)
		for j, x := range k.in {
			if x == nil {
				continue
			}
			from := halfColumns * (1 + j*halfColumnRows)
			s.in[j] = s.buf[from : from+(s.hi-s.lo)*w]
			for q := s.lo; q < s.hi; q++ {
				widen(k.as, s.in[j][(q-s.lo)*w:][:w], x[q*k.c+lo:][:w])
			}
		}
		k.body(sum, &s.tile)
	}
	if k.out != nil {
		narrow(k.as, k.out[lo:hi], sum)
	}
}
