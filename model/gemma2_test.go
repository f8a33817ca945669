package model_test

import (
	"encoding/json"
	"math"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/interp"
	"github.com/spillway-ml/spillway/model"
)

func tinyGemma2() model.Config {
	c := model.Config{Family: model.Gemma2, Layers: 2, Width: 8, Heads: 4, KVHeads: 2, HeadDim: 6, FFN: 12, Vocab: 11, Positions: 6, TiedHead: true}
	c.AttnCap, c.LogitCap, c.Window, c.QueryScalar = 1.5, 2, 3, 5
	return c
}

// drawn returns element i of parameter k; testdata/gemma2.py computes the same value.
func drawn(k, i int) float64 {
	x := uint32(i)*2654435761 + uint32(k)*40503 + 12345
	x = x*2246822519 + 3266489917
	return (float64(x)/(1<<32) - 0.5) * 1.5
}

// TestGemma2EqualsPyTorch checks the logits of every row and the loss against a PyTorch
// implementation of the published architecture (testdata/gemma2.py).
func TestGemma2EqualsPyTorch(t *testing.T) {
	var want struct {
		Config json.RawMessage
		Tokens []int32
		Logits [][]float64
	}
	text, err := os.ReadFile("testdata/gemma2.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &want))
	c, err := model.Parse(want.Config)
	require.NoError(t, err)

	world := func(kind model.Kind) (*graph.Program, *interp.World[float64]) {
		p, err := model.Build(c, kind, 1, len(want.Tokens))
		require.NoError(t, err)
		w := interp.New[float64](p)
		for k := range p.Params {
			v := make([]float64, p.Params[k].Elems())
			for i := range v {
				v[i] = drawn(k, i)
			}
			require.NoError(t, w.Set(p.Params[k].Value, v))
		}
		tokens, err := w.I32(0, p.Tokens)
		require.NoError(t, err)
		copy(tokens, want.Tokens)
		return p, w
	}
	sum := 0.0
	for row, logits := range want.Logits {
		p, w := world(model.Generate)
		key, err := w.I64(0, p.Key)
		require.NoError(t, err)
		key[graph.KeyRow] = int64(row)
		require.NoError(t, w.Run("generate"))
		got, err := w.Floats(0, p.Logits)
		require.NoError(t, err)
		require.InDeltaSlice(t, logits, got, 1e-9, "row %d", row)

		total := 0.0
		for _, l := range logits {
			total += math.Exp(l)
		}
		sum += math.Log(total) - logits[(row*7)%c.Vocab]
	}
	p, w := world(model.Eval)
	targets, err := w.I32(0, p.Targets)
	require.NoError(t, err)
	for row := range targets {
		targets[row] = int32(row * 7 % c.Vocab)
	}
	loss, err := w.F64(0, p.Loss)
	require.NoError(t, err)
	loss[0] = 0
	require.NoError(t, w.Run("eval"))
	require.InDelta(t, sum, loss[0], 1e-9)
}

func TestGemma2Config(t *testing.T) {
	const text = `{"model_type":"gemma2","hidden_size":64,"intermediate_size":96,"num_hidden_layers":3,"num_attention_heads":8,"vocab_size":100,"max_position_embeddings":128}`
	c, err := model.Parse([]byte(text))
	require.NoError(t, err)
	want := model.Config{Family: model.Gemma2, Layers: 3, Width: 64, FFN: 96, Heads: 8, KVHeads: 4, HeadDim: 256, Vocab: 100, Positions: 128,
		NormEps: 1e-6, InitStd: 0.02, TiedHead: true, RopeTheta: 10000}
	want.AttnCap, want.LogitCap, want.QueryScalar, want.Window = 50, 30, 256, 4096
	require.Equal(t, want, c, "Gemma2Config's defaults")

	for more, bad := range map[string]string{
		`"attn_logit_softcapping":null,"final_logit_softcapping":null`:             "",
		`"layer_types":["sliding_attention","full_attention","sliding_attention"]`: "",
		`"layer_types":["full_attention","full_attention","sliding_attention"]`:    "layer_types",
		`"attn_logit_softcapping":-1`:                                              "attn_logit_softcapping",
		`"tie_word_embeddings":false`:                                              "tie_word_embeddings",
		`"hidden_activation":"silu"`:                                               "hidden_activation",
		`"sliding_window":0`:                                                       "sliding_window",
		`"query_pre_attn_scalar":0`:                                                "query_pre_attn_scalar",
		`"num_experts":8`:                                                          "num_experts",
		`"rope_scaling":{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":64}`: "rope_scaling",
	} {
		c, err := model.Parse([]byte(text[:len(text)-1] + "," + more + "}"))
		if bad != "" {
			require.ErrorContains(t, err, bad)
			continue
		}
		require.NoError(t, err)
		out, err := model.Marshal(c, "float32", nil)
		require.NoError(t, err)
		back, err := model.Parse(out)
		require.NoError(t, err)
		require.True(t, back.SameModel(c))
	}
	for want, set := range map[string]func(*model.Config){
		"Window is 0":        func(c *model.Config) { c.Window = 0 },
		"AttnCap is NaN":     func(c *model.Config) { c.AttnCap = math.NaN() },
		"QueryScalar is -1":  func(c *model.Config) { c.QueryScalar = -1 },
		"TiedHead is false":  func(c *model.Config) { c.TiedHead = false },
		"ResidDropout 0.1":   func(c *model.Config) { c.ResidDropout = 0.1 },
		"HeadDim is 3, want": func(c *model.Config) { c.HeadDim = 3 },
	} {
		c := tinyGemma2()
		set(&c)
		require.ErrorContains(t, c.Validate(), want)
	}
}
