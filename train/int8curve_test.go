package train

import (
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// curveModels holds the configs of the models trained below.
var curveModels = map[string]string{
	"gpt2":  `{"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 48, "vocab_size": 256, "n_positions": 64, "tie_word_embeddings": false}`,
	"llama": `{"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 48, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 64}`,
}

var curveNames = slices.Sorted(maps.Keys(curveModels))

var eachInt8 = [][]string{{"optimizer"}, {"gather"}, {"reduce"}, {"activations"}, {"matmul"}}

// int8Curve trains a model from a seed and returns all losses and the last held-out loss.
func int8Curve(t *testing.T, model string, seed int64, steps int, int8 ...string) (losses []float64, heldOut float64) {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(curveModels[model]), 0o644))
	text, err := os.ReadFile("../testdata/text.bin")
	require.NoError(t, err)
	cut := len(text) / 20 * 18
	for name, part := range map[string][]byte{"train.bin": text[:cut], "eval.bin": text[cut:]} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), part, 0o644))
	}
	c := request{Config: config.Default()}
	c.Model, c.Init, c.Data, c.EvalData, c.EvalSteps, c.EvalEvery = dir, "random", filepath.Join(dir, "train.bin"), filepath.Join(dir, "eval.bin"), 8, steps
	c.Order, c.Seed, c.Ranks, c.Zero, c.Batch, c.Seq, c.Steps = "shuffled", seed, 2, 3, 4, 32, steps
	c.Precision, c.LR, c.LRSchedule, c.Warmup, c.Clip, c.Int8 = "bf16", 2e-3, "cosine", steps/10, 1, int8
	tr, err := c.start(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	require.NoError(t, tr.Run(t.Context(), func(r StepResult) error {
		losses = append(losses, float64(r.Loss))
		if r.Eval != nil {
			heldOut = float64(r.Eval.Loss)
		}
		return nil
	}))
	return losses, heldOut
}

// TestInt8FollowsBF16 trains 24 steps in int8 and in bf16 from the same weights and data. Each loss
// must be within 0.2 % of bf16's, and the losses must differ. It enables all kinds of int8 together
// and, with SPILLWAY_LONG, each alone and for both models.
func TestInt8FollowsBF16(t *testing.T) {
	t.Parallel()
	for _, model := range long.Or(curveNames[1:], curveNames) {
		want, _ := int8Curve(t, model, 1, 24)
		for _, kinds := range append([][]string{config.Int8Switches}, long.Or(nil, eachInt8)...) {
			got, _ := int8Curve(t, model, 1, 24, kinds...)
			require.NotEqual(t, want, got, "%s, %v", model, kinds)
			worst := 0.0
			for i := range want {
				worst = max(worst, math.Abs(got[i]/want[i]-1))
			}
			require.Less(t, worst, 0.002, "%s, %v", model, kinds)
			t.Logf("%s, %v: %.4f %%", model, kinds, 100*worst)
		}
	}
}

// TestInt8Curves trains 300 steps of two models with three seeds. The mean held-out loss must be at
// most 0.5 % above bf16's, with all kinds of int8 together and with each alone.
func TestInt8Curves(t *testing.T) {
	long.Only(t)
	mean := func(t *testing.T, model string, kinds ...string) (loss float64) {
		for seed := range int64(3) {
			_, heldOut := int8Curve(t, model, seed+1, 300, kinds...)
			loss += heldOut / 3
		}
		return loss
	}
	for _, model := range curveNames {
		t.Run(model, func(t *testing.T) {
			want := mean(t, model)
			for _, kinds := range append([][]string{config.Int8Switches}, eachInt8...) {
				t.Run(strings.Join(kinds, ","), func(t *testing.T) {
					got := mean(t, model, kinds...)
					t.Logf("mean held-out loss %.4f, bf16's %.4f (%+.2f %%)", got, want, 100*(got/want-1))
					require.LessOrEqual(t, got, 1.005*want)
				})
			}
		})
	}
}
