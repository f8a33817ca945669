package planner

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
)

// shaped returns a folder with the configuration of a GPT-2 with a vocabulary of 256 and 256
// positions.
func shaped(t *testing.T, layers, width int) string {
	t.Helper()
	dir := t.TempDir()
	text := fmt.Appendf(nil, `{"model_type":"gpt2","n_layer":%d,"n_head":4,"n_embd":%d,"vocab_size":256,"n_positions":256}`, layers, width)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), text, 0o644))
	return dir
}

// fitConfig returns a job of 2 layers on 2 ranks. Without a cap its plan needs about 34 MiB of
// device memory.
func fitConfig(t *testing.T) Request {
	c := Request{Config: config.Default()}
	c.Model, c.Ranks, c.Batch, c.Seq, c.DeviceMemory = shaped(t, 2, 256), 2, 4, 128, 30<<20
	return c
}

// fewPlans returns this CPU with a search limit of 100 plans, enough for most tests here.
func fewPlans() Hardware {
	hw := CPUHardware(2)
	hw.Effort = 100
	return hw
}

func TestFitLeavesWhatWasGiven(t *testing.T) {
	t.Parallel()
	c := fitConfig(t)
	c.Zero, c.Recompute, c.Prefetch = 2, "full", 5
	got, err := c.Fit(t.Context(), Fixed{Zero: true, Recompute: true, Prefetch: true}, 0, fewPlans())
	require.NoError(t, err)
	require.Equal(t, 2, got.Config.Zero)
	require.Equal(t, "full", got.Config.Recompute)
	require.Equal(t, 5, got.Config.Prefetch)
	require.Equal(t, []int{4, 1}, []int{got.Config.Batch, got.Config.Accum}) // without a global batch

	got, err = c.Fit(t.Context(), Fixed{}, 12, fewPlans())
	require.NoError(t, err)
	require.Equal(t, 12, got.Config.Ranks*got.Config.Batch*got.Config.Accum)
	_, err = c.Fit(t.Context(), Fixed{}, 25, CPUHardware(2))
	require.ErrorContains(t, err, "Config.GlobalBatch 25")
	require.ErrorContains(t, err, "24 and 26")
}

func TestFitRefusesWhatNothingFits(t *testing.T) {
	t.Parallel()
	c := fitConfig(t)
	c.DeviceMemory = 100 << 10
	_, err := c.Fit(t.Context(), Fixed{}, 0, CPUHardware(2))
	var refused *plan.DoesNotFit
	require.ErrorAs(t, err, &refused)
	require.Equal(t, graph.Device, refused.Space)
}

// With tensor parallelism, ranks that share layers share their rows: the global batch is divided by
// groups, and so are the shards.
func TestFitOfTensorRanks(t *testing.T) {
	t.Parallel()
	c := fitConfig(t)
	c.Ranks, c.Tensor = 8, 2
	got, err := c.Fit(t.Context(), Fixed{}, 12, fewPlans())
	require.NoError(t, err)
	require.Equal(t, 12, got.Config.DataRanks()*got.Config.Batch*got.Config.Accum)
	_, err = c.Fit(t.Context(), Fixed{}, 26, CPUHardware(2))
	require.ErrorContains(t, err, "Config.GlobalBatch 26 is not a multiple of 4 ranks")
	require.ErrorContains(t, err, "24 and 28")

	c.ShardSize, c.DeviceMemory = 1, 20<<20
	asked, err := c.Predict(t.Context(), cost.CPU(2, 1))
	require.NoError(t, err)
	require.False(t, asked.Fits)
	ways, _ := WaysOut(t.Context(), asked, fewPlans())
	sizes := map[int]bool{}
	for _, w := range ways {
		require.NoError(t, w.Forecast.Config.Validate())
		sizes[w.Forecast.Config.ShardSize] = true
	}
	require.Equal(t, true, sizes[2] || sizes[4], "%v", sizes)
}
