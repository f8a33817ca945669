// Package exec runs a program with a memory layout on one rank's device, and traces it. It makes no
// decisions: the program and the layout fix each operation's stream, order and addresses.
package exec

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync/atomic"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/memplan"
)

// Config has the program of an Executor and the resources on which it runs.
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
	// Poison fills a buffer's bytes with NaN after its last operation, for tests: see release.go.
	// The Context must be a device.Poisoner.
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
//   - Nothing is allocated after New: no device memory ever, and running a phase allocates nothing
//     on the Go heap either.
//   - An operation is bound once. Its addresses never change, so a device may capture runs of
//     operations and launch each run as one: graphs.go.
//   - Only stream order and events order operations. Phases are not barriers. Sections are: a
//     section starts when all streams of the previous one are idle.
//   - The first error on any rank ends the job on all ranks: a device's error aborts the rank's
//     groups, a group's error aborts the rank's device. The call that runs or syncs returns the
//     error, and so does every later call. The error names rank, step, section, phase and operation.
//
// Deliberately absent: any decision about memory, order, streams or prefetch (the passes made
// them); retries and fallbacks; knowledge of an operation's computation; more than one goroutine a
// rank. Only Abort, Touched and TouchedClasses may be called from any goroutine.
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

// SetStep sets the number of the current step, for errors; −1: none. repeats is how often the
// step's repeating phase runs, at least 2, if that differs from the plan
// (graph.Program.StepOf); 0: as planned.
func (e *Executor) SetStep(step int64, repeats int) {
	e.step.Store(step)
	e.repeats = repeats
}

// times returns the number of runs of a phase.
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

func (e *Executor) eachOp(f func(*operation)) {
	for i := range e.sections {
		for j := range e.sections[i].phases {
			ops := e.sections[i].phases[j].ops
			for k := range ops {
				f(&ops[k])
			}
		}
	}
}

// stream returns the device's stream, made at first use.
func (e *Executor) stream(id graph.StreamID) (device.Stream, error) {
	if id >= graph.NumStreams {
		return nil, fmt.Errorf("no stream %s", id)
	}
	if e.streams[id] != nil {
		return e.streams[id], nil
	}
	s, err := e.cfg.Context.NewStream(id)
	if err != nil {
		return nil, err
	}
	if e.cfg.Trace != nil || e.meter != nil {
		timed, ok := s.(device.Timed)
		if !ok {
			return nil, fmt.Errorf("stream %s: the device can't time its kernels for a trace or a meter (%T)", id, s)
		}
		if err := e.watch(id, timed); err != nil {
			return nil, err
		}
	}
	e.streams[id] = s
	return s, nil
}

// watch makes a stream report the times of its kernels to the trace and the meter.
func (e *Executor) watch(id graph.StreamID, timed device.Timed) error {
	k := e.cfg.Trace.add(e.rank, id)
	if e.meter != nil && slices.Contains(metered, id) {
		k.lane = &lane{}
		e.meter.lanes[id] = k.lane
	}
	e.tracks[id] = k
	return timed.Time(k)
}

func (e *Executor) event(id graph.EventID) (device.Event, error) {
	if id < 1 || int(id) > len(e.events) {
		return nil, fmt.Errorf("event %d of %d", id, len(e.events))
	}
	return e.events[id-1], nil
}

// ptr returns the address of a buffer on this rank; the zero Ptr for NoBuf.
func (e *Executor) ptr(id graph.BufID) (device.Ptr, error) {
	p := e.cfg.Program
	if id == graph.NoBuf {
		return device.Ptr{}, nil
	}
	if id < 0 || int(id) >= len(p.Buffers) {
		return device.Ptr{}, fmt.Errorf("buffer %d of %d", id, len(p.Buffers))
	}
	b := p.Buf(id)
	root, off := p.Resolve(id, e.cfg.Coord)
	r := p.Buf(root)
	at := e.cfg.Layout.Offset[root]
	arena := e.arenas[r.Space]
	switch {
	case b.Space != r.Space:
		return device.Ptr{}, fmt.Errorf("buffer %q is in %s memory, its base %q in %s", b.Name, b.Space, r.Name, r.Space)
	case off < 0 || off > r.Bytes()-b.Bytes():
		return device.Ptr{}, fmt.Errorf("buffer %q: bytes [%d, %d) are outside its base %q of %d bytes", b.Name, off, off+b.Bytes(), r.Name, r.Bytes())
	case at < 0 || arena == nil:
		return device.Ptr{}, fmt.Errorf("buffer %q has no place in the layout", r.Name)
	}
	ptr := device.Ptr{Arena: arena, Off: at + off, Len: b.Bytes()}
	if err := ptr.Check(); err != nil {
		return device.Ptr{}, fmt.Errorf("buffer %q: %w", b.Name, err)
	}
	return ptr, nil
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

// Usage returns the cost of the rank's collectives in all sections that have ended; the zero
// Usage without Config.Meter. Any goroutine may call it.
func (e *Executor) Usage() Usage {
	if e.meter == nil {
		return Usage{}
	}
	e.meter.mu.Lock()
	defer e.meter.mu.Unlock()
	return e.meter.sum
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
