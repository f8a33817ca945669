package zero

import "github.com/spillway-ml/spillway/graph"

// NovoGrad has one second moment a parameter, of its gradient's norm.
var _ = register(&Rule{
	Name: "novograd", States: []string{"exp_avg"}, PerParam: []string{"exp_avg_sq"}, Second: true,
	Source: "Ginsburg et al., Stochastic Gradient Methods with Layer-wise Adaptive Moments, 2019",
	Emit: func(e *Emitter, t *Target) {
		a := e.Attr(t)
		a.AdaptAll = true // every parameter has a second moment
		norms := e.ParamNorms(t, a)
		e.Apply(t, graph.NovoGrad, "novograd", []graph.BufID{t.Grad, norms, e.Coef, e.p.Hyper}, InPlace(t.Value, t.States[0], t.States[1]), a)
	},
})
