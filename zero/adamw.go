package zero

import "github.com/spillway-ml/spillway/graph"

// AdamW has two moments an element and decoupled weight decay.
var _ = register(&Rule{
	Name: "adamw", States: []string{"exp_avg", "exp_avg_sq"}, Narrow: true, Second: true,
	Source: "Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019",
	Emit: func(e *Emitter, t *Target) {
		e.Apply(t, graph.AdamW, "adamw", e.Scalars(t), InPlace(t.Value, t.States[0], t.States[1]), e.Attr(t))
	},
})
