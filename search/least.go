package search

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/offload"
)

// leastTime is what the compute stream of a base without any move does in a step. It runs
// one operation after the other, so that no plan takes less than the operations that it
// has there, and moves add to them: what is computed again is known before a plan is
// made, and what leaves the device takes the update along at most.
type leastTime struct {
	all    float64 // s a step
	states float64 // s a step, of all: what may run on the host where units' states leave
	micro  float64 // s of a micro-batch's forward and backward
}

// leastTime reads it off a base's plan.
func (s *searcher) leastTime(f *Forecast) *leastTime {
	p := f.Plan.Program
	sec := p.SectionOf(graph.SectionStep, graph.FormWhole)
	micro, ok := s.microBatch(f.Spec)
	if sec == nil || !ok {
		return nil
	}
	t := &leastTime{micro: micro}
	for i := range sec.Phases {
		ph := &sec.Phases[i]
		for k := range ph.Ops {
			op := &ph.Ops[k]
			if op.Stream != graph.Compute {
				continue
			}
			seconds := busy(s.machine, s.machine.Op(p, op)) * float64(ph.Repeat)
			t.all += seconds
			if op.Pass == graph.Update || op.Kind == graph.Fill || op.Kind == graph.Scale {
				t.states += seconds
			}
		}
	}
	return t
}

// microBatch is the time of a micro-batch's forward and backward, with what they compute
// again, on the compute stream; false where they cannot be made.
func (s *searcher) microBatch(c Spec) (seconds float64, ok bool) {
	key := fmt.Sprint(c.Batch, c.Precision, "|", c.Recompute)
	s.mu.Lock()
	seconds, ok = s.micros[key]
	s.mu.Unlock()
	if ok {
		return seconds, true
	}
	c.Accum, c.Shares, c.Shapes, c.LayerOrder, c.Stage, c.Prefetch, c.Offload = 1, nil, nil, false, 0, 0, offload.Options{} // which it does not depend on
	at, err := c.passes(0)
	if err != nil {
		return 0, false
	}
	at.BoundsOnly, at.Stop = true, s.ctx.Err
	p, err := s.spec.Plans.Recomputed(at.Forward, at.Config)
	if err != nil {
		return 0, false
	}
	seconds = computing(s.machine, p, p.SectionOf(graph.SectionTrain, graph.FormWhole).Micro())
	s.mu.Lock()
	defer s.mu.Unlock()
	s.micros[key] = seconds
	return seconds, true
}

// computing sums what the compute stream does in operations of a phase.
func computing(m *cost.Machine, p *graph.Program, ph *graph.Phase) (seconds float64) {
	for k := range ph.Ops {
		if op := &ph.Ops[k]; op.Stream == graph.Compute {
			seconds += busy(m, m.Op(p, op))
		}
	}
	return seconds
}

// rounding is how far sums of the same times in another order may lie apart, and more.
const rounding = 1e-9

// atLeast is a time a token that a point does not stay under, found without planning it.
// from is its base without any move.
func (s *searcher) atLeast(p *point, from *measured) float64 {
	if from.least == nil {
		return 0
	}
	c := s.whole(p)
	micro, ok := s.microBatch(c)
	if !ok {
		return 0
	}
	seconds := from.least.all + float64(p.accum)*(micro-from.least.micro)
	if c.Offload.States() {
		seconds -= from.least.states
	}
	return s.perToken(p, seconds) * (1 - rounding)
}

// What a point has to take to count, of what parts of it take alone: nothing was found to
// take less, and what does is left out under every cap, as neither depends on one.
const (
	classesAlone = 0.999 // of the time of the classes that leave the device, without another move
	parkedAlone  = 0.8   // of the time of the link for all kinds that wait off the device: the last layers' may be read at once
)

// countsFrom is the least time a token at which a base's point counts.
func (q *queue) countsFrom(b *bounded, p *point) float64 {
	floor := max(b.floor, q.perToken(p, parkedAlone*q.onLink(p)))
	if alone := p.classes(); alone != nil {
		if m := q.measure(alone); m.err == nil {
			floor = max(floor, classesAlone*q.perToken(p, m.seconds))
		}
	}
	return floor
}

// cheapest is a bound for what a base's point takes, s a token, found without a plan.
func (q *queue) cheapest(b *bounded, p *point) float64 {
	return max(b.floor, q.perToken(p, parkedAlone*q.onLink(p)), q.atLeast(p, b.from))
}

// onLink is the time of a step that the link to the host takes for what waits there from
// the forward to the backward.
func (s *searcher) onLink(p *point) float64 {
	if s.machine.ToHost <= 0 {
		return 0
	}
	bytes := 0.0
	for i := range p.set.moves {
		mv := &p.set.moves[i]
		if mv.kind != parkMove {
			continue
		}
		n := mv.layers(s.layers)
		switch {
		case p.x != nil:
			bytes += mv.bytes * float64(layersOf(p.x[i], n)) / float64(n)
		case p.away.Activations == mv.space && !p.again.Active():
			bytes += mv.bytes
		}
	}
	return bytes * float64(p.passes()) / s.machine.ToHost
}

// classes is a point with the classes alone that leave the device whole at another; nil:
// none does, or nothing else is moved.
func (p *point) classes() *point {
	alone := &point{base: p.base, set: p.set, x: make(mix, len(p.set.moves)), tier: p.tier}
	some, more := false, p.x == nil
	for i := range p.set.moves {
		mv := &p.set.moves[i]
		leaves := mv.kind == placeMove && (p.x != nil && p.x[i] >= 1 || p.x == nil && p.away.Whole(mv.class) == mv.space)
		if leaves {
			alone.x[i], some = 1, true
		} else {
			more = more || p.x != nil && p.x[i] > 0
		}
	}
	if !some || !more {
		return nil
	}
	return alone
}
