package hfmodel

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/hfconfig"
	"github.com/spillway-ml/spillway/internal/presets"
	"github.com/spillway-ml/spillway/model"
)

// Published counts: Hugging Face's num_parameters() of each checkpoint.
var published = map[string]int64{
	"gpt2":           124_439_808,
	"gpt2-medium":    354_823_168,
	"gpt2-large":     774_030_080,
	"gpt2-xl":        1_557_611_200,
	"llama-2-7b":     6_738_415_616,
	"llama-2-13b":    13_015_864_320,
	"llama-2-70b":    68_976_648_192,
	"llama-3-8b":     8_030_261_248,
	"llama-3-70b":    70_553_706_496,
	"llama-3.1-405b": 405_853_388_800,
	"llama-3.2-1b":   1_235_814_400,
	"llama-3.2-3b":   3_212_749_824,
	"qwen-2.5-0.5b":  494_032_768,
	"qwen-2.5-1.5b":  1_543_714_304,
	"qwen-2.5-7b":    7_615_616_512,
	"mistral-7b":     7_241_732_096,
}

func TestParameterCountsArePublished(t *testing.T) {
	for name, want := range published {
		preset, err := presets.Lookup(name)
		require.NoError(t, err)
		c, err := Config(preset.Config)
		require.NoError(t, err, name)
		p, err := model.Build(c, model.Train, 1, 8)
		require.NoError(t, err, name)
		require.Equal(t, want, p.ParamElems(), name)
	}
}

func TestEveryPresetBuilds(t *testing.T) {
	for _, preset := range presets.List() {
		c, err := Config(preset.Config)
		require.NoError(t, err, preset.Name)
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

// largest is Llama 3.1 405B with so many of its 126 layers.
func largest(t testing.TB, layers int) model.Config {
	preset, err := presets.Lookup("llama-3.1-405b")
	require.NoError(t, err)
	c, err := Config(preset.Config)
	require.NoError(t, err)
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

// Building, differentiating and fusing the largest preset is linear in its layers: a
// fourfold depth allocates at most about four times as much, in number and bytes.
// (BenchmarkLargestPreset has the time.)
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
	require.Less(t, bytes4, 5*bytes) // slices grow by doubling or less
}

func BenchmarkLargestPreset(b *testing.B) {
	c := largest(b, 126)
	for b.Loop() {
		build(b, c)
	}
}

func TestConfigKeepsEveryField(t *testing.T) {
	h := hfconfig.Config{
		Arch: hfconfig.Llama, Layers: 2, Hidden: 48, Inner: 40, Heads: 4, KVHeads: 2, HeadDim: 8, Vocab: 9, Positions: 7,
		Activation: hfconfig.SiLU, NormEps: 1e-4, TieHead: true, InitStd: 0.5, QKVBias: true, OutBias: true, MLPBias: true, RopeTheta: 5,
		RopeScaling: &hfconfig.RopeScaling{Factor: 8, LowFreqFactor: 1, HighFreqFactor: 4, OriginalPositions: 3},
	}
	c, err := Config(h)
	require.NoError(t, err)
	require.Equal(t, model.Config{
		Family: model.Llama, Layers: 2, Width: 48, Heads: 4, KVHeads: 2, HeadDim: 8, FFN: 40, Vocab: 9, Positions: 7, TiedHead: true,
		NormEps: 1e-4, InitStd: 0.5, QKVBias: true, OutBias: true, MLPBias: true, RopeTheta: 5,
		RopeScaling: &model.RopeScaling{Factor: 8, LowFreq: 1, HighFreq: 4, OriginalPositions: 3},
	}, c)

	h.Activation = hfconfig.ReLU
	_, err = Config(h)
	require.ErrorContains(t, err, `activation "relu" is not built for a gated MLP`)
	h.Arch = "bert"
	_, err = Config(h)
	require.ErrorContains(t, err, `architecture "bert" is not built`)
	_, err = Config(hfconfig.Config{Arch: hfconfig.GPT2, Activation: "tanh"})
	require.ErrorContains(t, err, `activation "tanh"`)
}
