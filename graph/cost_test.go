package graph_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

func TestCost(t *testing.T) {
	const b, s, c, f, v = 2, 8, 16, 64, 50
	p := build(t, func(bl *graph.Builder) {
		x := bl.Embed("embed", bl.Tokens(b, s), param(bl, "table", v, c))
		x = bl.AttentionPacked("attn", bl.Linear("qkv", x, param(bl, "w", c, 3*c), param(bl, "bias", 3*c), graph.LinearAttr{}),
			graph.AttentionAttr{Batch: b, Seq: s, Heads: 2, KVHeads: 2, HeadDim: c / 2, Scale: 1, Causal: true})
		x = bl.Linear("up", x, param(bl, "w2", f, c), graph.Value{}, graph.LinearAttr{TransW: true})
		bl.HeadLoss("loss", x, param(bl, "head", v, f), bl.Targets(b, s))
	})
	p, err := graph.Differentiate(p)
	require.NoError(t, err)
	cost := map[string][2]int64{}
	for _, op := range p.Sections[0].Phases[0].Ops {
		fl, by := graph.Cost(p, &op)
		cost[op.Name] = [2]int64{fl, by}
	}
	const n = b * s
	require.Equal(t, [2]int64{0, n*4 + 2*n*c*4}, cost["embed"], "rows of the table, not all of it")
	require.Equal(t, [2]int64{2*n*c*3*c + n*3*c, 4 * (n*c + c*3*c + 3*c + n*3*c)}, cost["qkv"])
	require.Equal(t, [2]int64{2 * n * c * f, 4 * (n*c + c*f + n*f)}, cost["up"])
	require.Equal(t, int64(2*n*c*f), cost["up/dw"][0])
	require.Equal(t, int64(2*n*c*f), cost["up/dx"][0])
	pairs := int64(b * 2 * s * (s + 1) / 2)
	require.Equal(t, pairs*(2*2*c/2+8), cost["attn"][0], "two products and an exponential for each visible pair")
	require.Equal(t, pairs*(5*2*c/2+8), cost["attn/dx"][0])
	require.Equal(t, int64(n*v*(3*2*f+10)), cost["loss"][0], "logits and two gradients")

	for k, list := range samples(t) {
		for _, s := range list {
			fl, by := graph.Cost(s.p, &s.op)
			require.GreaterOrEqual(t, fl, int64(0), k)
			if k != graph.Join {
				require.Positive(t, by, k)
			}
		}
	}
}
