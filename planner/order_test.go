package planner

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// OrderCost is the difference between two plans. With sharded gradients a reproducible sum sends no
// more bytes, except for small units: the plan without it also reduces every micro-step into f32 of
// the same size.
func TestWhatTheOrderOfASumCosts(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Batch, c.Seq, c.Ranks, c.Accum = 1, 8, 4, 3
	machine := CPUHardware(1).Machine(c.Ranks)
	var flat int64 // bytes of all units' gradients in f32
	for zero := range 4 {
		c.Zero, c.Reproducible = zero, false
		without, err := c.Predict(t.Context(), machine)
		require.NoError(t, err)
		none, err := without.OrderCost(t.Context(), machine)
		require.NoError(t, err)
		require.Nil(t, none)
		c.Reproducible = true
		with, err := c.Predict(t.Context(), machine)
		require.NoError(t, err)
		cost, err := with.OrderCost(t.Context(), machine)
		require.NoError(t, err)
		flat = 0
		sums, sent, padded := int64(0), int64(0), int64(0)
		for u := range with.Plan.Program.Units {
			whole := 4 * with.Plan.Program.Units[u].FlatLen // bytes
			flat += whole
			small := 4 * without.Plan.Program.Units[u].FlatLen // not padded for shards without the flag
			switch {
			case small < whole: // reduced and gathered instead of all-reduced: once a step, or once a micro-step
				padded += whole
				times := int64(1)
				if zero >= 2 {
					times = 3
				}
				sums += whole/4 + whole
				sent += (3+1)*whole/4*3 - times*2*small/4*3
			case zero == 0: // the parts and the gathered result; three reductions instead of one
				sums += whole/4 + whole
				sent += 2 * whole / 4 * 3
			case zero == 1:
				sums += whole / 4
				sent += 2 * whole / 4 * 3
			default:
				sums += whole / 4
			}
		}
		require.Equal(t, sums, cost.Sums, "stage %d", zero)
		require.Equal(t, sent, cost.Sent-cost.Before, "stage %d", zero)
		require.Equal(t, with.Plan.Layout.Spaces[graph.Device].Peak-without.Plan.Layout.Spaces[graph.Device].Peak, cost.Peak[graph.Device])
		require.Contains(t, cost.String(), "over the step's 12 micro-batches from left to right")
		if zero >= 2 {
			require.Less(t, cost.Peak[graph.Device], 8<<10+3*padded, "stage %d: the ranks' losses, the sum of the leaves' squares, where they come to lie, and units that are too small for shards, padded and gathered", zero)
		}
	}
	c.Ranks, c.Accum = 1, 1
	one, err := c.Predict(t.Context(), machine)
	require.NoError(t, err)
	cost, err := one.OrderCost(t.Context(), machine)
	require.NoError(t, err)
	require.Zero(t, cost.Sent-cost.Before+cost.Sums+cost.Staging)
	require.Contains(t, cost.String(), "nothing is added")
}
