package plan

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

// Under full recomputation each further layer costs exactly its unit's input: batch × tokens ×
// width elements. The total is at most the unit inputs, one unit's activations and the head's: as
// much as a model of one layer without recomputation, plus the inputs of the other layers.
func TestFullRecomputationKeepsUnitInputs(t *testing.T) {
	for _, name := range []string{"gpt2", "llama-3.2-1b"} {
		m := preset(t, name)
		const batch, tokens = 4, 256
		activations := func(layers int, policy string) int64 {
			m.Layers = layers
			opt, err := recompute.Parse(policy)
			require.NoError(t, err)
			p, err := Build(forwardOf(t, m, batch, tokens, false), Config{Ranks: 1, Stage: zero.Replicate, Accum: 1, Optimizer: adamW, Target: graph.CPUTarget(), Recompute: opt})
			require.NoError(t, err)
			return p.Layout.Spaces[graph.Device].ClassPeak[graph.Activations]
		}
		input := int64(batch * tokens * m.Width * 4)
		one, none := activations(1, "full"), activations(1, "none")
		for _, layers := range []int{2, 3, 6, 12} {
			full := activations(layers, "full")
			t.Logf("%s, %d layers: %d unit inputs + %d bytes; without recomputation %d", name, layers, layers, full-int64(layers)*input, activations(layers, "none"))
			require.LessOrEqual(t, full, int64(layers-1)*input+none)
			if layers > 2 {
				require.Equal(t, int64(layers-2)*input, full-activations(2, "full"))
			}
		}
		require.LessOrEqual(t, one, none)
	}
}
