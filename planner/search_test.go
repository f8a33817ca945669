package planner

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
)

func demo(t *testing.T) Request {
	t.Helper()
	c := Request{Config: config.Default()}
	c.Model, c.Batch, c.Seq = "spillway-ledger", 4, 128
	return c
}

func peakOf(t *testing.T, c Request) int64 {
	t.Helper()
	p, err := c.Plan(t.Context())
	require.NoError(t, err)
	return p.Layout.Spaces[graph.Device].Peak
}

// A lower cap recomputes more and predicts a longer step, but never a longer one than full
// recomputation.
func TestAutoDropsWhatTheCapAsksFor(t *testing.T) {
	t.Parallel()
	c := demo(t)
	m := cost.CPU(2, 1)
	c.Recompute = "auto"
	f, err := c.Predict(t.Context(), m)
	require.NoError(t, err)
	require.Equal(t, "none", f.Config.Recompute)
	require.Contains(t, f.Auto, "no cap")

	c.Recompute = "none"
	most := peakOf(t, c)
	c.Recompute = "full"
	full, err := c.Predict(t.Context(), m)
	require.NoError(t, err)
	least := full.Plan.Layout.Spaces[graph.Device].Peak
	c.Recompute = "auto"
	last := 0.0
	for i := range 6 {
		c.DeviceMemory = most - (most-least)*int64(i)/5
		f, err := c.Predict(t.Context(), m)
		require.NoError(t, err)
		require.True(t, f.Fits, "%d", i)
		require.GreaterOrEqual(t, f.Step.Seconds, last*(1-1e-9))
		require.LessOrEqual(t, f.Step.Seconds, full.Step.Seconds*(1+1e-9))
		last = f.Step.Seconds
		if i == 0 {
			require.Equal(t, "none", f.Config.Recompute)
			require.Contains(t, f.Auto, "nothing needs")
		}
		if i == 2 {
			require.True(t, strings.HasPrefix(f.Config.Recompute, "drop:"), f.Config.Recompute)
			require.Less(t, f.Step.Seconds, full.Step.Seconds)
			// The explanation describes the plan. Planning again with the chosen policy by name
			// gives the same plan.
			e := Explain(f)
			require.NotEmpty(t, e.Recomputed)
			again := c
			again.Recompute = f.Config.Recompute
			same, err := again.Predict(t.Context(), m)
			require.NoError(t, err)
			require.Equal(t, f.Plan.Hash(), same.Plan.Hash())
			require.Contains(t, f.Auto, quote(f.Config.Recompute))
		}
	}
	c.DeviceMemory = least / 2
	f, err = c.Predict(t.Context(), m)
	require.NoError(t, err)
	require.False(t, f.Fits)
	require.Equal(t, "full", f.Config.Recompute)
}

// If the optimizer's states slightly exceed the device, only a part of them is offloaded.
func TestFitMovesAShareOfTheStates(t *testing.T) {
	t.Parallel()
	c := demo(t)
	c.Ranks = 1
	keep := Fixed{Recompute: true, Prefetch: true}
	c.Offload = "optimizer=host"
	none := c
	none.Offload = ""
	c.DeviceMemory = (peakOf(t, c) + peakOf(t, none)) / 2
	got, err := c.Fit(t.Context(), keep, 0, fewPlans())
	require.NoError(t, err)
	require.True(t, got.Fits)
	require.Contains(t, got.Config.Offload, "%", got.Choices)
	whole, err := c.Predict(t.Context(), cost.CPU(2, 1))
	require.NoError(t, err)
	require.Less(t, got.Step.Seconds, whole.Step.Seconds)
	moved := Explain(got.Forecast).Placed
	require.NotEmpty(t, moved)
	require.Less(t, moved[0].Units, moved[0].Of)
}

// With a cap on the host, the remaining states go to disk; without a disk nothing fits.
func TestFitUsesTheTiers(t *testing.T) {
	t.Parallel()
	c := demo(t)
	c.DeviceMemory, c.HostMemory = 24<<20, 61<<20
	_, err := c.Fit(t.Context(), Fixed{}, 0, fewPlans())
	var none *NothingFits
	require.ErrorAs(t, err, &none)
	require.NotNil(t, none.Smallest)
	var refused *plan.DoesNotFit
	require.ErrorAs(t, err, &refused)
	c.Disk = t.TempDir()
	got, err := c.Fit(t.Context(), Fixed{}, 0, fewPlans())
	require.NoError(t, err)
	require.True(t, got.Fits)
	require.Positive(t, got.Plan.Layout.Spaces[graph.Disk].Peak)
	require.LessOrEqual(t, got.Plan.Layout.Spaces[graph.Host].Peak, c.HostMemory)
}

// Fit uses 16 bits only if they are allowed, and then if they are faster.
func TestFitChoosesAllowedPrecisions(t *testing.T) {
	t.Parallel()
	g, err := gpus.Lookup("a100-40")
	require.NoError(t, err)
	hw := Hardware{Machine: func(ranks int) *cost.Machine { return g.Machine(ranks) }, Effort: 100}
	c := Request{Config: config.Default()}
	c.Model, c.Ranks, c.Batch, c.Seq, c.DeviceMemory = "gpt2-medium", 4, 4, 1024, g.Memory
	got, err := c.Fit(t.Context(), Fixed{}, 0, hw)
	require.NoError(t, err)
	require.Equal(t, "fp32", got.Config.PrecisionName())
	c.Allow = []string{"bf16"}
	faster, err := c.Fit(t.Context(), Fixed{}, 0, hw)
	require.NoError(t, err)
	require.Equal(t, "bf16", faster.Config.PrecisionName())
	require.Contains(t, faster.Choices.String(), "Config.Precision bf16")
	require.Greater(t, faster.TokensPerSecond(), got.TokensPerSecond())
	c.Device, c.Allow = "cuda", []string{"fp16"}
	require.NoError(t, c.Runnable(), "what may be chosen runs there")
}

// If no plan meets the caps, WaysOut reports the plan nearest to them, with its need in every
// capped space. That need is at most that of the plan as asked.
func TestNoWayOut(t *testing.T) {
	t.Parallel()
	c := demo(t)
	c.DeviceMemory, c.HostMemory = 100<<10, 1<<20
	asked, err := c.Predict(t.Context(), cost.CPU(2, 1))
	require.NoError(t, err)
	ways, no := WaysOut(t.Context(), asked, fewPlans())
	require.Empty(t, ways)
	require.NotNil(t, no.Nearest)
	near, was := no.Nearest.Plan.Layout.Spaces, asked.Plan.Layout.Spaces
	require.Less(t, near[graph.Device].Peak, was[graph.Device].Peak/2)
	for _, want := range []string{"Nothing of", plan.Bytes(near[graph.Device].Peak) + " of device memory", plan.Bytes(near[graph.Host].Peak) + " of host memory",
		"cap of 100.00 KiB", "cap of 1.00 MiB", "bound by", "Config.Zero", "Tried in vain", "64 ranks", "rows down to 16 tokens", "disk"} {
		require.Contains(t, no.String(), want)
	}
	again, err := c.Predict(t.Context(), cost.CPU(2, 1))
	require.NoError(t, err)
	_, same := WaysOut(t.Context(), again, CPUHardware(2))
	require.Equal(t, no.String(), same.String())
	// A request for the nearest plan gives the plan that was reported.
	p, err := Predict(t.Context(), no.Nearest.Config, cost.CPU(2, 1))
	require.NoError(t, err)
	require.Equal(t, near[graph.Device].Peak, p.Plan.Layout.Spaces[graph.Device].Peak)
}

// If only the host's cap is exceeded, WaysOut proposes to keep everything on the device, or to
// offload less to the host where that is faster than using the disk.
func TestWaysOutOfTheHostsCap(t *testing.T) {
	t.Parallel()
	c := demo(t)
	c.Offload, c.HostMemory = "optimizer=host,activations=host", 61<<20
	asked, err := c.Predict(t.Context(), cost.CPU(2, 1))
	require.NoError(t, err)
	require.False(t, asked.Fits)
	ways, _ := WaysOut(t.Context(), asked, fewPlans())
	require.NotEmpty(t, ways)
	require.Equal(t, Settings{{"Config.Offload", "none"}}, ways[0].Changes)
	c.DeviceMemory, c.HostMemory, c.Disk = 26<<20, 78<<20, t.TempDir()
	c.Recompute = "full"
	asked, err = c.Predict(t.Context(), cost.CPU(2, 1))
	require.NoError(t, err)
	ways, no := WaysOut(t.Context(), asked, CPUHardware(2))
	require.NotEmpty(t, ways, "%v", no)
	require.Empty(t, ways[0].Cost)
	require.Less(t, ways[0].Slowdown, 1.1, "the disk takes 1.76: %s", ways[0].Changes)
}
