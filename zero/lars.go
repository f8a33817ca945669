package zero

import "github.com/spillway-ml/spillway/graph"

// LARS is SGD with momentum, with the rate scaled for each parameter by the ratio of the norms of
// the parameter and of its gradient.
var _ = register(&Rule{
	Name: "lars", States: []string{"momentum"}, Reads: []Constant{Beta1, Trust, AdaptAll, Nesterov},
	Source: "You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017",
	Emit:   func(e *Emitter, t *Target) { emitLARS(e, t, "lars", false) },
}, larsApply)

// LARC is LARS with each parameter's rate limited to the global rate.
var _ = register(&Rule{
	Name: "larc", States: []string{"momentum"}, Reads: []Constant{Beta1, Trust, AdaptAll, Nesterov},
	Source: "LARS with the local rate clipped at the global one (NVIDIA Apex)",
	Emit:   func(e *Emitter, t *Target) { emitLARS(e, t, "larc", true) },
}, larsApply)

func emitLARS(e *Emitter, t *Target, name string, clip bool) {
	a := e.Attr(t)
	a.Clip = clip
	norms := e.ParamNorms(t, a)
	e.Apply(t, larsApply, name, []graph.BufID{t.Grad, norms, e.Coef, e.p.Hyper}, InPlace(t.Value, t.States[0]), a)
}

var larsApply = update(graph.Definition{
	Kind: "lars_apply", Doc: "LARS, or LARC's clipped form, with momentum on coef·g; g, p, momentum (Len), norms i64 (2·params·Limbs).",
	In:  graph.NormedIn(),
	Out: []graph.Operand{graph.StateOut("p"), graph.StateOut("momentum"), graph.LowOut()},
}, 8)
