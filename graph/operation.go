package graph

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
)

// Definition describes an operation that is not in the kind table. A model adds it with
// Builder.Apply, a derivative with Derivation.Apply, an update rule with
// zero.Emitter.ApplyOwn. It is stored in the program (Op.Own); the passes, the verifier, the
// cost model, the executors and the interpreter treat it as a kind of the table.
//
// Its functions are called more than once and from several goroutines, so they must be
// pure: they depend only on their arguments. What a kernel writes depends only on its
// attributes and operands, not on the number of threads. Then all stages and placements give
// the same bits.
type Definition struct {
	// Kind names the operation in the text form and in messages: letters, digits and "_./-".
	// It must not be a kind of the kind table.
	Kind Kind
	// Doc says what the operation computes; Derivative gives its derivative as a formula.
	Doc, Derivative string

	// In and Out are its operands. FloatIn, FloatOut, GradOut, StateOut and others make them.
	In, Out []Operand

	// Attr is the zero value of its attributes, a struct of numbers, strings and bools;
	// nil for none.
	Attr any

	// Saves names the operands that the derivative reads.
	Saves []string
	// Cheap says that the operation costs little time for the memory of its output:
	// selective recomputation repeats it.
	Cheap bool

	// Shapes returns the outputs' shapes for the inputs' shapes (nil for an absent input), or
	// an error if the inputs do not fit. Each input has at least one element. Shapes is nil
	// for an operation of an update rule, whose Attr is UpdateAttr: Operand.Per gives the
	// sizes of its operands.
	Shapes func(attr any, in [][]int64) (out [][]int64, err error)

	// Flops counts the floating-point operations (a multiply-add is 2); nil: none. Memory
	// traffic is taken to be each operand once.
	Flops func(attr any, in, out [][]int64) int64

	// Work is the bytes of scratch that the kernels need (Call.Work); nil: none.
	Work func(attr any, in, out [][]int64) int64

	// Derive adds the operations that compute the gradients; nil: no gradient flows back.
	Derive func(d *Derivation)

	// Library says that the kernel libraries have the kernels, under Kind; CPU, CUDA and
	// Reference are then nil. Spillway's own operations are defined in this way.
	Library bool
	// CPU is the kernel for the CPU. Float operands are in Tensor.F32 whatever their DType:
	// 16-bit inputs are widened before, and 16-bit outputs rounded once after.
	CPU func(c *Call) error
	// CUDA is the kernel for a GPU. If it is nil, binding a plan for a GPU fails.
	CUDA *CUDAKernel
	// Reference computes the same in fp64 in the simplest way: float operands are in
	// Tensor.F64. Tests compare the kernel and the derivative with it; nil: they cannot.
	Reference func(c *Call) error
}

// Operation is an operation made by Define, whose definition goes with the program. Two
// Operations are the same only if their pointers are equal.
type Operation struct {
	def  Definition
	info *Info
}

// Kind returns its name.
func (o *Operation) Kind() Kind { return o.def.Kind }

// Definition returns the definition, with defaults of the operands filled in.
func (o *Operation) Definition() *Definition { return &o.def }

// operandTypes are the element types that a Tensor can have.
var operandTypes = []DType{F32, BF16, F16, F64, I64, I32}

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

// MustDefine is Define for a definition that is fixed in the source: it panics on an error.
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

// table returns the operation's Info, in the form that kinds of the kind table have.
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

// outShapes returns what Shapes says of an operation's outputs.
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

// Info returns the Info of the operation's definition or of its kind in the kind table.
func (op *Op) Info() (*Info, bool) {
	if op.Own != nil {
		return op.Own.info, op.Own.def.Kind == op.Kind
	}
	in, ok := kindTable[op.Kind]
	return in, ok
}

// BringsKernels says whether the operation's kernels come with the program (Define); the
// kernels of others are in the kernel libraries.
func (op *Op) BringsKernels() bool { return op.Own != nil && !op.Own.def.Library }

// checkOwn checks that a program has at most one Operation for each kind.
func checkOwn(op *Op, seen map[Kind]*Operation) error {
	if op.Own == nil {
		return nil
	}
	switch have, ok := seen[op.Kind]; {
	case op.Own.def.Kind != op.Kind:
		return fmt.Errorf("is %q by an operation defined as %q", op.Kind, op.Own.def.Kind)
	case ok && have != op.Own:
		return fmt.Errorf("two operations are defined as %q; define it once, and use that value everywhere", op.Kind)
	}
	seen[op.Kind] = op.Own
	return nil
}

// FloatIn declares an input with floating-point elements: F32, or BF16 or F16 in a plan of
// mixed precision.
func FloatIn(name string) Operand { return in(name, "") }

// FloatOut declares an output with floating-point elements: F32, BF16 or F16, the same type
// as the other such operands of the operation.
func FloatOut(name string) Operand { return out(name, "") }

// GradOut declares an output that is the gradient of an input. It is written or accumulated
// into (Tensor.Accum). The gradient of a parameter may be F32 while the other operands have
// 16 bits.
func GradOut(name string) Operand { return grad(name, "") }

// TypedIn and TypedOut declare operands whose type is t in every precision of the plan.
func TypedIn(name string, t DType) Operand  { return in(name, "").typ([]DType{t}) }
func TypedOut(name string, t DType) Operand { return out(name, "").typ([]DType{t}) }
