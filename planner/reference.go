package planner

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// ActivationReference compares a published formula with a plan's own activations, in bytes.
type ActivationReference struct {
	All       int64 // formula without recomputation
	Selective int64 // formula if the attention's inner values are recomputed
	Ours      int64 // of this plan, at their peak
	Gated     bool  // the model's MLP is gated, but the formula is for one of 4 widths
	// Values are All, Selective and Ours as numbers of values per token, layer and unit of width.
	Values [3]float64
}

// MegatronActivations compares the formula of Korthikanti et al. (2022, section 4.1, equation 1)
// with the forecast's activations: see cost.MegatronActivationBytes.
func (f *Forecast) MegatronActivations() (ActivationReference, error) {
	c := &f.Config
	if c.Own.Model != nil {
		return ActivationReference{}, fmt.Errorf("model %.80q: the formula is one of transformers of config.json", c.Own.Model.Name)
	}
	h := f.of.Shape
	layers, s, b, width, heads := float64(h.Layers), float64(c.Seq), float64(c.Batch), float64(h.Width), float64(h.Heads)
	r := ActivationReference{
		All:       int64(cost.MegatronActivationBytes(layers, s, b, width, heads, false)),
		Selective: int64(cost.MegatronActivationBytes(layers, s, b, width, heads, true)),
		Ours:      f.Plan.Layout.Spaces[graph.Device].ClassPeak[graph.Activations],
		Gated:     h.RopeTheta > 0,
	}
	ours := 2.0 // bytes per value
	if c.PrecisionName() == "fp32" {
		ours = 4
	}
	for i, v := range []float64{float64(r.All) / 2, float64(r.Selective) / 2, float64(r.Ours) / ours} {
		r.Values[i] = v / (layers * s * b * width)
	}
	return r, nil
}
