package graph

import (
	"fmt"
	"reflect"
	"slices"
)

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

// check1 does the same as Check with a checker that the caller reuses.
func (i *Info) check1(c *checker, p *Program, op *Op) error {
	*c = checker{p: p, op: op, info: i}
	c.operands()
	if c.err == nil && i.check != nil {
		i.check(c)
	}
	return c.err
}

// operands checks everything except shapes.
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

// scaled checks that quantised operands come with their own scales, and that other operands
// come without.
func (c *checker) scaled() {
	hasScales := func(o Operand) bool { return o.ScaleOf != "" }
	if !slices.ContainsFunc(c.inOps, hasScales) && !slices.ContainsFunc(c.outOps, hasScales) {
		return
	}
	type operand struct {
		o  *Operand
		id BufID
	}
	var all []operand
	for i := range c.inOps {
		all = append(all, operand{&c.inOps[i], c.op.in(i)})
	}
	for k := range c.outOps {
		all = append(all, operand{&c.outOps[k], c.op.out(k)})
	}
	for _, s := range all {
		if s.o.ScaleOf == "" || c.err != nil {
			continue
		}
		for _, v := range all {
			if v.o.Name != s.o.ScaleOf || v.id == NoBuf {
				continue
			}
			d := c.p.Buffers[v.id].DType
			quantised := d == I8 || d == U8
			switch {
			case quantised && s.id == NoBuf:
				c.failf("operand %s is missing, and %s (%s) is %v", s.o.Name, v.o.Name, c.p.Buffers[v.id].Name, d)
			case !quantised && s.id != NoBuf:
				c.failf("operand %s (%s) has scales of %s (%s), which is %v", s.o.Name, c.p.Buffers[s.id].Name, v.o.Name, c.p.Buffers[v.id].Name, d)
			case quantised && (c.p.Buffers[s.id].Scale.Block == 0 || c.p.Buffers[s.id].Scale.Of != v.id):
				c.failf("operand %s (%s) is not the scales of %s (%s)", s.o.Name, c.p.Buffers[s.id].Name, v.o.Name, c.p.Buffers[v.id].Name)
			case quantised && c.p.Buffers[s.id].Scale.Block != s.o.Per:
				c.failf("operand %s (%s) has a scale for each %d values, want %d", s.o.Name, c.p.Buffers[s.id].Name, c.p.Buffers[s.id].Scale.Block, s.o.Per)
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
