package graph

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
)

// Define checks a definition and makes it an operation. The error names the field.
func Define(d Definition) (*Operation, error) {
	d.In, d.Out = slices.Clone(d.In), slices.Clone(d.Out)
	if err := d.check(); err != nil {
		return nil, fmt.Errorf("graph: define operation %.60q: %w", d.Kind, err)
	}
	o := &Operation{def: d}
	o.info = o.table()
	return o, nil
}

// MustDefine does the same as Define, for a definition that is fixed in the source: it panics on an
// error.
func MustDefine(d Definition) *Operation {
	o, err := Define(d)
	if err != nil {
		panic(err)
	}
	return o
}

func (d *Definition) check() error {
	for _, r := range d.Kind {
		if !bareRune(r) {
			return fmt.Errorf("its Kind has %q, want letters, digits and _ . / -", r)
		}
	}
	_, known := kindTable[d.Kind]
	_, update := d.Attr.(UpdateAttr)
	switch {
	case d.Kind == "":
		return errors.New("its Kind is empty, want a name")
	case known:
		return errors.New("its Kind is one of the kind table's, want a name of its own")
	case len(d.Out) == 0:
		return errors.New("its Out is empty, want at least one output")
	case d.Library && (d.CPU != nil || d.CUDA != nil || d.Reference != nil):
		return errors.New("its kernels are in the libraries (Library): want no CPU, CUDA and Reference")
	case d.CPU == nil && !d.Library:
		return errors.New("its CPU is nil, want the kernel: the results of other devices are compared with the CPU's")
	case d.Shapes == nil && !update:
		return errors.New("its Shapes is nil, want the outputs' shapes by those of the inputs")
	case d.Attr != nil && reflect.TypeOf(d.Attr).Kind() != reflect.Struct:
		return fmt.Errorf("its Attr is %T, want a struct or nil", d.Attr)
	case d.Attr != nil && !reflect.TypeOf(d.Attr).Comparable():
		return fmt.Errorf("its Attr is %T, want one whose values can be compared", d.Attr)
	case d.CUDA != nil && (d.CUDA.Source == "" || d.CUDA.Launches == nil):
		return errors.New("its CUDA lacks Source or Launches")
	}
	if d.Library {
		return nil
	}
	names := map[string]bool{}
	for i := range d.In {
		if err := d.In[i].own(names, false); err != nil {
			return fmt.Errorf("its In[%d]: %w", i, err)
		}
	}
	for i := range d.Out {
		if err := d.Out[i].own(names, true); err != nil {
			return fmt.Errorf("its Out[%d]: %w", i, err)
		}
	}
	for _, s := range d.Saves {
		if !names[s] {
			return fmt.Errorf("its Saves has %q, want the name of an operand", s)
		}
	}
	return nil
}

// operandTypes are the element types that a Tensor can have.
var operandTypes = []DType{F32, BF16, F16, F64, I64, I32}

// own checks an operand of a definition and fills in defaults: the types of the compute
// dtype and, for outputs, mode Write.
func (o *Operand) own(names map[string]bool, out bool) error {
	if o.Name == "" || names[o.Name] {
		return fmt.Errorf("is named %q, want a name that no other operand has", o.Name)
	}
	names[o.Name] = true
	if o.Types == nil {
		o.Types = isFloat
		if o.Float == AnyFloat {
			o.Float = ComputeFloat
		}
	}
	for _, t := range o.Types {
		if !slices.Contains(operandTypes, t) {
			return fmt.Errorf("%s may be %v, want some of %s", o.Name, t, typeNames(operandTypes))
		}
	}
	switch {
	case o.ScaleOf != "":
		return fmt.Errorf("%s holds scales; quantised values are the kind table's", o.Name)
	case !out && (len(o.Modes) > 0 || o.Over != "" || o.Stat):
		return fmt.Errorf("%s is an input, which has no Modes, Over and Stat", o.Name)
	case out && len(o.Modes) == 0:
		o.Modes = modeW
	}
	return nil
}

// table returns the operation's Info, as for a kind of the kind table.
func (o *Operation) table() *Info {
	d := &o.def
	i := &Info{Kind: d.Kind, Doc: d.Doc, Derivative: d.Derivative, In: d.In, Out: d.Out, Attr: d.Attr, Saves: d.Saves, Cheap: d.Cheap}
	i.check = d.shapes
	if d.Flops != nil {
		i.flops = func(c *checker) int64 {
			in, out := operandShapes(c.p, c.op)
			return d.Flops(c.op.Attr, in, out)
		}
	}
	if !d.Library {
		i.work = func(t Target, p *Program, op *Op) int64 { return d.scratch(t, p, op) + d.widened(t, p, op) }
		i.cudaWork = d.scratch
	}
	if d.Derive != nil {
		i.derive = func(df *differ) { d.Derive(&Derivation{df}) }
	}
	return i
}

func (d *Definition) scratch(t Target, p *Program, op *Op) int64 {
	if d.Work == nil {
		return 0
	}
	in, out := operandShapes(p, op)
	return t.align(max(0, d.Work(op.Attr, in, out)))
}

// widened returns the bytes of scratch in which the CPU holds 16-bit operands as f32.
func (d *Definition) widened(t Target, p *Program, op *Op) (n int64) {
	Effects(op, func(e Effect) {
		if half(p, e.Buf) {
			n += t.align(4 * p.Buf(e.Buf).Elems())
		}
	})
	return n
}

// operandShapes returns the shapes of an operation's operands, nil for those absent.
func operandShapes(p *Program, op *Op) (in, out [][]int64) {
	shape := func(id BufID) []int64 {
		if id == NoBuf {
			return nil
		}
		if s := p.Buf(id).Shape; len(s) > 0 {
			return slices.Clone(s)
		}
		return []int64{1}
	}
	for _, id := range op.In {
		in = append(in, shape(id))
	}
	for _, o := range op.Out {
		out = append(out, shape(o.Buf))
	}
	return in, out
}

// outShapes returns the output shapes according to Definition.Shapes.
func (d *Definition) outShapes(p *Program, op *Op) ([][]int64, error) {
	in, _ := operandShapes(p, op)
	for len(in) < len(d.In) {
		in = append(in, nil)
	}
	shapes, err := d.Shapes(op.Attr, in)
	if err == nil && len(shapes) != len(d.Out) {
		err = fmt.Errorf("its Shapes returns %d shapes, want one for each of the %d outputs", len(shapes), len(d.Out))
	}
	return shapes, err
}

// shapes checks the operands' shapes against Definition.Shapes.
func (d *Definition) shapes(c *checker) {
	if _, ok := c.op.Attr.(UpdateAttr); ok {
		c.update()
		return
	}
	want, err := d.outShapes(c.p, c.op)
	if err != nil {
		c.failf("%w", err)
		return
	}
	for k := range d.Out {
		c.shape(c.out(k), want[k], "by its Shapes")
	}
}
