package model

import (
	"cmp"
	"fmt"
	"math"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/nearest"
)

// GPT2 is GPT-2 (Radford et al. 2019). It has learned positions, layer norms, biases in all layers,
// and an MLP of two matrices.
const GPT2 Family = "gpt2"

var gpt2Arch = Arch{
	Family: GPT2, Types: []string{"gpt2"}, Dropout: true, Presets: gpt2Presets,
	defaults: func(c *Config) {
		c.FFN = cmp.Or(c.FFN, 4*c.Width)
		c.NormEps = cmp.Or(c.NormEps, 1e-5)
		c.Act = cmp.Or(c.Act, graph.ActGELUTanh)
	},
	check: func(c Config) error {
		switch {
		case c.Heads*c.HeadDim != c.Width:
			return fmt.Errorf("model: Heads %d × HeadDim %d is not Width %d; a GPT-2's heads share its width", c.Heads, c.HeadDim, c.Width)
		case c.KVHeads != c.Heads:
			return fmt.Errorf("model: KVHeads is %d; a GPT-2 has one for each of its %d heads", c.KVHeads, c.Heads)
		}
		return nil
	},
	read: readGPT2, write: writeGPT2, forward: (*writer).gpt2,
}

// gpt2 writes GPT-2 (Radford et al. 2019; names and shapes of Hugging Face's
// GPT2LMHeadModel without the prefix "transformer."). Its Conv1D weights are
// (in, out). N = B·T, C the width, F the MLP's, V the vocabulary.
func (w *writer) gpt2() {
	c := w.c
	width, ffn := int64(c.Width), int64(c.FFN)

	w.Unit("embed")
	wte := w.Param("wte.weight", w.normal(), int64(c.Vocab), width)
	x := w.Embed("wte", w.Tokens(w.batch, w.seq), wte) // (N,C)
	w.Unit("pos")
	wpe := w.Param("wpe.weight", w.normal(), int64(c.Positions), width)
	x = w.positions("wpe", x, wpe)
	x = w.dropout("drop", x, c.EmbdDropout)

	// Each block adds two projections to the residual stream.
	residual := graph.Normal(c.InitStd / math.Sqrt(2*float64(c.Layers)))
	attn := w.attention(float64(c.HeadDim))
	for i := range c.Layers {
		h := fmt.Sprintf("h.%d", i)
		w.Block("h", i)
		a := w.layerNorm(h+".ln_1", x)                                 // (N,C)
		a = w.conv1D(h+".attn.c_attn", a, w.normal(), width, 3*width)  // (N,3C)
		a = w.attend(h+".attn", a, graph.Value{}, graph.Value{}, attn) // (N,C)
		a = w.conv1D(h+".attn.c_proj", a, residual, width, width)      // (N,C)
		a = w.dropout(h+".attn.resid_dropout", a, c.ResidDropout)      //
		x = w.Add(h+".attn.add", x, a)                                 // (N,C)
		a = w.layerNorm(h+".ln_2", x)                                  // (N,C)
		a = w.conv1D(h+".mlp.c_fc", a, w.normal(), width, ffn)         // (N,F)
		a = w.Activation(h+".mlp.act", a, c.Act)                       // (N,F)
		a = w.conv1D(h+".mlp.c_proj", a, residual, ffn, width)         // (N,C)
		a = w.dropout(h+".mlp.dropout", a, c.ResidDropout)             //
		x = w.Add(h+".mlp.add", x, a)                                  // (N,C)
	}
	w.Unit("norm")
	x = w.layerNorm("ln_f", x)
	w.head(x, wte, 0)
}

func (w *writer) layerNorm(name string, x graph.Value) graph.Value {
	n := int64(w.c.Width)
	gamma := w.Param(name+".weight", graph.Ones, n)
	return w.LayerNorm(name, x, gamma, w.Param(name+".bias", graph.Zeros, n), w.c.NormEps)
}

// conv1D is Hugging Face's name for a linear layer with its weight (in, out).
func (w *writer) conv1D(name string, x graph.Value, init graph.Init, in, out int64) graph.Value {
	weight := w.Param(name+".weight", init, in, out)
	return w.Linear(name, x, weight, w.Param(name+".bias", graph.Zeros, out), graph.LinearAttr{})
}

// readGPT2 follows transformers' GPT2Config.
func readGPT2(o *object, _ string) Config {
	c := Config{Family: GPT2}
	c.Layers = o.requiredInt("n_layer", mostLayers)
	c.Heads = o.requiredInt("n_head", mostHeads)
	c.Width = o.requiredInt("n_embd", mostWidth)
	c.Vocab = o.requiredInt("vocab_size", mostVocab)
	c.Positions = o.requiredInt("n_positions", mostPositions)
	if o.err != nil {
		return c
	}
	if c.Width%c.Heads != 0 {
		o.failf("n_head is %d, which does not divide n_embd %d; every head needs the same width: use %s", c.Heads, c.Width, nearest.Divisors(c.Width, c.Heads))
		return c
	}
	c.KVHeads, c.HeadDim = c.Heads, c.Width/c.Heads
	c.FFN = o.int("n_inner", 4*c.Width, mostFFN)
	c.Act = o.activation("activation_function", "gelu_new")
	c.NormEps = o.positive("layer_norm_epsilon", 1e-5, 1)
	c.TiedHead = o.bool("tie_word_embeddings", true)
	c.InitStd = o.positive("initializer_range", 0.02, 1)
	o.mustBe("scale_attn_weights", true, true, "attention without its 1/sqrt(head width) is not built")
	o.mustBe("scale_attn_by_inverse_layer_idx", false, false, "attention scaled by 1/(layer+1) is not built")
	o.mustBe("add_cross_attention", false, false, "cross-attention is not built")
	return c
}

func writeGPT2(c Config, m *orderedMap) {
	m.add("architectures", []string{"GPT2LMHeadModel"})
	m.add("model_type", "gpt2")
	m.add("activation_function", actNames[c.Act])
	m.add("n_layer", c.Layers)
	m.add("n_head", c.Heads)
	m.add("n_embd", c.Width)
	m.add("n_inner", c.FFN)
	m.add("n_positions", c.Positions)
	m.add("n_ctx", c.Positions)
	m.add("layer_norm_epsilon", c.NormEps)
}

// Sources of the shapes.
const (
	srcGPT2     = "Radford et al. 2019, table 2, as released (heads 64 wide) in openai-community/gpt2*"
	srcGPT3     = "Brown et al. 2020, table 2.1; attention here is dense in every layer"
	srcMegatron = "Korthikanti et al. 2022, table 3 (Megatron-LM; 51,200 tokens, 2,048 positions)"
)

var gpt2Presets = []Preset{
	gpt2("gpt2", 12, 768, 12, "gpt2-small", "gpt2-124m"),
	gpt2("gpt2-medium", 24, 1024, 16, "gpt2-355m"),
	gpt2("gpt2-large", 36, 1280, 20, "gpt2-774m"),
	gpt2("gpt2-xl", 48, 1600, 25, "gpt2-1.5b", "gpt2-1558m"),

	// For the records of the loss that features cost (benchmarks/ledger).
	gpt("spillway-ledger", "Spillway's own records", 4, 256, 8, 256, 256, nil),

	gpt3("gpt3-125m", 12, 768, 12, "gpt3-small"),
	gpt3("gpt3-350m", 24, 1024, 16, "gpt3-medium"),
	gpt3("gpt3-760m", 24, 1536, 16, "gpt3-large"),
	// The table's 24 heads of 128 do not make its width of 2,048; 16 do.
	gpt3("gpt3-1.3b", 24, 2048, 16, "gpt3-xl"),
	gpt3("gpt3-2.7b", 32, 2560, 32),
	gpt3("gpt3-6.7b", 32, 4096, 32),
	// The table's width of 5,140 is not 40 heads of 128; 5,120 is.
	gpt3("gpt3-13b", 40, 5120, 40),
	gpt3("gpt3-175b", 96, 12288, 96, "gpt3"),

	megatron("megatron-22b", 48, 6144, 64),
	megatron("megatron-175b", 96, 12288, 96),
	megatron("megatron-530b", 105, 20480, 128, "mt-nlg-530b"),
	megatron("megatron-1t", 128, 25600, 160),
}

func gpt(name, source string, layers, hidden, heads, vocab, positions int, aliases []string) Preset {
	return Preset{Name: name, Aliases: aliases, Source: source, Config: Config{
		Family: GPT2,
		Layers: layers, Width: hidden, FFN: 4 * hidden, Heads: heads, KVHeads: heads, HeadDim: hidden / heads,
		Vocab: vocab, Positions: positions,
		Act: graph.ActGELUTanh, NormEps: 1e-5, TiedHead: true, InitStd: 0.02,
	}}
}

func gpt2(name string, layers, hidden, heads int, aliases ...string) Preset {
	return gpt(name, srcGPT2, layers, hidden, heads, 50257, 1024, aliases)
}

func gpt3(name string, layers, hidden, heads int, aliases ...string) Preset {
	return gpt(name, srcGPT3, layers, hidden, heads, 50257, 2048, append(aliases, strings.Replace(name, "gpt3", "gpt-3", 1)))
}

func megatron(name string, layers, hidden, heads int, aliases ...string) Preset {
	return gpt(name, srcMegatron, layers, hidden, heads, 51200, 2048, aliases)
}
