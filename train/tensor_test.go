//go:build linux

package train

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/plan"
)

// tensorSlices is the number of slices of the runs below.
const tensorSlices = 4

// cutModel replaces the model by a random one that tensorSlices divides. The vocabulary may be any
// number: the last slice then has fewer tokens.
func cutModel(t testing.TB, r *rand.Rand, c *request) {
	heads := tensorSlices * (1 + r.IntN(2))
	width := heads * 2 * (1 + r.IntN(4))
	kv := heads
	if r.IntN(2) == 0 {
		kv = tensorSlices
	}
	vocab, positions := tensorSlices*4+r.IntN(200), 2+r.IntN(40)
	shape := map[string]any{"model_type": "gpt2", "n_layer": 1 + r.IntN(3), "n_head": heads, "n_embd": width, "vocab_size": vocab, "n_positions": positions,
		"n_inner": tensorSlices * (1 + r.IntN(2*width)), "tie_word_embeddings": r.IntN(2) == 0}
	if c.Dropout == 0 && r.IntN(2) == 0 {
		shape = map[string]any{"model_type": []string{"llama", "qwen2", "qwen3"}[r.IntN(3)], "num_hidden_layers": 1 + r.IntN(3), "num_attention_heads": heads, "num_key_value_heads": kv,
			"hidden_size": width, "head_dim": 2 * (1 + r.IntN(9)), "intermediate_size": tensorSlices * (1 + r.IntN(2*width)), "vocab_size": vocab,
			"max_position_embeddings": positions, "tie_word_embeddings": r.IntN(2) == 0}
	}
	text, err := json.Marshal(shape)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(c.Model, "config.json"), text, 0o644))
	tokens := make([]byte, 2*(positions+1+r.IntN(2000)))
	for i := 0; i < len(tokens); i += 2 {
		tokens[i] = byte(r.IntN(min(vocab, 256)))
	}
	require.NoError(t, os.WriteFile(c.Data, tokens, 0o644))
	c.Seq = 1 + r.IntN(positions)
}

// tensorCase returns a random run for the tensor parallelism tests.
func tensorCase(t testing.TB, seed uint64, dir string) request {
	r := rand.New(rand.NewPCG(seed, 3))
	c := randomModel(t, r, dir)
	cutModel(t, r, &c)
	c.Seed, c.Steps, c.poison = int64(r.Uint64()>>1), 2, true
	c.Batch, c.Accum, c.Ranks = 1+r.IntN(3), 1+r.IntN(3), 1+r.IntN(2)
	if c.Seq > tensorSlices && r.IntN(3) > 0 { // the slices divide the rows
		c.Seq -= c.Seq % tensorSlices
	}
	if r.IntN(3) == 0 { // with replicas
		c.ShardSize = c.Ranks
		c.Ranks *= 2
	}
	c.Order = []string{"sequential", "shuffled"}[r.IntN(2)]
	c.Optimizer = []string{"adamw", "adamw", "sgd", "adagrad"}[r.IntN(4)]
	if r.IntN(2) == 0 {
		c.Clip = 0.1 + r.Float64()
	}
	if c.Dropout == 0 && r.IntN(3) == 0 {
		c.LoRA = lora.Options{Rank: 1 + r.IntN(5), Alpha: 4, Targets: [][]string{nil, {"*attn*"}, {"*_proj.weight"}}[r.IntN(3)]}
		c.Base = []string{"", "", "bf16"}[r.IntN(3)]
	} else if r.IntN(3) == 0 {
		p, err := c.planned().Plan(t.Context())
		require.NoError(t, err)
		for range 1 + r.IntN(4) {
			c.Freeze = append(c.Freeze, p.Program.Params[r.IntN(len(p.Program.Params))].Name)
		}
	}
	return c
}

// TestTensorRanksGiveTheSameBits checks that tensor parallelism gives the bits of the same slices
// on one rank per group. It varies stage, placement, recomputation and a resume at another number
// of ranks. Losses must equal those without slices except for rounding. SPILLWAY_TEST_CASES sets
// the number of cases.
func TestTensorRanksGiveTheSameBits(t *testing.T) { overSeeds(t, tensorRanks) }

func tensorRanks(t *testing.T, seed uint64) {
	t.Logf("%s=%d", seedVariable, seed)
	c := tensorCase(t, seed, t.TempDir())
	r := rand.New(rand.NewPCG(seed, 4))
	describe := func(v request) string { return fmt.Sprintf("%s=%d: %+v", seedVariable, seed, v) }
	run := func(v request) outcome {
		before := runtime.GOMAXPROCS(1 + r.IntN(3))
		defer runtime.GOMAXPROCS(before)
		return runOf(t, v)
	}
	whole := run(c)
	for _, half := range []struct {
		reference    int
		reproducible bool
		stages       []int
	}{{0, false, []int{0, 1}}, {2, false, []int{2, 3}}, {2, true, []int{0, 1, 2, 3}}} {
		if half.reproducible { // reproducible sums over replicas are not supported
			c.ShardSize = 0
		}
		v := c
		v.Zero, v.Prefetch, v.Reproducible, v.TensorSlices = half.reference, 1, half.reproducible, tensorSlices
		want := run(v)
		for i := range want.losses {
			require.InEpsilon(t, whole.losses[i], want.losses[i], 1e-5, describe(v))
		}
		at := func(zero int) request {
			v := c
			v.Zero, v.Reproducible, v.TensorSlices = zero, half.reproducible, tensorSlices
			if half.reproducible {
				v.Ranks = oneOfDivisors(r, c.Ranks*c.Accum)
				v.Accum = c.Ranks * c.Accum / v.Ranks
			}
			v.Tensor = []int{1, 2, 4}[r.IntN(3)]
			v.Ranks *= v.Tensor
			return variant(t, r, v)
		}
		for _, zero := range half.stages {
			v := at(zero)
			got := run(v)
			require.Equal(t, want.losses, got.losses, describe(v))
			require.Equal(t, want.sha, got.sha, describe(v))
		}
		if half.reference == 0 {
			v = at(r.IntN(4))
			if v.AccumOrder = "layer"; v.DeviceMemory > 0 { // the cap was computed for micro order
				v.DeviceMemory, v.Recompute = 0, "full"
			}
			used := false
			got := runPlanned(t, v, func(p *plan.Plan) { used = len(p.UsedTwice) > 0 })
			if !used { // a parameter used twice is summed in another order
				require.Equal(t, want.sha, got.sha, describe(v))
			}
		}
		v = at(half.stages[r.IntN(len(half.stages))])
		v.Checkpoint, v.SaveEvery, v.Keep = scratch(t), 1, 0
		require.Equal(t, want.sha, run(v).sha, describe(v))
		require.NoError(t, os.RemoveAll(filepath.Join(v.Checkpoint, "step-00000002")))
		folder := v.Checkpoint
		v = at(half.stages[r.IntN(len(half.stages))])
		v.Checkpoint, v.Resume = folder, true
		got := run(v)
		require.Equal(t, want.losses[1:], got.losses, describe(v))
		require.Equal(t, want.sha, got.sha, describe(v))
	}
}

// TestTensorRanksIn16Bits checks 16-bit types, where each rank has one slice. Losses must equal
// those without slices except for the type's rounding.
func TestTensorRanksIn16Bits(t *testing.T) {
	first, cases := seedOf(t)
	for k := range cases {
		seed := first + uint64(k)
		t.Logf("%s=%d", seedVariable, seed)
		c := tensorCase(t, seed, t.TempDir())
		r := rand.New(rand.NewPCG(seed, 5))
		if c.Precision, c.Accum = "bf16", 1; seed%2 == 0 {
			c.Precision, c.Base, c.LossScale = "fp16", "", "128" // a dynamic scale may skip the first steps
		}
		whole := runOf(t, c)
		c.Tensor = []int{2, 4}[r.IntN(2)]
		c.Ranks *= c.Tensor
		want := runOf(t, c)
		for i := range want.losses {
			require.InEpsilon(t, whole.losses[i], want.losses[i], 1e-2, "%s=%d: %+v", seedVariable, seed, c)
		}
		for zero := range 4 {
			v := c
			v.Zero = zero
			v = variant(t, r, v)
			got := runOf(t, v)
			require.Equal(t, want.losses, got.losses, "%s=%d: %+v", seedVariable, seed, v)
			require.Equal(t, want.sha, got.sha, "%s=%d: %+v", seedVariable, seed, v)
		}
	}
}

// TestTensorRanksAddUpIn16Bits checks that micro-batches accumulate in f32, also gradients of
// unsliced parameters, which ranks sum in 16 bits. Layer order and pipelines must give the bits of
// micro order.
func TestTensorRanksAddUpIn16Bits(t *testing.T) {
	c := tiny("gpt2")
	c.Model, c.Init = t.TempDir(), "random"
	shape, err := json.Marshal(map[string]any{"model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
		"hidden_size": 32, "head_dim": 8, "intermediate_size": 48, "vocab_size": 512, "max_position_embeddings": 64, "tie_word_embeddings": false})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(c.Model, "config.json"), shape, 0o644))
	c.Steps, c.Accum, c.Ranks, c.Tensor, c.Zero = 3, 3, 2, 2, 0
	for _, c.Precision = range []string{"bf16", "fp16"} {
		c.LossScale = map[string]string{"fp16": "128"}[c.Precision]
		want := runOf(t, c)
		layers, stages := c, c
		layers.AccumOrder, layers.Recompute = "layer", "full"
		stages.Pipeline, stages.Ranks = 2, 4
		for _, v := range []request{layers, stages} {
			got := runOf(t, v)
			require.Equal(t, want.losses, got.losses, "%+v", v)
			require.Equal(t, want.sha, got.sha, "%+v", v)
		}
	}
}

// TestTensorRanksSkipTogether checks that an overflow makes all ranks skip the step, including
// those that share layers.
func TestTensorRanksSkipTogether(t *testing.T) {
	var want []StepResult
	for zero := range 4 {
		c := tiny("gpt2")
		c.Ranks, c.Tensor, c.Steps, c.Precision, c.Zero = 4, 2, 12, "fp16", zero
		tr := trainerAt(t, c, 1<<26)
		var got []StepResult
		require.NoError(t, tr.Run(t.Context(), func(r StepResult) error {
			got = append(got, StepResult{Step: r.Step, Loss: r.Loss, LossScale: r.LossScale, Skipped: r.Skipped})
			return nil
		}))
		if want == nil {
			want = got
		}
		require.Equal(t, want, got, "stage %d", zero)
	}
	require.True(t, want[0].Skipped)
	require.False(t, want[len(want)-1].Skipped)
}

// TestReceiptsOfSlices checks that a run in slices has the same receipt for every number of ranks
// that share layers. Its steps verify with another number. In 16 bits that number is always the
// number of slices.
func TestReceiptsOfSlices(t *testing.T) {
	t.Parallel()
	first, cases := seedOf(t)
	for k := range cases {
		seed := first + uint64(k)
		t.Logf("%s=%d", seedVariable, seed)
		c := tensorCase(t, seed, t.TempDir())
		r := rand.New(rand.NewPCG(seed, 6))
		c.poison, c.Zero, c.TensorSlices = false, r.IntN(4), tensorSlices
		if c.Reproducible = r.IntN(2) == 0; c.Reproducible {
			c.ShardSize = 0
		}
		tensor := []int{1, 2, 4}
		if r.IntN(3) == 0 {
			c.Precision, tensor = "bf16", tensor[2:]
		}
		c = kept(c, r)
		at := func(every int) request {
			v := c
			v.Tensor, v.SaveEvery = tensor[r.IntN(len(tensor))], every
			v.Ranks *= v.Tensor
			return v
		}
		want := withReceipt(t, at(0))
		for range tensor {
			v := at(0)
			require.Equal(t, string(want), string(withReceipt(t, v)), "%+v", v)
		}
		v := in(at(c.SaveEvery), scratch(t))
		runOf(t, v)
		again := at(0)
		again.ReceiptEvery = 0
		verified(t, v, variant(t, r, again))
	}
}
