package cpu

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// The target's workspace for generation equals the kernels' own, with caches of any size.
func TestWorkspaceOfGeneration(t *testing.T) {
	for _, seq := range []int64{1, 2, 63, 64, 65, 600} {
		for _, more := range []int64{0, 1, 63, 500} {
			b, batch := graph.NewBuilder(), 1+more%3
			n := batch * seq
			a := graph.AttentionAttr{Batch: batch, Seq: seq, Heads: 6, KVHeads: 2, HeadDim: 20, Scale: 1, Causal: true}
			b.AttentionCached("a", b.Input("q", n, 120), b.Input("k", n, 40), b.Input("v", n, 40), b.Positions(batch, seq), b.Cache("keys", 4, seq+more, 40), b.Cache("values", 4, seq+more, 40), a)
			b.RopeAt("turn", b.Input("x", n, 120), b.Positions(batch, seq), graph.RopeAttr{Heads: 6, HeadDim: 20, Theta: 10000})
			p, err := b.Program()
			require.NoError(t, err)
			for i := range p.Sections[0].Phases[0].Ops {
				op := &p.Sections[0].Phases[0].Ops[i]
				require.Equal(t, workspace(p, op), graph.CPUTarget().Workspace(p, op), "%s of %d rows, %d more", op.Kind, seq, more)
			}
		}
	}
}
