package train

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// deep is a run of a random model of four layers of a family.
func deep(t testing.TB, family string, tied bool) request {
	dir := t.TempDir()
	shape := map[string]any{"model_type": "gpt2", "n_layer": 4, "n_head": 2, "n_embd": 16, "vocab_size": 90, "n_positions": 24, "tie_word_embeddings": tied}
	if family != "gpt2" {
		shape = map[string]any{"model_type": family, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16, "intermediate_size": 40,
			"vocab_size": 90, "max_position_embeddings": 24, "tie_word_embeddings": tied}
	}
	text, err := json.Marshal(shape)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), text, 0o644))
	tokens := make([]byte, 4000)
	for i := 0; i < len(tokens); i += 2 {
		tokens[i] = byte(i * i / 7 % 90)
	}
	c := tiny("gpt2")
	c.Model, c.Init, c.Data = dir, "random", filepath.Join(dir, "tokens.bin")
	require.NoError(t, os.WriteFile(c.Data, tokens, 0o644))
	c.Batch, c.Seq, c.Steps, c.Clip = 2, 12, 3, 0.5
	return c
}

// Stages compute what one rank does: an untied model in the same bits, a tied one in bits of its
// own, which no number of stages and no schedule changes.
func TestPipelinesGiveTheSameBits(t *testing.T) {
	for _, family := range []string{"gpt2", "llama"} {
		for _, tied := range []bool{false, true} {
			for _, reproducible := range []bool{true, false} {
				c := deep(t, family, tied)
				c.Zero, c.Accum, c.Reproducible = 0, 3, reproducible
				whole := runOf(t, c)
				var want outcome
				for i, at := range []struct {
					pipeline int
					schedule string
					stages   string
				}{{2, "gpipe", ""}, {4, "gpipe", ""}, {2, "1f1b", "0-0,1-3"}, {4, "1f1b", ""}} {
					v := c
					v.Pipeline, v.Ranks, v.PipelineSchedule, v.Stages = at.pipeline, at.pipeline, at.schedule, at.stages
					what := fmt.Sprintf("%s, tied %v, reproducible %v, %+v", family, tied, reproducible, at)
					got := runOf(t, v)
					if i == 0 {
						want = got
					}
					require.Equal(t, want.losses, got.losses, what)
					require.Equal(t, want.sha, got.sha, what)
				}
				if !tied {
					require.Equal(t, whole.losses, want.losses, family)
					require.Equal(t, whole.sha, want.sha, family)
				}
				for i := range whole.losses {
					require.InEpsilon(t, whole.losses[i], want.losses[i], 1e-5, family)
				}
			}
		}
	}
}
