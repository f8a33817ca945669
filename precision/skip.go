package precision

import "github.com/spillway-ml/spillway/graph"

// SkipNonFinite makes a program skip the update of a step whose gradients are not finite, on all
// ranks. It uses the flag of loss scaling, without a scale. A program that has a Scaler does this
// already and is returned unchanged.
func SkipNonFinite(p *graph.Program) *graph.Program {
	if p.Scaler != nil {
		return p
	}
	q := p.Clone()
	q.Scaler = &graph.Scaler{State: graph.NoBuf}
	q.Scaler.Overflow = overflowFlag(q)
	return q
}

// overflowFlag adds the flag that makes updates skip.
func overflowFlag(p *graph.Program) graph.BufID {
	return p.AddBuffer(graph.Buffer{Name: "overflow", DType: graph.I32, Shape: []int64{1},
		Class: graph.Workspace, Life: graph.LifeStep, Unit: -1})
}
