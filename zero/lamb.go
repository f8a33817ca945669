package zero

import "github.com/spillway-ml/spillway/graph"

// LAMB takes Adam's direction, at a rate for each parameter that the norms of the
// parameter and of its direction scale.
var _ = register(&Rule{
	Name: "lamb", States: []string{"exp_avg", "exp_avg_sq"}, Second: true, Adapts: true,
	Source: "You et al., Large Batch Optimization for Deep Learning, ICLR 2020, algorithm 2",
	Emit: func(e *Emitter, t *Target) {
		a := e.Attr(t)
		if e.p.Buf(t.Grad).DType != graph.F32 {
			// The direction takes the gradient's place: it needs f32.
			wide := e.p.AddBuffer(graph.Buffer{Name: t.Name + "/direction", DType: graph.F32, Shape: []int64{t.Shard.Len},
				Class: graph.Workspace, Life: graph.LifeStep, Unit: t.Unit})
			e.Op(graph.Cast, t.Name+"/direction", t.Unit, []graph.BufID{t.Grad}, []graph.Out{{Buf: wide}}, nil)
			t.Grad = wide
		}
		norms := e.Norms(t, func(into graph.Out) {
			e.Op(graph.LAMBDirection, t.Name+"/lamb_dir", t.Unit, []graph.BufID{t.Value, e.Coef, e.p.Hyper},
				append(InPlace(t.Grad, t.States[0], t.States[1]), into), a).Skip = e.skip
		})
		e.Apply(t, graph.LAMBApply, "lamb", []graph.BufID{t.Grad, norms, e.Coef, e.p.Hyper}, InPlace(t.Value), a)
	},
})
