package cost

import (
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// Kinds whose time is spent on multiply-adds: matrix products, the head included, and attention.
var (
	products  = []graph.Kind{graph.Linear, graph.LinearAct, graph.LinearGradX, graph.LinearGradAct, graph.LinearGradW, graph.LinearGradWB, graph.HeadLoss, graph.HeadLossGrad, graph.HeadStats, graph.HeadSliceGrad, graph.NewtonSchulz}
	attention = []graph.Kind{graph.Attention, graph.AttentionGrad, graph.AttentionCached}
)

// IsCollective says whether all ranks of a group meet in an operation.
func IsCollective(op *graph.Op) bool {
	switch op.Kind {
	case graph.AllGather, graph.ReduceScatter, graph.AllReduce, graph.AllToAll:
		return true
	}
	return false
}

// IsProduct says whether an operation's speed is compared with the peak of matrix products.
func IsProduct(op *graph.Op) bool {
	return slices.Contains(products, op.Kind) || slices.Contains(attention, op.Kind)
}

// ModelFlops returns the FLOPs of a rank's products and attention in the forward and backward
// passes of one run of a section. Recomputation does not count.
func ModelFlops(p *graph.Program, section string) (sum float64) {
	sec := p.Section(section)
	if sec == nil {
		return 0
	}
	for i := range sec.Phases {
		ph := &sec.Phases[i]
		for k := range ph.Ops {
			if op := &ph.Ops[k]; IsProduct(op) && (op.Pass == graph.Forward || op.Pass == graph.Backward) {
				sum += float64(SizeOf(p, op).Flops * float64(max(ph.Repeat, 1)))
			}
		}
	}
	return sum
}
