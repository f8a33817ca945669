package exec

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/graph"
)

// ErrAbandoned may be returned by RunSection's argument before to end the section early. Enqueued
// operations still run, no further ones are enqueued, and RunSection returns ErrAbandoned. All
// ranks must do so before the same repetition of the same phase. Otherwise collectives wait for
// ranks that never arrive.
var ErrAbandoned = errors.New("exec: the section was abandoned")

// RunSection runs a section and returns when all its operations have run.
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

// RunGated runs a section as RunSection does. If the section has a gate (see gateOf), the rank's
// streams are synchronised there, and the update is enqueued only if pass returns true. The loss is
// known at the gate; norm says whether GradNorm is too. RunGated returns the result of pass. If it
// is false, the resident states are unchanged.
//
// pass must return the same on every rank, so it may depend only on values that were summed over
// the ranks.
func (e *Executor) RunGated(
	name string, before func(phase *graph.Phase, repeat int) error, pass func(norm bool) (bool, error),
) (bool, error) {
	s, err := e.section(name)
	if err != nil {
		return false, err
	}
	return e.run(s, before, pass) // without a gate pass is not called
}

// run does the same as RunSection, or with pass the same as RunGated for a section with a gate.
func (e *Executor) run(
	s *section, before func(phase *graph.Phase, repeat int) error, pass func(norm bool) (bool, error),
) (bool, error) {
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

func (e *Executor) enqueue(ops []operation) error {
	for i := range ops {
		o := &ops[i]
		for _, w := range o.wait {
			if err := o.stream.Wait(w); err != nil {
				return e.stop(err)
			}
		}
		if o.kernel != nil {
			e.tracks[o.op.Stream].launch(o)
			if err := o.stream.Launch(o.kernel); err != nil {
				return e.stop(err)
			}
			o.ran.Store(true)
		}
		for _, k := range o.release {
			e.tracks[o.op.Stream].launch(nil)
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
