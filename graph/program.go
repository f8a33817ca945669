package graph

import (
	"fmt"
	"iter"
	"slices"
)

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

// Scalars are the numbers that change with the step and that every update rule reads. They
// are in buffers, not constants of operations, so that a captured program can be run again.
// The program's first set is for the current step. There is a second set if updates are
// deferred into the next step, or run before the gradient norm is known.
type Scalars struct {
	Hyper BufID // F64 (NumHyper): rate, loss scale, bias corrections, number of the update: Hyper* constants
	Coef  BufID // F32 (1): factor for gradients: the clip coefficient over the loss scale
	Skip  BufID // I32 (1): while it is not 0 update rules change nothing; NoBuf: they always run
}

// scalarNames are the names of the fields in the text form.
var scalarNames = [...]string{"hyper", "coef", "skip"}

func (s *Scalars) buffers() []*BufID { return []*BufID{&s.Hyper, &s.Coef, &s.Skip} }

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
	if len(p.Buffers) == cap(p.Buffers) { // append would copy a large program's many times
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

// Phases goes through the program's phases, each with its section.
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
