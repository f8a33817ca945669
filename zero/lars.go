package zero

import "github.com/spillway-ml/spillway/graph"

// LARS is SGD with momentum at a rate for each parameter that the norms of the
// parameter and of its gradient scale.
var _ = register(&Rule{
	Name: "lars", States: []string{"momentum"}, Trust: true, Adapts: true,
	Source: "You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017",
	Emit:   func(e *Emitter, t *Target) { lars(e, t, "lars", false) },
})

// LARC is LARS whose rate for a parameter is at most the global one.
var _ = register(&Rule{
	Name: "larc", States: []string{"momentum"}, Trust: true, Adapts: true,
	Source: "LARS with the local rate clipped at the global one (NVIDIA Apex)",
	Emit:   func(e *Emitter, t *Target) { lars(e, t, "larc", true) },
})

func lars(e *Emitter, t *Target, name string, clip bool) {
	a := e.Attr(t)
	a.Clip = clip
	norms := e.ParamNorms(t, a)
	e.Apply(t, graph.LARSApply, name, []graph.BufID{t.Grad, norms, e.Coef, e.p.Hyper}, InPlace(t.Value, t.States[0]), a)
}
