package graph

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// Operand describes one input or output in the signature of a kind of operation.
type Operand struct {
	Name  string
	Shape string // in the kind table's notation, for documentation
	// Per is how many elements of the operation's shard share one element of the operand:
	// 1 for an operand of (Len), 256 for the scales of blocks of 256. 0 means that the
	// operand does not depend on the shard's elements (a scalar). PerParam means one element
	// a parameter; the operation then cannot be divided into chunks.
	Per      int64
	Types    []DType // allowed element types; nil: any
	Optional bool    // may be NoBuf, or left off at the end of the list
	Float    FloatRule
	Modes    []Mode // outputs: the modes that are allowed, besides in place

	// Over names the input whose buffer this output may use, in mode ReadWrite. Empty: the
	// output is never in place.
	Over string

	// Stat marks an output that only the derivative reads (a mean, a log-sum-exp).
	// No gradient flows through it.
	Stat bool

	// ScaleOf marks an operand of scales and names the operand of quantised values that
	// they belong to, one scale for each Per values. The scales are present exactly if those
	// values are quantised (I8 or U8), and the two buffers are tied (type ScaleOf).
	ScaleOf string
}

// PerParam is the value of Operand.Per for one element a parameter.
const PerParam = -1

// FloatRule relates the float types of an operation's operands to each other.
type FloatRule uint8

// Rules. In mixed precision values have 16 bits; sums and statistics stay in f32, since
// rounding them would cost accuracy.
const (
	// AnyFloat: the operand's type is independent of the others.
	AnyFloat FloatRule = iota
	// ComputeFloat: f32, bf16 or f16, the same for all such operands of an
	// operation. Kernels compute in f32 and round once on writing.
	ComputeFloat
	// GradFloat: a parameter's gradient. It has the operation's compute type, or f32, which
	// keeps the kernel's f32 sum unrounded.
	GradFloat
)

// Info is a kind's entry in the kind table: its meaning as data, which the
// builder, differentiation, the verifier and the cost model share.
type Info struct {
	Kind       Kind
	Doc        string // what it computes, with shapes
	Derivative string // formula by input; empty where it has none
	In, Out    []Operand
	Attr       any // zero value of the attribute struct; nil for none

	attrOptional bool     // an operation may have no attribute
	Saves        []string // operands that the derivative reads, and so stay in memory until the backward
	Cheap        bool     // costs little time for the memory of its output: selective recomputation repeats it

	// packedIn and packedOut replace In and Out where the attribute is a packed
	// AttentionAttr.
	packedIn, packedOut []Operand
	// check compares shapes, once operands, types and the attribute are right.
	check func(c *checker)
	// flops counts floating-point operations (a multiply-add is 2), nil for none.
	flops func(c *checker) int64
	// bytes overrides the traffic that Cost computes from the operands.
	bytes func(c *checker) int64
	// work and cudaWork return a kernel's scratch in bytes on the CPU and on a GPU, see
	// Target.Workspace; nil for none.
	work, cudaWork func(t Target, p *Program, op *Op) int64
	// derive adds the backward operations of an operation from Define; for kinds of the
	// table the map derivatives has that function.
	derive func(d *differ)
	// shares says that operands may overlap, as views of each other (collectives).
	shares bool
}

// kindTable has every kind of this package.
var kindTable = tableOf(elementKinds, linearKinds, normKinds, attentionKinds, movingKinds, convKinds, generateKinds, lossKinds, quantKinds, updateKinds)

func tableOf(lists ...[]*Info) map[Kind]*Info {
	table := map[Kind]*Info{}
	for _, list := range lists {
		for _, in := range list {
			table[in.Kind] = in
		}
	}
	return table
}

// InfoOf returns the kind's entry in the kind table.
func InfoOf(k Kind) (*Info, bool) {
	in, ok := kindTable[k]
	return in, ok
}

// Kinds returns every kind of the table, sorted by name.
func Kinds() []Kind {
	return slices.Sorted(maps.Keys(kindTable))
}

// Differentiable says whether gradients can flow through the kind.
func (i *Info) Differentiable() bool { return i.derivative() != nil }

// derivative returns the function that emits the backward operations, nil for none.
func (i *Info) derivative() func(d *differ) {
	if i.derive != nil {
		return i.derive
	}
	return derivatives[i.Kind]
}

// Operands returns the signature for an attribute. It depends on the attribute only for
// attention, which can be packed or not.
func (i *Info) Operands(attr any) (in, out []Operand) {
	if a, _ := attr.(AttentionAttr); a.Packed {
		return i.packedIn, i.packedOut
	}
	return i.In, i.Out
}

// Check verifies one operation against the kind table: known kind, attribute
// type, operands present, element types, output modes, in-place use, and every
// dimension. The error names operation, operand and dimension.
func Check(p *Program, op *Op) error {
	in, ok := op.Info()
	if !ok {
		return fmt.Errorf("graph: %s: unknown kind %q", op.Name, op.Kind)
	}
	return in.Check(p, op)
}

// Check verifies op, whose kind is i's; see the function Check.
func (i *Info) Check(p *Program, op *Op) error { return i.check1(&checker{}, p, op) }

// check1 is Check with a checker that is used for one operation after another.
func (i *Info) check1(c *checker, p *Program, op *Op) error {
	*c = checker{p: p, op: op, info: i}
	c.operands()
	if c.err == nil && i.check != nil {
		i.check(c)
	}
	return c.err
}

// Cost estimates one execution on one rank: floating-point operations (a
// multiply-add counts 2, a transcendental function 8) and bytes of memory read
// and written, each operand once (a kernel's re-reads are its own). For
// collectives bytes is the traffic in the rank's own memory, not on a link. The
// operation must pass Check.
func Cost(p *Program, op *Op) (flops, bytes int64) {
	in, ok := op.Info()
	if !ok {
		return 0, 0
	}
	c := &checker{p: p, op: op, info: in}
	c.inOps, c.outOps = in.Operands(op.Attr)
	if in.flops != nil {
		flops = in.flops(c)
	}
	if in.bytes != nil {
		return flops, in.bytes(c)
	}
	for _, id := range op.In {
		if id != NoBuf {
			bytes += p.Buffers[id].Bytes()
		}
	}
	for _, o := range op.Out {
		if o.Buf == NoBuf {
			continue
		}
		n := p.Buffers[o.Buf].Bytes()
		bytes += n
		if o.Mode != Write && !slices.Contains(op.In, o.Buf) {
			bytes += n
		}
	}
	return flops, bytes
}

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

// operands checks everything but shapes.
func (c *checker) operands() {
	op := c.op
	if c.attribute(); c.err != nil {
		return
	}
	c.inOps, c.outOps = c.info.Operands(op.Attr)
	if len(op.In) > len(c.inOps) {
		c.failf("has %d inputs, want at most %d", len(op.In), len(c.inOps))
	}
	if len(op.Out) > len(c.outOps) {
		c.failf("has %d outputs, want at most %d", len(op.Out), len(c.outOps))
	}
	for i := range c.inOps {
		c.operand(&c.inOps[i], op.in(i))
	}
	for k := range c.outOps {
		c.operand(&c.outOps[k], op.out(k))
	}
	if c.err != nil {
		return
	}
	c.floats()
	c.scaled()
	for i, o := range op.Out {
		if o.Buf != NoBuf {
			c.output(i)
		}
	}
}

// attribute checks the attribute's type.
func (c *checker) attribute() {
	if want := c.info.Attr; reflect.TypeOf(c.op.Attr) != reflect.TypeOf(want) && !(c.op.Attr == nil && c.info.attrOptional) {
		c.failf("attribute is %T, want %T", c.op.Attr, want)
	}
}

// floats checks that all operands of the compute type have the same type, and gradients
// that type or f32.
func (c *checker) floats() {
	var first ref
	one := func(o *Operand, r ref) {
		if c.err != nil || !r.ok() || o.Float == AnyFloat {
			return
		}
		switch {
		case o.Float == GradFloat && (r.buf.DType == F32 || !first.ok()):
		case !first.ok():
			first = r
		case r.buf.DType != first.buf.DType:
			c.failf("operand %s (%s) is %v, want %v (as %s)", r.name, r.buf.Name, r.buf.DType, first.buf.DType, first.name)
		}
	}
	for i := range c.inOps {
		one(&c.inOps[i], c.in(i))
	}
	for i := range c.outOps {
		one(&c.outOps[i], c.out(i))
	}
}

func (c *checker) operand(o *Operand, id BufID) {
	switch {
	case c.err != nil:
	case id == NoBuf && !o.Optional:
		c.failf("operand %s is missing", o.Name)
	case id == NoBuf:
	case id < 0 || int(id) >= len(c.p.Buffers):
		c.failf("operand %s: the program has no buffer %d", o.Name, id)
	default:
		b := &c.p.Buffers[id]
		if o.Types != nil && !slices.Contains(o.Types, b.DType) {
			c.failf("operand %s (%s) is %v, want %s", o.Name, b.Name, b.DType, typeNames(o.Types))
		}
		for d, n := range b.Shape {
			if n < 1 {
				c.failf("operand %s (%s): dimension %d is %d, want at least 1", o.Name, b.Name, d, n)
			}
		}
	}
}

// output checks the mode of output i, and that it overlaps no input or other output.
func (c *checker) output(i int) {
	o, sig := c.op.Out[i], &c.outOps[i]
	inPlace := false
	for j, id := range c.op.In {
		if id == NoBuf || c.info.shares || !c.overlap(o.Buf, id) {
			continue
		}
		if id != o.Buf || sig.Over == "" || sig.Over != c.inOps[j].Name {
			c.failf("output %s (%s) overlaps input %s (%s), which the kind does not allow",
				sig.Name, c.p.Buffers[o.Buf].Name, c.inOps[j].Name, c.p.Buffers[id].Name)
			return
		}
		inPlace = true
	}
	for j := range i {
		if q := c.op.Out[j].Buf; q != NoBuf && c.overlap(o.Buf, q) {
			c.failf("outputs %s and %s (%s) overlap", c.outOps[j].Name, sig.Name, c.p.Buffers[o.Buf].Name)
		}
	}
	if inPlace {
		if o.Mode != ReadWrite {
			c.failf("output %s (%s) is in place of %s in mode %v, want %v", sig.Name, c.p.Buffers[o.Buf].Name, sig.Over, o.Mode, ReadWrite)
		}
		return
	}
	if !slices.Contains(sig.Modes, o.Mode) {
		c.failf("output %s (%s) has mode %v, want one of %v", sig.Name, c.p.Buffers[o.Buf].Name, o.Mode, sig.Modes)
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

// ref is an operand that is being checked; buf is nil if it is absent.
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

// rows and cols are those of Buffer.matrix; 1 for an absent operand.
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

func (c *checker) bad(r ref, dim string, got, want int64, why string) {
	c.failf("operand %s (%s, shape %v): %s is %d, want %d%s", r.name, r.buf.Name, r.buf.Shape, dim, got, want, why)
}

// matrix wants r to be (rows, cols), leading dimensions flattened.
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

// vector wants r to have n elements.
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

// rank2 wants at least two dimensions, so that r has rows and columns.
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

// shape wants exactly this shape.
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

// same wants r to have the shape of another operand.
func (c *checker) same(r, as ref) {
	if c.err == nil && r.ok() && as.ok() {
		c.shape(r, as.buf.Shape, "as "+as.name)
	}
}

// positive wants a number of the attribute to be at least 1.
func (c *checker) positive(what string, n int64) {
	if c.err == nil && n < 1 {
		c.failf("%s is %d, want at least 1", what, n)
	}
}

// within wants a number of 1 to limit. Limits keep products of such numbers within an int64.
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

func because(why string) string {
	if why == "" {
		return ""
	}
	return " (" + why + ")"
}

func typeNames(ts []DType) string {
	s := make([]string, len(ts))
	for i, t := range ts {
		s[i] = t.String()
	}
	return strings.Join(s, " or ")
}

// Shorthands of the kind table.
var (
	isF32 = []DType{F32}
	isF64 = []DType{F64}
	isI32 = []DType{I32}
	isI64 = []DType{I64}
	isSum = []DType{F32, F64, I64, BF16, F16} // what reductions over ranks add; 16 bits in f32 arithmetic

	isFloat = []DType{F32, BF16, F16} // f32 first: the reference
	isHalf  = []DType{BF16, F16}

	modeW  = []Mode{Write}
	modeA  = []Mode{Accum}
	modeRW = []Mode{ReadWrite}
	modeWA = []Mode{Write, Accum}
)

// in, out and acc return operands of the compute type; the method typ changes the type.
func in(name, shape string) Operand {
	return Operand{Name: name, Shape: shape, Types: isFloat, Float: ComputeFloat}
}

func optIn(name, shape string) Operand { return in(name, shape).opt() }

func out(name, shape string) Operand {
	return Operand{Name: name, Shape: shape, Types: isFloat, Float: ComputeFloat, Modes: modeW}
}

// acc returns an output that may be written or accumulated into.
func acc(name, shape string) Operand { return out(name, shape).mode(modeWA) }

// grad returns an output for a parameter's gradient.
func grad(name, shape string) Operand {
	o := acc(name, shape)
	o.Float = GradFloat
	return o
}

func (o Operand) opt() Operand           { o.Optional = true; return o }
func (o Operand) over(in string) Operand { o.Over = in; return o }
func (o Operand) stat() Operand          { o.Stat = true; return o }
func (o Operand) per(n int64) Operand    { o.Per = n; return o }
func (o Operand) typ(t []DType) Operand  { o.Types, o.Float = t, AnyFloat; return o }
func (o Operand) mode(ms []Mode) Operand { o.Modes = ms; return o }
