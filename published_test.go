package spillway

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// The worked example of GPT-2 1.5B in fp32 at 32 rows of 1,024 tokens counts
// 6 + 6 + 18 GB of parameters, gradients and Adam with a copy of the parameters,
// and about 56 GiB of activations. What our program needs of it, and why less:
//
//   - Parameters and gradients are the same: 4 bytes each.
//   - Adam is 8 bytes and not 12: the parameters are fp32, so they are their own
//     master copy.
//   - The estimate counts 12 values a token, layer and unit of width, which is what
//     remains when cheap outputs are computed again: kept whole, Megatron's
//     equation 1 has 34/2 of them and the attention's scores. Ours keep 16 (two
//     norms, 3 of q, k and v, attention and its sum, 4 and 4 of the MLP, its sum and
//     statistics; no scores, and logits of a chunk of rows only), and fewer than the
//     estimate's 12 with --recompute selective.
func TestGPT2XLWorkedExample(t *testing.T) {
	c := Default()
	c.Model, c.Batch, c.Seq, c.Zero = "gpt2-xl", 32, 1024, 0
	f, err := Predict(c, cost.CPU(2, 1))
	require.NoError(t, err)
	n := float64(f.Parameters())
	require.InEpsilon(t, 1.5576e9, n, 1e-3)
	use := f.Plan.Layout.Spaces[graph.Device]
	require.InEpsilon(t, 4*n, use.ClassPeak[graph.Parameters], 1e-9)
	require.InEpsilon(t, 4*n, use.ClassPeak[graph.Gradients], 1e-9)
	require.InEpsilon(t, 8*n, use.ClassPeak[graph.Optimizer], 1e-9)
	// In GB, at the example's 1.5 billion.
	for class, want := range map[graph.Class]float64{graph.Parameters: 6, graph.Gradients: 6, graph.Optimizer: 12} {
		require.InDelta(t, want, float64(use.ClassPeak[class])/n*1.5, 0.01, class.String())
	}
	// Values kept a token, layer and unit of width.
	values := func(policy string) float64 {
		one := c
		one.Recompute = policy
		g, err := Predict(one, cost.CPU(2, 1))
		require.NoError(t, err)
		return float64(g.Plan.Layout.Spaces[graph.Device].ClassPeak[graph.Activations]) / 4 / (48 * 1600 * 32 * 1024)
	}
	megatron := cost.MegatronActivationBytes(48, 1024, 32, 1600, 25, false) / 2 / (48 * 1600 * 32 * 1024)
	none, selective, full := values("none"), values("selective"), values("full")
	t.Logf("values a token, layer and unit of width: Megatron's equation %.1f, ours %.1f, selective %.1f, full %.1f", megatron, none, selective, full)
	require.Less(t, none, 17.0) // Megatron's 34 bytes, without the scores
	require.Less(t, selective, 12.0)
	require.Less(t, full, 2.5)
}
