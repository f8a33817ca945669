package planning

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/planner"
)

// The recommendation is the fastest of the search's result and of the ways out without a cost.
func TestAFasterWayOutIsRecommended(t *testing.T) {
	c := config.Default()
	c.Batch, c.Seq = 1, 8
	took := func(seconds float64) *planner.Forecast {
		return &planner.Forecast{Config: c, Step: &cost.Run{Seconds: seconds}}
	}
	way := func(seconds float64, costs string) planner.Way {
		return planner.Way{Forecast: took(seconds), Cost: costs}
	}
	best := func(found *planner.Fitted, ways ...planner.Way) float64 {
		got := faster(found, ways)
		if got == nil {
			return 0
		}
		return got.Forecast.Step.Seconds
	}
	found := &planner.Fitted{Forecast: took(2)}
	require.Equal(t, 1.0, best(found, way(3, ""), way(1, ""), way(1.5, "")))
	require.Zero(t, best(found, way(3, ""), way(1, "more ranks")), "what the search found")
	require.Equal(t, 3.0, best(nil, way(4, ""), way(3, "")))
	require.Zero(t, best(nil, way(1, "a disk")))
}
