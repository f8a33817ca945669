package plan

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/zero"
)

// With Reproducible every sum over leaves, of gradients and of losses, adds from left to right. A
// tree's order would depend on the number of ranks. In a loss this changes bits that its 32-bit
// value rarely shows.
func TestLeavesAreSummedFromLeftToRight(t *testing.T) {
	fwd := forwardOf(t, smallLlama, 1, 16, true)
	for _, ranks := range []int{1, 2, 3} {
		for stage := range zero.Stage(4) {
			for _, int8 := range []bool{false, true} {
				cfg := mixed(ranks, 0)
				cfg.Accum, cfg.Stage, cfg.Reproducible, cfg.Int8Reduce, cfg.Precision = 12/ranks, stage, true, int8, precision.BF16
				p, err := Build(fwd, cfg)
				require.NoError(t, err)
				losses, gradients := 0, 0
				for _, sec := range p.Program.Sections {
					for _, ph := range sec.Phases {
						for _, op := range ph.Ops {
							order, sums := graph.SumTree, false
							switch a := op.Attr.(type) {
							case graph.SumPartsAttr:
								order, sums = a.Order, true
							case graph.QuantAttr:
								order, sums = a.Order, op.Kind == graph.DequantizeSum
							case graph.GroupAttr:
								order, sums = a.Order, op.Kind == graph.ReduceScatter
							}
							if !sums {
								continue
							}
							require.Equal(t, graph.SumSequential, order, "%d ranks, stage %d, %s", ranks, stage, op.Name)
							if op.Unit < 0 {
								losses++
							} else {
								gradients++
							}
						}
					}
				}
				what := fmt.Sprintf("%d ranks, stage %d, int8 %v", ranks, stage, int8)
				require.Positive(t, losses, what)
				require.Positive(t, gradients, what)
			}
		}
	}
}
