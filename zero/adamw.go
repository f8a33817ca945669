package zero

import "github.com/spillway-ml/spillway/graph"

// AdamW has two moments an element and decoupled weight decay.
var adamwRule = register(&Rule{
	Name: "adamw", States: []string{"exp_avg", "exp_avg_sq"}, Narrow: true, Reads: []Constant{Beta1, Beta2, Eps},
	Source: "Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019",
	Emit: func(e *Emitter, t *Target) {
		e.Apply(t, adamw, "adamw", e.Scalars(t), InPlace(t.Value, t.States[0], t.States[1]), e.Attr(t))
	},
}, adamw)

var adamw = update(graph.Definition{
	Kind: "adamw",
	Doc: "AdamW on coef·g; g, p, m, v (Len). m and v may be u8, codes of the signed and of the unsigned dynamic map, " +
		"with m_scales and v_scales (Len/256); or p, m and v are all bf16, rounded stochastically.",
	In: graph.UpdateIn(),
	Out: []graph.Operand{graph.NarrowOut("p", false), graph.NarrowOut("m", true), graph.NarrowOut("v", true), graph.LowOut(),
		graph.ScalesOut("m"), graph.ScalesOut("v")},
}, 16)
