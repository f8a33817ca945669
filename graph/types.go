package graph

import (
	"fmt"
	"slices"
)

// DType is the element type of a buffer.
type DType uint8

// Element types. I64 also holds exact accumulators (see kernels/cpu/exact).
const (
	F32 DType = iota
	F64
	BF16
	F16
	I64
	I32
	I8
	U8
)

var dtypeNames = [...]string{"f32", "f64", "bf16", "f16", "i64", "i32", "i8", "u8"}
var dtypeSizes = [...]int64{4, 8, 2, 2, 8, 4, 1, 1}

func (d DType) String() string { return name(dtypeNames[:], int(d), "dtype") }

// Size returns the bytes of one element.
func (d DType) Size() int64 { return dtypeSizes[d] }

// Space is a memory space (a tier) of a rank.
type Space uint8

// Memory spaces: the accelerator's memory, page-locked host memory, and a file.
const (
	Device Space = iota
	Host
	Disk
	NumSpaces
)

var spaceNames = [...]string{"device", "host", "disk"}

func (s Space) String() string { return name(spaceNames[:], int(s), "space") }

// Class says what a buffer is for; plans report memory by class.
type Class uint8

// Classes, as contracted for plan reports.
const (
	Parameters    Class = iota // resident in the compute dtype: the whole copy below stage 3, the shard at 3
	Gradients                  // reduced or accumulating
	Optimizer                  // fp32 masters where they exist, moments, constants
	Activations                // kept from forward to backward, and the values in flight
	Unsharded                  // gathered parameters, gradients not yet reduced
	Communication              // staging
	Workspace                  // scratch of one operation
	Inputs                     // tokens, targets, step state
	Padding                    // holes, alignment, flat-parameter padding
	NumClasses
)

var classNames = [...]string{"parameters", "gradients", "optimizer", "activations", "unsharded", "communication", "workspace", "inputs", "padding"}

func (c Class) String() string { return name(classNames[:], int(c), "class") }

// Life is how long a buffer's contents are meant to last.
type Life uint8

// Lifetimes. Within them memory is reused as soon as the last reader is done.
const (
	LifePhase Life = iota // within one phase
	LifeStep              // across the phases of one section's execution
	LifeRun               // across steps: states
)

var lifeNames = [...]string{"phase", "step", "run"}

func (l Life) String() string { return name(lifeNames[:], int(l), "life") }

// Pass says which part of a training step an operation belongs to.
type Pass uint8

// Passes of a step.
const (
	Forward Pass = iota
	Backward
	Recompute
	Update
)

var passNames = [...]string{"forward", "backward", "recompute", "update"}

func (p Pass) String() string { return name(passNames[:], int(p), "pass") }

// Mode is how an operation touches an output buffer.
type Mode uint8

// Output modes. Accum adds to the contents; ReadWrite is any other in-place use.
const (
	Write Mode = iota
	Accum
	ReadWrite
)

var modeNames = [...]string{"write", "accum", "rw"}

func (m Mode) String() string { return name(modeNames[:], int(m), "mode") }

// StreamID names one of a rank's in-order queues.
type StreamID uint8

// Streams of a rank. Operations of one stream run in order; across streams only
// events order them.
const (
	Compute  StreamID = iota
	Comm              // collectives, all on one stream so that their order is total
	CopyIn            // host to device
	CopyOut           // device to host
	HostWork          // kernels that run on the host (offloaded updates)
	DiskIn            // disk to host
	DiskOut           // host to disk
	NumStreams
)

var streamNames = [...]string{"compute", "comm", "copy-in", "copy-out", "host", "disk-in", "disk-out"}

func (s StreamID) String() string { return name(streamNames[:], int(s), "stream") }

func name(names []string, i int, what string) string {
	if i < 0 || i >= len(names) {
		return fmt.Sprintf("%s(%d)", what, i)
	}
	return names[i]
}

// BufID indexes Program.Buffers. NoBuf marks an absent optional operand.
type BufID int32

// NoBuf is the absent buffer.
const NoBuf BufID = -1

// EventID numbers an event of the program. 0 is none.
type EventID int32

// Placement says how a buffer's global value is laid over one mesh axis.
type Placement uint8

// Placements over a mesh axis.
const (
	Replicate Placement = iota // every rank holds the whole value
	Sharded                    // rank i of the axis holds the i-th of equal contiguous parts
	Partial                    // every rank holds an addend of the value
)

var placementNames = [...]string{"replicate", "shard", "partial"}

func (p Placement) String() string { return name(placementNames[:], int(p), "placement") }

// Axis is one axis of the device mesh. World size is the product of all sizes;
// the last axis varies fastest over ranks.
type Axis struct {
	Name string
	Size int
}

// TensorAxis is the name of the axis along which ranks share the computation of a layer. Ranks
// along it have the same data, and the same whole parameters.
const TensorAxis = "tensor"

// PipelineAxis is the name of the axis of pipeline stages: the rank with index i along it runs
// the blocks of stage i (Unit.Stage).
const PipelineAxis = "pipeline"

// AxisOf returns the index of the mesh axis with a name, −1 if there is none.
func (p *Program) AxisOf(name string) int {
	return slices.IndexFunc(p.Mesh, func(a Axis) bool { return a.Name == name })
}

// DataRanks returns the number of ranks that have data of their own.
func (p *Program) DataRanks() int {
	n := p.WorldSize()
	for _, a := range p.Mesh {
		if a.Name == TensorAxis || a.Name == PipelineAxis {
			n /= a.Size
		}
	}
	return n
}

// View places a buffer inside another one: bytes
// [Offset + rank·RankStride, + Bytes()) of Base, where rank is the index along
// mesh axis Axis. A view of a view is allowed.
type View struct {
	Base       BufID
	Offset     int64 // bytes
	RankStride int64 // bytes; 0 for views that are the same on every rank
	Axis       int   // mesh axis whose index RankStride multiplies
}

// Buffer is a typed region of one memory space, row-major and contiguous. Shape
// is the local shape: what one rank holds.
type Buffer struct {
	Name  string
	DType DType
	Shape []int64
	Space Space
	Class Class
	Life  Life
	Unit  int     // index into Program.Units, or -1
	Pad   int64   // of Bytes(), how many are flat-parameter padding (reported as class padding)
	View  *View   // nil for a root buffer
	Port  Port    // what the host does with it between operations
	Micro int     // which of a phase's micro-batches it belongs to, from 0
	Scale ScaleOf // the quantised values whose scales these are

	// Global is the global shape where it differs from Shape, and Place has a
	// placement for each mesh axis (nil: replicated on all).
	Global []int64
	Place  []Placement
}

// Elems returns the number of elements.
func (b *Buffer) Elems() int64 { return elemsOf(b.Shape) }

func elemsOf(shape []int64) int64 {
	n := int64(1)
	for _, d := range shape {
		n *= d
	}
	return n
}

// matrix returns the leading dimensions multiplied, and the last one: activations may have any
// number of dimensions.
func (b *Buffer) matrix() (rows, cols int64) {
	last := len(b.Shape) - 1
	if last < 0 {
		return 1, 1
	}
	return elemsOf(b.Shape[:last]), b.Shape[last]
}

// Bytes returns the size of the buffer in its space.
func (b *Buffer) Bytes() int64 { return b.Elems() * b.DType.Size() }

// Out is an output operand.
type Out struct {
	Buf  BufID
	Mode Mode
}

// Op is one operation of the step program. Its Kind fixes the meaning and order
// of In, Out and Attr (see Info). Optional operands that
// are absent are NoBuf.
type Op struct {
	Kind Kind
	Own  *Operation // where the program brings the operation along; nil: the kind table's
	Name string     // unique within its phase, e.g. "h.3.attn.c_proj" or "h.3.attn.c_proj/dw"
	In   []BufID
	Out  []Out
	Work BufID // workspace, NoBuf if none
	Attr any   // the kind's attribute struct (a value, comparable or nil)

	Stream StreamID
	Wait   []EventID // waited for on Stream before the operation
	Record EventID   // recorded on Stream after the operation; 0: none

	Pass   Pass
	Unit   int    // index into Program.Units of the unit it belongs to, or -1
	Micro  int    // which of the phase's micro-batches it belongs to, from 0
	Source string // name of the operation that this one was derived from
	Skip   BufID  // I32 scalar: the operation does nothing while it is non-zero; NoBuf: always runs
}

// in and out return input i and output k; NoBuf for one that is absent or left off.
func (o *Op) in(i int) BufID {
	if i < len(o.In) {
		return o.In[i]
	}
	return NoBuf
}

func (o *Op) out(k int) BufID {
	if k < len(o.Out) {
		return o.Out[k].Buf
	}
	return NoBuf
}

// Phase is a straight line of operations, run Repeat times in a row. Of a step's
// micro-steps First and Last say which it has: a phase of all has both.
type Phase struct {
	Name        string
	Kind        PhaseKind
	First, Last bool
	Repeat      int
	Round       int // of its first run, and of its first micro-batch: see shares.go
	Ops         []Op
	// Throttles are orders beyond what the data demands. They wait here, by
	// name, for Schedule, which makes them events.
	Throttles []Throttle
}

// Throttle says that operation After must not start before operation Before of
// the same phase has finished. Before stands earlier in the phase. Prefetching
// is bounded so.
type Throttle struct{ Before, After string }

// Section is something that the program can be asked to run as a whole: a step,
// an evaluation, a generation. Kind and Form say what it is, Name is what a person
// calls it (SectionName). Sections share one arena; only LifeRun buffers carry
// contents from one to the next, and one starts after the other has finished.
type Section struct {
	Name   string
	Kind   SectionKind
	Form   Form
	Shares []int // micro-batches of each rank in a run of it; nil: every rank has as many
	Phases []Phase
}

// InitKind says how a parameter gets its first values.
type InitKind uint8

// Initial values.
const (
	InitNormal InitKind = iota // N(0, Std²)
	InitOnes
	InitZeros
	InitUniform // U(-Std, Std)
)

// Param is a trainable (or frozen) tensor of the model, in Hugging Face's shape.
type Param struct {
	Name   string
	Shape  []int64 // global: of the whole tensor
	Split  *Split  // nil: every rank's model has all of it
	Init   InitKind
	Std    float64
	Unit   int  // index into Program.Units
	Decay  bool // weight decay applies
	Frozen bool
	// TiedTo is 1 + the index of the parameter whose value this is too, on another stage of the
	// pipeline; 0: it is a parameter of its own. Such copies come after all others.
	TiedTo int

	Value BufID // the whole value, in the compute dtype; after sharding a view or NoBuf
	Grad  BufID // the whole gradient; NoBuf for frozen parameters and before differentiation
}

// Elems returns the number of elements, of the whole tensor.
func (p *Param) Elems() int64 { return elemsOf(p.Shape) }

// Segment is a range of one parameter inside a unit's flat parameter. Start and
// lengths are in elements; Flat is a multiple of 256, Start too.
type Segment struct {
	Param int   // index into Program.Params
	Start int64 // first element of the parameter
	Len   int64
	Flat  int64 // where it lies in the flat parameter
}

// Unit is what is unsharded together, as a list of segments.
type Unit struct {
	Name     string
	Segments []Segment
	FlatLen  int64 // padded length in elements; set by the sharding rewrite
	Frozen   bool
	Block    Block // what it is a part of: of a partly frozen block there are two units
	Stage    int   // of the pipeline: index along PipelineAxis of the ranks that have it

	// Where the unit's states rest between steps; set by the sharding rewrite.
	// Value is the (master) parameters, Compute what the model computes with (Value
	// itself, or its 16-bit copy), States the optimizer's.
	Value, Compute State
	States         []State
	// Grad is the way of its gradients; nil for one that is frozen or not laid out.
	Grad *Gradient
}

// State is a resident buffer that holds a unit's flat parameter, or something
// of the same layout. With Axis ≥ 0 the rank with index i along that mesh axis
// holds elements [i·Len, (i+1)·Len); with Axis −1 every rank holds all of it.
// PerParam states have one element for each distinct parameter of the unit, in
// the order of the segments, on every rank.
//
// A state whose buffer has U8 elements is quantised: they are codes, and their scales
// are the buffer's that Program.ScalesOf returns.
type State struct {
	Name     string // "value", "exp_avg", "exp_avg_sq", "momentum" …
	Buf      BufID
	Axis     int
	Len      int64
	PerParam bool
}

// Program is a whole run's operations over its buffers. It is the same on every
// rank (SPMD): what differs by rank is only the rank's index, which views with a
// RankStride and collectives use. Of a pipeline a rank runs the operations of its
// stage's units, and those of no unit (Role). Rewrites take a Program and return a
// new one.
type Program struct {
	Mesh     []Axis
	Buffers  []Buffer
	Params   []Param
	Units    []Unit
	Sections []Section

	Events int // events are numbered 1..Events

	// Well-known buffers on the device; NoBuf where a program lacks them. What the
	// host fills and reads has a Port.
	Tokens, Targets BufID // I32 (rows, T)
	Positions       BufID // I32 (rows, T): of generation's tokens in their texts
	Hyper           BufID // F64 (NumHyper): see Hyper* constants
	Key             BufID // I64 (NumKey): see Key* constants
	Loss            BufID // F64 (1): this rank's sum over its counted targets since the step began
	GradNorm        BufID // F64 (1)
	Logits          BufID // F32 (rows, V): of the row KeyRow in section "generate", or of each row in "generate-next"

	// Scalars are the sets of what changes by step: of the step at hand, and of updates
	// with a time of their own. None before the update is there.
	Scalars []Scalars

	// Scaler has the buffers of dynamic loss scaling and of updates that may be
	// skipped; nil where every update is applied.
	Scaler *Scaler

	sole  bool // made by Clone, and not Kept: nothing else has parts of it
	spare bool // given up by who has it
}

// Scaler decides for each step, on every rank the same, whether its update is left
// out because a gradient is not finite, and has the state of dynamic loss scaling;
// where there is none (State is NoBuf) steps are only left out. The scale of a step reaches the
// loss's gradient, and the clip coefficient that divides by it, through
// HyperLossScale: the host fills that with the scale that the step before left.
type Scaler struct {
	State    BufID // F64 (NumScale): see Scale* constants; lives for the run, on every rank the same
	Overflow BufID // I32 (1): not 0 where this step's gradients overflowed: nothing is updated
}

// Slots of the Scaler's state, as float64.
const (
	ScaleValue = iota // the scale of the next step
	ScaleClean        // steps without overflow since it last moved; −n: n overflows in a row, and it has not moved yet
	NumScale   = 2
)

// InitialLossScale is where dynamic loss scaling starts.
const InitialLossScale = 1 << 16

// DefaultLossScale is how it moves on.
var DefaultLossScale = LossScaleAttr{Growth: 2, Backoff: 0.5, Floor: 1, Interval: 2000}

// Slots of the Hyper buffer: what changes by step, as float64.
const (
	HyperLR        = iota // learning rate
	HyperInvCount         // 1 / (counted targets of the global batch)
	HyperLossScale        // loss scale; 1 where there is none
	HyperBC1              // 1 - beta1^t
	HyperBC2              // 1 - beta2^t
	HyperUpdate           // t: the number of this update, from 1; skipped steps do not count
	HyperSeed             // the run's seed, its low 53 bits: of stochastic rounding
	NumHyper       = 16
)

// Slots of the Key buffer: what changes by step, as int64.
const (
	KeySeed   = iota // the run's seed
	KeyStep          // step from 0
	KeySample        // global sample index of this rank's row 0 in this micro-step
	KeyRow           // generate: row of the (1, T) input whose logits are wanted
	KeyValid         // generate: number of valid positions
	KeySlot          // generate: the caches' slot of the first sequence; the others have the next ones
	NumKey    = 8
)

// Buf returns the buffer with the given ID.
func (p *Program) Buf(id BufID) *Buffer { return &p.Buffers[id] }

// Resolve follows views to the root buffer and returns it with the byte offset
// in it, for the rank whose index along each mesh axis is coord (nil: rank 0).
func (p *Program) Resolve(id BufID, coord []int) (root BufID, off int64) {
	for {
		v := p.Buffers[id].View
		if v == nil {
			return id, off
		}
		off += v.Offset
		if v.RankStride != 0 && coord != nil {
			off += v.RankStride * int64(coord[v.Axis])
		}
		id = v.Base
	}
}

// WorldSize returns the product of the mesh's axes (1 for an empty mesh).
func (p *Program) WorldSize() int {
	n := 1
	for _, a := range p.Mesh {
		n *= a.Size
	}
	return n
}

// Section returns the section with the given name, or nil.
func (p *Program) Section(name string) *Section {
	for i := range p.Sections {
		if p.Sections[i].Name == name {
			return &p.Sections[i]
		}
	}
	return nil
}

// AddBuffer appends b and returns its ID.
func (p *Program) AddBuffer(b Buffer) BufID {
	if len(p.Buffers) == cap(p.Buffers) { // append would copy a large program's many times
		p.Buffers = slices.Grow(p.Buffers, len(p.Buffers)+1)
	}
	p.Buffers = append(p.Buffers, b)
	return BufID(len(p.Buffers) - 1)
}

// NewOp returns an operation on the compute stream, of the forward pass and of no
// unit, without workspace and predicate.
func NewOp(kind Kind, name string, in []BufID, out []Out, attr any) Op {
	return Op{Kind: kind, Name: name, In: in, Out: out, Attr: attr, Work: NoBuf, Skip: NoBuf, Unit: -1}
}

// NewCopy returns a copy between two buffers on a stream.
func NewCopy(name string, from, to BufID, stream StreamID, pass Pass, unit int) Op {
	op := NewOp(Copy, name, []BufID{from}, []Out{{Buf: to}}, nil)
	op.Stream, op.Pass, op.Unit = stream, pass, unit
	return op
}

// NewEvent returns a fresh event.
func (p *Program) NewEvent() EventID {
	p.Events++
	return EventID(p.Events)
}
