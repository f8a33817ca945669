package graph

import "fmt"

// checker checks one operation. Its first error sticks.
type checker struct {
	p             *Program
	op            *Op
	info          *Info
	inOps, outOps []Operand
	err           error
}

func (c *checker) failf(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf("graph: %s (%s): %w", c.op.Name, c.op.Kind, fmt.Errorf(format, args...))
	}
}

func (c *checker) bad(r ref, dim string, got, want int64, why string) {
	c.failf("operand %s (%s, shape %v): %s is %d, want %d%s", r.name, r.buf.Name, r.buf.Shape, dim, got, want, why)
}

// ref is an operand under check; buf is nil if it is absent.
type ref struct {
	name string
	buf  *Buffer
}

func (c *checker) in(i int) ref  { return c.ref(c.inOps[i].Name, c.op.in(i)) }
func (c *checker) out(k int) ref { return c.ref(c.outOps[k].Name, c.op.out(k)) }

func (c *checker) ref(name string, id BufID) ref {
	if id == NoBuf {
		return ref{name: name}
	}
	return ref{name, &c.p.Buffers[id]}
}

func (r ref) ok() bool { return r.buf != nil }

// rows and cols return the results of Buffer.matrix; 1 for an absent operand.
func (r ref) rows() int64 { rows, _ := r.matrix(); return rows }
func (r ref) cols() int64 { _, cols := r.matrix(); return cols }

func (r ref) matrix() (rows, cols int64) {
	if r.buf == nil {
		return 1, 1
	}
	return r.buf.matrix()
}

func (r ref) elems() int64 {
	if r.buf == nil {
		return 0
	}
	return r.buf.Elems()
}

// matrix checks that r is (rows, cols), with leading dimensions flattened.
func (c *checker) matrix(r ref, rows, cols int64, why string) {
	if c.err != nil || !r.ok() {
		return
	}
	if len(r.buf.Shape) < 2 {
		c.failf("operand %s (%s, shape %v): has %d dimensions, want 2 or more%s", r.name, r.buf.Name, r.buf.Shape, len(r.buf.Shape), because(why))
		return
	}
	if got := r.cols(); got != cols {
		c.bad(r, fmt.Sprintf("dimension %d", len(r.buf.Shape)-1), got, cols, because(why))
	}
	if got := r.rows(); got != rows {
		what := "dimension 0"
		if len(r.buf.Shape) > 2 {
			what = "product of the leading dimensions"
		}
		c.bad(r, what, got, rows, because(why))
	}
}

// vector checks that r has n elements.
func (c *checker) vector(r ref, n int64, why string) {
	if c.err != nil || !r.ok() {
		return
	}
	if got := r.elems(); got != n {
		what := "number of elements"
		if len(r.buf.Shape) == 1 {
			what = "dimension 0"
		}
		c.bad(r, what, got, n, because(why))
	}
}

// rank2 checks that r has at least two dimensions, so that it has rows and columns.
func (c *checker) rank2(r ref) {
	if c.err == nil && r.ok() && len(r.buf.Shape) < 2 {
		c.failf("operand %s (%s, shape %v): has %d dimensions, want 2 or more", r.name, r.buf.Name, r.buf.Shape, len(r.buf.Shape))
	}
}

func (c *checker) rank(r ref, n int) bool {
	if c.err == nil && r.ok() && len(r.buf.Shape) != n {
		c.failf("operand %s (%s, shape %v): has %d dimensions, want %d", r.name, r.buf.Name, r.buf.Shape, len(r.buf.Shape), n)
	}
	return c.err == nil && r.ok()
}

// shape checks that r has exactly this shape.
func (c *checker) shape(r ref, want []int64, why string) {
	if c.err != nil || !r.ok() {
		return
	}
	if len(r.buf.Shape) != len(want) {
		c.failf("operand %s (%s, shape %v): has %d dimensions, want %d%s", r.name, r.buf.Name, r.buf.Shape, len(r.buf.Shape), len(want), because(why))
		return
	}
	for d, n := range want {
		if r.buf.Shape[d] != n {
			c.bad(r, fmt.Sprintf("dimension %d", d), r.buf.Shape[d], n, because(why))
		}
	}
}

// same checks that r has the shape of another operand.
func (c *checker) same(r, as ref) {
	if c.err == nil && r.ok() && as.ok() {
		c.shape(r, as.buf.Shape, "as "+as.name)
	}
}

// positive checks that a number of the attribute is at least 1.
func (c *checker) positive(what string, n int64) {
	if c.err == nil && n < 1 {
		c.failf("%s is %d, want at least 1", what, n)
	}
}

// within checks that n is 1 to limit. Limits keep products of such numbers within an int64.
func (c *checker) within(what string, n, limit int64) {
	if c.err == nil && (n < 1 || n > limit) {
		c.failf("%s is %d, want 1 to %d", what, n, limit)
	}
}

func (c *checker) divides(what string, n int64, r ref, of string, total int64) {
	c.positive(what, n)
	if c.err == nil && total%n != 0 {
		c.failf("operand %s (%s, shape %v): %s %d is not a multiple of %s %d", r.name, r.buf.Name, r.buf.Shape, of, total, what, n)
	}
}

// slice checks an optional SliceAttr. Each slice of the vocabulary must have as many elements as
// table has rows.
func (c *checker) slice(table ref) {
	a, ok := c.op.Attr.(SliceAttr)
	if !ok {
		return
	}
	c.sliceOf(a)
	if c.err == nil && table.ok() && table.buf.Shape[0] != a.Each {
		c.bad(table, "dimension 0", table.buf.Shape[0], a.Each, " (the elements of a slice)")
	}
}

// groups checks that n divides elems, the size of x. If x is one of several equal parts, n must
// divide their total, and elems must be the size of a part.
func (c *checker) groups(what string, n int64, x ref, of string, elems int64, part SliceAttr) {
	if part == (SliceAttr{}) {
		c.divides(what, n, x, of, elems)
		return
	}
	c.sliceOf(part)
	if c.err == nil && (part.Each != elems || part.Total%elems != 0) {
		c.failf("operand %s (%s, shape %v): %s is %d, want a part of %d of %d", x.name, x.buf.Name, x.buf.Shape, of, elems, part.Each, part.Total)
	}
	c.divides(what, n, x, of+" of the whole", part.Total)
}

// sliceOf checks a slice, independent of other operands.
func (c *checker) sliceOf(a SliceAttr) {
	if c.err != nil {
		return
	}
	ranks := int64(1)
	if a.Axis < -1 || a.Axis >= len(c.p.Mesh) {
		c.failf("a slice along mesh axis %d, want −1 to %d", a.Axis, len(c.p.Mesh)-1)
		return
	} else if a.Axis >= 0 {
		ranks = int64(c.p.Mesh[a.Axis].Size)
	}
	c.within("the elements of a slice", a.Each, maxElems)
	if c.err == nil && (a.Index < 0 || a.Index >= a.PerRank || (ranks*a.PerRank-1)*a.Each >= a.Total || ranks*a.PerRank*a.Each < a.Total) {
		c.failf("slice %d of %d on each of %d ranks, each of %d elements of %d: want slices that cover all of them, and none empty",
			a.Index, a.PerRank, ranks, a.Each, a.Total)
	}
}

func (c *checker) overlap(a, b BufID) bool {
	if a == b {
		return true
	}
	if c.p.Buffers[a].View == nil && c.p.Buffers[b].View == nil {
		return false
	}
	ra, alo, ahi := Span(c.p, a)
	rb, blo, bhi := Span(c.p, b)
	return ra == rb && alo < bhi && blo < ahi
}

func because(why string) string {
	if why == "" {
		return ""
	}
	return " (" + why + ")"
}
