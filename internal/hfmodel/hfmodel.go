// Package hfmodel turns what a Hugging Face config.json or a preset says into a
// model's shape. It stands apart from model, which touches no file, directly or
// through others.
package hfmodel

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/hfconfig"
	"github.com/spillway-ml/spillway/model"
)

// Config returns the shape of the model that h describes. Dropout is not part
// of it: it is 0 until the caller sets it.
func Config(h hfconfig.Config) (model.Config, error) {
	c := model.Config{
		Layers: h.Layers, Width: h.Hidden, Heads: h.Heads, KVHeads: h.KVHeads, HeadDim: h.HeadDim, FFN: h.Inner,
		Vocab: h.Vocab, Positions: h.Positions, TiedHead: h.TieHead, NormEps: h.NormEps, InitStd: h.InitStd,
		QKVBias: h.QKVBias, OutBias: h.OutBias, MLPBias: h.MLPBias, RopeTheta: h.RopeTheta,
		NormHeads: h.QKNorm == hfconfig.NormByHead, NormQK: h.QKNorm == hfconfig.NormAll, PostNorm: h.PostNorm,
	}
	switch h.Arch {
	case hfconfig.GPT2:
		c.Family = model.GPT2
		acts := map[hfconfig.Activation]graph.ActKind{
			hfconfig.GELUTanh: graph.ActGELUTanh, hfconfig.GELU: graph.ActGELU, hfconfig.ReLU: graph.ActReLU, hfconfig.SiLU: graph.ActSiLU,
		}
		var ok bool
		if c.Act, ok = acts[h.Activation]; !ok {
			return model.Config{}, fmt.Errorf("model: activation %q is not built for a GPT-2; want %s, %s, %s or %s",
				h.Activation, hfconfig.GELUTanh, hfconfig.GELU, hfconfig.ReLU, hfconfig.SiLU)
		}
	case hfconfig.Llama:
		c.Family = model.Llama
		if h.Activation != hfconfig.SiLU {
			return model.Config{}, fmt.Errorf("model: activation %q is not built for a gated MLP; want %s", h.Activation, hfconfig.SiLU)
		}
	default:
		return model.Config{}, fmt.Errorf("model: architecture %q is not built; want %s or %s", h.Arch, hfconfig.GPT2, hfconfig.Llama)
	}
	if s := h.RopeScaling; s != nil {
		c.RopeScaling = &model.RopeScaling{Factor: s.Factor, LowFreq: s.LowFreqFactor, HighFreq: s.HighFreqFactor, OriginalPositions: s.OriginalPositions}
	}
	return c, c.Validate()
}
