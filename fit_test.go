package spillway

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
)

func nothingGiven(string) bool { return false }

func fitConfig() Config {
	c := Default()
	c.Model, c.Ranks, c.Batch, c.Seq, c.DeviceMemory = "spillway-demo", 2, 4, 128, 60<<20
	return c
}

// Choosing buffer by buffer is never slower than the best of all whole policies
// and classes, at any cap.
func TestFitIsAsFastAsAnyWholeChoice(t *testing.T) {
	for _, limit := range []int64{40 << 20} {
		c, hw := fitConfig(), CPUHardware(2)
		c.DeviceMemory = limit
		got, err := Fit(c, nothingGiven, 0, hw)
		require.NoError(t, err)
		require.True(t, got.Fits)
		require.NoError(t, got.Plan.Fit())
		best := 0.0
		for z := range 4 {
			for p := range 2 {
				for _, r := range []string{"none", "selective", "full"} {
					for _, o := range wholePlacements {
						one := c
						one.Zero, one.Prefetch, one.Recompute, one.Offload = z, p, r, o
						if f, err := predict(one, hw.Machine(2), early); err == nil && f.Fits {
							best = max(best, f.TokensPerSecond())
						}
					}
				}
			}
		}
		require.GreaterOrEqual(t, got.TokensPerSecond(), best*(1-1e-9), got.Flags)
		again, err := Fit(c, nothingGiven, 0, hw)
		require.NoError(t, err)
		require.Equal(t, got.Flags, again.Flags)
		require.Equal(t, got.Reasons, again.Reasons)
		t.Log(got.Flags)
	}
}

func TestFitLeavesWhatWasGiven(t *testing.T) {
	c := fitConfig()
	c.Zero, c.Recompute, c.Prefetch = 2, "full", 5
	got, err := Fit(c, func(flag string) bool { return flag == "zero" || flag == "recompute" || flag == "prefetch" }, 0, CPUHardware(2))
	require.NoError(t, err)
	require.Equal(t, 2, got.Config.Zero)
	require.Equal(t, "full", got.Config.Recompute)
	require.Equal(t, 5, got.Config.Prefetch)
	require.Equal(t, []int{4, 1}, []int{got.Config.Batch, got.Config.Accum}) // without a global batch

	got, err = Fit(c, nothingGiven, 24, CPUHardware(2))
	require.NoError(t, err)
	require.Equal(t, 24, got.Config.Ranks*got.Config.Batch*got.Config.Accum)
	_, err = Fit(c, nothingGiven, 25, CPUHardware(2))
	require.ErrorContains(t, err, "--global-batch 25")
	require.ErrorContains(t, err, "24 and 26")
}

func TestFitRefusesWhatNothingFits(t *testing.T) {
	c := fitConfig()
	c.DeviceMemory = 100 << 10
	_, err := Fit(c, nothingGiven, 0, CPUHardware(2))
	var refused *plan.DoesNotFit
	require.ErrorAs(t, err, &refused)
	require.Equal(t, graph.Device, refused.Space)
}

// Planned at few layers and extended, memory and time are those of the whole
// model, within what the search allows for.
func TestExtrapolationOverLayers(t *testing.T) {
	for _, change := range []func(*Config){
		func(*Config) {},
		func(c *Config) { c.Zero, c.Accum = 1, 3 },
		func(c *Config) { c.Recompute, c.Prefetch = "full", 0 },
		func(c *Config) { c.Recompute, c.Precision = "selective", "bf16" },
		func(c *Config) { c.Offload = "optimizer=host,activations=host" },
	} {
		c := Default()
		c.Model, c.Ranks, c.Batch, c.Seq = "gpt2-large", 4, 2, 512
		change(&c)
		hw := Hardware{Machine: func(int) *cost.Machine { return cost.CPU(2, 4) }}
		s, err := newSearcher(c, hw.Machine(4), false, nil)
		require.NoError(t, err)
		require.True(t, s.folded)
		m := s.extrapolate(&point{base: base{c.Batch, c.Accum, c.Zero, c.Prefetch, c.Precision}, again: c.Recompute, away: c.Offload})
		require.NoError(t, m.err)
		whole, err := Predict(c, hw.Machine(4))
		require.NoError(t, err)
		for sp, n := range m.need {
			bound := whole.Plan.Layout.Spaces[sp].LowerBound + whole.Plan.Config.Outside[sp]
			require.LessOrEqual(t, float64(n), foldedSlack*float64(bound), "%v: what fits would be left out", graph.Space(sp))
			require.GreaterOrEqual(t, float64(n), 0.95*float64(bound), "%v", graph.Space(sp))
		}
		require.InEpsilon(t, whole.Step.Seconds, m.seconds, 0.02)
	}
}
