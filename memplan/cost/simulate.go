package cost

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
)

// Run is the predicted course of one run of a section.
type Run struct {
	Trace   *graph.Trace // repeated phases come twice in it
	Start   []float64    // by step of the trace: s from the start of the section
	End     []float64
	Seconds float64                   // of the section, all repetitions counted
	Busy    [graph.NumStreams]float64 // s that each stream works, all repetitions counted
	Pass    map[graph.Pass]float64    // s of computation by pass, all repetitions counted
	Exposed float64                   // s of Seconds in which the compute stream does not work
}

// Simulate runs section name of p on m: an operation starts when the one before
// it on its stream and all that its events wait for have finished. Of a phase
// that repeats, the second copy is what further repetitions cost.
func Simulate(p *graph.Program, name string, m *Machine) (*Run, error) {
	if err := m.Validate(); err != nil {
		return nil, err
	}
	sec := p.Section(name)
	if sec == nil {
		return nil, fmt.Errorf("cost: the program has no section %q", name)
	}
	regions, err := graph.NewRegions(p)
	if err != nil {
		return nil, fmt.Errorf("cost: %w", err)
	}
	t, err := graph.NewTrace(p, regions, sec)
	if err != nil {
		return nil, fmt.Errorf("cost: %w", err)
	}
	r := &Run{Trace: t, Start: make([]float64, len(t.Steps)), End: make([]float64, len(t.Steps)), Pass: map[graph.Pass]float64{}}
	var free [graph.NumStreams]float64
	all := 0.0    // latest end so far
	before := 0.0 // latest end before copy 1 of the phase at hand
	prior := graph.Step{Phase: -1}
	extra := 0.0
	settle := func() {
		if prior.Phase >= 0 {
			if ph := &sec.Phases[prior.Phase]; ph.Repeat > 2 {
				extra += float64(ph.Repeat-2) * (all - before)
			}
		}
	}
	for i := range t.Steps {
		at := t.Steps[i]
		if at.Phase != prior.Phase {
			settle()
		} else if at.Copy != prior.Copy {
			before = all
		}
		prior = at
		op := t.Op(i)
		start := free[op.Stream]
		if m.Serial {
			start = all
		}
		for st := range graph.NumStreams {
			if j := t.Known(i, st); j >= 0 {
				start = max(start, r.End[j])
			}
		}
		d := m.Op(p, op)
		r.Start[i], r.End[i] = start, start+d
		free[op.Stream] = start + d
		all = max(all, start+d)
		times := 1.0
		if ph := &sec.Phases[at.Phase]; at.Copy == 1 && ph.Repeat > 2 {
			times = float64(ph.Repeat - 1)
		}
		r.Busy[op.Stream] += times * d
		if op.Stream == graph.Compute || op.Stream == graph.HostWork {
			r.Pass[op.Pass] += times * d
		}
	}
	settle()
	r.Seconds = all + extra
	r.Exposed = max(0, r.Seconds-r.Busy[graph.Compute])
	return r, nil
}
