// Package hfconfig reads and writes Hugging Face's config.json for the two
// architectures that Spillway has: GPT-2 and Llama, of which Mistral, Qwen2, Qwen3,
// OLMo 2 and SmolLM are members. Keys have transformers'
// meanings and defaults; what would change the model and is not built is
// refused by name, never ignored.
package hfconfig

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spillway-ml/spillway/internal/nearest"
	"github.com/spillway-ml/spillway/internal/regular"
)

// Arch is an architecture: a forward program with its parameters.
type Arch string

const (
	// GPT2 has learned positions, layer norm, biases everywhere and one MLP
	// matrix up and one down (Radford et al. 2019).
	GPT2 Arch = "gpt2"
	// Llama has rotary positions, RMS norm, grouped-query attention and a
	// gated MLP (Touvron et al. 2023). Qwen2 is Llama with QKVBias, Qwen3 with
	// QKNorm by head, OLMo 2 with QKNorm over all heads and PostNorm; Mistral
	// without its window and SmolLM are Llama.
	Llama Arch = "llama"
)

// Activation is the MLP's non-linearity.
type Activation string

const (
	// GELUTanh is GELU's tanh form: transformers' gelu_new and
	// gelu_pytorch_tanh.
	GELUTanh Activation = "gelu_new"
	// GELU is the exact form, x·Φ(x).
	GELU Activation = "gelu"
	// ReLU is max(x, 0).
	ReLU Activation = "relu"
	// SiLU is x·sigmoid(x). In a Llama it gates: down(silu(gate x) · up x).
	SiLU Activation = "silu"
)

// Config is a model's shape. Every field is set by Parse (defaults filled in);
// the fields marked Llama keep their zero value in a GPT-2, except KVHeads and
// HeadDim.
type Config struct {
	Arch      Arch
	ModelType string // config.json's model_type: gpt2, llama, mistral, qwen2, qwen3 or olmo2

	Layers    int
	Hidden    int // width of the residual stream: n_embd, hidden_size
	Inner     int // width of the MLP: n_inner, intermediate_size
	Heads     int // query heads
	KVHeads   int // key and value heads; divides Heads; equal to it in a GPT-2
	HeadDim   int // width of a head; Hidden/Heads unless the file says another
	Vocab     int // rows of the embedding
	Positions int // longest sequence; rows of the position embedding in a GPT-2

	Activation Activation
	NormEps    float64 // added to the variance or the mean square
	TieHead    bool    // the head is the embedding's matrix
	InitStd    float64 // initializer_range, of a random init

	QKVBias     bool         // Llama: biases of q_proj, k_proj and v_proj
	OutBias     bool         // Llama: bias of o_proj
	MLPBias     bool         // Llama: biases of gate_proj, up_proj and down_proj
	QKNorm      QKNorm       // Llama: an RMS norm of queries and of keys, before they turn
	PostNorm    bool         // Llama: attention and MLP are normed after, not before
	RopeTheta   float64      // Llama: base of the rotary angles
	RopeScaling *RopeScaling // Llama: nil, or Llama 3.1's scaling of the frequencies

	// Dropouts lists the file's dropout keys that are not 0, for a person: they are
	// no part of the model here.
	Dropouts string
}

// QKNorm says what an RMS norm of queries and keys is over.
type QKNorm string

// Norms of queries and keys.
const (
	NoQKNorm   QKNorm = ""
	NormByHead QKNorm = "head" // each head by itself, with one weight for all (Qwen3)
	NormAll    QKNorm = "all"  // all heads together (OLMo 2)
)

// RopeScaling is rope_scaling of type llama3: rotary frequencies whose
// wavelength is over OriginalPositions/LowFreqFactor tokens are divided by
// Factor, those under OriginalPositions/HighFreqFactor are kept, and between
// the two they are interpolated (transformers' _compute_llama3_parameters).
type RopeScaling struct {
	Factor            float64
	LowFreqFactor     float64
	HighFreqFactor    float64
	OriginalPositions int
}

// FileName is the name of the file in a model's folder.
const FileName = "config.json"

// maxFileBytes bounds what is read of a config.json; real ones are under
// 10 KB.
const maxFileBytes = 1 << 20

// Read reads the config.json at path, or in the folder at path. Errors name
// the file and the key.
func Read(path string) (Config, error) {
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		path = filepath.Join(path, FileName)
	}
	data, err := readLimited(path)
	if err != nil {
		return Config{}, err
	}
	c, err := Parse(data)
	if err != nil {
		return Config{}, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

func readLimited(path string) ([]byte, error) {
	// Looked at before it is opened: opening a pipe would wait for its writer.
	st, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("read model config: %s does not exist; a model folder holds a Hugging Face %s", path, FileName)
	}
	if err != nil {
		return nil, fmt.Errorf("read model config: %w", err)
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("read model config: %s is not a regular file", path)
	}
	f, err := regular.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read model config: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read model config: %w", err)
	}
	if len(data) > maxFileBytes {
		return nil, fmt.Errorf("read model config: %s is over %d bytes; a %s is a few KB", path, maxFileBytes, FileName)
	}
	return data, nil
}

// Parse reads the text of a config.json. Required keys: for gpt2 n_layer,
// n_head, n_embd, vocab_size, n_positions; for llama, mistral, qwen2, qwen3 and olmo2
// hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
// vocab_size, max_position_embeddings; and model_type. The rest take
// transformers' defaults; keys that change nothing are ignored, and those that change
// the result and are not built are refused by name.
func Parse(data []byte) (Config, error) {
	o, err := parseObject(data)
	if err != nil {
		return Config{}, err
	}
	modelType := o.requiredString("model_type")
	if o.err != nil {
		return Config{}, o.err
	}
	var c Config
	switch modelType {
	case "gpt2":
		c = parseGPT2(o)
	case "llama", "mistral", "qwen2", "qwen3", "olmo2":
		c = parseLlama(o, modelType)
	default:
		return Config{}, fmt.Errorf("model_type %q is not supported; it must be gpt2, llama, mistral, qwen2, qwen3 or olmo2", cutText(modelType))
	}
	o.refuse()
	c.Dropouts = o.dropouts()
	if o.err != nil {
		return Config{}, o.err
	}
	return c, nil
}

// parseGPT2 follows transformers' GPT2Config.
func parseGPT2(o *object) Config {
	c := Config{Arch: GPT2, ModelType: "gpt2"}
	c.Layers = o.requiredInt("n_layer", maxLayers)
	c.Heads = o.requiredInt("n_head", maxHeads)
	c.Hidden = o.requiredInt("n_embd", maxHidden)
	c.Vocab = o.requiredInt("vocab_size", maxVocab)
	c.Positions = o.requiredInt("n_positions", maxPositions)
	if o.err != nil {
		return c
	}
	if c.Hidden%c.Heads != 0 {
		o.failf("n_head is %d, which does not divide n_embd %d; every head needs the same width: use %s", c.Heads, c.Hidden, nearest.Divisors(c.Hidden, c.Heads))
		return c
	}
	c.KVHeads, c.HeadDim = c.Heads, c.Hidden/c.Heads
	c.Inner = o.int("n_inner", 4*c.Hidden, maxInner)
	c.Activation = o.activation("activation_function", "gelu_new")
	c.NormEps = o.positive("layer_norm_epsilon", 1e-5, 1)
	c.TieHead = o.bool("tie_word_embeddings", true)
	c.InitStd = o.positive("initializer_range", 0.02, 1)
	o.mustBe("scale_attn_weights", true, true, "attention without its 1/sqrt(head width) is not built")
	o.mustBe("scale_attn_by_inverse_layer_idx", false, false, "attention scaled by 1/(layer+1) is not built")
	o.mustBe("add_cross_attention", false, false, "cross-attention is not built")
	return c
}

// parseLlama follows transformers' LlamaConfig, MistralConfig, Qwen2Config,
// Qwen3Config and Olmo2Config.
func parseLlama(o *object, modelType string) Config {
	c := Config{Arch: Llama, ModelType: modelType}
	c.Hidden = o.requiredInt("hidden_size", maxHidden)
	c.Inner = o.requiredInt("intermediate_size", maxInner)
	c.Layers = o.requiredInt("num_hidden_layers", maxLayers)
	c.Heads = o.requiredInt("num_attention_heads", maxHeads)
	c.Vocab = o.requiredInt("vocab_size", maxVocab)
	c.Positions = o.requiredInt("max_position_embeddings", maxPositions)
	if o.err != nil {
		return c
	}
	if c.llamaHeads(o, modelType); o.err != nil {
		return c
	}
	c.Activation = o.activation("hidden_act", "silu")
	if o.err == nil && c.Activation != SiLU {
		o.failf("hidden_act is %q, which is not built for a gated MLP; it must be silu", o.string("hidden_act", "silu"))
	}
	eps := 1e-6
	if modelType == "olmo2" {
		eps = 1e-5
	}
	c.NormEps = o.positive("rms_norm_eps", eps, 1)
	c.TieHead = o.bool("tie_word_embeddings", false)
	c.InitStd = o.positive("initializer_range", 0.02, 1)
	switch modelType {
	case "qwen2":
		c.QKVBias = true
		o.mustBe("use_sliding_window", false, false, "sliding-window attention is not built")
	case "qwen3":
		c.QKNorm = NormByHead
		c.QKVBias = o.bool("attention_bias", false)
		c.OutBias = c.QKVBias
		o.mustBe("use_sliding_window", false, false, "sliding-window attention is not built")
	case "olmo2":
		c.QKNorm, c.PostNorm = NormAll, true
		c.QKVBias = o.bool("attention_bias", false)
		c.OutBias = c.QKVBias
	case "mistral":
		window := o.int("sliding_window", 0, 1<<40)
		if !o.has("sliding_window") {
			window = 4096
		}
		if o.err == nil && window != 0 && window < c.Positions {
			o.failf("sliding_window is %d, below max_position_embeddings %d; sliding-window attention is not built: it must be null (or set max_position_embeddings to %d, where the two are the same)", window, c.Positions, window)
		}
	default:
		c.QKVBias = o.bool("attention_bias", false)
		c.OutBias = c.QKVBias
		c.MLPBias = o.bool("mlp_bias", false)
	}
	parseRope(o, &c)
	return c
}

// llamaHeads reads how the width is cut into heads.
func (c *Config) llamaHeads(o *object, modelType string) {
	// An absent key and a null differ: the classes' own defaults are not None
	// in Qwen2Config and Qwen3Config (32) and MistralConfig (8), while a null means one
	// key-value head per query head everywhere.
	kvDefault := c.Heads
	if !o.has("num_key_value_heads") {
		switch modelType {
		case "qwen2", "qwen3":
			kvDefault = 32
		case "mistral":
			kvDefault = 8
		}
	}
	c.KVHeads = o.int("num_key_value_heads", kvDefault, maxHeads)
	headDim := 0
	if modelType == "qwen3" {
		headDim = 128
	}
	c.HeadDim = o.int("head_dim", headDim, maxHidden)
	if o.err != nil {
		return
	}
	if c.Heads%c.KVHeads != 0 {
		o.failf("num_key_value_heads is %d, which does not divide num_attention_heads %d; each key-value head serves the same number of query heads: use %s", c.KVHeads, c.Heads, nearest.Divisors(c.Heads, c.KVHeads))
		return
	}
	if c.HeadDim == 0 {
		if c.Hidden%c.Heads != 0 {
			o.failf("num_attention_heads is %d, which does not divide hidden_size %d; every head needs the same width: use %s (or give head_dim)", c.Heads, c.Hidden, nearest.Divisors(c.Hidden, c.Heads))
			return
		}
		c.HeadDim = c.Hidden / c.Heads
	}
	if c.HeadDim%2 != 0 {
		o.failf("a head is %d wide (head_dim, or hidden_size / num_attention_heads); rotary positions turn pairs, so it must be even", c.HeadDim)
		return
	}
	if int64(c.Heads)*int64(c.HeadDim) > maxInner {
		o.failf("num_attention_heads %d × head_dim %d is over %d", c.Heads, c.HeadDim, maxInner)
		return
	}
}

// parseRope reads rope_theta and rope_scaling, or rope_parameters, which
// holds both since transformers 5.
func parseRope(o *object, c *Config) {
	scalingKey, s := "rope_scaling", o.object("rope_scaling")
	c.RopeTheta = o.positive("rope_theta", 10000, maxRopeTheta)
	if p := o.object("rope_parameters"); p != nil {
		if s != nil {
			o.failf("rope_scaling and rope_parameters are both given; one of them says how positions turn")
			return
		}
		theta := p.positive("rope_theta", c.RopeTheta, maxRopeTheta)
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
			LowFreqFactor:     s.requiredPositive("low_freq_factor", 1e6),
			HighFreqFactor:    s.requiredPositive("high_freq_factor", 1e6),
			OriginalPositions: s.requiredInt("original_max_position_embeddings", maxPositions),
		}
		if s.err == nil && r.Factor < 1 {
			s.failf("factor is %g; it must be 1 or more", r.Factor)
		}
		if s.err == nil && r.HighFreqFactor <= r.LowFreqFactor {
			s.failf("high_freq_factor is %g, not above low_freq_factor %g", r.HighFreqFactor, r.LowFreqFactor)
		}
		c.RopeScaling = r
	}
	if s.err != nil {
		o.failf("%s: %v", scalingKey, s.err)
	}
}

// orderedMap keeps the order of Write's keys in the file.
type orderedMap []struct {
	key   string
	value any
}

func (m *orderedMap) add(key string, value any) {
	*m = append(*m, struct {
		key   string
		value any
	}{key, value})
}

func (m orderedMap) MarshalJSON() ([]byte, error) {
	out := []byte{'{'}
	for i, e := range m {
		if i > 0 {
			out = append(out, ',')
		}
		k, err := json.Marshal(e.key)
		if err != nil {
			return nil, err
		}
		v, err := json.Marshal(e.value)
		if err != nil {
			return nil, err
		}
		out = append(append(append(out, k...), ':'), v...)
	}
	return append(out, '}'), nil
}

// Marshal gives the text of a config.json with c's shape that transformers
// and Parse read back to the same Config. torchDtype is the dtype of the
// weights beside it: float32 or bfloat16. A Config that no model_type can
// express is an error.
func Marshal(c Config, torchDtype string) ([]byte, error) {
	var m orderedMap
	switch c.Arch {
	case GPT2:
		m.add("architectures", []string{"GPT2LMHeadModel"})
		m.add("model_type", "gpt2")
		m.add("activation_function", c.Activation)
		m.add("n_layer", c.Layers)
		m.add("n_head", c.Heads)
		m.add("n_embd", c.Hidden)
		m.add("n_inner", c.Inner)
		m.add("n_positions", c.Positions)
		m.add("n_ctx", c.Positions)
		m.add("layer_norm_epsilon", c.NormEps)
	case Llama:
		modelType, class := "llama", "LlamaForCausalLM"
		switch {
		case c.QKNorm == NormAll:
			modelType, class = "olmo2", "Olmo2ForCausalLM"
		case c.QKNorm == NormByHead:
			modelType, class = "qwen3", "Qwen3ForCausalLM"
		case c.QKVBias != c.OutBias:
			modelType, class = "qwen2", "Qwen2ForCausalLM"
		}
		m.add("architectures", []string{class})
		m.add("model_type", modelType)
		m.add("hidden_act", c.Activation)
		m.add("hidden_size", c.Hidden)
		m.add("intermediate_size", c.Inner)
		m.add("num_hidden_layers", c.Layers)
		m.add("num_attention_heads", c.Heads)
		m.add("num_key_value_heads", c.KVHeads)
		m.add("head_dim", c.HeadDim)
		m.add("max_position_embeddings", c.Positions)
		m.add("rms_norm_eps", c.NormEps)
		m.add("rope_theta", c.RopeTheta)
		if s := c.RopeScaling; s != nil {
			var r orderedMap
			r.add("rope_type", "llama3")
			r.add("factor", s.Factor)
			r.add("low_freq_factor", s.LowFreqFactor)
			r.add("high_freq_factor", s.HighFreqFactor)
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
	default:
		return nil, fmt.Errorf("write model config: architecture %q is not %s or %s", c.Arch, GPT2, Llama)
	}
	m.add("vocab_size", c.Vocab)
	m.add("tie_word_embeddings", c.TieHead)
	m.add("initializer_range", c.InitStd)
	m.add("torch_dtype", torchDtype)
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("write model config: %w", err)
	}
	data = append(data, '\n')
	back, err := Parse(data)
	if err != nil {
		return nil, fmt.Errorf("write model config: %w", err)
	}
	if !back.SameModel(c) {
		return nil, fmt.Errorf("write model config: no model_type expresses %+v (QKVBias %v, OutBias %v, MLPBias %v); transformers has Llama, whose biases of attention come together, Qwen2, with QKVBias alone, Qwen3 and OLMo 2", c.Arch, c.QKVBias, c.OutBias, c.MLPBias)
	}
	return data, nil
}

// SameModel says that two Configs describe the same model: all fields but
// ModelType and Dropouts, and what RopeScaling points to.
func (c Config) SameModel(d Config) bool {
	if (c.RopeScaling == nil) != (d.RopeScaling == nil) {
		return false
	}
	if c.RopeScaling != nil && *c.RopeScaling != *d.RopeScaling {
		return false
	}
	c.RopeScaling, d.RopeScaling = nil, nil
	c.ModelType, d.ModelType = "", ""
	c.Dropouts, d.Dropouts = "", ""
	return c == d
}
