package model_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/interp"
	"github.com/spillway-ml/spillway/model"
)

func tinyGPT2() model.Config {
	return model.Config{Family: model.GPT2, Layers: 2, Width: 8, Heads: 2, Vocab: 11, Positions: 6, TiedHead: true}
}

func tinyLlama() model.Config {
	return model.Config{Family: model.Llama, Layers: 1, Width: 8, Heads: 4, KVHeads: 2, HeadDim: 6, FFN: 12, Vocab: 11, Positions: 6, QKVBias: true}
}

func params(p *graph.Program) string {
	var b strings.Builder
	for _, pr := range p.Params {
		fmt.Fprintf(&b, "%s %v %s decay=%v init=%d std=%.4g\n", pr.Name, pr.Shape, p.Units[pr.Unit].Name, pr.Decay, pr.Init, pr.Std)
	}
	return b.String()
}

// TestGPT2Parameters checks that names and shapes equal those of the state dict in transformers.
func TestGPT2Parameters(t *testing.T) {
	p, err := model.Build(tinyGPT2(), model.Train, 2, 4)
	require.NoError(t, err)
	want := `wte.weight [11 8] embed decay=true init=0 std=0.02
wpe.weight [6 8] pos decay=true init=0 std=0.02
`
	for i := range 2 {
		h := fmt.Sprintf("h.%d", i)
		want += strings.ReplaceAll(`H.ln_1.weight [8] H decay=false init=1 std=0
H.ln_1.bias [8] H decay=false init=2 std=0
H.attn.c_attn.weight [8 24] H decay=true init=0 std=0.02
H.attn.c_attn.bias [24] H decay=false init=2 std=0
H.attn.c_proj.weight [8 8] H decay=true init=0 std=0.01
H.attn.c_proj.bias [8] H decay=false init=2 std=0
H.ln_2.weight [8] H decay=false init=1 std=0
H.ln_2.bias [8] H decay=false init=2 std=0
H.mlp.c_fc.weight [8 32] H decay=true init=0 std=0.02
H.mlp.c_fc.bias [32] H decay=false init=2 std=0
H.mlp.c_proj.weight [32 8] H decay=true init=0 std=0.01
H.mlp.c_proj.bias [8] H decay=false init=2 std=0
`, "H", h)
	}
	want += `ln_f.weight [8] norm decay=false init=1 std=0
ln_f.bias [8] norm decay=false init=2 std=0
`
	require.Equal(t, want, params(p))

	c := tinyGPT2()
	c.TiedHead = false
	p, err = model.Build(c, model.Train, 2, 4)
	require.NoError(t, err)
	require.Equal(t, want+"lm_head.weight [11 8] head decay=true init=0 std=0.02\n", params(p))
}

func TestLlamaParameters(t *testing.T) {
	p, err := model.Build(tinyLlama(), model.Train, 2, 4)
	require.NoError(t, err)
	require.Equal(t, `model.embed_tokens.weight [11 8] embed decay=true init=0 std=0.02
model.layers.0.input_layernorm.weight [8] h.0 decay=false init=1 std=0
model.layers.0.self_attn.q_proj.weight [24 8] h.0 decay=true init=0 std=0.02
model.layers.0.self_attn.q_proj.bias [24] h.0 decay=false init=2 std=0
model.layers.0.self_attn.k_proj.weight [12 8] h.0 decay=true init=0 std=0.02
model.layers.0.self_attn.k_proj.bias [12] h.0 decay=false init=2 std=0
model.layers.0.self_attn.v_proj.weight [12 8] h.0 decay=true init=0 std=0.02
model.layers.0.self_attn.v_proj.bias [12] h.0 decay=false init=2 std=0
model.layers.0.self_attn.o_proj.weight [8 24] h.0 decay=true init=0 std=0.02
model.layers.0.post_attention_layernorm.weight [8] h.0 decay=false init=1 std=0
model.layers.0.mlp.gate_proj.weight [12 8] h.0 decay=true init=0 std=0.02
model.layers.0.mlp.up_proj.weight [12 8] h.0 decay=true init=0 std=0.02
model.layers.0.mlp.down_proj.weight [8 12] h.0 decay=true init=0 std=0.02
model.norm.weight [8] norm decay=false init=1 std=0
lm_head.weight [11 8] head decay=true init=0 std=0.02
`, params(p))
}

// TestKindsShareParameters checks that all programs of a model have the same parameters and units
// in the same order. Merging the programs needs this.
func TestKindsShareParameters(t *testing.T) {
	for _, c := range []model.Config{tinyGPT2(), tinyLlama(), tinyGemma2()} {
		if c.Family != model.Gemma2 { // Gemma 2 has no dropout
			c.EmbdDropout, c.ResidDropout = 0.1, 0.1
		}
		train, err := model.Build(c, model.Train, 2, 4)
		require.NoError(t, err)
		eval, err := model.Build(c, model.Eval, 2, 4)
		require.NoError(t, err)
		generate, err := model.Build(c, model.Generate, 1, 6)
		require.NoError(t, err)
		require.Equal(t, params(train), params(eval))
		require.Equal(t, params(train), params(generate))
		require.Equal(t, train.Units, generate.Units)
		require.Equal(t, []string{"forward", "eval", "generate"}, []string{train.Sections[0].Name, eval.Sections[0].Name, generate.Sections[0].Name})

		require.Equal(t, c.ResidDropout > 0, train.Key != graph.NoBuf, "dropout's key")
		require.Equal(t, graph.NoBuf, eval.Key, "no dropout in evaluation")
		require.Equal(t, graph.NoBuf, generate.Loss)
		require.Equal(t, graph.NoBuf, generate.Targets)
		require.Equal(t, []int64{1, int64(c.Vocab)}, generate.Buf(generate.Logits).Shape)
		require.Equal(t, graph.LifeStep, generate.Buf(generate.Logits).Life)
		require.Equal(t, []int64{1, 6}, generate.Buf(generate.Tokens).Shape)
	}
}

// TestGenerateAgreesWithEvaluation checks that the cross-entropy of a generated row's logits equals
// the loss in evaluation. Later tokens must not change the logits.
func TestGenerateAgreesWithEvaluation(t *testing.T) {
	for _, c := range []model.Config{tinyGPT2(), tinyLlama(), tinyGemma2()} {
		const row, target = 3, 7
		generate, err := model.Build(c, model.Generate, 1, 6)
		require.NoError(t, err)
		eval, err := model.Build(c, model.Eval, 1, 6)
		require.NoError(t, err)
		tokens := []int32{3, 1, 4, 1, 5, 9}

		fill := func(p *graph.Program, tokens []int32) *interp.World[float64] {
			rng := rand.New(rand.NewPCG(1, 1))
			w := interp.New[float64](p)
			for i := range p.Params {
				v := make([]float64, p.Params[i].Elems())
				for k := range v {
					v[k] = rng.NormFloat64()
				}
				require.NoError(t, w.Set(p.Params[i].Value, v))
			}
			tok, err := w.I32(0, p.Tokens)
			require.NoError(t, err)
			copy(tok, tokens)
			return w
		}
		we := fill(eval, tokens)
		targets, err := we.I32(0, eval.Targets)
		require.NoError(t, err)
		for i := range targets {
			targets[i] = -1
		}
		targets[row] = target
		loss, err := we.F64(0, eval.Loss)
		require.NoError(t, err)
		loss[0] = 0
		require.NoError(t, we.Run("eval"))

		for _, last := range []int32{9, 2} {
			tokens[5] = last
			wg := fill(generate, tokens)
			key, err := wg.I64(0, generate.Key)
			require.NoError(t, err)
			key[graph.KeyRow] = row
			require.NoError(t, wg.Run("generate"))
			logits, err := wg.Floats(0, generate.Logits)
			require.NoError(t, err)
			sum := 0.0
			for _, l := range logits {
				sum += math.Exp(l)
			}
			require.InDelta(t, loss[0], math.Log(sum)-logits[target], 1e-9, c.Family)
		}
	}
}

func TestUnits(t *testing.T) {
	names := func(c model.Config) (out []string) {
		p, err := model.Build(c, model.Train, 2, min(4, max(1, c.Positions)))
		require.NoError(t, err)
		for i, u := range p.Units {
			out = append(out, u.Name)
			has := false
			for _, pr := range p.Params {
				has = has || pr.Unit == i
			}
			require.True(t, has, "unit %s has parameters", u.Name)
		}
		return out
	}
	c := tinyGPT2()
	require.Equal(t, []string{"embed", "pos", "h.0", "h.1", "norm"}, names(c))
	c.TiedHead = false
	require.Equal(t, []string{"embed", "pos", "h.0", "h.1", "norm", "head"}, names(c))
	c = tinyLlama()
	require.Equal(t, []string{"embed", "h.0", "norm", "head"}, names(c))
	require.Equal(t, []string{"layer.0", "layer.1"}, names(model.Config{Family: model.MLP, Inputs: 3, Hidden: []int{4}, Classes: 2}))
	require.Equal(t, []string{"layer.0", "layer.1"}, names(model.Config{Family: model.CNN, Height: 4, ImgWidth: 4, Chans: 1, Hidden: []int{4}, Classes: 2}))
}

func TestDropoutOnlyInTraining(t *testing.T) {
	c := tinyGPT2()
	c.EmbdDropout, c.ResidDropout = 0.1, 0.2
	count := func(kind model.Kind, batch int) (rates []float64) {
		p, err := model.Build(c, kind, batch, 4)
		require.NoError(t, err)
		sites := map[int64]bool{}
		for _, op := range p.Sections[0].Phases[0].Ops {
			if a, ok := op.Attr.(graph.DropoutAttr); ok {
				rates = append(rates, a.P)
				require.False(t, sites[a.Site], "site %d twice", a.Site)
				sites[a.Site] = true
				require.EqualValues(t, 4*c.Width, a.Elems)
			}
		}
		return rates
	}
	require.Equal(t, []float64{0.1, 0.2, 0.2, 0.2, 0.2}, count(model.Train, 3))
	require.Empty(t, count(model.Eval, 3))
	require.Empty(t, count(model.Generate, 1))
}

func TestBuildRefuses(t *testing.T) {
	gpt, llama := tinyGPT2, tinyLlama
	with := func(c model.Config, f func(c *model.Config)) model.Config { f(&c); return c }
	for want, c := range map[string]model.Config{
		`family is "bert", want gpt2, llama, gemma2, mlp or cnn`: {Family: "bert"},
		"Layers is 0, want 1 to 16384":                           with(gpt(), func(c *model.Config) { c.Layers = 0 }),
		"Width is -8, want 1":                                    with(gpt(), func(c *model.Config) { c.Width = -8 }),
		"Heads is 0, want 1":                                     with(gpt(), func(c *model.Config) { c.Heads = 0 }),
		"Vocab is 0, want 1":                                     with(gpt(), func(c *model.Config) { c.Vocab = 0 }),
		"Positions is 0, want 1":                                 with(gpt(), func(c *model.Config) { c.Positions = 0 }),
		"Heads 3 × HeadDim 2 is not Width 8":                     with(gpt(), func(c *model.Config) { c.Heads = 3 }),
		"KVHeads is 1; a GPT-2 has one for each":                 with(gpt(), func(c *model.Config) { c.KVHeads = 1 }),
		"AttnDropout is 0.1, want 0: attention here":             with(gpt(), func(c *model.Config) { c.AttnDropout = 0.1 }),
		"ResidDropout is 1, want a probability in":               with(gpt(), func(c *model.Config) { c.ResidDropout = 1 }),
		"EmbdDropout is NaN, want a probability in":              with(gpt(), func(c *model.Config) { c.EmbdDropout = math.NaN() }),
		`activation is "tanh", want gelu_tanh`:                   with(gpt(), func(c *model.Config) { c.Act = "tanh" }),
		"FFN is 0, want 1":                                       with(llama(), func(c *model.Config) { c.FFN = 0 }),
		"Heads is 4, not a multiple of KVHeads 3":                with(llama(), func(c *model.Config) { c.KVHeads = 3 }),
		"HeadDim is 3, want an even number":                      with(llama(), func(c *model.Config) { c.HeadDim = 3 }),
		"Inputs is 0, want 1":                                    {Family: model.MLP, Classes: 2},
		"Classes is 0, want 1":                                   {Family: model.MLP, Inputs: 2},
		"Hidden[1] is 0, want 1":                                 {Family: model.MLP, Inputs: 2, Classes: 2, Hidden: []int{2, 0}},
		"pooling halves an image of (5, 2) to nothing":           {Family: model.CNN, Height: 5, ImgWidth: 2, Chans: 1, Classes: 2, Hidden: []int{2, 2}},
	} {
		_, err := model.Build(c, model.Train, 2, 4)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "model: ")
	}
	for want, args := range map[string][2]int{"seq is 7, want 1 to the model's 6 positions": {2, 7}, "batch is 0, want 1": {0, 4}, "seq is 0": {1, 0}} {
		_, err := model.Build(tinyGPT2(), model.Train, args[0], args[1])
		require.ErrorContains(t, err, want)
	}
	_, err := model.Build(tinyGPT2(), model.Generate, 2, 4)
	require.ErrorContains(t, err, "batch is 2, want 1: without kept keys and values generation follows one row")
	mlp := model.Config{Family: model.MLP, Inputs: 2, Classes: 2}
	_, err = model.Build(mlp, model.Generate, 1, 1)
	require.ErrorContains(t, err, "a classifier (mlp) generates nothing")
	_, err = model.Build(mlp, model.Train, 1, 3)
	require.ErrorContains(t, err, "a classifier (mlp) has one target a sample")
	_, err = model.Build(tinyGPT2(), 9, 1, 1)
	require.ErrorContains(t, err, "program kind is 9")
}

// TestBuildNeverPanics builds and differentiates models with random and extreme sizes. Each must
// give a program or an error, never a panic.
func TestBuildNeverPanics(t *testing.T) {
	numbers := []int{math.MinInt, -1, 0, 1, 2, 3, 4, 6, 8, 12, 1 << 16, 1 << 28, 1 << 40, math.MaxInt}
	built := 0
	for seed := range uint64(12000) {
		rng := rand.New(rand.NewPCG(seed, 4))
		n := func() int {
			if rng.IntN(3) > 0 {
				return numbers[3+rng.IntN(6)]
			}
			return numbers[rng.IntN(len(numbers))]
		}
		c := model.Config{
			Family: []model.Family{model.GPT2, model.Llama, model.Gemma2, model.MLP, model.CNN}[rng.IntN(5)],
			Layers: n(), Width: n(), Heads: n(), KVHeads: n(), HeadDim: n(), FFN: n(), Vocab: n(), Positions: n(), TiedHead: rng.IntN(2) == 0,
			NormEps: []float64{0, 1e-5, math.NaN(), -1}[rng.IntN(4)], ResidDropout: []float64{0, 0.5, 2}[rng.IntN(3)],
			RopeTheta: []float64{0, 1e4, -1, math.Inf(1)}[rng.IntN(4)],
			Inputs:    n(), Height: n(), ImgWidth: n(), Chans: n(), Hidden: []int{n(), n()}[:rng.IntN(3)], Classes: n(),
		}
		c.AttnCap, c.LogitCap, c.Window = []float64{0, 50, -1, math.Inf(1)}[rng.IntN(4)], []float64{0, 30}[rng.IntN(2)], n()
		require.NotPanics(t, func() {
			p, err := model.Build(c, model.Kind(rng.IntN(3)), n(), n())
			if err == nil && p.Sections[0].Name == "forward" {
				_, err = graph.Differentiate(p)
				require.NoError(t, err)
				built++
			}
		}, "seed %d, %+v", seed, c)
	}
	require.Greater(t, built, 100)
}
