// Package model writes GPT-2, the Llama family and two classifiers as forward
// programs. It is pure: shapes come in as a Config, and nothing is allocated.
package model

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
)

// Family is an architecture.
type Family string

// Families.
const (
	GPT2  Family = "gpt2"  // Radford et al. 2019: learned positions, layer norm, biases
	Llama Family = "llama" // Touvron et al. 2023: rotary positions, RMS norm, SwiGLU, grouped-query attention
	MLP   Family = "mlp"   // a classifier of vectors
	CNN   Family = "cnn"   // a classifier of images: 3×3 convolutions and max-pooling
)

// Config is a model's shape. The first group serves GPT2 and Llama, the last
// the classifiers.
type Config struct {
	Family Family

	Layers    int // blocks
	Width     int // of the residual stream
	Heads     int // query heads
	KVHeads   int // key and value heads; divides Heads; 0: Heads
	HeadDim   int // width of a head; 0: Width/Heads
	FFN       int // width inside the MLP; 0: 4·Width (GPT2; Llama must say)
	Vocab     int // rows of the embedding; never padded
	Positions int // the longest sequence; rows of GPT2's position table
	TiedHead  bool
	Act       graph.ActKind // GPT2's activation, also the classifiers'; "": gelu_tanh (GPT2), relu
	NormEps   float64       // 0: 1e-5 (GPT2), 1e-6 (Llama)
	InitStd   float64       // of random weights; 0: 0.02

	// Llama.
	QKVBias, OutBias, MLPBias bool    // Qwen2 has QKVBias
	NormHeads                 bool    // queries and keys are normed head by head before they turn, with one weight for all heads (Qwen3)
	NormQK                    bool    // … all heads together (OLMo 2)
	PostNorm                  bool    // attention and MLP are normed after, before they are added, not before (OLMo 2)
	RopeTheta                 float64 // 0: 10000
	RopeScaling               *RopeScaling

	// Dropout probabilities, in training only. Attention's must be 0: attention
	// here never holds the matrix of probabilities.
	EmbdDropout, ResidDropout, AttnDropout float64

	// Classifiers.
	Inputs                  int   // MLP: width of an input
	Height, ImgWidth, Chans int   // CNN: of an input image, channels last
	Hidden                  []int // MLP: widths of the hidden layers; CNN: output channels of the convolutions, each followed by 2×2 max-pooling
	Classes                 int
}

// RopeScaling is Llama 3.1's scaling of the rotary frequencies.
type RopeScaling struct {
	Factor, LowFreq, HighFreq float64
	OriginalPositions         int
}

// Bounds that keep every product of sizes far from overflow.
const (
	maxLayers = 1 << 14
	maxSize   = 1 << 28
	maxBatch  = 1 << 24
)

// withDefaults fills in what 0 stands for.
func (c Config) withDefaults() Config {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	deff := func(v *float64, d float64) {
		if *v == 0 {
			*v = d
		}
	}
	deff(&c.InitStd, 0.02)
	switch c.Family {
	case GPT2:
		def(&c.FFN, 4*c.Width)
		deff(&c.NormEps, 1e-5)
		if c.Act == "" {
			c.Act = graph.ActGELUTanh
		}
	case Llama:
		deff(&c.NormEps, 1e-6)
		deff(&c.RopeTheta, 10000)
	default:
		if c.Act == "" {
			c.Act = graph.ActReLU
		}
	}
	def(&c.KVHeads, c.Heads)
	if c.Heads > 0 {
		def(&c.HeadDim, c.Width/c.Heads)
	}
	return c
}

// Validate names the first field that makes no model.
func (c Config) Validate() error {
	c = c.withDefaults()
	if c.Family == GPT2 || c.Family == Llama {
		return c.validateLM()
	}
	if c.Family != MLP && c.Family != CNN {
		return fmt.Errorf("model: family is %q, want %s, %s, %s or %s", c.Family, GPT2, Llama, MLP, CNN)
	}
	sizes := []size{{"Classes", c.Classes, maxSize}}
	if c.Family == MLP {
		sizes = append(sizes, size{"Inputs", c.Inputs, maxSize})
	} else {
		sizes = append(sizes, size{"Height", c.Height, 1 << 16}, size{"ImgWidth", c.ImgWidth, 1 << 16}, size{"Chans", c.Chans, 1 << 16})
	}
	for i, h := range c.Hidden {
		limit := maxSize
		if c.Family == CNN {
			limit = 1 << 16
			if halvings := len(c.Hidden); c.Height>>halvings < 1 || c.ImgWidth>>halvings < 1 {
				return fmt.Errorf("model: Hidden has %d convolutions, whose pooling halves an image of (%d, %d) to nothing", halvings, c.Height, c.ImgWidth)
			}
		}
		sizes = append(sizes, size{fmt.Sprintf("Hidden[%d]", i), h, limit})
	}
	return checkSizes(sizes)
}

type size struct {
	name  string
	n     int
	limit int
}

func checkSizes(sizes []size) error {
	for _, s := range sizes {
		if s.n < 1 || s.n > s.limit {
			return fmt.Errorf("model: %s is %d, want 1 to %d", s.name, s.n, s.limit)
		}
	}
	return nil
}

func (c Config) validateLM() error {
	err := checkSizes([]size{
		{"Layers", c.Layers, maxLayers}, {"Width", c.Width, maxSize}, {"Heads", c.Heads, 1 << 16},
		{"KVHeads", c.KVHeads, 1 << 16}, {"HeadDim", c.HeadDim, 1 << 16}, {"FFN", c.FFN, maxSize},
		{"Vocab", c.Vocab, maxSize}, {"Positions", c.Positions, maxSize},
	})
	if err != nil {
		return err
	}
	switch {
	case c.Heads%c.KVHeads != 0:
		return fmt.Errorf("model: Heads is %d, not a multiple of KVHeads %d", c.Heads, c.KVHeads)
	case c.Family == GPT2 && c.Heads*c.HeadDim != c.Width:
		return fmt.Errorf("model: Heads %d × HeadDim %d is not Width %d; a GPT-2's heads share its width", c.Heads, c.HeadDim, c.Width)
	case c.Family == GPT2 && c.KVHeads != c.Heads:
		return fmt.Errorf("model: KVHeads is %d; a GPT-2 has one for each of its %d heads", c.KVHeads, c.Heads)
	case c.Family == Llama && c.HeadDim%2 != 0:
		return fmt.Errorf("model: HeadDim is %d, want an even number: rotary positions turn pairs", c.HeadDim)
	case c.NormHeads && c.NormQK:
		return fmt.Errorf("model: NormHeads and NormQK are both set; queries and keys are normed once")
	case c.AttnDropout != 0:
		return fmt.Errorf("model: AttnDropout is %g, want 0: attention here never holds its probabilities, so there is nothing to drop from; use ResidDropout", c.AttnDropout)
	case !(c.EmbdDropout >= 0 && c.EmbdDropout < 1):
		return fmt.Errorf("model: EmbdDropout is %g, want a probability in [0, 1)", c.EmbdDropout)
	case !(c.ResidDropout >= 0 && c.ResidDropout < 1):
		return fmt.Errorf("model: ResidDropout is %g, want a probability in [0, 1)", c.ResidDropout)
	}
	return nil
}

// Kind is what a program is for.
type Kind uint8

// Kinds of programs. Only Train has dropout. The last three are batches of one:
// Generate gives the row Key[KeyRow] its Logits; Prompt is the same and keeps the
// keys and values of all its rows for Next, which takes one token, at position
// Key[KeyStart] (and Key[KeyRow], the same), and gives the Logits after it.
const (
	Train Kind = iota
	Eval
	Generate
	Prompt
	Next
)

var sections = [...]graph.SectionKind{graph.SectionForward, graph.SectionEval, graph.SectionGenerate, graph.SectionGenerate, graph.SectionGenerate}

// Build writes the forward program for batch rows of seq tokens (classifiers:
// batch samples, seq 1 or 0). Its one section is "forward" for Train, "eval",
// or "generate"; the parameters are the same in all three, in the same order,
// under Hugging Face's names and shapes.
//
// A language model's units are "embed", "pos" (GPT-2), "h.0", "h.1" …, "norm"
// and, untied, "head"; a tied head uses the parameter of "embed". Classifiers
// have a unit a layer, "layer.0" ….
//
// Random weights: N(0, InitStd²), the projections onto the residual stream
// N(0, InitStd²/(2·Layers)) in a GPT-2, ones and zeros for norms and biases, as
// Hugging Face's transformers does (GPT-2's position table too, where OpenAI's
// code has 0.01); classifiers as He et al. 2015.
func Build(c Config, kind Kind, batch, seq int) (*graph.Program, error) {
	b := graph.NewBuilder()
	if err := Write(b, c, kind, batch, seq); err != nil {
		return nil, err
	}
	p, err := b.Program()
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	if kind == Next {
		p.Sections[0].Form = graph.FormNext
	}
	p.Sections[0].Become(sections[kind])
	return p, nil
}

// Write is Build that writes onto a builder, beside what a program of one's own has
// there. What is wrong with the program is the builder's error.
func Write(b *graph.Builder, c Config, kind Kind, batch, seq int) error {
	if err := c.Validate(); err != nil {
		return err
	}
	c = c.withDefaults()
	if kind > Next {
		return fmt.Errorf("model: program kind is %d, want Train, Eval, Generate, Prompt or Next", kind)
	}
	if batch < 1 || batch > maxBatch {
		return fmt.Errorf("model: batch is %d, want 1 to %d", batch, maxBatch)
	}
	w := &writer{Builder: b, c: c, kind: kind, batch: int64(batch), seq: int64(seq), kept: int64(seq)}
	if kind == Next {
		w.seq = 1
	}
	switch c.Family {
	case GPT2, Llama:
		if seq < 1 || seq > c.Positions {
			return fmt.Errorf("model: seq is %d, want 1 to the model's %d positions", seq, c.Positions)
		}
		if kind >= Generate && batch != 1 {
			return fmt.Errorf("model: batch is %d, want 1: generation follows one sequence", batch)
		}
		if c.Family == GPT2 {
			w.gpt2()
		} else {
			w.llama()
		}
	default:
		if kind >= Generate {
			return fmt.Errorf("model: a classifier (%s) generates nothing; want Train or Eval", c.Family)
		}
		if seq > 1 || seq < 0 {
			return fmt.Errorf("model: seq is %d; a classifier (%s) has one target a sample, so want 1", seq, c.Family)
		}
		if c.Family == MLP {
			w.mlp()
		} else {
			w.cnn()
		}
	}
	return nil
}

// writer is a Builder that knows the model it writes.
type writer struct {
	*graph.Builder
	c          Config
	kind       Kind
	batch, seq int64 // rows, and tokens of one
	kept       int64 // positions whose keys and values Prompt and Next keep
}

func (w *writer) normal() graph.Init { return graph.Normal(w.c.InitStd) }

// dropout is the identity but in training.
func (w *writer) dropout(name string, x graph.Value, p float64) graph.Value {
	if w.kind != Train || p == 0 {
		return x
	}
	return w.Dropout(name, x, p, w.batch, graph.InPlace)
}

// head ends a language model: the loss, or the logits of one row. table is the
// (V,C) matrix.
func (w *writer) head(x, table graph.Value) {
	if w.kind < Generate {
		w.HeadLoss("head", x, table, w.Targets(w.batch, w.seq))
		return
	}
	row := x
	if w.kind != Next {
		row = w.SelectRow("head.row", x)
	}
	w.Logits(w.Linear("head", row, table, graph.Value{}, graph.LinearAttr{TransW: true}))
}
