package planner

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
)

// The worked example of GPT-2 1.5B in fp32 at 32 rows of 1,024 tokens estimates 6 + 6 + 18 GB for
// parameters, gradients and Adam with a copy of the parameters, and about 56 GiB for activations.
// Our program needs less, for these reasons:
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
	c := Request{Config: config.Default()}
	c.Model, c.Batch, c.Seq, c.Zero = "gpt2-xl", 32, 1024, 0
	f, err := c.Predict(t.Context(), cost.CPU(2, 1))
	require.NoError(t, err)
	n := float64(f.Parameters())
	require.InEpsilon(t, 1.5576e9, n, 1e-3)
	use := f.Plan.Layout.Spaces[graph.Device]
	require.InEpsilon(t, 4*n, use.ClassPeak[graph.Parameters], 1e-9)
	require.InEpsilon(t, 4*n, use.ClassPeak[graph.Gradients], 1e-9)
	require.InEpsilon(t, 8*n, use.ClassPeak[graph.Optimizer], 1e-9)
	// In GB, for the example's 1.5 billion parameters.
	for class, want := range map[graph.Class]float64{graph.Parameters: 6, graph.Gradients: 6, graph.Optimizer: 12} {
		require.InDelta(t, want, float64(use.ClassPeak[class])/n*1.5, 0.01, class.String())
	}
	// docs/worked-example.md must show the planner's figures, in the order of its table.
	page, err := os.ReadFile("../docs/worked-example.md")
	require.NoError(t, err)
	cells := map[graph.Class][]string{}
	// values returns the activations kept, in values per token, layer and unit of width.
	values := func(policy string) float64 {
		one := c
		one.Recompute = policy
		g, err := one.Predict(t.Context(), cost.CPU(2, 1))
		require.NoError(t, err)
		peaks := g.Plan.Layout.Spaces[graph.Device].ClassPeak
		for _, class := range []graph.Class{graph.Parameters, graph.Gradients, graph.Optimizer, graph.Activations} {
			cells[class] = append(cells[class], plan.Bytes(peaks[class]))
		}
		return float64(peaks[graph.Activations]) / 4 / (48 * 1600 * 32 * 1024)
	}
	megatron := cost.MegatronActivationBytes(48, 1024, 32, 1600, 25, false) / 2 / (48 * 1600 * 32 * 1024)
	none, selective, full := values("none"), values("selective"), values("full")
	t.Logf("values a token, layer and unit of width: Megatron's equation %.1f, ours %.1f, selective %.1f, full %.1f", megatron, none, selective, full)
	for class, example := range map[graph.Class]string{graph.Parameters: "6 GB", graph.Gradients: "6 GB", graph.Optimizer: "18 GB", graph.Activations: "56 GB"} {
		require.Contains(t, string(page), fmt.Sprintf("| %s | %s | %s |\n", class, example, strings.Join(cells[class], " | ")))
	}
	for _, v := range []string{fmt.Sprintf("there are %.0f", megatron), fmt.Sprintf("keeps %.1f", none), fmt.Sprintf("keeps %.1f", selective)} {
		require.Contains(t, string(page), v)
	}
	require.Less(t, none, 17.0) // Megatron's 34 bytes are 17 values of 16 bits, without the scores
	require.Less(t, selective, 12.0)
	require.Less(t, full, 2.5)
}
