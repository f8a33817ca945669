package train

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/lora"
)

// packedRun returns a run on 60 conversations of 30 to 100 byte tokens, in rows of 150.
func packedRun(t *testing.T, model string) request {
	c := tiny("gpt2")
	dir := t.TempDir()
	text := map[string]string{
		"gpt2":   `{"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 257, "n_positions": 160, "tie_word_embeddings": false, "initializer_range": 0.1}`,
		"llama":  `{"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 257, "max_position_embeddings": 160, "tie_word_embeddings": false, "initializer_range": 0.1}`,
		"gemma2": `{"model_type": "gemma2", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 257, "max_position_embeddings": 160, "sliding_window": 20, "initializer_range": 0.1}`,
	}[model]
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o644))
	c.Model, c.Init, c.Tokenizer, c.Order, c.Seq, c.LR = dir, "random", "bytes", "sequential", 150, 1e-3
	var lines strings.Builder
	for i := range 60 {
		fmt.Fprintf(&lines, `{"prompt": "%s?", "response": "%s"}`+"\n", strings.Repeat("ab", 1+i*7%23), strings.Repeat("c", 1+i*5%29))
	}
	c.Data = filepath.Join(dir, "chat.jsonl")
	require.NoError(t, os.WriteFile(c.Data, []byte(lines.String()), 0o644))
	return c
}

// rowsOf returns the number of rows of a run's data.
func rowsOf(t *testing.T, c request) int {
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	return int(tr.train.Sampler().Windows())
}

// TestPackedLossesAreThoseOfDocuments checks that losses and gradient norms with packing equal
// those without, for steps with the same documents.
func TestPackedLossesAreThoseOfDocuments(t *testing.T) {
	t.Parallel()
	for _, m := range []string{"gpt2", "llama", "gemma2"} {
		var results [2][]StepResult
		for i, packing := range []string{"off", "on"} {
			c := packedRun(t, m)
			c.Packing, c.Steps = packing, long.Or(2, 3)
			c.Batch = rowsOf(t, c)
			require.Equal(t, i == 0, c.Batch == 60)
			if i == 1 {
				require.Less(t, c.Batch, 35)
			}
			tr, err := c.start(context.Background())
			require.NoError(t, err)
			require.NoError(t, tr.Run(context.Background(), func(r StepResult) error { results[i] = append(results[i], r); return nil }))
			require.NoError(t, tr.Close())
		}
		for s, want := range results[0] {
			got := results[1][s]
			require.Equal(t, want.Targets, got.Targets)
			require.InDelta(t, want.Loss, got.Loss, 1e-6, "%s step %d", m, s)
			require.InEpsilon(t, want.GradNorm, got.GradNorm, 1e-5, "%s step %d", m, s)
		}
	}
}

// TestPackingGivesTheSameBits checks that packing gives the bits of stage 0 at every stage,
// offloaded, in layer order and recomputed. It includes uneven shares with padding, adapters on an
// int8 base, and bf16. runOf checks that touched memory equals the plan. By default each model has
// half of the stages.
func TestPackingGivesTheSameBits(t *testing.T) {
	t.Parallel()
	for k, m := range []string{"gpt2", "llama"} {
		for i, change := range []func(c *request){
			func(*request) {},
			func(c *request) { c.Precision = "bf16" },
			func(c *request) {
				c.LoRA, c.Base = lora.Options{Rank: 2, Alpha: 4, Targets: blockTargets[map[string]string{"gpt2": "gpt2", "llama": "llama-tied"}[m]]}, "int8"
			},
		} {
			c := packedRun(t, m)
			c.Ranks, c.Steps, c.Clip, c.Batch, c.GlobalBatch, c.Reproducible, c.Zero = 3, 3, 0.5, 2, 9, true, 0
			c.EvalSplit, c.EvalSteps = 0.3, 1
			change(&c)
			want := runOf(t, c)
			for _, zero := range long.Or(stagePairs[(k+i)%2], []int{0, 1, 2, 3}) {
				v := c
				v.Zero, v.Disk = zero, scratch(t)
				v.Recompute = []string{"full", "selective", "none", "full"}[zero]
				v.Offload = []string{"", "optimizer=host,parameters=host", "optimizer=disk,gradients=host,activations=host", "optimizer=disk,parameters=disk"}[(zero+k)%4]
				switch zero {
				case 1, 3:
					v.AccumOrder = "layer"
				case 2:
					v.Ranks = 2
				}
				got := runOf(t, v)
				require.Equal(t, want.losses, got.losses, "%s, change %d, stage %d", m, i, zero)
				require.Equal(t, want.sha, got.sha, "%s, change %d, stage %d", m, i, zero)
			}
		}
	}
}

// TestPackedRowsTakeLinearMemory checks that memory grows at most in proportion to the row length:
// there is no mask over pairs of positions.
func TestPackedRowsTakeLinearMemory(t *testing.T) {
	t.Parallel()
	peak := func(seq int) (bytes int64) {
		c := packedRun(t, "llama")
		path := filepath.Join(c.Model, "config.json")
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path, []byte(strings.Replace(string(text), `: 160`, `: 4096`, 1)), 0o644))
		c.Seq, c.Batch = seq, 1
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		defer func() { require.NoError(t, tr.Close()) }()
		for _, use := range tr.plan.Layout.Spaces {
			bytes += use.Peak
		}
		return bytes
	}
	one, four := peak(1024), peak(4096)
	require.Greater(t, four, 2*one)
	require.Less(t, four, 4*one)
}

// TestPackedRowsOfFrozenLayersAreCached checks that the frozen layers' outputs for packed rows are
// cached, with the same bits.
func TestPackedRowsOfFrozenLayersAreCached(t *testing.T) {
	t.Parallel()
	for m, frozen := range map[string][]string{"gpt2": {"wte.*", "wpe.*", "h.0.*"}, "llama": {"*embed_tokens*", "*layers.0.*"}} {
		c := packedRun(t, m)
		c.Freeze = frozen
		c.Batch = 8
		c.Steps = 3 * rowsOf(t, c) / c.Batch
		want := runOf(t, c)
		c.FrozenCache = config.FrozenCache{Tier: graph.Host, Bytes: 4 << 20}
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		cached, losses := false, []float32(nil)
		require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
			cached, losses = cached || r.Cached, append(losses, r.Loss)
			return nil
		}))
		sha, err := tr.ParamsSHA256()
		require.NoError(t, err)
		require.NoError(t, tr.Close())
		require.True(t, cached)
		require.Equal(t, want.losses, losses)
		require.Equal(t, want.sha, sha)
	}
}

// TestHeldOutTextBesidePackedRows checks that held-out text is evaluated as one document per row,
// with the same loss whether or not training rows are packed.
func TestHeldOutTextBesidePackedRows(t *testing.T) {
	t.Parallel()
	var losses []float32
	for _, packing := range []string{"on", "off"} {
		c := packedRun(t, "gpt2")
		c.LR, c.Steps, c.EvalData, c.EvalSteps, c.Packing = 0, 2, "../testdata/text.txt", 2, packing
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
			if r.Eval != nil {
				losses = append(losses, r.Eval.Loss)
			}
			return nil
		}))
		require.NoError(t, tr.Close())
	}
	require.Len(t, losses, 2)
	require.Equal(t, losses[0], losses[1])
}

// TestPackingRefused checks that packing is refused for data other than conversations, for own
// models and for GPUs.
func TestPackingRefused(t *testing.T) {
	t.Parallel()
	c := packedRun(t, "gpt2")
	c.Packing = "yes"
	refused(t, c, "Config.Packing", "on, off")
	c = packedRun(t, "gpt2")
	c.Packing, c.Device = "on", "cuda"
	refused(t, c, "Config.Packing on with Config.Device cuda")
	c = tiny("gpt2")
	c.Packing = "on"
	refused(t, c, "Config.Packing with Config.Data", "holds no conversations")
	c = packedRun(t, "gpt2")
	c.Packing, c.Model, c.Own.Model = "on", "", &config.Model{Name: "own", Forward: func(*graph.Builder, int, int, bool) error { return nil }}
	refused(t, c, "Config.Packing on with Config.Own.Model")
}

// TestEpochsAndHeldOutDocuments checks the number of steps computed from Epochs, also for a run
// resumed with another batch. It also checks EvalSplit with documents of text.
func TestEpochsAndHeldOutDocuments(t *testing.T) {
	t.Parallel()
	c := packedRun(t, "gpt2")
	rows := rowsOf(t, c)
	c.Batch, c.Epochs, c.Checkpoint, c.LRSchedule = 4, 2, scratch(t), "cosine"
	notes := strings.Join(ended(t, c), "\n")
	steps := (2*rows + 3) / 4
	require.Contains(t, notes, fmt.Sprintf("2 epochs of %d rows, 4 a step: %d steps", rows, steps))
	require.Equal(t, steps, newestOf(t, c.Checkpoint).Manifest.Step)
	require.NotContains(t, notes, "Config.Warmup")
	c.Resume, c.Epochs, c.Batch, c.Steps, c.Warmup = true, 3, 8, 0, 1000
	notes = strings.Join(ended(t, c), "\n")
	steps += (3*rows - 4*steps + 7) / 8
	require.Equal(t, steps, newestOf(t, c.Checkpoint).Manifest.Step, notes)
	require.Equal(t, 1, strings.Count(notes, "8 a step: "), notes)
	require.Contains(t, notes, fmt.Sprintf("3 epochs of %d rows, 8 a step: %d steps", rows, steps))
	require.Contains(t, notes, "Config.Warmup 1000 is more than Config.Steps: the rate does not reach Config.LR")
	require.Contains(t, notes, "Config.Epochs: 2 → 3")
	require.NotContains(t, notes, ": Config.Steps")

	dir := t.TempDir()
	for i := range 20 {
		require.NoError(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("%02d.txt", i)), []byte(strings.Repeat("text ", 40)), 0o644))
	}
	d := tiny("gpt2")
	d.Data, d.EvalSplit, d.EvalSteps, d.Steps, d.Checkpoint = dir, 0.3, 1, 2, scratch(t)
	notes = strings.Join(ended(t, d), "\n")
	require.Regexp(t, `1\d of 20 documents for training: \d+ tokens`, notes)
	require.Regexp(t, `\d of 20 documents held out: \d+ tokens`, notes)
	d.Checkpoint, d.Data = "", filepath.Join(dir, "00.txt")
	refused(t, d, "of the documents in", "1, none is held out")
	d.Data = "../testdata/text.bin"
	refused(t, d, "is a token file, in which documents cannot be told apart")
}
