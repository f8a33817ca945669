package train

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
)

func nothingGiven(string) bool { return false }

// shaped is a folder with a GPT-2 of a vocabulary of 256 and 256 positions.
func shaped(t *testing.T, layers, width int) string {
	t.Helper()
	dir := t.TempDir()
	text := fmt.Appendf(nil, `{"model_type":"gpt2","n_layer":%d,"n_head":4,"n_embd":%d,"vocab_size":256,"n_positions":256}`, layers, width)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), text, 0o644))
	return dir
}

// fitConfig is a job of 2 layers on 2 ranks, whose plan without a cap takes some
// 34 MiB of device memory.
func fitConfig(t *testing.T) Config {
	c := Default()
	c.Model, c.Ranks, c.Batch, c.Seq, c.DeviceMemory = shaped(t, 2, 256), 2, 4, 128, 30<<20
	return c
}

// Choosing buffer by buffer is never slower than the best of all whole policies
// and classes: whichever of them would be faster does not fit. The same search has
// the same outcome.
func TestFitIsAsFastAsAnyWholeChoice(t *testing.T) {
	c, hw := fitConfig(t), CPUHardware(2)
	c.DeviceMemory = 22 << 20
	got, err := Fit(c, nothingGiven, 0, hw)
	require.NoError(t, err)
	require.True(t, got.Fits)
	require.NoError(t, got.Plan.Fit())
	faster, slower := 0, 0
	for z := range 4 {
		for p := range 2 {
			for _, r := range []string{"none", "selective", "full"} {
				for _, o := range wholePlacements {
					one := c
					one.Zero, one.Prefetch, one.Recompute, one.Offload = z, p, r, o
					f, err := predict(one, hw.Machine(2), bounds)
					if err != nil { // a class that this stage cannot place
						require.ErrorContains(t, err, "--offload")
						continue
					}
					if f.TokensPerSecond()*(1-1e-9) <= got.TokensPerSecond() {
						slower++
						continue
					}
					faster++
					f, err = predict(one, hw.Machine(2), early) // an error where its lower bounds are over the cap
					require.False(t, err == nil && f.Fits, "stage %d, prefetch %d, %s, %q fits and is faster than %s", z, p, r, o, got.Flags)
				}
			}
		}
	}
	require.Positive(t, faster)
	require.Positive(t, slower)
	again, err := Fit(c, nothingGiven, 0, hw)
	require.NoError(t, err)
	require.Equal(t, got.Flags, again.Flags)
	require.Equal(t, got.Reasons, again.Reasons)
	t.Log(got.Flags)
}

func TestFitLeavesWhatWasGiven(t *testing.T) {
	c := fitConfig(t)
	c.Zero, c.Recompute, c.Prefetch = 2, "full", 5
	got, err := Fit(c, func(flag string) bool { return flag == "zero" || flag == "recompute" || flag == "prefetch" }, 0, CPUHardware(2))
	require.NoError(t, err)
	require.Equal(t, 2, got.Config.Zero)
	require.Equal(t, "full", got.Config.Recompute)
	require.Equal(t, 5, got.Config.Prefetch)
	require.Equal(t, []int{4, 1}, []int{got.Config.Batch, got.Config.Accum}) // without a global batch

	got, err = Fit(c, nothingGiven, 12, CPUHardware(2))
	require.NoError(t, err)
	require.Equal(t, 12, got.Config.Ranks*got.Config.Batch*got.Config.Accum)
	_, err = Fit(c, nothingGiven, 25, CPUHardware(2))
	require.ErrorContains(t, err, "--global-batch 25")
	require.ErrorContains(t, err, "24 and 26")
}

func TestFitRefusesWhatNothingFits(t *testing.T) {
	c := fitConfig(t)
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
		m := s.extrapolate(&point{base: c.asBase(), again: c.Recompute, away: c.Offload})
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
