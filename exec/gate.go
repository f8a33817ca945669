package exec

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// gate is the point in a section up to which the units' resident states are unchanged: before
// operation op of phase phase, the first of the section's update. phase < 0 means that there is
// no gate, because the section updates nothing, or because a predicate can skip the update.
//
// If updates overlap the backward, the gate is in the last micro-step, where the gradient norm is
// not known yet. The loss is known: the operations that sum it over the ranks and copy it to the
// host, which come after the gate, are hoisted to it. That is allowed because they use only the
// loss's buffers, and nothing before them uses what they write. At their own place they still
// wait and record, because later operations on their streams rely on that order.
type gate struct {
	phase, op int
	norm      bool // GradNorm is known at the gate
	hoisted   []hoisted
}

type hoisted struct {
	at           int         // index in the phase
	early, place []operation // one operation each: what runs at the gate, and what stays at index at
}

// gateOf finds the gate of a section.
func gateOf(p *graph.Program, s *graph.Section) gate {
	none := gate{phase: -1}
	if p.Scaler != nil {
		return none
	}
	resident := residents(p)
	for i := range s.Phases {
		ph := &s.Phases[i]
		if ph.Repeat != 1 {
			continue
		}
		for k := range ph.Ops {
			op := &ph.Ops[k]
			switch _, rule := op.Attr.(graph.UpdateAttr); {
			case ph.Kind == graph.UpdatePhase && writesAny(p, op, resident):
				return gate{phase: i, op: k, norm: true}
			case ph.Kind != graph.UpdatePhase && rule && op.Skip == graph.NoBuf:
				return gate{phase: i, op: k, hoisted: observers(p, ph.Ops, k)}
			}
		}
	}
	return none
}

// observers lists the operations, from index first on, that sum the loss and copy it to the host.
func observers(p *graph.Program, ops []graph.Op, first int) (list []hoisted) {
	loss := map[graph.BufID]bool{}
	for _, id := range []graph.BufID{p.Loss, p.Port(graph.PortLoss)} {
		if id != graph.NoBuf {
			r, _ := p.Resolve(id, nil)
			loss[r] = true
		}
	}
	for k := first; k < len(ops); k++ {
		if writesAny(p, &ops[k], loss) {
			list = append(list, hoisted{at: k})
		}
	}
	return list
}

// bindGate prepares the hoisted operations, after the section is bound.
func (s *section) bindGate() {
	for i := range s.gate.hoisted {
		h := &s.gate.hoisted[i]
		early, place := s.phases[s.gate.phase].ops[h.at], s.phases[s.gate.phase].ops[h.at]
		early.wait, early.record, early.release = nil, nil, nil // at the gate all streams are idle
		place.kernel = nil
		h.early, h.place = []operation{early}, []operation{place}
	}
}

// residents returns the roots of the units' values and optimizer states.
func residents(p *graph.Program) map[graph.BufID]bool {
	roots := map[graph.BufID]bool{}
	add := func(id graph.BufID) {
		if id != graph.NoBuf {
			r, _ := p.Resolve(id, nil)
			roots[r] = true
		}
	}
	for i := range p.Units {
		if u := &p.Units[i]; u.FlatLen > 0 {
			add(u.Value.Buf)
			for _, s := range u.States {
				add(s.Buf)
			}
		}
	}
	return roots
}

func writesAny(p *graph.Program, op *graph.Op, roots map[graph.BufID]bool) bool {
	for _, o := range op.Out {
		if o.Buf == graph.NoBuf {
			continue
		}
		if r, _ := p.Resolve(o.Buf, nil); roots[r] {
			return true
		}
	}
	return false
}

// RunGated runs a section as RunSection does. If the section has a gate (see gateOf), the rank's
// streams are synchronised there, and the update is enqueued only if pass returns true. The
// loss is known at that point; norm says whether GradNorm is too. RunGated returns the result of
// pass: if it is false, the resident states are unchanged.
//
// pass must return the same on every rank, so it may depend only on values that were summed over
// the ranks.
func (e *Executor) RunGated(name string, before func(phase *graph.Phase, repeat int) error, pass func(norm bool) (bool, error)) (bool, error) {
	s, err := e.section(name)
	if err != nil {
		return false, err
	}
	return e.run(s, before, pass) // without a gate pass is not called
}

// pass enqueues the phase that contains a section's gate: up to the gate, and the rest if the
// function pass returns true.
func (e *Executor) pass(s *section, pass func(norm bool) (bool, error)) (bool, error) {
	g, ph := s.gate, &s.phases[s.gate.phase]
	ops := e.launches(ph)
	if err := e.enqueue(ops[:g.op]); err != nil {
		return false, err
	}
	if err := e.Sync(); err != nil {
		return false, err
	}
	for i := range g.hoisted {
		if err := e.enqueue(g.hoisted[i].early); err != nil {
			return false, err
		}
		if err := e.Sync(); err != nil {
			return false, err
		}
	}
	e.current.Store(s)
	ok, err := pass(g.norm)
	if err != nil {
		return false, e.stop(err)
	}
	if !ok {
		e.current.Store(nil)
		return false, nil
	}
	from := g.op
	for i := range g.hoisted {
		h := &g.hoisted[i]
		if err := e.enqueue(ops[from:h.at]); err != nil {
			return false, err
		}
		if err := e.enqueue(h.place); err != nil {
			return false, err
		}
		from = h.at + 1
	}
	ph.captured.warm = true
	return true, e.enqueue(ops[from:])
}

// Scalar waits for all enqueued operations and returns a buffer of one f64, in any memory
// space. Only the first call for a buffer allocates memory.
func (e *Executor) Scalar(id graph.BufID) (float64, error) {
	fail := func(err error) (float64, error) {
		return 0, fmt.Errorf("exec: rank %d: scalar in buffer %d: %w", e.rank, id, err)
	}
	if id == graph.NoBuf {
		return fail(errors.New("the program lacks it"))
	}
	if b := e.cfg.Program.Buf(id); b.DType != graph.F64 || b.Elems() != 1 {
		return fail(fmt.Errorf("%q is %s of %d elements, want one f64", b.Name, b.DType, b.Elems()))
	}
	if e.cfg.Program.Buf(id).Space == graph.Host {
		v, err := e.HostF64(id)
		if err != nil {
			return fail(err)
		}
		return v[0], nil
	}
	staging, err := e.ptr(e.cfg.Program.Port(graph.PortStaging))
	if err == nil && staging.Len < 8 {
		err = errors.New("the program has no staging buffer")
	}
	if err != nil {
		return fail(err)
	}
	staging.Len = 8
	k := e.peek[id]
	if k == nil {
		there, err := e.ptr(id)
		if err != nil {
			return fail(err)
		}
		if k, err = e.cfg.Context.Copy("peek "+e.cfg.Program.Buf(id).Name, staging, there); err != nil {
			return fail(err)
		}
		if e.peek == nil {
			e.peek = map[graph.BufID]device.Kernel{}
		}
		e.peek[id] = k
	}
	s, err := e.stream(graph.CopyOut)
	if err != nil {
		return fail(err)
	}
	e.tracks[graph.CopyOut].launch(nil)
	if err := s.Launch(k); err != nil {
		return fail(e.stop(err))
	}
	if err := s.Sync(); err != nil {
		return fail(e.stop(err))
	}
	b, err := e.cfg.Context.HostBytes(staging)
	if err != nil {
		return fail(err)
	}
	return math.Float64frombits(binary.LittleEndian.Uint64(b)), nil
}
