package search

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
)

// The search plans a pipeline with one micro-batch more than stages and extrapolates. Device memory
// and step time must match the plan of all micro-batches within 0.2 %.
func TestMicroBatchesOfAPipelineAreAlike(t *testing.T) {
	for _, stages := range []int{2, 4} {
		for _, change := range []func(*Spec){
			func(*Spec) {},
			func(c *Spec) { c.Recompute, c.Precision = policyOf(recompute.Full), precision.BF16 },
			func(c *Spec) {
				c.Offload = resting([]graph.Class{graph.Optimizer, graph.Gradients, graph.Activations}, graph.Host)
			},
		} {
			j := gpt2(8, 128)
			j.stages = stages
			c := j.spec(2*stages, 2, 128)
			c.Stage, c.Accum = 1, 4*stages
			change(&c)
			m := cost.CPU(2, 2*stages)
			m.Cores, m.Sharers = 0, 0 // each rank has its own host
			m.ToHost, m.ToDevice = m.Memory/10, m.Memory/10
			require.Equal(t, stages+1, c.micros())
			got := newSearcher(t.Context(), c, m, false, nil).at(c, 0)
			require.NoError(t, got.err)
			whole, err := predict(t.Context(), c, m, 0, bounds)
			require.NoError(t, err)
			require.InEpsilon(t, whole.Step.Seconds, got.seconds, 0.002)
			require.InEpsilon(t, whole.Step.Pass[graph.Forward], got.forward, 0.002)
			require.InEpsilon(t, whole.Plan.Layout.Spaces[graph.Device].LowerBound, got.need[graph.Device], 0.002)
			require.InEpsilon(t, whole.ops(-1), got.ops, 0.05) // only to tell large programs
		}
	}
}
