package search

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// counted is a job that counts the plans made of it.
type counted struct {
	*job
	plans atomic.Int64
}

func (c *counted) At(sh Shape) (plan.Spec, error) {
	c.plans.Add(1)
	return c.job.At(sh)
}

// A search and its ways out share one budget of plans, and together never exceed it. Repeating them
// gives the same result.
func TestNoMorePlansThanTheBudget(t *testing.T) {
	for _, n := range []int{1, 2, 3, 7, 12, 25, 60, 200} {
		try := func(cap int64) (chosen string, planned int64) {
			of := &counted{job: gpt2(2, 256)}
			c, hw := of.spec(2, 4, 128), CPUHardware(2)
			c.Job, c.Capacity[graph.Device] = of, cap
			asked, err := Predict(t.Context(), c, hw.Machine(2))
			require.NoError(t, err)
			hw.Budget = NewBudget(n)
			of.plans.Store(0)
			got, err := Fit(t.Context(), c, Given{}, nil, 8, hw)
			if err == nil {
				chosen = keyOf(&got.Spec)
			} else {
				var none *NothingFits
				require.ErrorAs(t, err, &none)
			}
			ways, _ := WaysOut(t.Context(), asked, hw)
			for _, way := range ways {
				chosen += keyOf(&way.Forecast.Spec)
			}
			require.LessOrEqual(t, hw.Budget.Used(), n)
			return chosen, of.plans.Load()
		}
		for _, cap := range []int64{1 << 20, 22 << 20} {
			chosen, planned := try(cap)
			// The moves of each micro-batch size, order and job are listed once, which counts here
			// but uses no budget.
			require.LessOrEqual(t, planned, int64(n)+24, "%d plans allowed", n)
			again, _ := try(cap)
			require.Equal(t, chosen, again)
		}
	}
}
