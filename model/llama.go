package model

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/nearest"
)

// Llama has rotary positions, RMS norm, grouped-query attention and a gated MLP
// (Touvron et al. 2023). Qwen2 is Llama with QKVBias, Qwen3 with NormHeads, OLMo 2
// with NormQK and PostNorm; Mistral without its window and SmolLM are Llama.
const Llama Family = "llama"

var llamaArch = Arch{
	Family: Llama, Types: []string{"llama", "mistral", "qwen2", "qwen3", "olmo2"}, Presets: llamaPresets,
	defaults: func(c *Config) {
		c.NormEps = cmp.Or(c.NormEps, 1e-6)
		c.RopeTheta = cmp.Or(c.RopeTheta, 10000)
	},
	check: func(c Config) error {
		if c.NormHeads && c.NormQK {
			return fmt.Errorf("model: NormHeads and NormQK are both set; queries and keys are normed once")
		}
		return c.checkRotary()
	},
	read: readLlama, write: writeLlama, forward: (*writer).llama,
}

// checkRotary checks that heads have an even width, which rotary positions need.
func (c Config) checkRotary() error {
	if c.HeadDim%2 != 0 {
		return fmt.Errorf("model: HeadDim is %d, want an even number: rotary positions turn pairs", c.HeadDim)
	}
	return nil
}

// llama writes the Llama family (Touvron et al. 2023, Grattafiori et al. 2024). Names and shapes
// are those of Hugging Face's LlamaForCausalLM and related models. Qwen2 adds biases on queries,
// keys and values, Qwen3 norms of queries and keys, OLMo 2 these norms and norms after attention
// and MLP. Weights are (out, in). N = B·T, C the width, D of a head.
func (w *writer) llama() {
	c := w.c
	width, ffn := int64(c.Width), int64(c.FFN)
	q, kv := int64(c.Heads*c.HeadDim), int64(c.KVHeads*c.HeadDim)

	w.Unit("embed")
	table := w.Param("model.embed_tokens.weight", w.normal(), int64(c.Vocab), width)
	x := w.Embed("model.embed_tokens", w.Tokens(w.batch, w.seq), table) // (N,C)

	attn := w.attention(float64(c.HeadDim))
	for i := range c.Layers {
		w.Block("h", i)
		h := fmt.Sprintf("model.layers.%d", i)
		sa, mlp := h+".self_attn", h+".mlp"
		a := x
		if !c.PostNorm {
			a = w.rmsNorm(h+".input_layernorm", x) // (N,C)
		}
		qs := w.project(sa+".q_proj", a, width, q, c.QKVBias)  // (N,Heads·D)
		ks := w.project(sa+".k_proj", a, width, kv, c.QKVBias) // (N,KVHeads·D)
		vs := w.project(sa+".v_proj", a, width, kv, c.QKVBias) // (N,KVHeads·D)
		qs = w.normQK(sa+".q_norm", qs, c.Heads)
		ks = w.normQK(sa+".k_norm", ks, c.KVHeads)
		qs = w.turn(sa+".q_rope", qs, c.Heads)
		ks = w.turn(sa+".k_rope", ks, c.KVHeads)
		a = w.attend(sa, qs, ks, vs, attn)                  // (N,Heads·D)
		a = w.project(sa+".o_proj", a, q, width, c.OutBias) // (N,C)
		if c.PostNorm {
			a = w.rmsNorm(h+".post_attention_layernorm", a)
		}
		a = w.dropout(sa+".dropout", a, c.ResidDropout) //
		x = w.Add(sa+".add", x, a)                      // (N,C)
		a = x
		if !c.PostNorm {
			a = w.rmsNorm(h+".post_attention_layernorm", x) // (N,C)
		}
		gate := w.project(mlp+".gate_proj", a, width, ffn, c.MLPBias) // (N,F)
		up := w.project(mlp+".up_proj", a, width, ffn, c.MLPBias)     // (N,F)
		a = w.SwiGLU(mlp+".swiglu", gate, up)                         // (N,F)
		a = w.project(mlp+".down_proj", a, ffn, width, c.MLPBias)     // (N,C)
		if c.PostNorm {
			a = w.rmsNorm(h+".post_feedforward_layernorm", a)
		}
		a = w.dropout(mlp+".dropout", a, c.ResidDropout) //
		x = w.Add(mlp+".add", x, a)                      // (N,C)
	}
	w.Unit("norm")
	x = w.rmsNorm("model.norm", x)
	w.head(x, table, 0)
}

func (w *writer) rmsNorm(name string, x graph.Value) graph.Value {
	return w.RMSNorm(name, x, w.Param(name+".weight", graph.Ones, int64(w.c.Width)), w.c.NormEps)
}

// normQK adds an RMS norm of queries or keys x (N, heads·D): of each head separately, with one
// weight (D), or of all together, with a weight (heads·D).
func (w *writer) normQK(name string, x graph.Value, heads int) graph.Value {
	d := int64(w.c.HeadDim)
	width := int64(heads) * d
	switch {
	case w.c.NormQK:
		return w.RMSNorm(name, x, w.Param(name+".weight", graph.Ones, width), w.c.NormEps)
	case w.c.NormHeads:
		rows := w.batch * w.seq
		x = w.Reshape(name+".heads", x, rows*int64(heads), d)
		x = w.RMSNorm(name, x, w.Param(name+".weight", graph.Ones, d), w.c.NormEps)
		return w.Reshape(name+".rows", x, rows, width)
	}
	return x
}

// project adds a linear layer with its weight (out, in).
func (w *writer) project(name string, x graph.Value, in, out int64, bias bool) graph.Value {
	weight := w.Param(name+".weight", w.normal(), out, in)
	var b graph.Value
	if bias {
		b = w.Param(name+".bias", graph.Zeros, out)
	}
	return w.Linear(name, x, weight, b, graph.LinearAttr{TransW: true})
}

func (w *writer) rope(heads int) graph.RopeAttr {
	a := graph.RopeAttr{Heads: int64(heads), HeadDim: int64(w.c.HeadDim), Seq: w.seq, Theta: w.c.RopeTheta}
	if s := w.c.RopeScaling; s != nil {
		a.ScaleFactor, a.LowFreq, a.HighFreq, a.OriginalPositions = s.Factor, s.LowFreq, s.HighFreq, int64(s.OriginalPositions)
	}
	return a
}

// readLlama follows transformers' LlamaConfig, MistralConfig, Qwen2Config,
// Qwen3Config and Olmo2Config.
func readLlama(o *object, modelType string) Config {
	c := Config{Family: Llama}
	if c.readSizes(o); o.err != nil {
		return c
	}
	kv, headDim := c.Heads, 0 // the defaults of the classes in transformers
	switch modelType {
	case "qwen2":
		kv = 32
	case "qwen3":
		kv, headDim = 32, 128
	case "mistral":
		kv = 8
	}
	if c.readHeads(o, kv, headDim); o.err != nil {
		return c
	}
	if act := o.activation("hidden_act", "silu"); o.err == nil && act != graph.ActSiLU {
		o.failf("hidden_act is %q, which is not built for a gated MLP; it must be silu", o.string("hidden_act", "silu"))
	}
	eps := 1e-6
	if modelType == "olmo2" {
		eps = 1e-5
	}
	c.NormEps = o.positive("rms_norm_eps", eps, 1)
	c.TiedHead = o.bool("tie_word_embeddings", false)
	c.InitStd = o.positive("initializer_range", 0.02, 1)
	switch modelType {
	case "qwen2":
		c.QKVBias = true
		o.mustBe("use_sliding_window", false, false, "sliding-window attention is not built")
	case "qwen3":
		c.NormHeads = true
		c.readBias(o)
		o.mustBe("use_sliding_window", false, false, "sliding-window attention is not built")
	case "olmo2":
		c.NormQK, c.PostNorm = true, true
		c.readBias(o)
	case "mistral":
		window := o.int("sliding_window", 0, 1<<40)
		if !o.has("sliding_window") {
			window = 4096
		}
		if o.err == nil && window != 0 && window < c.Positions {
			o.failf("sliding_window is %d, below max_position_embeddings %d; sliding-window attention is not built: it must be null (or set max_position_embeddings to %d, where the two are the same)", window, c.Positions, window)
		}
	default:
		c.readBias(o)
		c.MLPBias = o.bool("mlp_bias", false)
	}
	readRope(o, &c)
	return c
}

// readSizes reads the required sizes of a model with rotary positions.
func (c *Config) readSizes(o *object) {
	c.Width = o.requiredInt("hidden_size", mostWidth)
	c.FFN = o.requiredInt("intermediate_size", mostFFN)
	c.Layers = o.requiredInt("num_hidden_layers", mostLayers)
	c.Heads = o.requiredInt("num_attention_heads", mostHeads)
	c.Vocab = o.requiredInt("vocab_size", mostVocab)
	c.Positions = o.requiredInt("max_position_embeddings", mostPositions)
}

func (c *Config) readBias(o *object) {
	c.QKVBias = o.bool("attention_bias", false)
	c.OutBias = c.QKVBias
}

// readHeads reads how the width is divided into heads. If num_key_value_heads is absent it is
// kvDefault; if it is null, each query head has separate keys and values. headDim is the default of
// head_dim; 0 means width/heads.
func (c *Config) readHeads(o *object, kvDefault, headDim int) {
	if o.has("num_key_value_heads") {
		kvDefault = c.Heads
	}
	c.KVHeads = o.int("num_key_value_heads", kvDefault, mostHeads)
	c.HeadDim = o.int("head_dim", headDim, mostWidth)
	if o.err != nil {
		return
	}
	if c.Heads%c.KVHeads != 0 {
		o.failf("num_key_value_heads is %d, which does not divide num_attention_heads %d; each key-value head serves the same number of query heads: use %s", c.KVHeads, c.Heads, nearest.Divisors(c.Heads, c.KVHeads))
		return
	}
	if c.HeadDim == 0 {
		if c.Width%c.Heads != 0 {
			o.failf("num_attention_heads is %d, which does not divide hidden_size %d; every head needs the same width: use %s (or give head_dim)", c.Heads, c.Width, nearest.Divisors(c.Width, c.Heads))
			return
		}
		c.HeadDim = c.Width / c.Heads
	}
	if c.HeadDim%2 != 0 {
		o.failf("a head is %d wide (head_dim, or hidden_size / num_attention_heads); rotary positions turn pairs, so it must be even", c.HeadDim)
		return
	}
	if int64(c.Heads)*int64(c.HeadDim) > mostFFN {
		o.failf("num_attention_heads %d × head_dim %d is over %d", c.Heads, c.HeadDim, mostFFN)
		return
	}
}

// readRope reads rope_theta and rope_scaling, or rope_parameters, which has held both since
// transformers 5.
func readRope(o *object, c *Config) {
	scalingKey, s := "rope_scaling", o.object("rope_scaling")
	c.RopeTheta = o.positive("rope_theta", 10000, mostRopeTheta)
	if p := o.object("rope_parameters"); p != nil {
		if s != nil {
			o.failf("rope_scaling and rope_parameters are both given; one of them says how positions turn")
			return
		}
		theta := p.positive("rope_theta", c.RopeTheta, mostRopeTheta)
		if o.has("rope_theta") && theta != c.RopeTheta {
			o.failf("rope_theta is %g, and %g in rope_parameters; they must agree", c.RopeTheta, theta)
			return
		}
		c.RopeTheta = theta
		scalingKey, s = "rope_parameters", p
		if s.err != nil {
			o.failf("%s: %v", scalingKey, s.err)
			return
		}
	}
	if s == nil || o.err != nil {
		return
	}
	kind := s.string("rope_type", s.string("type", "default"))
	switch {
	case s.err != nil:
	case kind == "default":
		return
	case kind != "llama3":
		s.failf("rope_type %q is not built; it must be default or llama3", kind)
	default:
		r := &RopeScaling{
			Factor:            s.requiredPositive("factor", 1e6),
			LowFreq:           s.requiredPositive("low_freq_factor", 1e6),
			HighFreq:          s.requiredPositive("high_freq_factor", 1e6),
			OriginalPositions: s.requiredInt("original_max_position_embeddings", mostPositions),
		}
		if s.err == nil && r.Factor < 1 {
			s.failf("factor is %g; it must be 1 or more", r.Factor)
		}
		if s.err == nil && r.HighFreq <= r.LowFreq {
			s.failf("high_freq_factor is %g, not above low_freq_factor %g", r.HighFreq, r.LowFreq)
		}
		c.RopeScaling = r
	}
	if s.err != nil {
		o.failf("%s: %v", scalingKey, s.err)
	}
}

func writeLlama(c Config, m *orderedMap) {
	modelType, class := "llama", "LlamaForCausalLM"
	switch {
	case c.NormQK:
		modelType, class = "olmo2", "Olmo2ForCausalLM"
	case c.NormHeads:
		modelType, class = "qwen3", "Qwen3ForCausalLM"
	case c.QKVBias != c.OutBias:
		modelType, class = "qwen2", "Qwen2ForCausalLM"
	}
	m.add("architectures", []string{class})
	m.add("model_type", modelType)
	m.add("hidden_act", "silu")
	c.writeRotary(m)
	if s := c.RopeScaling; s != nil {
		var r orderedMap
		r.add("rope_type", "llama3")
		r.add("factor", s.Factor)
		r.add("low_freq_factor", s.LowFreq)
		r.add("high_freq_factor", s.HighFreq)
		r.add("original_max_position_embeddings", s.OriginalPositions)
		m.add("rope_scaling", r)
	} else {
		m.add("rope_scaling", nil)
	}
	if modelType == "qwen2" || modelType == "qwen3" {
		m.add("use_sliding_window", false)
	}
	if modelType != "qwen2" {
		m.add("attention_bias", c.QKVBias)
	}
	if modelType == "llama" {
		m.add("mlp_bias", c.MLPBias)
	}
}

// writeRotary writes to config.json the sizes of a model with rotary positions and RMS norm.
func (c Config) writeRotary(m *orderedMap) {
	m.add("hidden_size", c.Width)
	m.add("intermediate_size", c.FFN)
	m.add("num_hidden_layers", c.Layers)
	m.add("num_attention_heads", c.Heads)
	m.add("num_key_value_heads", c.KVHeads)
	m.add("head_dim", c.HeadDim)
	m.add("max_position_embeddings", c.Positions)
	m.add("rms_norm_eps", c.NormEps)
	m.add("rope_theta", c.RopeTheta)
}

// Sources of the shapes.
const (
	srcLlama1  = "Touvron et al. 2023 (LLaMA), table 2"
	srcLlama2  = "Touvron et al. 2023 (Llama 2), meta-llama/Llama-2-*-hf"
	srcLlama3  = "Grattafiori et al. 2024, table 3, meta-llama/Meta-Llama-3-*, Llama-3.1-*"
	srcLlama32 = "meta-llama/Llama-3.2-*"
	srcQwen25  = "Qwen2.5 technical report 2024, Qwen/Qwen2.5-*"
	srcQwen3   = "Qwen3 technical report 2025, Qwen/Qwen3-*"
	srcOLMo2   = "OLMo et al. 2024 (2 OLMo 2 Furious), allenai/OLMo-2-1124-*"
	srcSmolLM2 = "Allal et al. 2025 (SmolLM2), HuggingFaceTB/SmolLM2-*"
	srcMistral = "Jiang et al. 2023, mistralai/Mistral-7B-*"
)

var llamaPresets = []Preset{
	// The model that `spillway train` trains by default, on bytes of the Go toolchain's source.
	llama("spillway-demo", "Spillway's own demo", shape{layers: 2, hidden: 256, inner: 688, heads: 8, kv: 8, vocab: 264, positions: 256, eps: 1e-5, theta: 1e4, tied: true}),

	llama("llama-7b", srcLlama1, shape{layers: 32, hidden: 4096, inner: 11008, heads: 32, kv: 32, vocab: 32000, positions: 2048, eps: 1e-6, theta: 1e4}, "llama-1-7b"),
	llama("llama-13b", srcLlama1, shape{layers: 40, hidden: 5120, inner: 13824, heads: 40, kv: 40, vocab: 32000, positions: 2048, eps: 1e-6, theta: 1e4}, "llama-1-13b"),
	llama("llama-33b", srcLlama1, shape{layers: 60, hidden: 6656, inner: 17920, heads: 52, kv: 52, vocab: 32000, positions: 2048, eps: 1e-6, theta: 1e4}, "llama-1-33b", "llama-30b"),
	llama("llama-65b", srcLlama1, shape{layers: 80, hidden: 8192, inner: 22016, heads: 64, kv: 64, vocab: 32000, positions: 2048, eps: 1e-5, theta: 1e4}, "llama-1-65b"),

	llama("llama-2-7b", srcLlama2, shape{layers: 32, hidden: 4096, inner: 11008, heads: 32, kv: 32, vocab: 32000, positions: 4096, eps: 1e-5, theta: 1e4}),
	llama("llama-2-13b", srcLlama2, shape{layers: 40, hidden: 5120, inner: 13824, heads: 40, kv: 40, vocab: 32000, positions: 4096, eps: 1e-5, theta: 1e4}),
	llama("llama-2-70b", srcLlama2, shape{layers: 80, hidden: 8192, inner: 28672, heads: 64, kv: 8, vocab: 32000, positions: 4096, eps: 1e-5, theta: 1e4}),

	llama("llama-3-8b", srcLlama3, shape{layers: 32, hidden: 4096, inner: 14336, heads: 32, kv: 8, vocab: 128256, positions: 8192, eps: 1e-5, theta: 5e5}),
	llama("llama-3-70b", srcLlama3, shape{layers: 80, hidden: 8192, inner: 28672, heads: 64, kv: 8, vocab: 128256, positions: 8192, eps: 1e-5, theta: 5e5}),
	llama("llama-3.1-8b", srcLlama3, shape{layers: 32, hidden: 4096, inner: 14336, heads: 32, kv: 8, vocab: 128256, positions: 131072, eps: 1e-5, theta: 5e5, ropeFactor: 8}),
	llama("llama-3.1-70b", srcLlama3, shape{layers: 80, hidden: 8192, inner: 28672, heads: 64, kv: 8, vocab: 128256, positions: 131072, eps: 1e-5, theta: 5e5, ropeFactor: 8}, "llama-3.3-70b"),
	llama("llama-3.1-405b", srcLlama3, shape{layers: 126, hidden: 16384, inner: 53248, heads: 128, kv: 8, vocab: 128256, positions: 131072, eps: 1e-5, theta: 5e5, ropeFactor: 8}, "llama-3-405b"),
	llama("llama-3.2-1b", srcLlama32, shape{layers: 16, hidden: 2048, inner: 8192, heads: 32, kv: 8, vocab: 128256, positions: 131072, eps: 1e-5, theta: 5e5, ropeFactor: 32, tied: true}),
	llama("llama-3.2-3b", srcLlama32, shape{layers: 28, hidden: 3072, inner: 8192, heads: 24, kv: 8, vocab: 128256, positions: 131072, eps: 1e-5, theta: 5e5, ropeFactor: 32, tied: true}),

	qwen25("qwen-2.5-0.5b", shape{layers: 24, hidden: 896, inner: 4864, heads: 14, kv: 2, vocab: 151936, positions: 32768, eps: 1e-6, theta: 1e6, tied: true}),
	qwen25("qwen-2.5-1.5b", shape{layers: 28, hidden: 1536, inner: 8960, heads: 12, kv: 2, vocab: 151936, positions: 131072, eps: 1e-6, theta: 1e6, tied: true}),
	qwen25("qwen-2.5-3b", shape{layers: 36, hidden: 2048, inner: 11008, heads: 16, kv: 2, vocab: 151936, positions: 32768, eps: 1e-6, theta: 1e6, tied: true}),
	qwen25("qwen-2.5-7b", shape{layers: 28, hidden: 3584, inner: 18944, heads: 28, kv: 4, vocab: 152064, positions: 131072, eps: 1e-6, theta: 1e6}),
	qwen25("qwen-2.5-14b", shape{layers: 48, hidden: 5120, inner: 13824, heads: 40, kv: 8, vocab: 152064, positions: 131072, eps: 1e-5, theta: 1e6}),
	qwen25("qwen-2.5-32b", shape{layers: 64, hidden: 5120, inner: 27648, heads: 40, kv: 8, vocab: 152064, positions: 131072, eps: 1e-5, theta: 1e6}),
	qwen25("qwen-2.5-72b", shape{layers: 80, hidden: 8192, inner: 29568, heads: 64, kv: 8, vocab: 152064, positions: 131072, eps: 1e-5, theta: 1e6}),

	qwen3("qwen-3-0.6b", shape{layers: 28, hidden: 1024, inner: 3072, heads: 16, kv: 8, vocab: 151936, positions: 40960, eps: 1e-6, theta: 1e6, tied: true}),
	qwen3("qwen-3-8b", shape{layers: 36, hidden: 4096, inner: 12288, heads: 32, kv: 8, vocab: 151936, positions: 40960, eps: 1e-6, theta: 1e6}),

	olmo2("olmo-2-7b", shape{layers: 32, hidden: 4096, inner: 11008, heads: 32, kv: 32, vocab: 100352, positions: 4096, eps: 1e-6, theta: 5e5}),

	llama("smollm2-135m", srcSmolLM2, shape{layers: 30, hidden: 576, inner: 1536, heads: 9, kv: 3, vocab: 49152, positions: 8192, eps: 1e-5, theta: 1e5, tied: true}, "smollm-2-135m"),
	llama("smollm2-360m", srcSmolLM2, shape{layers: 32, hidden: 960, inner: 2560, heads: 15, kv: 5, vocab: 49152, positions: 8192, eps: 1e-5, theta: 1e5, tied: true}, "smollm-2-360m"),

	// v0.1 attends over a window of 4,096 tokens, which is full attention up to 4,096 positions;
	// v0.3 dropped the window.
	llama("mistral-7b", srcMistral, shape{layers: 32, hidden: 4096, inner: 14336, heads: 32, kv: 8, vocab: 32000, positions: 4096, eps: 1e-5, theta: 1e4}, "mistral-7b-v0.1"),
	llama("mistral-7b-v0.3", srcMistral, shape{layers: 32, hidden: 4096, inner: 14336, heads: 32, kv: 8, vocab: 32768, positions: 32768, eps: 1e-5, theta: 1e6}),
}

// shape is the shape of a Llama-like model. ropeFactor 0 means no scaling.
type shape struct {
	layers, hidden, inner, heads, kv, vocab, positions int
	eps, theta, ropeFactor                             float64
	tied                                               bool
}

func llama(name, source string, s shape, aliases ...string) Preset {
	c := Config{
		Family: Llama,
		Layers: s.layers, Width: s.hidden, FFN: s.inner, Heads: s.heads, KVHeads: s.kv, HeadDim: s.hidden / s.heads,
		Vocab: s.vocab, Positions: s.positions,
		NormEps: s.eps, TiedHead: s.tied, InitStd: 0.02, RopeTheta: s.theta,
	}
	if s.ropeFactor != 0 {
		c.RopeScaling = &RopeScaling{Factor: s.ropeFactor, LowFreq: 1, HighFreq: 4, OriginalPositions: 8192}
	}
	// llama2-7b and llama-2-7b are both common spellings.
	for _, n := range append([]string{name}, aliases...) {
		if rest, ok := strings.CutPrefix(n, "llama-"); ok {
			aliases = append(aliases, "llama"+rest)
		}
	}
	return Preset{Name: name, Aliases: aliases, Config: c, Source: source}
}

func qwen25(name string, s shape) Preset {
	p := llama(name, srcQwen25, s, strings.Replace(name, "qwen-", "qwen", 1))
	p.Config.QKVBias = true
	return p
}

// qwen3 returns a preset whose heads are 128 wide, independently of its width.
func qwen3(name string, s shape) Preset {
	p := llama(name, srcQwen3, s, strings.Replace(name, "qwen-", "qwen", 1))
	p.Config.HeadDim, p.Config.NormHeads = 128, true
	return p
}

func olmo2(name string, s shape) Preset {
	p := llama(name, srcOLMo2, s, strings.Replace(name, "olmo-", "olmo", 1))
	p.Config.NormQK, p.Config.PostNorm = true, true
	return p
}
