// Package exec runs a program with a memory layout on one rank's device, and traces it. It makes
// no decisions: the program and the layout say which operation runs where, in which order and
// on which bytes.
package exec

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/memplan"
)

// Config has the program that an Executor runs and the resources that it runs on.
type Config struct {
	Program *graph.Program
	Layout  *memplan.Layout
	// Context is the rank's device context. The Executor owns it: Close closes it, and so
	// does New if it fails.
	Context device.Context
	// Library has the kernels of all operations except copies and collectives.
	Library kernels.Library
	// Groups has the rank's communication groups by mesh axis; −1 is the group of all ranks.
	// Each axis that a collective of the program names is needed.
	Groups map[int]comm.Group
	// Coord is the rank's index along each mesh axis.
	Coord []int
	// Trace records when each operation ran; nil: no trace.
	Trace *Trace
	// Meter measures collectives for Usage.
	Meter bool
	// Poison fills the bytes of a buffer with NaN as soon as its last operation
	// is done, for tests: see release.go. The Context must be a device.Poisoner.
	Poison bool
	// Graphs launches runs of a step's operations as one CUDA graph each, if the device can:
	// see graphs.go. It has no effect with a Trace or Meter, which time single operations.
	Graphs bool
	// Warn is called, on the rank's goroutine, if capturing fails and the run continues
	// without CUDA graphs; may be nil.
	Warn func(string)
}

// Executor runs the sections of a program on one rank.
//
// New:
//
//	for each space with a planned peak:  one arena of exactly that size
//	for each stream that is used:        one device stream
//	for each event:                      one device event
//	for each operation of each section:  bind it to its operands' addresses
//	    copy → Context.Copy; collective → its axis's Group; join → nothing;
//	    rest → Library
//
// RunSection:
//
//	for each phase, for each repeat:
//	    sync the streams that read host inputs; before(phase, repeat) fills these
//	    for each operation in program order:
//	        stream.Wait(each event); stream.Launch(kernel); stream.Record(event)
//	sync all streams
//
// Invariants:
//   - Nothing is allocated after New: no device memory ever, and running a phase
//     allocates nothing on the Go heap either.
//   - An operation is bound once; its addresses never change (so a device may
//     capture runs of them and launch each as one: graphs.go).
//   - Only stream order and events order operations. Phases are not barriers.
//     Sections are: one starts when all streams of the one before are idle.
//   - The first error on any rank ends the job on all: a device's error aborts
//     the rank's groups, a group's error aborts the rank's device. It comes out
//     of the call that runs or syncs, and of every later one, and names rank,
//     step, section, phase and operation.
//
// Deliberately absent: any decision about memory, order, streams or prefetch
// (the passes made them); retries and fallbacks; knowledge of what a kind
// computes; more than one goroutine a rank (methods are called from one, Abort,
// Touched and TouchedClasses from any).
type Executor struct {
	cfg      Config
	rank     int
	arenas   [graph.NumSpaces]device.Arena
	streams  [graph.NumStreams]device.Stream
	tracks   [graph.NumStreams]*track
	meter    *meter         // nil: none
	events   []device.Event // by EventID − 1
	sections []section
	groups   []comm.Group // distinct
	byKernel map[device.Kernel]*operation
	// readers are the streams on which operations read the host's inputs.
	readers []device.Stream
	closed  bool
	// peek copies Loss or GradNorm to the staging buffer: see Scalar.
	peek    map[graph.BufID]device.Kernel
	classes classes

	step    atomic.Int64
	repeats int // how often a step's repeating phase runs; 0: as planned
	current atomic.Pointer[section]
}

type section struct {
	graph  *graph.Section
	phases []phase
	gate   gate
}

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
	track  *track
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

// New allocates the arenas and binds the program. If it fails it ends the job on every rank,
// because the others would wait for this one.
func New(cfg Config) (*Executor, error) {
	e, err := build(cfg)
	if err == nil {
		return e, nil
	}
	for _, g := range cfg.Groups {
		g.Abort(err)
	}
	if cfg.Context != nil {
		err = errors.Join(err, cfg.Context.Close())
	}
	return nil, err
}

func build(cfg Config) (*Executor, error) {
	p := cfg.Program
	switch {
	case cfg.Context == nil:
		return nil, errors.New("exec: no device context")
	case p == nil || cfg.Layout == nil || cfg.Library == nil:
		return nil, errors.New("exec: want a program, a layout and a kernel library")
	case len(cfg.Layout.Offset) != len(p.Buffers):
		return nil, fmt.Errorf("exec: the layout has %d offsets, the program %d buffers", len(cfg.Layout.Offset), len(p.Buffers))
	case len(cfg.Coord) != len(p.Mesh):
		return nil, fmt.Errorf("exec: %d coordinates for a mesh of %d axes", len(cfg.Coord), len(p.Mesh))
	}
	for i, a := range p.Mesh {
		if cfg.Coord[i] < 0 || cfg.Coord[i] >= a.Size {
			return nil, fmt.Errorf("exec: coordinate %d along mesh axis %s of size %d", cfg.Coord[i], a.Name, a.Size)
		}
	}
	e := &Executor{cfg: cfg, rank: cfg.Context.Rank(), byKernel: map[device.Kernel]*operation{}}
	if cfg.Meter {
		e.meter = &meter{}
	}
	e.cfg.Graphs = cfg.Graphs && cfg.Trace == nil && !cfg.Meter
	e.step.Store(-1)
	for s := range graph.NumSpaces {
		peak := cfg.Layout.Spaces[s].Peak
		if peak == 0 {
			continue
		}
		a, err := cfg.Context.Alloc(s, peak)
		if err != nil {
			return nil, fmt.Errorf("exec: %w", err)
		}
		e.arenas[s] = a
	}
	for range p.Events {
		ev, err := cfg.Context.NewEvent()
		if err != nil {
			return nil, fmt.Errorf("exec: rank %d: event: %w", e.rank, err)
		}
		e.events = append(e.events, ev)
	}
	cfg.Context.OnError(func(err error) {
		for _, g := range cfg.Groups {
			g.Abort(e.describe(err))
		}
	})
	seen := map[comm.Group]bool{}
	for _, g := range cfg.Groups {
		if !seen[g] {
			seen[g] = true
			e.groups = append(e.groups, g)
			g.OnError(cfg.Context.Abort)
		}
	}
	if err := e.bindAll(); err != nil {
		return nil, err
	}
	return e, nil
}

// label is what errors and traces call the operation: phase/name.
func (o *operation) label() string { return o.phase.graph.Name + "/" + o.op.Name }

func (o *operation) path() string {
	return fmt.Sprintf("section %s, phase %s, operation %s", o.phase.section.graph.Name, o.phase.graph.Name, o.op.Name)
}

// SetStep sets the number of the current step, for errors; −1: none. repeats is how often the
// step's repeating phase runs, at least 2, if that differs from the plan
// (graph.Program.StepOf); 0: as planned.
func (e *Executor) SetStep(step int64, repeats int) {
	e.step.Store(step)
	e.repeats = repeats
}

// times returns how often a phase runs.
func (e *Executor) times(ph *phase) int {
	if n := ph.graph.Repeat; n < 2 || e.repeats == 0 || ph.section.graph.Kind != graph.SectionStep {
		return n
	}
	return e.repeats
}

// describe adds rank, step, section and operation to an error. It may run on any goroutine.
func (e *Executor) describe(err error) error {
	at := fmt.Sprintf("rank %d", e.rank)
	if step := e.step.Load(); step >= 0 {
		at += fmt.Sprintf(", step %d", step)
	}
	if failed, ok := errors.AsType[*device.OpError](err); ok && failed.Rank == e.rank {
		k, where := failed.Kernel, fmt.Sprintf("on stream %s", failed.Stream)
		if failed.Where != "" {
			where += " of " + failed.Where
		}
		o := e.operationOf(k)
		if o == nil {
			return fmt.Errorf("%s, operation %s %s: %w", at, k.Label(), where, failed.Err)
		}
		return fmt.Errorf("%s, %s %s: %w", at, o.path(), where, failed.Err)
	}
	if s := e.current.Load(); s != nil {
		at += ", section " + s.graph.Name
	}
	return fmt.Errorf("%s: %w", at, err)
}

func (e *Executor) operationOf(k device.Kernel) *operation {
	for k != nil && reflect.TypeOf(k).Comparable() {
		if o := e.byKernel[k]; o != nil {
			return o
		}
		w, ok := k.(interface{ Unwrap() device.Kernel })
		if !ok {
			return nil
		}
		k = w.Unwrap()
	}
	return nil
}

// stop ends the job on every rank because of err, and returns err with its description.
func (e *Executor) stop(err error) error {
	e.cfg.Context.Abort(err)
	return e.describe(err)
}

func (e *Executor) section(name string) (*section, error) {
	if e.closed {
		return nil, fmt.Errorf("exec: rank %d: section %s: the executor is closed", e.rank, name)
	}
	for i := range e.sections {
		if e.sections[i].graph.Name == name {
			return &e.sections[i], nil
		}
	}
	return nil, fmt.Errorf("exec: rank %d: the program has no section %q", e.rank, name)
}

func (e *Executor) enqueue(ops []operation) error {
	for i := range ops {
		o := &ops[i]
		for _, w := range o.wait {
			if err := o.stream.Wait(w); err != nil {
				return e.stop(err)
			}
		}
		if o.kernel != nil {
			o.track.launch(o)
			if err := o.stream.Launch(o.kernel); err != nil {
				return e.stop(err)
			}
			o.ran.Store(true)
		}
		for _, k := range o.release {
			o.track.launch(nil)
			if err := o.stream.Launch(k); err != nil {
				return e.stop(err)
			}
		}
		if o.record != nil {
			if err := o.stream.Record(o.record); err != nil {
				return e.stop(err)
			}
		}
	}
	return nil
}

// ErrAbandoned may be returned by the argument before of RunSection to end the section early:
// enqueued operations still run, no further ones are enqueued, and RunSection returns
// ErrAbandoned. All ranks must do so before the same repetition of the same phase; otherwise
// collectives wait for ranks that never come.
var ErrAbandoned = errors.New("exec: the section was abandoned")

// RunSection runs a whole section and returns when all of it has run.
//
// before, if not nil, is called each time before a phase is enqueued, with the number of times
// that the phase has run. It may then fill the host's inputs (graph.Port.In): all operations
// enqueued before that read them have finished. An error of before, except ErrAbandoned, ends
// the job on every rank.
func (e *Executor) RunSection(name string, before func(phase *graph.Phase, repeat int) error) error {
	s, err := e.section(name)
	if err != nil {
		return err
	}
	_, err = e.run(s, before, nil)
	return err
}

// run is RunSection, or with pass RunGated of a section that has a gate.
func (e *Executor) run(s *section, before func(phase *graph.Phase, repeat int) error, pass func(norm bool) (bool, error)) (bool, error) {
	e.current.Store(s)
	for i := range s.phases {
		ph := &s.phases[i]
		for r := range e.times(ph) {
			if err := e.prepare(ph, r, before); err != nil {
				return false, err
			}
			if pass != nil && i == s.gate.phase {
				if ok, err := e.pass(s, pass); err != nil || !ok {
					return false, err
				}
				continue
			}
			if err := e.enqueue(e.launches(ph)); err != nil {
				return false, err
			}
			ph.captured.warm = true
		}
	}
	return true, e.Sync()
}

// prepare waits for the readers of the host's inputs and calls before: see RunSection.
func (e *Executor) prepare(ph *phase, repeat int, before func(phase *graph.Phase, repeat int) error) error {
	if before == nil {
		return nil
	}
	for _, st := range e.readers {
		if err := st.Sync(); err != nil {
			return e.stop(err)
		}
	}
	switch err := before(ph.graph, repeat); {
	case errors.Is(err, ErrAbandoned):
		return cmp.Or(e.Sync(), ErrAbandoned)
	case err != nil:
		return e.stop(fmt.Errorf("phase %s: %w", ph.graph.Name, err))
	}
	return nil
}

// Sync returns when all enqueued operations have run on this rank, or with the error that ended
// the job.
func (e *Executor) Sync() error {
	for _, s := range e.streams {
		if s == nil {
			continue
		}
		if err := s.Sync(); err != nil {
			return e.stop(err)
		}
	}
	if e.meter != nil {
		e.meter.fold()
	}
	e.current.Store(nil)
	return nil
}

// Abort ends the job on every rank: running and waiting calls fail with err.
func (e *Executor) Abort(err error) { e.cfg.Context.Abort(err) }

// Running names the operations that the rank's streams are running, if the device can tell. It
// may be called from any goroutine, also while the rank is stuck.
func (e *Executor) Running() []string {
	if d, ok := e.cfg.Context.(device.Observer); ok {
		return d.Running()
	}
	return nil
}

// CommStats returns the rank's traffic so far, summed over its groups.
func (e *Executor) CommStats() comm.Stats {
	var sum comm.Stats
	for _, g := range e.groups {
		s := g.Stats()
		sum.Calls += s.Calls
		sum.Sent += s.Sent
		sum.Read += s.Read
		sum.Written += s.Written
	}
	return sum
}

// DiskTraffic returns the bytes that the rank has read from and written to disk so far.
func (e *Executor) DiskTraffic() device.Traffic {
	if u, ok := e.cfg.Context.(device.DiskUser); ok {
		return u.DiskTraffic()
	}
	return device.Traffic{}
}

// Close ends the streams and frees the arenas. Other calls fail after it.
func (e *Executor) Close() error {
	if e.closed {
		return nil
	}
	e.closed = true
	if err := e.cfg.Context.Close(); err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	return nil
}
