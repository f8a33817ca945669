// Package model has the architectures: GPT-2, the Llama family, Gemma 2 and two classifiers. It
// reads their config.json and writes their forward programs. It does no I/O: its input is a Config
// or text, and it allocates no tensors.
package model

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// Config is a model's shape. The first group of fields is for GPT2 and Llama, the last for the
// classifiers.
type Config struct {
	Family Family

	Layers    int // blocks
	Width     int // of the residual stream
	Heads     int // query heads
	KVHeads   int // key and value heads; divides Heads; 0: Heads
	HeadDim   int // width of a head; 0: Width/Heads
	FFN       int // width inside the MLP; 0: 4·Width (GPT2; required for Llama)
	Vocab     int // rows of the embedding; never padded
	Positions int // the longest sequence; rows of GPT2's position table
	TiedHead  bool
	Act       graph.ActKind // GPT2's activation, also the classifiers'; "": gelu_tanh (GPT2), relu
	NormEps   float64       // 0: 1e-5 (GPT2), 1e-6 (Llama)
	InitStd   float64       // of random weights; 0: 0.02

	// Llama.
	QKVBias, OutBias, MLPBias bool    // Qwen2 has QKVBias
	NormHeads                 bool    // queries and keys are normalized per head before rotary positions, with one weight for all heads (Qwen3)
	NormQK                    bool    // likewise, over all heads together (OLMo 2)
	PostNorm                  bool    // norms follow attention and MLP, before the residual addition, instead of preceding them (OLMo 2)
	RopeTheta                 float64 // 0: 10000
	RopeScaling               *RopeScaling
	Gemma2Config

	// Documents says that rows of training and evaluation may hold several documents. Positions and
	// attention start anew in each, and the program has the input Starts.
	Documents bool

	// Dropout probabilities, in training only. AttnDropout must be 0, because attention never
	// stores the matrix of probabilities.
	EmbdDropout, ResidDropout, AttnDropout float64

	// Dropouts lists the non-zero dropout keys of a config.json, for a note: the model ignores
	// them.
	Dropouts string

	// Classifiers.
	Inputs                  int   // MLP: width of an input
	Height, ImgWidth, Chans int   // CNN: of an input image, channels last
	Hidden                  []int // MLP: widths of the hidden layers; CNN: output channels of the convolutions, each followed by 2×2 max-pooling
	Classes                 int
}

// RopeScaling is Llama 3.1's scaling of the rotary frequencies. Those whose wavelength is over
// OriginalPositions/LowFreq tokens are divided by Factor; those under OriginalPositions/HighFreq
// are unchanged; between the two they are interpolated.
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

// withDefaults replaces zero fields with their defaults.
func (c Config) withDefaults() Config {
	c.InitStd = cmp.Or(c.InitStd, 0.02)
	if a := c.Arch(); a != nil {
		a.defaults(&c)
	}
	c.KVHeads = cmp.Or(c.KVHeads, c.Heads)
	if c.Heads > 0 {
		c.HeadDim = cmp.Or(c.HeadDim, c.Width/c.Heads)
	}
	return c
}

// Validate returns an error that names the first invalid field.
func (c Config) Validate() error {
	c = c.withDefaults()
	a := c.Arch()
	if a == nil {
		names := families()
		last := len(names) - 1
		return fmt.Errorf("model: family is %q, want %s or %s", c.Family, strings.Join(names[:last], ", "), names[last])
	}
	if !a.Classifier {
		if err := c.validateLM(); err != nil {
			return err
		}
	}
	return a.check(c)
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
	case c.AttnDropout != 0:
		return fmt.Errorf("model: AttnDropout is %g, want 0: attention here never holds its probabilities, so there is nothing to drop from; use ResidDropout", c.AttnDropout)
	case !(c.EmbdDropout >= 0 && c.EmbdDropout < 1):
		return fmt.Errorf("model: EmbdDropout is %g, want a probability in [0, 1)", c.EmbdDropout)
	case !(c.ResidDropout >= 0 && c.ResidDropout < 1):
		return fmt.Errorf("model: ResidDropout is %g, want a probability in [0, 1)", c.ResidDropout)
	}
	return nil
}
