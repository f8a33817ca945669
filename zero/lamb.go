package zero

import "github.com/spillway-ml/spillway/graph"

// LAMB takes Adam's direction, scaled for each parameter by the ratio of the norms of the parameter
// and of its direction.
var _ = register(&Rule{
	Name: "lamb", States: []string{"exp_avg", "exp_avg_sq"}, Reads: []Constant{Beta1, Beta2, Eps, AdaptAll},
	Source: "You et al., Large Batch Optimization for Deep Learning, ICLR 2020, algorithm 2",
	Emit: func(e *Emitter, t *Target) {
		a := e.Attr(t)
		if e.p.Buf(t.Grad).DType != graph.F32 {
			// The direction overwrites the gradient and needs f32.
			wide := e.p.AddBuffer(graph.Buffer{Name: t.Name + "/direction", DType: graph.F32, Shape: []int64{t.Shard.Len},
				Class: graph.Workspace, Life: graph.LifeStep, Unit: t.Unit})
			e.Op(graph.Cast, t.Name+"/direction", t.Unit, []graph.BufID{t.Grad}, []graph.Out{{Buf: wide}}, nil)
			t.Grad = wide
		}
		norms := e.Norms(t, func(into graph.Out) {
			e.own(lambDirection, t.Name+"/lamb_dir", t.Unit, []graph.BufID{t.Value, e.Coef, e.p.Hyper},
				append(InPlace(t.Grad, t.States[0], t.States[1]), into), a)
		})
		e.Apply(t, lambApply, "lamb", []graph.BufID{t.Grad, norms, e.Coef, e.p.Hyper}, InPlace(t.Value), a)
	},
}, lambDirection, lambApply)

var lambDirection = update(graph.Definition{
	Kind: "lamb_dir",
	Doc: "LAMB's Adam direction, which replaces g, and norms += the exact squares of p and of it for each parameter of the unit with decay " +
		"(AdaptAll: for each); p, g, m, v (Len), norms i64 (2·params·Limbs).",
	In:  append([]graph.Operand{graph.ValueIn()}, graph.UpdateIn()[1:]...),
	Out: []graph.Operand{graph.StateOut("g"), graph.StateOut("m"), graph.StateOut("v"), graph.NormsOut()},
}, 18)

var lambApply = update(graph.Definition{
	Kind: "lamb_apply", Doc: "p −= lr·(‖p‖/‖g‖)·g for each parameter, g the direction, the ratio 1 where a norm is 0; g, p (Len), norms i64 (2·params·Limbs).",
	In:  graph.NormedIn(),
	Out: []graph.Operand{graph.StateOut("p"), graph.LowOut()},
}, 2)
