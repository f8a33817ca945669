package graph

import (
	"fmt"
	"slices"
)

// Builder writes a forward program. Every operation is checked as it is added;
// the first error sticks, later calls do nothing, and Program returns it.
//
//	b := graph.NewBuilder()
//	b.Unit("fc")   // or b.Block("h", 3)
//	x := b.Input("x", 8, 784)
//	w := b.Param("fc.weight", graph.Normal(0.02), 10, 784)
//	y := b.Linear("fc", x, w, graph.Value{}, graph.LinearAttr{TransW: true})
//	b.CrossEntropy("loss", y, b.Targets(8, 1))
//	p, err := b.Program()
//
// The program has one section "forward" with one phase "micro". Operations and
// parameters belong to the unit that was named last. Names of operations, parameters and
// inputs are unique. The buffer of an operation's result has the operation's name.
type Builder struct {
	p       *Program
	ops     []Op
	unit    int
	units   map[string]int
	opNames map[string]bool
	names   map[string]bool // of buffers
	version []int32         // by buffer: in-place operations on it so far
	last    map[BufID]string
	sites   int64
	starts  Value // see Documents; the zero Value if each row holds one document
	err     error
}

// Value is the result of an operation of a Builder. The zero Value means no value: an
// absent optional operand, or the result of an operation that failed.
type Value struct {
	id      BufID // + 1
	version int32
}

// None says whether v is the zero Value.
func (v Value) None() bool { return v.id == 0 }

// Buf returns the buffer that holds v, NoBuf for the zero Value.
func (v Value) Buf() BufID { return v.id - 1 }

// Init is the initial distribution of a parameter.
type Init struct {
	Kind InitKind
	Std  float64
}

// Ones and Zeros set all elements to 1 or to 0.
var (
	Ones  = Init{Kind: InitOnes}
	Zeros = Init{Kind: InitZeros}
)

// Normal returns the distribution N(0, std²).
func Normal(std float64) Init { return Init{Kind: InitNormal, Std: std} }

// Uniform returns the distribution U(−bound, bound).
func Uniform(bound float64) Init { return Init{Kind: InitUniform, Std: bound} }

// Option is an option of the Builder's methods that add an operation: InPlace.
type Option uint8

// InPlace gives the result its first operand's memory. The operand's Value
// cannot be used afterwards.
const InPlace Option = 1

// NewBuilder returns a builder of an empty program.
func NewBuilder() *Builder {
	p := &Program{
		Tokens: NoBuf, Targets: NoBuf, Positions: NoBuf, Hyper: NoBuf, Key: NoBuf, Loss: NoBuf, GradNorm: NoBuf, Logits: NoBuf,
	}
	return &Builder{
		p: p, unit: -1,
		units: map[string]int{}, opNames: map[string]bool{}, names: map[string]bool{}, last: map[BufID]string{},
	}
}

// Program returns the program, or the first error.
func (b *Builder) Program() (*Program, error) {
	if b.err != nil {
		return nil, b.err
	}
	p := b.p.Clone()
	p.Sections = []Section{NewSection(SectionForward, FormWhole, Phase{Name: "micro", Kind: MicroPhase, First: true, Last: true, Repeat: 1, Ops: CloneOps(b.ops)})}
	return p, nil
}

// Err returns the first error.
func (b *Builder) Err() error { return b.err }

func (b *Builder) failf(format string, args ...any) {
	if b.err == nil {
		b.err = fmt.Errorf("graph: "+format, args...)
	}
}

// Unit makes name the unit of the operations and parameters that are added next. The unit
// is a block that does not repeat. A later call may name the same unit again.
func (b *Builder) Unit(name string) { b.enter(name, Block{name, -1}) }

// Block makes the block of the given template and index, from 0, the unit of the operations
// and parameters that are added next. The unit's name is "template.index". If a user is to
// select the block's buffers by pattern, their names must contain the index between dots.
func (b *Builder) Block(template string, index int) {
	if b.err == nil && (template == "" || index < 0) {
		b.failf("block %q %d: a block needs the name of its template and an index from 0", template, index)
	}
	b.enter(fmt.Sprintf("%s.%d", template, index), Block{template, index})
}

func (b *Builder) enter(name string, block Block) {
	if b.err != nil {
		return
	}
	i, ok := b.units[name]
	if !ok {
		i = len(b.p.Units)
		b.p.Units = append(b.p.Units, Unit{Name: name, Block: block})
		b.units[name] = i
	}
	b.unit = i
}

// Shape returns the shape of v's buffer.
func (b *Builder) Shape(v Value) []int64 {
	if v.None() {
		return nil
	}
	return slices.Clone(b.p.Buffers[v.Buf()].Shape)
}

// Param adds a parameter, f32, to the current unit. Weight decay applies to it
// when it has two or more dimensions.
func (b *Builder) Param(name string, init Init, shape ...int64) Value {
	if b.err == nil && b.unit < 0 {
		b.failf("parameter %s: belongs to no unit; name one first (Builder.Unit)", name)
	}
	v := b.buffer(Buffer{Name: name, DType: F32, Shape: shape, Class: Parameters, Life: LifeRun, Unit: b.unit})
	if v.None() {
		return v
	}
	b.p.Params = append(b.p.Params, Param{
		Name: name, Shape: slices.Clone(shape), Init: init.Kind, Std: init.Std, Unit: b.unit,
		Decay: len(shape) >= 2, Value: v.Buf(), Grad: NoBuf,
	})
	return v
}

// Input adds an f32 input of the model, which the host fills for every step.
func (b *Builder) Input(name string, shape ...int64) Value {
	return b.buffer(Buffer{Name: name, DType: F32, Shape: shape, Class: Inputs, Life: LifeStep, Unit: -1})
}

// Tokens adds the program's tokens, i32 (rows, seq). A second call returns the same
// Value.
func (b *Builder) Tokens(rows, seq int64) Value {
	return b.wellKnown(&b.p.Tokens, Buffer{Name: "tokens", DType: I32, Shape: []int64{rows, seq}, Class: Inputs, Life: LifeStep})
}

// Targets adds the program's targets, i32 (rows, seq); −1 is a position without a target.
// A classifier's targets have seq 1.
func (b *Builder) Targets(rows, seq int64) Value {
	return b.wellKnown(&b.p.Targets, Buffer{Name: "targets", DType: I32, Shape: []int64{rows, seq}, Class: Inputs, Life: LifeStep})
}

// Positions adds, for generation, the position of each token in its text, i32 (rows, seq).
func (b *Builder) Positions(rows, seq int64) Value {
	return b.wellKnown(&b.p.Positions, Buffer{Name: "positions", DType: I32, Shape: []int64{rows, seq}, Class: Inputs, Life: LifeStep})
}

func (b *Builder) key() Value {
	return b.wellKnown(&b.p.Key, Buffer{Name: "key", DType: I64, Shape: []int64{NumKey}, Class: Inputs, Life: LifeStep})
}

func (b *Builder) loss() Value {
	return b.wellKnown(&b.p.Loss, Buffer{Name: "loss", DType: F64, Shape: []int64{1}, Class: Activations, Life: LifeStep})
}

func (b *Builder) wellKnown(id *BufID, buf Buffer) Value {
	if b.err != nil {
		return Value{}
	}
	if *id != NoBuf {
		if have := b.p.Buffers[*id].Shape; !slices.Equal(have, buf.Shape) && id != &b.p.Loss {
			b.failf("%s: shape is %v, and %v before", buf.Name, buf.Shape, have)
			return Value{}
		}
		return b.valueOf(*id)
	}
	buf.Unit = -1
	v := b.buffer(buf)
	if !v.None() {
		*id = v.Buf()
	}
	return v
}

func (b *Builder) valueOf(id BufID) Value { return Value{id: id + 1, version: b.version[b.root(id)]} }

func (b *Builder) root(id BufID) BufID {
	root, _ := b.p.Resolve(id, nil)
	return root
}

// buffer adds a buffer. It checks that the name is new and that no dimension is too large.
func (b *Builder) buffer(buf Buffer) Value {
	if b.err != nil {
		return Value{}
	}
	if buf.Name == "" || b.names[buf.Name] {
		b.failf("%q: a buffer needs a name that no other has", buf.Name)
		return Value{}
	}
	n := int64(1)
	for d, s := range buf.Shape {
		if s < 1 || s > maxElems/n {
			b.failf("%s: shape %v: dimension %d is %d, want at least 1 and at most %d elements in all", buf.Name, buf.Shape, d, s, maxElems)
			return Value{}
		}
		n *= s
	}
	b.names[buf.Name] = true
	buf.Shape = slices.Clone(buf.Shape)
	b.version = append(b.version, 0)
	return b.valueOf(b.p.AddBuffer(buf))
}

// use returns the buffer of an operand. If the operand is the zero Value, an earlier call
// failed or the caller passed none: use then records an error.
func (b *Builder) use(op, operand string, v Value) BufID {
	if b.err != nil {
		return NoBuf
	}
	if v.None() {
		b.failf("%s: operand %s is missing", op, operand)
		return NoBuf
	}
	id := v.Buf()
	if int(id) >= len(b.p.Buffers) {
		b.failf("%s: operand %s is of another builder", op, operand)
		return NoBuf
	}
	if root := b.root(id); v.version != b.version[root] {
		b.failf("%s: operand %s (%s) was overwritten in place by %s", op, operand, b.p.Buffers[id].Name, b.last[root])
		return NoBuf
	}
	return id
}

// result describes an output of an operation that is being added.
type result struct {
	suffix string // suffix of the buffer's name; "" for the first output, which has the operation's name
	dtype  DType
	shape  []int64
	over   operandValue // operand that it overwrites in place; if its name is empty, the result gets a new buffer
}

func y(shape ...int64) result { return result{shape: shape} }

// op returns an operation of the current unit, without operands.
func (b *Builder) op(kind Kind, name string, attr any) Op {
	op := NewOp(kind, name, nil, nil, attr)
	op.Unit = b.unit
	return op
}

// free checks that an operation can have the name.
func (b *Builder) free(kind Kind, name string) bool {
	if b.err == nil && (name == "" || b.opNames[name]) {
		b.failf("%s %q: an operation needs a name that no other has", kind, name)
	}
	return b.err == nil
}

// add appends an operation and returns its first output. Operands have names for error
// messages. With InPlace the first output is the first operand's buffer.
func (b *Builder) add(name string, kind Kind, attr any, ins []operandValue, results []result, opts []Option) Value {
	op := b.op(kind, name, attr)
	if !b.free(kind, name) || !b.inputs(&op, ins) {
		return Value{}
	}
	if slices.Contains(opts, InPlace) {
		results[0].over = ins[0]
	}
	if !b.outputs(&op, results) {
		return Value{}
	}
	return b.append(op)
}

func (b *Builder) inputs(op *Op, ins []operandValue) bool {
	for _, in := range ins {
		id := NoBuf
		if !(in.optional && in.v.None()) {
			id = b.use(op.Name, in.name, in.v)
		}
		op.In = append(op.In, id)
	}
	return b.err == nil
}

func (b *Builder) outputs(op *Op, results []result) bool {
	for _, r := range results {
		if r.over.name != "" {
			id := b.use(op.Name, r.over.name, r.over.v)
			if b.err != nil {
				return false
			}
			if class := b.p.Buffers[b.root(id)].Class; class != Activations {
				b.failf("%s: cannot be in place of %s, which is %v", op.Name, b.p.Buffers[id].Name, class)
			}
			op.Out = append(op.Out, Out{id, ReadWrite})
			continue
		}
		name := op.Name
		if r.suffix != "" {
			name += "." + r.suffix
		}
		v := b.buffer(Buffer{Name: name, DType: r.dtype, Shape: r.shape, Class: Activations, Life: LifePhase, Unit: b.unit})
		op.Out = append(op.Out, Out{v.Buf(), Write})
	}
	return b.err == nil
}

// append checks and appends op and returns its first output's value.
func (b *Builder) append(op Op) Value {
	if b.err != nil {
		return Value{}
	}
	if err := Check(b.p, &op); err != nil {
		b.err = err
		return Value{}
	}
	for _, o := range op.Out {
		if o.Mode == ReadWrite {
			root := b.root(o.Buf)
			b.version[root]++
			b.last[root] = op.Name
		}
	}
	b.opNames[op.Name] = true
	b.ops = append(b.ops, op)
	return b.valueOf(op.Out[0].Buf)
}

type operandValue struct {
	name     string
	v        Value
	optional bool
}

func opd(name string, v Value) operandValue { return operandValue{name: name, v: v} }

func opds(vs ...operandValue) []operandValue { return vs }

// like returns a result with v's shape.
func (b *Builder) like(v Value) result { return y(b.Shape(v)...) }

// rowsOf and colsOf return the rows and columns of v as a matrix: cols is the last dimension, rows
// the product of the others. Both are 1 for an absent value.
func (b *Builder) rowsOf(v Value) int64 { return b.view(v).rows() }
func (b *Builder) colsOf(v Value) int64 { return b.view(v).cols() }

func (b *Builder) view(v Value) ref {
	if b.err != nil || v.None() || int(v.Buf()) >= len(b.p.Buffers) {
		return ref{}
	}
	return ref{buf: &b.p.Buffers[v.Buf()]}
}

// withCols returns v's leading dimensions followed by n.
func (b *Builder) withCols(v Value, n int64) []int64 {
	s := b.Shape(v)
	if len(s) == 0 {
		return []int64{1, n}
	}
	s[len(s)-1] = n
	return s
}
