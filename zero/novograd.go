package zero

import "github.com/spillway-ml/spillway/graph"

// NovoGrad has one second moment for each parameter: a mean of its gradient's squared norm.
var _ = register(&Rule{
	Name: "novograd", States: []string{"exp_avg"}, PerParam: []string{"exp_avg_sq"}, Reads: []Constant{Beta1, Beta2, Eps},
	Source: "Ginsburg et al., Stochastic Gradient Methods with Layer-wise Adaptive Moments, 2019",
	Emit: func(e *Emitter, t *Target) {
		a := e.Attr(t)
		a.AdaptAll = true // every parameter has a second moment
		norms := e.ParamNorms(t, a)
		e.Apply(t, novograd, "novograd", []graph.BufID{t.Grad, norms, e.Coef, e.p.Hyper}, InPlace(t.Value, t.States[0], t.States[1]), a)
	},
}, novograd)

var novograd = update(graph.Definition{
	Kind: "novograd", Doc: "NovoGrad on coef·g: one second moment a parameter; g, p, m (Len), v (params of the unit), norms i64 (2·params·Limbs).",
	In:  graph.NormedIn(),
	Out: []graph.Operand{graph.StateOut("p"), graph.StateOut("m"), graph.ParamOut("v"), graph.LowOut()},
}, 10)
