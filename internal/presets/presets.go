// Package presets is the table of models that Config.Model names: the shapes of
// published models, without weights.
package presets

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/internal/hfconfig"
	names "github.com/spillway-ml/spillway/internal/nearest"
)

// Preset is a published model's shape.
type Preset struct {
	Name    string   // as listed; lower case
	Aliases []string // other names that Lookup takes; lower case
	Config  hfconfig.Config
	Source  string // where the shape was published
}

// Sources of the table.
const (
	srcGPT2     = "Radford et al. 2019, table 2, as released (heads 64 wide) in openai-community/gpt2*"
	srcGPT3     = "Brown et al. 2020, table 2.1; attention here is dense in every layer"
	srcMegatron = "Korthikanti et al. 2022, table 3 (Megatron-LM; 51,200 tokens, 2,048 positions)"
	srcLlama1   = "Touvron et al. 2023 (LLaMA), table 2"
	srcLlama2   = "Touvron et al. 2023 (Llama 2), meta-llama/Llama-2-*-hf"
	srcLlama3   = "Grattafiori et al. 2024, table 3, meta-llama/Meta-Llama-3-*, Llama-3.1-*"
	srcLlama32  = "meta-llama/Llama-3.2-*"
	srcQwen25   = "Qwen2.5 technical report 2024, Qwen/Qwen2.5-*"
	srcQwen3    = "Qwen3 technical report 2025, Qwen/Qwen3-*"
	srcOLMo2    = "OLMo et al. 2024 (2 OLMo 2 Furious), allenai/OLMo-2-1124-*"
	srcSmolLM2  = "Allal et al. 2025 (SmolLM2), HuggingFaceTB/SmolLM2-*"
	srcMistral  = "Jiang et al. 2023, mistralai/Mistral-7B-*"
)

var table = []Preset{
	gpt2("gpt2", 12, 768, 12, "gpt2-small", "gpt2-124m"),
	gpt2("gpt2-medium", 24, 1024, 16, "gpt2-355m"),
	gpt2("gpt2-large", 36, 1280, 20, "gpt2-774m"),
	gpt2("gpt2-xl", 48, 1600, 25, "gpt2-1.5b", "gpt2-1558m"),

	// What `spillway train` trains by itself: bytes of the Go toolchain's source.
	gpt("spillway-demo", "Spillway's own demo", 4, 256, 8, 256, 256, nil),

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

	// v0.1 attends over a window of 4,096 tokens, which up to 4,096 positions
	// is full attention; v0.3 dropped the window.
	llama("mistral-7b", srcMistral, shape{layers: 32, hidden: 4096, inner: 14336, heads: 32, kv: 8, vocab: 32000, positions: 4096, eps: 1e-5, theta: 1e4}, "mistral-7b-v0.1"),
	llama("mistral-7b-v0.3", srcMistral, shape{layers: 32, hidden: 4096, inner: 14336, heads: 32, kv: 8, vocab: 32768, positions: 32768, eps: 1e-5, theta: 1e6}),
}

func gpt(name, source string, layers, hidden, heads, vocab, positions int, aliases []string) Preset {
	return Preset{Name: name, Aliases: aliases, Source: source, Config: hfconfig.Config{
		Arch: hfconfig.GPT2, ModelType: "gpt2",
		Layers: layers, Hidden: hidden, Inner: 4 * hidden, Heads: heads, KVHeads: heads, HeadDim: hidden / heads,
		Vocab: vocab, Positions: positions,
		Activation: hfconfig.GELUTanh, NormEps: 1e-5, TieHead: true, InitStd: 0.02,
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

// shape is a row of the Llama-like models. ropeFactor 0 means no scaling.
type shape struct {
	layers, hidden, inner, heads, kv, vocab, positions int
	eps, theta, ropeFactor                             float64
	tied                                               bool
}

func llama(name, source string, s shape, aliases ...string) Preset {
	c := hfconfig.Config{
		Arch: hfconfig.Llama, ModelType: "llama",
		Layers: s.layers, Hidden: s.hidden, Inner: s.inner, Heads: s.heads, KVHeads: s.kv, HeadDim: s.hidden / s.heads,
		Vocab: s.vocab, Positions: s.positions,
		Activation: hfconfig.SiLU, NormEps: s.eps, TieHead: s.tied, InitStd: 0.02, RopeTheta: s.theta,
	}
	if s.ropeFactor != 0 {
		c.RopeScaling = &hfconfig.RopeScaling{Factor: s.ropeFactor, LowFreqFactor: 1, HighFreqFactor: 4, OriginalPositions: 8192}
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
	p.Config.ModelType = "qwen2"
	p.Config.QKVBias = true
	return p
}

// qwen3's heads are 128 wide whatever the width.
func qwen3(name string, s shape) Preset {
	p := llama(name, srcQwen3, s, strings.Replace(name, "qwen-", "qwen", 1))
	p.Config.ModelType, p.Config.HeadDim, p.Config.QKNorm = "qwen3", 128, hfconfig.NormByHead
	return p
}

func olmo2(name string, s shape) Preset {
	p := llama(name, srcOLMo2, s, strings.Replace(name, "olmo-", "olmo", 1))
	p.Config.ModelType, p.Config.QKNorm, p.Config.PostNorm = "olmo2", hfconfig.NormAll, true
	return p
}

// List gives every preset, in the order of families and sizes. The caller may
// change what it gets.
func List() []Preset {
	out := slices.Clone(table)
	for i := range out {
		out[i] = out[i].clone()
	}
	return out
}

func (p Preset) clone() Preset {
	p.Aliases = slices.Clone(p.Aliases)
	if s := p.Config.RopeScaling; s != nil {
		r := *s
		p.Config.RopeScaling = &r
	}
	return p
}

// Lookup finds a preset by its name or an alias, in any case; an underscore
// counts as a hyphen. The error of an unknown name gives the nearest ones.
func Lookup(name string) (Preset, error) {
	key := strings.ReplaceAll(strings.ToLower(strings.TrimSpace(name)), "_", "-")
	for _, p := range table {
		if p.Name == key || slices.Contains(p.Aliases, key) {
			return p.clone(), nil
		}
	}
	return Preset{}, fmt.Errorf("model %q is neither a preset nor a folder; the nearest presets are %s", name, strings.Join(nearest(key, 3), ", "))
}

// Nearest is the preset whose name is nearest to that of a model on a hub, such as
// Meta-Llama-3-8B; "" where none is near.
func Nearest(name string) string {
	key := strings.ReplaceAll(strings.ToLower(name), "_", "-")
	var entries [][]string
	for _, p := range table {
		entries = append(entries, append([]string{p.Name}, p.Aliases...))
	}
	best := names.Names(key, entries, 1)
	if len(best) == 0 || names.Distance(key, best[0]) > len(key)/3+1 {
		return ""
	}
	return best[0]
}

// nearest gives the n presets with the names most like key.
func nearest(key string, n int) []string {
	var entries [][]string
	for _, p := range table {
		entries = append(entries, append([]string{p.Name}, p.Aliases...))
	}
	return names.Names(key, entries, n)
}
