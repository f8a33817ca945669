package plan

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
)

// Divide minimizes the largest stage's work. A large head counts as work too, so its stage gets
// fewer layers.
func TestDivide(t *testing.T) {
	m := model.Config{Family: model.Llama, Layers: 8, Width: 16, FFN: 24, Heads: 8, KVHeads: 4, HeadDim: 2, Positions: 6, NormEps: 1e-5, RopeTheta: 1e4}
	for vocab, want := range map[int][]int{2: {0, 2, 4, 6}, 4000: {0, 2, 4, 7}} {
		m.Vocab = vocab
		p, err := graph.Differentiate(forwardOf(t, m, 2, 5, false).Train)
		require.NoError(t, err)
		flops := func(op *graph.Op) float64 {
			n, _ := graph.Cost(p, op)
			return float64(n)
		}
		first, err := Divide(p, 4, flops)
		require.NoError(t, err)
		require.Equal(t, want, first, "vocabulary %d", vocab)
		_, err = Divide(p, 9, flops)
		require.ErrorContains(t, err, "give at most 8")
	}
}
