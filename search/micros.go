package search

import (
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/mesh"
)

// micros returns the number of a step's micro-batches that a search plans. In a pipeline that
// alternates forwards and backwards it is one more than the stages. A stage keeps the activations
// of at most that many, and each further one adds a period, so that memory and time of all follow.
func (s *Spec) micros() int {
	if s.Pipeline < 2 || s.Schedule != mesh.OneForwardOneBackward {
		return s.Accum
	}
	return min(s.Accum, s.Pipeline+1)
}

// period returns the seconds that each micro-batch beyond micros adds to a step: the time on the
// last stage between the beginnings of the forwards of micro-batches Pipeline-1 and Pipeline, the
// last two planned.
func (f *Forecast) period() float64 {
	run := f.Stages[len(f.Stages)-1]
	begin := func(micro int) float64 {
		i := slices.IndexFunc(run.Trace.Steps, func(st graph.Step) bool {
			op := &run.Trace.Section.Phases[st.Phase].Ops[st.Op]
			return op.Micro == micro && op.Unit >= 0 && op.Stream == graph.Compute
		})
		return run.Start[i]
	}
	return begin(f.Spec.Pipeline) - begin(f.Spec.Pipeline-1)
}
