package zero

import "github.com/spillway-ml/spillway/graph"

// SGD uses momentum, in Nesterov's form if Optimizer.Nesterov is set.
var _ = register(&Rule{
	Name: "sgd", States: []string{"momentum"}, Reads: []Constant{Beta1, Nesterov},
	Source: "Sutskever et al., On the importance of initialization and momentum, ICML 2013",
	Emit: func(e *Emitter, t *Target) {
		e.Apply(t, sgd, "sgd", e.Scalars(t), InPlace(t.Value, t.States[0]), e.Attr(t))
	},
}, sgd)

var sgd = update(graph.Definition{
	Kind: "sgd", Doc: "SGD with momentum on coef·g; g, p, momentum (Len).",
	In:  graph.UpdateIn(),
	Out: []graph.Operand{graph.StateOut("p"), graph.StateOut("momentum"), graph.LowOut()},
}, 6)
