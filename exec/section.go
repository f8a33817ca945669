package exec

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// section is a bound graph.Section.
type section struct {
	graph  *graph.Section
	phases []phase
	gate   gate
}

// phase is a bound graph.Phase.
type phase struct {
	graph   *graph.Phase
	section *section
	ops     []operation

	captured captured
}

// operation is a bound graph.Op.
type operation struct {
	op     *graph.Op
	phase  *phase
	kernel device.Kernel // nil: a join, which only waits and records
	stream device.Stream
	wait   []device.Event
	record device.Event // nil: none
	bytes  int64        // of all operands
	whole  int64        // bytes of the largest operand
	flops  int64        // as graph.Cost counts them
	unit   string       // name of its unit, empty for none
	ran    *atomic.Bool // whether it was enqueued at least once; shared by copies of this struct

	// release is launched after the kernel, before record: see Config.Poison.
	release []device.Kernel

	// Of two operations that run as one (kernels.Joiner), the first has no kernel and the
	// second the joint one. alone is the operation's own kernel, for running it separately.
	alone device.Kernel
	first bool // it is the first of such a pair

	idle bool // the rank has no micro-batch here, so it only waits and records
}

// label returns the operation's name in errors and traces: phase/name.
func (o *operation) label() string { return o.phase.graph.Name + "/" + o.op.Name }

func (o *operation) path() string {
	return fmt.Sprintf("section %s, phase %s, operation %s", o.phase.section.graph.Name, o.phase.graph.Name, o.op.Name)
}

// gate is the point in a section up to which the units' resident states are unchanged: before
// operation op of phase phase, the first of the section's update. phase < 0 means that there is
// no gate, because the section updates nothing, or because a predicate can skip the update.
//
// If updates overlap the backward, the gate is in the last micro-step, where the gradient norm is
// not known yet. The loss is known: the operations that sum it over the ranks and copy it to the
// host come after the gate, but are hoisted to it. That is allowed because they use only the loss's
// buffers, and no earlier operation uses their outputs. At their original place they still wait and
// record, because later operations on their streams rely on that order.
type gate struct {
	phase, op int
	norm      bool // GradNorm is known at the gate
	hoisted   []hoisted
}

type hoisted struct {
	at           int         // index in the phase
	early, place []operation // one operation each: the one that runs at the gate, and the one that stays at index at
}

// captured is the state of capturing one phase: see graphs.go.
type captured struct {
	warm bool        // the phase has run once
	done bool        // ops is set
	ops  []operation // the phase's operations; in a captured run only the last has a kernel, which runs all of them
}

// operands lists the buffers that an operation uses.
func operands(op *graph.Op) []graph.BufID {
	ids := slices.Clone(op.In)
	for _, o := range op.Out {
		ids = append(ids, o.Buf)
	}
	ids = append(ids, op.Work, op.Skip)
	return slices.DeleteFunc(ids, func(id graph.BufID) bool { return id == graph.NoBuf })
}
