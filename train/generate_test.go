package train

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/planner"
)

// generation is a run that only generates from one of testdata's models.
func generation(model string, seq int) request {
	c := request{Config: config.Default()}
	c.Model, c.Init = filepath.Join("../testdata", model), filepath.Join("../testdata", model)
	c.Inference, c.Generate, c.Batch, c.Seq, c.Tokenizer = true, true, 1, seq, "bytes"
	return c
}

// Keys and values that are kept give the logits of a forward over all tokens, to
// the bit, at every stage and number of ranks, past the end of the context too.
func TestKeptKeysGiveTheSameLogits(t *testing.T) {
	t.Parallel()
	for _, model := range []string{"gpt2", "llama-tied", "llama-untied", "mistral", "qwen3", "olmo2", "smollm"} {
		logitsOf := func(change func(*request)) [][]float32 {
			c := generation(model, 40)
			change(&c)
			tr, err := c.start(context.Background())
			require.NoError(t, err)
			defer tr.Close()
			kept := tr.plan.Program.SectionOf(graph.SectionGenerate, graph.FormNext) != nil
			require.Equal(t, !c.wholeGeneration, kept)
			rng := rand.New(rand.NewPCG(5, 5))
			tokens := []int32{1, 2, 3}
			d := decoder{t: tr}
			var all [][]float32
			for range 45 { // the last ones are past the 40 of the context
				logits := make([]float32, tr.cfg.Shape.Vocab)
				require.NoError(t, d.next(tokens, logits))
				all = append(all, logits)
				tokens = append(tokens, int32(rng.IntN(tr.cfg.Shape.Vocab)))
			}
			return all
		}
		want := logitsOf(func(c *request) { c.wholeGeneration = true })
		for _, ranks := range []int{1, 3} {
			for _, zero := range []int{0, 3} {
				if ranks == 3 && zero == 0 {
					continue
				}
				t.Run(fmt.Sprintf("%s, %d ranks, stage %d", model, ranks, zero), func(t *testing.T) {
					got := logitsOf(func(c *request) { c.Ranks, c.Zero, c.poison = ranks, zero, true })
					for i := range want {
						for k := range want[i] {
							require.Equal(t, math.Float32bits(want[i][k]), math.Float32bits(got[i][k]), "token %d, logit %d", i, k)
						}
					}
				})
			}
		}
	}
}

// Training and evaluation between two texts leave what generation keeps alone or
// make it anew: each text begins with its prompt.
func TestGenerationBetweenSteps(t *testing.T) {
	t.Parallel()
	c := generation("gpt2", 32)
	c.Inference, c.Data, c.Steps, c.Ranks, c.Order = false, "../testdata/text.txt", 3, 2, "sequential"
	text := func(whole bool) (all []string) {
		one := c
		one.wholeGeneration = whole
		tr, err := one.start(context.Background())
		require.NoError(t, err)
		defer tr.Close()
		for range 3 {
			_, err := tr.Step(context.Background())
			require.NoError(t, err)
			s, err := tr.Generate(context.Background(), "the ", 20, Sampling{Temperature: 1, Seed: 3})
			require.NoError(t, err)
			all = append(all, s)
		}
		return all
	}
	require.Equal(t, text(true), text(false))
}

// What is kept is in the plan: two rows of the key/value heads' width a layer and
// position.
func TestKeptKeysAreInThePlan(t *testing.T) {
	t.Parallel()
	kept := func(seq int) (bytes int64) {
		c := generation("llama-tied", seq)
		p, err := c.planned().Plan(t.Context())
		require.NoError(t, err)
		for i := range p.Program.Buffers {
			if b := &p.Program.Buffers[i]; strings.HasPrefix(b.Name, "cache/") {
				require.Equal(t, graph.LifeRun, b.Life)
				require.Equal(t, graph.Device, b.Space)
				bytes += b.Bytes()
			}
		}
		return bytes
	}
	h, err := planner.ModelConfig("../testdata/llama-tied")
	require.NoError(t, err)
	require.Equal(t, int64(2*h.Layers*h.KVHeads*h.HeadDim*4*24), kept(24))
	require.Equal(t, 2*kept(16), kept(32))
}

func TestSamplingPicks(t *testing.T) {
	t.Parallel()
	logits := []float32{0, 3, 1, 2}
	draw := func(s Sampling) map[int32]int {
		seen := map[int32]int{}
		rng := rand.New(rand.NewPCG(1, 1))
		for range 2000 {
			seen[s.pick(logits, rng)]++
		}
		return seen
	}
	require.Equal(t, map[int32]int{1: 2000}, draw(Sampling{}))
	require.Equal(t, map[int32]int{1: 2000}, draw(Sampling{Temperature: 1, TopK: 1}))
	require.Len(t, draw(Sampling{Temperature: 1}), 4)
	require.Len(t, draw(Sampling{Temperature: 1, TopK: 2}), 2)
	// e^3 is 64 % of the sum, e^3 + e^2 are 88 %, with e^1 97 %.
	require.Len(t, draw(Sampling{Temperature: 1, TopP: 0.6}), 1)
	require.Len(t, draw(Sampling{Temperature: 1, TopP: 0.65}), 2)
	require.Len(t, draw(Sampling{Temperature: 1, TopP: 0.9}), 3)
	share := float64(draw(Sampling{Temperature: 1})[1]) / 2000
	require.InDelta(t, 0.644, share, 0.04)
	require.Equal(t, int32(1), Sampling{}.pick([]float32{1, 5, 5}, nil), "of equal logits the first")
}

func TestWholeRunes(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int{"": 0, "a": 1, "a\xe2": 1, "a\xe2\x82": 1, "a€": 4, "\xff": 1, "a\xf0\x9f\x98": 1, "\x80\x80\x80\x80": 4} {
		require.Equal(t, want, wholeRunes([]byte(text)), "%q", text)
	}
}

func TestGenerateRefuses(t *testing.T) {
	t.Parallel()
	c := generation("gpt2", 16)
	c.Generate = false
	c.EvalData = filepath.Join(t.TempDir(), "a.txt")
	require.NoError(t, os.WriteFile(c.EvalData, []byte("some text"), 0o644))
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer tr.Close()
	_, err = tr.Generate(context.Background(), "a", 1, Sampling{})
	require.ErrorContains(t, err, "Config.Generate")
	_, err = tr.Step(context.Background())
	require.ErrorContains(t, err, "inference")
	r, err := tr.Evaluate(context.Background())
	require.NoError(t, err)
	require.EqualValues(t, 8, r.Targets)
}

// Weights that were trained in 16 bits are computed with in fp32, which is said; those of
// fp32 need no word.
func TestInferenceSaysItsPrecision(t *testing.T) {
	t.Parallel()
	for _, precision := range []string{"fp32", "bf16"} {
		c := generation("gpt2", 16)
		c.Inference, c.Generate, c.Data, c.Steps, c.Order, c.Precision = false, false, "../testdata/text.txt", 1, "sequential", precision
		c.Checkpoint = filepath.Join(t.TempDir(), "run")
		tr, err := c.start(t.Context())
		require.NoError(t, err)
		_, err = tr.Step(t.Context())
		require.NoError(t, err)
		_, err = tr.Save(context.Background())
		require.NoError(t, err)
		require.NoError(t, tr.Close())

		one := generation("gpt2", 16)
		one.Init = filepath.Join(c.Checkpoint, "step-00000001")
		tr, err = one.start(t.Context())
		require.NoError(t, err)
		if precision == "fp32" {
			require.Empty(t, tr.Notes())
		} else {
			require.Equal(t, []string{"computed in fp32; its run trained in bf16, whose own losses differ from these by the rounding of 16 bits"}, tr.Notes())
		}
		require.NoError(t, tr.Close())
	}
}
