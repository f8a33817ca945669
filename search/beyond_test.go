package search

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// WaysOut proposes a change that has a cost only where the other changes do not fit without it.
// With a cap of 1,300 KiB smaller micro-batches are enough; with 1,200 KiB they are not.
func TestWaysOutNeedWhatTheyCost(t *testing.T) {
	t.Parallel()
	c, hw := gpt2(2, 64).spec(8, 4, 32), CPUHardware(2)
	hw.HalfPrecision, hw.Effort = true, 240
	for limit, costs := range map[int64]bool{1200 << 10: true, 1300 << 10: false} {
		c.Capacity[graph.Device] = limit
		asked, err := Predict(t.Context(), c, hw.Machine(c.Ranks))
		require.NoError(t, err)
		ways, _ := WaysOut(t.Context(), asked, hw)
		found := false
		for _, way := range ways {
			if way.Cost == "" {
				continue
			}
			found = true
			without, err := Predict(t.Context(), c.keeping(&way.Forecast.Spec), hw.Machine(c.Ranks))
			require.NoError(t, err)
			require.False(t, without.Fits(), "%d bytes: it fits without %s: %v", limit, way.Cost, way.Changes)
		}
		require.Len(t, ways, map[bool]int{true: 4, false: 2}[costs])
		require.Equal(t, costs, found)
	}
}
