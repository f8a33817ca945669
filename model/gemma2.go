package model

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// Gemma2 is Gemma 2 (Gemma Team 2024, arXiv:2408.00118). It differs from Llama in several parts.
// The MLP is gated by GELU's tanh form. Scores and final logits have soft caps. Every other layer
// has a sliding window. Norms precede and follow attention and MLP, with gain 1 + weight.
// Embeddings are multiplied by √width, and the head is tied.
const Gemma2 Family = "gemma2"

// Gemma2Config has the fields that Gemma 2 needs in addition to those shared with Llama.
type Gemma2Config struct {
	AttnCap, LogitCap float64 // soft caps of attention's scores and of the final logits; 0: none
	Window            int     // tokens that a token attends to in layers 0, 2, 4 …, including itself
	QueryScalar       float64 // attention's scale is 1/√QueryScalar; 0: HeadDim
}

var gemma2Arch = Arch{
	Family: Gemma2, Types: []string{"gemma2"}, Presets: gemma2Presets,
	CPUOnly: "its soft caps, its sliding windows and its norms have no kernels for GPUs",
	defaults: func(c *Config) {
		c.NormEps = cmp.Or(c.NormEps, 1e-6)
		c.RopeTheta = cmp.Or(c.RopeTheta, 10000)
		if c.Heads > 0 {
			c.HeadDim = cmp.Or(c.HeadDim, c.Width/c.Heads)
		}
		c.QueryScalar = cmp.Or(c.QueryScalar, float64(c.HeadDim))
	},
	check: func(c Config) error {
		switch {
		case !(c.AttnCap >= 0 && c.AttnCap <= maxCap && c.LogitCap >= 0 && c.LogitCap <= maxCap):
			return fmt.Errorf("model: AttnCap is %g and LogitCap %g, want 0, for none, to %g", c.AttnCap, c.LogitCap, float64(maxCap))
		case c.Window < 1:
			return fmt.Errorf("model: Window is %d tokens, want at least 1", c.Window)
		case !(c.QueryScalar > 0 && c.QueryScalar <= maxSize):
			return fmt.Errorf("model: QueryScalar is %g, want a positive number up to %d", c.QueryScalar, maxSize)
		case !c.TiedHead:
			return fmt.Errorf("model: TiedHead is false; a Gemma 2's head is its embedding's table")
		case c.EmbdDropout != 0 || c.ResidDropout != 0:
			return fmt.Errorf("model: EmbdDropout %g and ResidDropout %g, want 0: a Gemma 2 has no dropout", c.EmbdDropout, c.ResidDropout)
		}
		return c.checkRotary()
	},
	read: readGemma2, write: writeGemma2, forward: (*writer).gemma2,
}

const maxCap = 1e6

// gemma2 writes the forward program of a Gemma 2 with the names and shapes of Hugging Face's
// Gemma2ForCausalLM. Weights are (out, in). N = B·T, C the width, F the MLP's.
func (w *writer) gemma2() {
	c := w.c
	width, ffn := int64(c.Width), int64(c.FFN)
	q, kv := int64(c.Heads*c.HeadDim), int64(c.KVHeads*c.HeadDim)

	w.Unit("embed")
	table := w.Param("model.embed_tokens.weight", w.normal(), int64(c.Vocab), width)
	x := w.Embed("model.embed_tokens", w.Tokens(w.batch, w.seq), table)                    // (N,C)
	x = w.Scale("model.embed_tokens.scale", x, math.Sqrt(float64(c.Width)), graph.InPlace) // (N,C)

	for i := range c.Layers {
		w.Block("h", i)
		h := fmt.Sprintf("model.layers.%d", i)
		sa, mlp := h+".self_attn", h+".mlp"
		attn := w.attention(c.QueryScalar)
		attn.Cap = c.AttnCap
		if i%2 == 0 && c.Window < c.Positions {
			attn.Window = int64(c.Window)
		}
		a := w.plusOneNorm(h+".input_layernorm", x)            // (N,C)
		qs := w.project(sa+".q_proj", a, width, q, c.QKVBias)  // (N,Heads·D)
		ks := w.project(sa+".k_proj", a, width, kv, c.QKVBias) // (N,KVHeads·D)
		vs := w.project(sa+".v_proj", a, width, kv, c.QKVBias) // (N,KVHeads·D)
		qs = w.turn(sa+".q_rope", qs, c.Heads)
		ks = w.turn(sa+".k_rope", ks, c.KVHeads)
		a = w.attend(sa, qs, ks, vs, attn)                        // (N,Heads·D)
		a = w.project(sa+".o_proj", a, q, width, c.OutBias)       // (N,C)
		a = w.plusOneNorm(h+".post_attention_layernorm", a)       // (N,C)
		x = w.Add(sa+".add", x, a)                                // (N,C)
		a = w.plusOneNorm(h+".pre_feedforward_layernorm", x)      // (N,C)
		gate := w.project(mlp+".gate_proj", a, width, ffn, false) // (N,F)
		up := w.project(mlp+".up_proj", a, width, ffn, false)     // (N,F)
		gate = w.Activation(mlp+".act", gate, graph.ActGELUTanh)  // (N,F)
		a = w.Mul(mlp+".gated", gate, up)                         // (N,F)
		a = w.project(mlp+".down_proj", a, ffn, width, false)     // (N,C)
		a = w.plusOneNorm(h+".post_feedforward_layernorm", a)     // (N,C)
		x = w.Add(mlp+".add", x, a)                               // (N,C)
	}
	w.Unit("norm")
	x = w.plusOneNorm("model.norm", x)
	w.head(x, table, c.LogitCap)
}

// plusOneNorm is an RMS norm whose gain is 1 + weight.
func (w *writer) plusOneNorm(name string, x graph.Value) graph.Value {
	return w.RMSNormPlusOne(name, x, w.Param(name+".weight", graph.Zeros, int64(w.c.Width)), w.c.NormEps)
}

// readGemma2 follows transformers' Gemma2Config.
func readGemma2(o *object, _ string) Config {
	c := Config{Family: Gemma2}
	if c.readSizes(o); o.err != nil {
		return c
	}
	if c.readHeads(o, 4, 256); o.err != nil {
		return c
	}
	act := o.activation("hidden_activation", o.string("hidden_act", "gelu_pytorch_tanh"))
	if o.err == nil && act != graph.ActGELUTanh {
		o.failf("hidden_activation is not gelu_pytorch_tanh, which is what is built for a Gemma 2")
	}
	c.NormEps = o.positive("rms_norm_eps", 1e-6, 1)
	c.InitStd = o.positive("initializer_range", 0.02, 1)
	c.TiedHead = true
	o.mustBe("tie_word_embeddings", true, true, "a Gemma 2 with a head of its own is not built")
	c.readBias(o)
	c.AttnCap = o.capOr("attn_logit_softcapping", 50)
	c.LogitCap = o.capOr("final_logit_softcapping", 30)
	c.QueryScalar = o.positive("query_pre_attn_scalar", 256, maxSize)
	c.Window = o.int("sliding_window", 4096, mostPositions)
	o.alternating(c.Layers)
	readRope(o, &c)
	if o.err == nil && c.RopeScaling != nil {
		o.failf("rope_scaling is not built for a Gemma 2; it must be null")
	}
	return c
}

// capOr reads a soft cap: null means none, and a missing key means def.
func (o *object) capOr(key string, def float64) float64 {
	if o.has(key) {
		def = 0
	}
	return o.positive(key, def, maxCap)
}

// alternating refuses layer_types other than a window in layers 0, 2, 4 ….
func (o *object) alternating(layers int) {
	v := o.raw("layer_types")
	if v == nil {
		return
	}
	var types []string
	if err := json.Unmarshal(v, &types); err != nil || !slices.Equal(types, layerTypes(layers)) {
		o.failf("layer_types is %s; a Gemma 2 alternates sliding_attention and full_attention over its %d layers", shorten(v), layers)
	}
}

func layerTypes(layers int) (types []string) {
	for i := range layers {
		types = append(types, []string{"sliding_attention", "full_attention"}[i%2])
	}
	return types
}

func writeGemma2(c Config, m *orderedMap) {
	m.add("architectures", []string{"Gemma2ForCausalLM"})
	m.add("model_type", "gemma2")
	m.add("hidden_act", "gelu_pytorch_tanh")
	m.add("hidden_activation", "gelu_pytorch_tanh")
	c.writeRotary(m)
	limit := func(v float64) any {
		if v == 0 {
			return nil
		}
		return v
	}
	m.add("attn_logit_softcapping", limit(c.AttnCap))
	m.add("final_logit_softcapping", limit(c.LogitCap))
	m.add("query_pre_attn_scalar", c.QueryScalar)
	m.add("sliding_window", c.Window)
	m.add("layer_types", layerTypes(c.Layers))
	m.add("attention_bias", c.QKVBias)
}

var gemma2Presets = []Preset{
	gemma2("gemma-2-2b", 26, 2304, 9216, 8, 4, 256, 256),
	gemma2("gemma-2-9b", 42, 3584, 14336, 16, 8, 256, 256),
	gemma2("gemma-2-27b", 46, 4608, 36864, 32, 16, 128, 144),
}

func gemma2(name string, layers, width, ffn, heads, kv, headDim int, scalar float64) Preset {
	c := Config{
		Family: Gemma2, Layers: layers, Width: width, FFN: ffn, Heads: heads, KVHeads: kv, HeadDim: headDim,
		Vocab: 256000, Positions: 8192, NormEps: 1e-6, InitStd: 0.02, TiedHead: true, RopeTheta: 10000,
	}
	c.AttnCap, c.LogitCap, c.Window, c.QueryScalar = 50, 30, 4096, scalar
	return Preset{Name: name, Aliases: []string{strings.Replace(name, "gemma-", "gemma", 1)}, Config: c, Source: "Gemma Team 2024, table 1, google/gemma-2-*"}
}
