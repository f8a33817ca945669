package zero

import "github.com/spillway-ml/spillway/graph"

// SGD has momentum, Nesterov's where asked for.
var _ = register(&Rule{
	Name: "sgd", States: []string{"momentum"},
	Source: "Sutskever et al., On the importance of initialization and momentum, ICML 2013",
	Emit: func(e *Emitter, t *Target) {
		e.Apply(t, graph.SGD, "sgd", e.Scalars(t), InPlace(t.Value, t.States[0]), e.Attr(t))
	},
})
