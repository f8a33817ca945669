package model

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// parameters returns the number of parameter elements of a preset, counting a tied head once. It
// checks that all programs of the preset have the same number.
func parameters(t *testing.T, p Preset) int64 {
	train, err := Build(p.Config, Train, 1, 8)
	require.NoError(t, err, p.Name)
	for _, kind := range []Kind{Eval, Generate} {
		q, err := Build(p.Config, kind, 1, 8)
		require.NoError(t, err, p.Name)
		require.Equal(t, train.ParamElems(), q.ParamElems(), p.Name)
	}
	q, err := graph.Differentiate(train)
	require.NoError(t, err, p.Name)
	var grads int64
	for _, pr := range q.Params {
		grads += q.Buf(pr.Grad).Elems()
	}
	require.Equal(t, train.ParamElems(), grads, p.Name)
	return train.ParamElems()
}

// TestParameterCountsArePublished checks the counts against the checkpoints on Hugging Face.
func TestParameterCountsArePublished(t *testing.T) {
	for name, want := range map[string]int64{
		"gpt2":        124_439_808,
		"gpt2-medium": 354_823_168,
		"gpt2-large":  774_030_080,
		"gpt2-xl":     1_557_611_200,
		"llama-7b":    6_738_415_616,
		"llama-13b":   13_015_864_320,
		"llama-33b":   32_528_943_616,
		"llama-65b":   65_285_660_672,
		"llama-2-7b":  6_738_415_616,
		"llama-2-13b": 13_015_864_320,
		"llama-2-70b": 68_976_648_192,
		"llama-3-8b":  8_030_261_248,
		"llama-3-70b": 70_553_706_496,

		"llama-3.1-8b":    8_030_261_248,
		"llama-3.1-70b":   70_553_706_496,
		"llama-3.1-405b":  405_853_388_800,
		"llama-3.2-1b":    1_235_814_400,
		"llama-3.2-3b":    3_212_749_824,
		"qwen-2.5-0.5b":   494_032_768,
		"qwen-2.5-1.5b":   1_543_714_304,
		"qwen-2.5-3b":     3_085_938_688,
		"qwen-2.5-7b":     7_615_616_512,
		"qwen-2.5-14b":    14_770_033_664,
		"qwen-2.5-32b":    32_763_876_352,
		"qwen-2.5-72b":    72_706_203_648,
		"qwen-3-0.6b":     596_049_920,
		"qwen-3-8b":       8_190_735_360,
		"olmo-2-7b":       7_298_617_344,
		"gemma-2-2b":      2_614_341_888,
		"gemma-2-9b":      9_241_705_984,
		"gemma-2-27b":     27_227_128_320,
		"smollm2-135m":    134_515_008,
		"smollm2-360m":    361_821_120,
		"mistral-7b":      7_241_732_096,
		"mistral-7b-v0.3": 7_248_023_552,
	} {
		p, err := LookupPreset(name)
		require.NoError(t, err)
		require.Equal(t, want, parameters(t, p), name)
	}
}

// TestParameterCountsAreAsNamed checks the counts against the rounded sizes in the papers, to 1 %.
func TestParameterCountsAreAsNamed(t *testing.T) {
	for name, billions := range map[string]float64{
		"gpt3-125m": 0.125, "gpt3-350m": 0.356, "gpt3-760m": 0.760, "gpt3-1.3b": 1.316, "gpt3-2.7b": 2.65, "gpt3-6.7b": 6.66, "gpt3-13b": 12.85, "gpt3-175b": 174.6,
		"megatron-22b": 22.1, "megatron-175b": 174.6, "megatron-530b": 529.6, "megatron-1t": 1008.0,
	} {
		p, err := LookupPreset(name)
		require.NoError(t, err)
		require.InEpsilon(t, billions, float64(parameters(t, p))/1e9, 0.01, name)
	}
}

func TestNames(t *testing.T) {
	seen := map[string]string{}
	for _, p := range Presets() {
		require.NotEmpty(t, p.Source, p.Name)
		for _, n := range append([]string{p.Name}, p.Aliases...) {
			require.Equal(t, strings.ToLower(n), n)
			require.Emptyf(t, seen[n], "%s names both %s and %s", n, seen[n], p.Name)
			seen[n] = p.Name
			got, err := LookupPreset(strings.ToUpper(n))
			require.NoError(t, err)
			require.Equal(t, p, got)
		}
	}
	p, err := LookupPreset(" Llama3_8B ")
	require.NoError(t, err)
	require.Equal(t, "llama-3-8b", p.Name)
}

func TestUnknownNameGivesNearest(t *testing.T) {
	for name, want := range map[string]string{"gpt9": "gpt2", "lama-2-7b": "llama-2-7b", "gpt2-xxl": "gpt2-xl", "llama-3-7b": "llama-3-8b", "qwen2.5-7bb": "qwen-2.5-7b"} {
		_, err := LookupPreset(name)
		require.ErrorContains(t, err, `"`+name+`"`)
		require.ErrorContains(t, err, want)
	}
	_, err := LookupPreset(strings.Repeat("x", 1<<20))
	require.Error(t, err)
}

// TestPresetsAreConfigs checks that every preset, exported as config.json and parsed again, is the
// same model.
func TestPresetsAreConfigs(t *testing.T) {
	for _, p := range Presets() {
		data, err := Marshal(p.Config, "float32", nil)
		require.NoError(t, err, p.Name)
		back, err := Parse(data)
		require.NoError(t, err, p.Name)
		require.Equal(t, p.Config, back, p.Name)
	}
}

func TestListIsACopy(t *testing.T) {
	Presets()[0].Config.Layers = 99
	for _, p := range Presets() {
		if p.Config.RopeScaling != nil {
			p.Config.RopeScaling.Factor = 99
		}
	}
	p, err := LookupPreset("gpt2")
	require.NoError(t, err)
	require.Equal(t, 12, p.Config.Layers)
	p, err = LookupPreset("llama-3.1-8b")
	require.NoError(t, err)
	require.Equal(t, 8.0, p.Config.RopeScaling.Factor)
}

// TestNearestPreset checks that a Hugging Face model name gives its preset, and that unrelated
// names give none.
func TestNearestPreset(t *testing.T) {
	require.Equal(t, "llama-3-8b", NearestPreset("Meta-Llama-3-8B"))
	require.Equal(t, "qwen-2.5-7b", NearestPreset("Qwen2.5-7B"))
	for _, other := range []string{"", "run1", "corpus", "a-model-of-my-own-that-nobody-knows"} {
		require.Empty(t, NearestPreset(other), other)
	}
}
