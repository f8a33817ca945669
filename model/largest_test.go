package model_test

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
)

func TestEveryPresetBuilds(t *testing.T) {
	for _, preset := range model.Presets() {
		c := preset.Config
		for _, kind := range []model.Kind{model.Train, model.Eval, model.Generate} {
			p, err := model.Build(c, kind, 1, min(c.Positions, 2048))
			require.NoError(t, err, preset.Name)
			if kind == model.Train {
				_, err = graph.Differentiate(p)
				require.NoError(t, err, preset.Name)
			}
		}
	}
}

// largest returns the config of Llama 3.1 405B with the given number of layers, in place of 126.
func largest(t testing.TB, layers int) model.Config {
	preset, err := model.LookupPreset("llama-3.1-405b")
	require.NoError(t, err)
	c := preset.Config
	c.Layers = layers
	return c
}

func build(t testing.TB, c model.Config) {
	p, err := model.Build(c, model.Train, 1, 8192)
	require.NoError(t, err)
	p, err = graph.Differentiate(p)
	require.NoError(t, err)
	graph.Fuse(p)
}

// TestLargestPresetIsLinear checks that building, differentiating and fusing the largest preset is
// linear in its layers. Four times the layers may allocate at most 4.5 times as many objects and 5
// times as many bytes. BenchmarkLargestPreset measures the time.
func TestLargestPresetIsLinear(t *testing.T) {
	allocated := func(layers int) (number, bytes float64) {
		c := largest(t, layers)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		build(t, c)
		runtime.ReadMemStats(&after)
		return float64(after.Mallocs - before.Mallocs), float64(after.TotalAlloc - before.TotalAlloc)
	}
	number, bytes := allocated(126)
	number4, bytes4 := allocated(4 * 126)
	require.Less(t, number4, 4.5*number)
	require.Less(t, bytes4, 5*bytes) // slices at most double when they grow
}

func BenchmarkLargestPreset(b *testing.B) {
	c := largest(b, 126)
	for b.Loop() {
		build(b, c)
	}
}
