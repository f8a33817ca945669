package planner

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
)

// Measuring the noise scale adds at most 1 % to a step's FLOPs and to its memory traffic.
func TestNoiseScaleCosts(t *testing.T) {
	for _, ranks := range []int{1, 4} {
		c := config.Default()
		c.Model, c.Ranks, c.Batch, c.Seq, c.GlobalBatch, c.Reproducible = "gpt2", ranks, 1, 256, 8, true
		p, err := Build(context.Background(), c)
		require.NoError(t, err)
		var all, added [2]int64
		add := func(to *[2]int64, op *graph.Op, by int64) {
			flops, bytes := graph.Cost(p.Program, op)
			to[0], to[1] = to[0]+by*flops, to[1]+by*bytes
		}
		for _, ph := range p.Program.SectionOf(graph.SectionStep, graph.FormWhole).Phases {
			for k := range ph.Ops {
				op, times := ph.Ops[k], int64(ph.Repeat)
				add(&all, &op, times)
				sums := op.Kind == graph.ReduceScatter || op.Kind == graph.SumParts
				switch {
				case strings.HasPrefix(op.Name, "squares/"):
					add(&added, &op, times)
				case sums && len(op.Out) == 2:
					add(&added, &op, times)
					op.Out = op.Out[:1]
					add(&added, &op, -times)
				}
			}
		}
		t.Logf("%d ranks: %.4f %% of the operations, %.4f %% of the bytes", ranks, 100*float64(added[0])/float64(all[0]), 100*float64(added[1])/float64(all[1]))
		for i := range all {
			require.Positive(t, added[i])
			require.LessOrEqual(t, float64(added[i]), 0.01*float64(all[i]))
		}
	}
}
