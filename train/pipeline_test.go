package train

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/lora"
)

// deep returns a run of a random four-layer model of the given family.
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

// TestPipelinesGiveTheSameBits compares pipelines with one rank. An untied model must give the same
// bits. A tied one has other bits, the same for all stages and schedules.
func TestPipelinesGiveTheSameBits(t *testing.T) {
	t.Parallel()
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

// pipelineCase returns a random run for the pipeline tests.
func pipelineCase(t testing.TB, seed uint64) (c request, tied bool) {
	r := rand.New(rand.NewPCG(seed, 7))
	tied = r.IntN(2) == 0
	family := []string{"gpt2", "llama", "qwen3"}[r.IntN(3)]
	c = deep(t, family, tied)
	c.Seed, c.Steps, c.Batch, c.Accum, c.Ranks = int64(r.Uint64()>>1), 2, 1+r.IntN(2), 1+r.IntN(5), 1+r.IntN(2)
	if c.Clip = 0; r.IntN(2) == 0 {
		c.Clip = 0.1 + r.Float64()
	}
	if r.IntN(3) == 0 {
		c.ShardSize = c.Ranks
		c.Ranks *= 2
	}
	c.Order = []string{"sequential", "shuffled"}[r.IntN(2)]
	c.Optimizer = []string{"adamw", "adamw", "sgd", "adagrad", "lamb"}[r.IntN(5)]
	if c.Optimizer != "lamb" && r.IntN(2) == 0 {
		c.TensorSlices = 2
	}
	switch r.IntN(4) { // these may reduce the first stage's backward pass
	case 0:
		c.LoRA = lora.Options{Rank: 1 + r.IntN(4), Alpha: 4, Targets: [][]string{nil, {"*.1.*", "*.3.*"}}[r.IntN(2)]}
		c.Base = []string{"", "bf16"}[r.IntN(2)]
	case 1:
		p, err := c.planned().Plan(t.Context())
		require.NoError(t, err)
		for range 1 + r.IntN(8) {
			c.Freeze = append(c.Freeze, p.Program.Params[r.IntN(len(p.Program.Tensors()))].Name)
		}
	case 2:
		if c.Freeze = []string{"*.{0-1}.*"}; family == "gpt2" && r.IntN(2) == 0 {
			c.Freeze = []string{"wte.*", "wpe.*", "*.0.*"}
		}
	}
	return c, tied
}

// piped returns c over a random number of pipeline stages, at another ZeRO stage and placement.
func piped(t testing.TB, r *rand.Rand, c request) request {
	for {
		v := placedStages(r, c)
		if _, err := v.planned().Plan(t.Context()); err == nil {
			return variant(t, r, v)
		} else {
			require.ErrorContains(t, err, "trains nothing") // a stage may have nothing to train
		}
	}
}

// placedStages chooses the stages and ranks of piped at random.
func placedStages(r *rand.Rand, c request) request {
	c.Pipeline, c.PipelineSchedule = []int{2, 3, 4}[r.IntN(3)], []string{"1f1b", "gpipe"}[r.IntN(2)]
	if c.Reproducible {
		all := c.Ranks * c.Accum
		c.Ranks = oneOfDivisors(r, all)
		c.Accum = all / c.Ranks
	}
	c.Ranks *= c.Pipeline
	if c.TensorSlices > 0 && c.Ranks <= 4 {
		c.Tensor = 1 + r.IntN(2)
		c.Ranks *= c.Tensor
	}
	c.Zero = r.IntN(2)
	return c
}

// TestResumeTellsHowTheTiedTableIsSummed resumes a tied model with a pipeline after a run without,
// and the reverse. A note must say that the gradient of the tied table is now summed differently.
func TestResumeTellsHowTheTiedTableIsSummed(t *testing.T) {
	for _, tied := range []bool{true, false} {
		for _, stages := range [][2]int{{1, 2}, {2, 1}, {2, 4}} {
			at := func(pipeline, steps int) request {
				c := deep(t, "gpt2", tied)
				c.Zero, c.Steps, c.Pipeline, c.Ranks = 0, steps, pipeline, pipeline
				return c
			}
			first := at(stages[0], 2)
			first.Checkpoint = scratch(t)
			ended(t, first)
			on := at(stages[1], 3)
			on.Checkpoint, on.Resume, on.Data, on.Model = first.Checkpoint, true, first.Data, first.Model
			notes := strings.Join(ended(t, on), "\n")
			if tied && min(stages[0], stages[1]) == 1 {
				require.Contains(t, notes, "the gradient of the tied table is summed", "%v", stages)
			} else {
				require.NotContains(t, notes, "tied table", "%v, tied %v", stages, tied)
			}
		}
	}
}

// TestMixedPipelinesGiveTheSameBits checks that a pipeline gives the same bits at ZeRO stages 0 and
// 1, with any schedule, placement and recomputation. This holds also if it resumes with another
// number of pipeline stages. An untied model gives the bits of one stage. SPILLWAY_TEST_CASES sets
// the number of cases.
func TestMixedPipelinesGiveTheSameBits(t *testing.T) {
	t.Parallel()
	overSeeds(t, mixedPipelines)
}

func mixedPipelines(t *testing.T, seed uint64) {
	t.Logf("%s=%d", seedVariable, seed)
	c, tied := pipelineCase(t, seed)
	r := rand.New(rand.NewPCG(seed, 8))
	describe := func(v request) string { return fmt.Sprintf("%s=%d: %+v", seedVariable, seed, v) }
	for _, reproducible := range []bool{false, true} {
		if c.Reproducible, c.Zero = reproducible, 0; reproducible {
			c.ShardSize = 0
		}
		want := runOf(t, c)
		if tied {
			whole := want
			v := c
			v.Pipeline = 2
			v.Ranks *= 2
			want = runOf(t, v)
			for i := range whole.losses {
				require.InEpsilon(t, whole.losses[i], want.losses[i], 1e-5, describe(v))
			}
		}
		for range 2 {
			v := piped(t, r, c)
			got := runOf(t, v)
			require.Equal(t, want.losses, got.losses, describe(v))
			require.Equal(t, want.sha, got.sha, describe(v))
		}
		v := piped(t, r, c)
		v.Checkpoint, v.SaveEvery, v.Keep = scratch(t), 1, 0
		require.Equal(t, want.sha, runOf(t, v).sha, describe(v))
		require.NoError(t, os.RemoveAll(filepath.Join(v.Checkpoint, "step-00000002")))
		folder := v.Checkpoint
		v = piped(t, r, c)
		if !tied && r.IntN(2) == 0 {
			v = c
		}
		v.Checkpoint, v.Resume = folder, true
		got := runOf(t, v)
		require.Equal(t, want.losses[1:], got.losses, describe(v))
		require.Equal(t, want.sha, got.sha, describe(v))
	}
}

// TestPipelinesInOtherTypes checks that a tied table's gradient counts once in the norm. In each
// precision, all schedules and ZeRO stages must give one result. An overflow must be skipped on all
// stages.
func TestPipelinesInOtherTypes(t *testing.T) {
	t.Parallel()
	for _, tied := range []bool{false, true} {
		for _, precision := range []string{"fp32", "bf16", "fp16"} {
			c := deep(t, "gpt2", tied)
			c.Zero, c.Accum, c.Precision, c.Optimizer, c.LR = 0, 3, precision, "sgd", 0.01
			results := func(c request) (losses []float32, norms []float64, skipped int) {
				tr, err := c.start(t.Context())
				require.NoError(t, err)
				defer func() { require.NoError(t, tr.Close()) }()
				require.NoError(t, tr.Run(t.Context(), func(r StepResult) error {
					losses, norms, skipped = append(losses, r.Loss), append(norms, r.GradNorm), r.SkippedAll
					return nil
				}))
				return losses, norms, skipped
			}
			losses, norms, skipped := results(c)
			epsilon := map[string]float64{"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}[precision]
			var first []float32
			for _, at := range []struct {
				pipeline, ranks, zero int
				schedule              string
			}{{2, 2, 0, "gpipe"}, {4, 4, 0, "1f1b"}, {2, 2, 1, "1f1b"}} {
				v := c
				v.Pipeline, v.Ranks, v.Zero, v.PipelineSchedule = at.pipeline, at.ranks, at.zero, at.schedule
				got, gotNorms, gotSkipped := results(v)
				require.Equal(t, skipped, gotSkipped, "%s %+v", precision, at)
				for i := range norms {
					if skipped == 0 {
						require.InEpsilon(t, norms[i], gotNorms[i], epsilon, "%s %+v", precision, at)
					}
					require.InEpsilon(t, losses[i], got[i], epsilon, "%s %+v", precision, at)
				}
				if !tied {
					require.Equal(t, losses, got, "%s %+v", precision, at)
				}
				if first == nil {
					first = got
				}
				require.Equal(t, first, got, "%s %+v", precision, at)
			}
		}
	}
}

// TestPipelinesEvaluate checks that an evaluation gives the same loss with one, two and four
// pipeline stages.
func TestPipelinesEvaluate(t *testing.T) {
	for _, reproducible := range []bool{false, true} {
		var want []float32
		for _, pipeline := range []int{1, 2, 4} {
			c := deep(t, "llama", false)
			c.Zero, c.Accum, c.Reproducible, c.EvalData, c.EvalEvery, c.EvalSteps = 1, 2, reproducible, c.Data, 1, 3
			c.Pipeline, c.Ranks, c.poison = pipeline, pipeline, false
			tr, err := c.start(t.Context())
			require.NoError(t, err)
			var got []float32
			for range 3 {
				_, err := tr.Step(t.Context())
				require.NoError(t, err)
				r, err := tr.Evaluate(t.Context())
				require.NoError(t, err)
				got = append(got, r.Loss)
			}
			require.NoError(t, tr.Close())
			if want == nil {
				want = got
			}
			require.NotEmpty(t, got)
			require.Equal(t, want, got, "%d stages", pipeline)
		}
	}
}
