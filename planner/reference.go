package planner

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// ActivationReference is a formula of the literature beside a plan's own
// activations, in bytes.
type ActivationReference struct {
	All       int64 // nothing is computed again
	Selective int64 // the attention's inner values are
	Ours      int64 // of this plan, at their most
	Gated     bool  // the model's MLP is gated: the formula is for one of 4 widths
	// Values is how many values All, Selective and Ours are a token, layer and unit
	// of width.
	Values [3]float64
}

// MegatronActivations sets the formula of Korthikanti et al. (2022, section 4.1,
// equation 1) beside the forecast's activations: see
// cost.MegatronActivationBytes.
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
	ours := 2.0 // bytes a value
	if c.PrecisionName() == "fp32" {
		ours = 4
	}
	for i, v := range []float64{float64(r.All) / 2, float64(r.Selective) / 2, float64(r.Ours) / ours} {
		r.Values[i] = v / (layers * s * b * width)
	}
	return r, nil
}
