package graph

import (
	"fmt"
	"iter"
	"slices"
)

// Program holds the operations of a complete run and their buffers. It is the same on every rank
// (SPMD): only the rank's index differs, which collectives and views with a RankStride use. In a
// pipeline a rank runs the operations of its stage's units, and those without a unit (Role).
// Rewrites take a Program and return a new one.
type Program struct {
	Mesh     []Axis
	Buffers  []Buffer
	Params   []Param
	Units    []Unit
	Sections []Section

	Events int // events are numbered 1..Events

	// Well-known buffers on the device; NoBuf if a program lacks them. Host inputs and outputs have
	// a Port.
	Tokens, Targets BufID // I32 (rows, T)
	Positions       BufID // I32 (rows, T): positions of generation's tokens in their texts
	Hyper           BufID // F64 (NumHyper): see Hyper* constants
	Key             BufID // I64 (NumKey): see Key* constants
	Loss            BufID // F64 (1): this rank's sum over its counted targets since the start of the step
	GradNorm        BufID // F64 (1)
	Logits          BufID // F32 (rows, V): for the row KeyRow in section "generate", for each row in "generate-next"

	// Scalars are the sets of numbers that change with the step: for the current step, and for
	// updates that run at another time. It is empty until the update is added.
	Scalars []Scalars

	// Scaler has the buffers of dynamic loss scaling and of updates that may be skipped; nil if
	// every update is applied.
	Scaler *Scaler

	sole  bool // made by Clone and not passed to Keep: no other program shares its parts
	spare bool // given up by its owner (Yield)
}

// Axis is one axis of the device mesh. The world size is the product of all sizes; the last axis
// varies fastest over ranks.
type Axis struct {
	Name string
	Size int
}

// TensorAxis is the name of the axis along which ranks share the computation of a layer. Ranks
// along it have the same data and the same complete parameters.
const TensorAxis = "tensor"

// PipelineAxis is the name of the axis of pipeline stages: the rank with index i along it runs
// the blocks of stage i (Unit.Stage).
const PipelineAxis = "pipeline"

// Scalars are the numbers that change with the step; every update rule reads them. They are in
// buffers, not constants of operations, so that a captured program can run again. The program's
// first set is for the current step. There is a second set if updates are deferred into the next
// step, or run before the gradient norm is known.
type Scalars struct {
	Hyper BufID // F64 (NumHyper): rate, loss scale, bias corrections, number of the update: Hyper* constants
	Coef  BufID // F32 (1): factor for gradients: the clip coefficient over the loss scale
	Skip  BufID // I32 (1): while it is not 0 update rules change nothing; NoBuf: they always run
}

// scalarNames are the names of the fields in the text form.
var scalarNames = [...]string{"hyper", "coef", "skip"}

func (s *Scalars) buffers() []*BufID { return []*BufID{&s.Hyper, &s.Coef, &s.Skip} }

// Scaler decides for each step, on every rank alike, whether its update is skipped because a
// gradient is not finite. It also has the state of dynamic loss scaling; if State is NoBuf, steps
// are only skipped. A step's scale reaches the loss's gradient, and the clip coefficient that
// divides by it, through HyperLossScale. The host fills that slot with the scale that the previous
// step left.
type Scaler struct {
	State    BufID // F64 (NumScale): see Scale* constants; lives for the run, the same on every rank
	Overflow BufID // I32 (1): not 0 if this step's gradients overflowed and nothing is updated
}

// Slots of the Scaler's state, as float64.
const (
	ScaleValue = iota // the scale of the next step
	ScaleClean        // steps without overflow since the scale last changed; −n: n overflows in a row without a change yet
	NumScale   = 2
)

// InitialLossScale is the initial value of dynamic loss scaling.
const InitialLossScale = 1 << 16

// DefaultLossScale is the default policy of dynamic loss scaling.
var DefaultLossScale = LossScaleAttr{Growth: 2, Backoff: 0.5, Floor: 1, Interval: 2000}

// Slots of the Hyper buffer, as float64. They change with the step.
const (
	HyperLR        = iota // learning rate
	HyperInvCount         // 1 / (counted targets of the global batch)
	HyperLossScale        // loss scale; 1 where there is none
	HyperBC1              // 1 - beta1^t
	HyperBC2              // 1 - beta2^t
	HyperUpdate           // t: the number of this update, from 1; skipped steps do not count
	HyperSeed             // the run's seed, its low 53 bits, for stochastic rounding
	NumHyper       = 16
)

// Slots of the Key buffer, as int64. They change with the step.
const (
	KeySeed   = iota // the run's seed
	KeyStep          // step from 0
	KeySample        // global index of the sample in this rank's row 0 in this micro-step
	KeyRow           // generate: row of the (1, T) input whose logits are requested
	KeyValid         // generate: number of valid positions
	KeySlot          // generate: the caches' slot of the first sequence; the others use the following slots
	NumKey    = 8
)

// Buf returns the buffer with the given ID.
func (p *Program) Buf(id BufID) *Buffer { return &p.Buffers[id] }

// bufName names a buffer in messages: a number if it has no name or is out of range.
func (p *Program) bufName(id BufID) string {
	if id < 0 || int(id) >= len(p.Buffers) {
		return fmt.Sprintf("#%d", id)
	}
	if n := p.Buffers[id].Name; n != "" {
		return n
	}
	return fmt.Sprintf("#%d", id)
}

// half says whether a buffer has 16-bit elements.
func half(p *Program, id BufID) bool {
	dt := p.Buffers[id].DType
	return dt == BF16 || dt == F16
}

// AddBuffer appends b and returns its ID.
func (p *Program) AddBuffer(b Buffer) BufID {
	if len(p.Buffers) == cap(p.Buffers) { // append would copy a large program's buffers many times
		p.Buffers = slices.Grow(p.Buffers, len(p.Buffers)+1)
	}
	p.Buffers = append(p.Buffers, b)
	return BufID(len(p.Buffers) - 1)
}

// NewEvent returns a fresh event.
func (p *Program) NewEvent() EventID {
	p.Events++
	return EventID(p.Events)
}

// Resolve follows views to the root buffer. It returns the root and the byte offset in it for the
// rank with index coord[a] along each mesh axis a (nil: rank 0).
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

// Span returns the root buffer of id and the byte range in it that any rank may
// touch through id: a view with a RankStride spans the parts of all ranks.
func Span(p *Program, id BufID) (root BufID, lo, hi int64) {
	hi = p.Buffers[id].Bytes()
	for {
		v := p.Buffers[id].View
		if v == nil {
			return id, lo, hi
		}
		lo += v.Offset
		hi += v.Offset
		if v.RankStride != 0 && v.Axis < len(p.Mesh) {
			hi += v.RankStride * int64(p.Mesh[v.Axis].Size-1)
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

// AxisOf returns the index of the mesh axis with a name, −1 if there is none.
func (p *Program) AxisOf(name string) int {
	return slices.IndexFunc(p.Mesh, func(a Axis) bool { return a.Name == name })
}

// DataRanks returns the number of ranks that have different data.
func (p *Program) DataRanks() int {
	n := p.WorldSize()
	for _, a := range p.Mesh {
		if a.Name == TensorAxis || a.Name == PipelineAxis {
			n /= a.Size
		}
	}
	return n
}

// Phases iterates over the program's phases, each with its section.
func (p *Program) Phases() iter.Seq2[*Section, *Phase] {
	return func(yield func(*Section, *Phase) bool) {
		for i := range p.Sections {
			s := &p.Sections[i]
			for j := range s.Phases {
				if !yield(s, &s.Phases[j]) {
					return
				}
			}
		}
	}
}

type wellKnown struct {
	name  string
	id    *BufID
	typed bool
	dtype DType
}

// wellKnown lists the program's named buffers in the order of their fields.
func (p *Program) wellKnown() []wellKnown {
	list := []wellKnown{
		{"tokens", &p.Tokens, true, I32}, {"targets", &p.Targets, true, I32}, {"positions", &p.Positions, true, I32},
		{"hyper", &p.Hyper, true, F64}, {"key", &p.Key, true, I64},
		{"loss", &p.Loss, true, F64}, {"grad-norm", &p.GradNorm, true, F64}, {"logits", &p.Logits, false, F32},
	}
	if s := p.Scaler; s != nil {
		list = append(list, wellKnown{"loss-scale", &s.State, true, F64}, wellKnown{"overflow", &s.Overflow, true, I32})
	}
	return list
}
