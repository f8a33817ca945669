package spillway

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/run"
)

// stepAt is a step on its way through the ranks.
type stepAt struct {
	index   int    // steps done before it
	section string // the form of the step that runs
	cached  bool   // what frozen layers hand on comes from the cache
	stopped bool   // it is not finite, and ended before its update
	noNorm  bool   // it ended before its gradient norm was known
	hyper   [graph.NumHyper]float64
}

// runStep runs a step on all ranks.
func (t *Trainer) runStep(at *stepAt) error {
	ran := make([]bool, len(t.micro))
	err := t.ranks.Each(fmt.Sprintf("step %d", at.index+1), func(r *run.Rank) error {
		r.Exec.SetStep(int64(at.index + 1))
		micro := 0
		var err error
		if t.stopsNonFinite() {
			ran[r.Slot], err = r.Exec.RunGated(at.section, t.inputsOf(r, at, &micro), func(norm bool) (bool, error) { return t.gate(r, norm) })
		} else {
			ran[r.Slot], err = true, r.Exec.RunSection(at.section, t.inputsOf(r, at, &micro))
		}
		if err != nil || at.cached || !ran[r.Slot] {
			return err
		}
		return t.keepPrefix(r, at.index, micro-1)
	})
	at.stopped = slices.Contains(ran, false)
	return err
}

// inputsOf returns what gives a rank the inputs of each micro-step, which it counts.
func (t *Trainer) inputsOf(r *run.Rank, at *stepAt, micro *int) func(*graph.Phase, int) error {
	return func(ph *graph.Phase, _ int) error {
		if ph.Kind == graph.UpdatePhase {
			return nil
		}
		defer func() { *micro++ }()
		var err error
		switch {
		case at.cached:
			err = t.givePrefix(r, at.index, *micro)
		case *micro > 0: // of the last one: after the section
			err = t.keepPrefix(r, at.index, *micro-1)
		}
		if err != nil {
			return err
		}
		return t.fill(r, t.train, at.hyper, at.index, *micro)
	}
}
