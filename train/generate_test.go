package train

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/planner"
)

// generation returns a run that only generates, from one of testdata's models.
func generation(model string, seq int) request {
	c := request{Config: config.Default()}
	c.Model, c.Init = filepath.Join("../testdata", model), filepath.Join("../testdata", model)
	c.Inference, c.Generate, c.Batch, c.Seq, c.Tokenizer = true, true, 1, seq, "bytes"
	return c
}

// logitsAfter returns the logits after the given tokens in a slot.
func logitsAfter(t *testing.T, d *decoder, slot int, tokens []int32) []float32 {
	t.Helper()
	rows := make([][]int32, len(d.kept))
	rows[slot] = tokens
	require.NoError(t, d.next(context.Background(), rows))
	logits, err := d.read(slot)
	require.NoError(t, err)
	return slices.Clone(logits)
}

// TestKeptKeysGiveTheSameLogits checks that the key/value cache gives the same logits, to the bit,
// as a forward pass over all tokens. It covers stages, numbers of ranks, and texts longer than the
// context.
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
			d := newDecoder(tr)
			var all [][]float32
			for range 45 { // the last ones exceed the context of 40 tokens
				all = append(all, logitsAfter(t, d, len(d.kept)-1, tokens))
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
					requireLogits(t, want, logitsOf(func(c *request) { c.Ranks, c.Zero, c.Batch, c.poison = ranks, zero, ranks, true }))
				})
			}
		}
	}
}

func requireLogits(t *testing.T, want, got [][]float32) {
	t.Helper()
	require.Len(t, got, len(want))
	for i := range want {
		for k := range want[i] {
			require.Equal(t, math.Float32bits(want[i][k]), math.Float32bits(got[i][k]), "token %d, logit %d", i, k)
		}
	}
}

// windowed writes the config of a Gemma 2 with windows shorter than the context and shared keys.
func windowed(t *testing.T) string {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"model_type": "gemma2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
		"num_key_value_heads": 2, "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 7, "vocab_size": 256, "max_position_embeddings": 128, "initializer_range": 0.3}`), 0o644))
	return dir
}

// spread gives varied values to parameters that are constant in a random model: biases, norms and
// adapters.
func spread(t *testing.T, tr *Trainer) {
	t.Helper()
	for k, name := range tr.Parameters() {
		_, v, err := tr.Parameter(name)
		require.NoError(t, err)
		if slices.Max(v) != slices.Min(v) {
			continue
		}
		for i := range v {
			v[i] += float32((k*31+i*17)%13-6) / 40
		}
		require.NoError(t, tr.SetParameter(name, v))
	}
}

// TestBatchedDecodingIsThatOfOneRow checks that rows decoded together get the tokens and log
// probabilities of rows decoded one at a time. Both must equal a forward pass over all tokens of
// each row. The test covers several architectures, all precisions and adapters. Some rows end early,
// others have a prompt that is processed in several pieces. By default it runs half of the
// combinations.
func TestBatchedDecodingIsThatOfOneRow(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(3, 9))
	var prompts [][]int32
	for _, n := range []int{1, 5, 90, 2, 64, 17, 65, 30} {
		prompt := make([]int32, n)
		for i := range prompt {
			prompt[i] = int32(rng.IntN(256))
		}
		prompts = append(prompts, prompt)
	}
	for m, model := range []string{"gpt2", "llama-untied", "gemma2", "lora"} {
		for p, precision := range []string{"fp32", "bf16", "fp16"} {
			if !long.On() && (m+p)%2 == 1 {
				continue
			}
			t.Run(model+" "+precision, func(t *testing.T) {
				t.Parallel()
				decode := func(rows int, whole bool) []Continuation {
					c := generation("gpt2", 0)
					switch model {
					case "gemma2":
						c.Model, c.Init = windowed(t), "random"
					case "lora":
						c.LoRA = lora.Options{Rank: 3, Alpha: 6, Targets: []string{"*.attn.*", "*.mlp.*"}}
					default:
						c.Model, c.Init = filepath.Join("../testdata", model), filepath.Join("../testdata", model)
					}
					// Make end tokens frequent among the 256 bytes.
					c.Tokenizer = withEnds(t, t.TempDir(), "aeiou", map[string]any{"generation_config.json": map[string]any{"eos_token_id": []int{'a', 'e', 'i', 'o', 'u'}}})
					h, err := planner.ModelConfig(c.Model)
					require.NoError(t, err)
					c.Seq, c.Batch, c.Precision, c.wholeGeneration, c.poison = h.Positions, rows, precision, whole, rows > 1
					tr, err := c.start(context.Background())
					require.NoError(t, err)
					defer tr.Close()
					spread(t, tr)
					fitting := slices.DeleteFunc(slices.Clone(prompts), func(p []int32) bool { return len(p)+12 > h.Positions })
					all := make([]Continuation, len(fitting))
					made, err := tr.Decode(context.Background(), fitting, Decoding{Sampling: Sampling{Temperature: 1, TopK: 100, Seed: 4}, Tokens: 12, LogProbs: true}, nil,
						func(i int, c Continuation) error { all[i] = c; return nil })
					require.NoError(t, err)
					for _, c := range all {
						made -= len(c.Tokens)
						require.NotEmpty(t, c.End)
					}
					require.Zero(t, made)
					return all
				}
				want := decode(1, true)
				require.Equal(t, want, decode(1, false))
				require.Equal(t, want, decode(3, false))
			})
		}
	}
}

// TestDecodingStops checks that a continuation excludes the stop text that ends it. No piece
// reported earlier may contain a part of the stop text.
func TestDecodingStops(t *testing.T) {
	t.Parallel()
	c := generation("gpt2", 60)
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer tr.Close()
	decode := func(stop ...string) (Continuation, string) {
		var told strings.Builder
		var out Continuation
		_, err := tr.Decode(context.Background(), [][]int32{[]int32("the ")}, Decoding{Sampling: Sampling{Temperature: 1, Seed: 7}, Tokens: 40, Stop: stop},
			func(_ int, text string) error { told.WriteString(text); return nil }, func(_ int, c Continuation) error { out = c; return nil })
		require.NoError(t, err)
		require.Equal(t, out.Text, told.String())
		return out, told.String()
	}
	whole, text := decode()
	require.Equal(t, EndLength, whole.End)
	require.Len(t, whole.Tokens, 40)
	at := -1 // of two bytes that do not occur earlier
	for i := 10; at < 0; i++ {
		if text[i] < 0x7f && text[i+1] < 0x7f && strings.Index(text, text[i:i+2]) == i {
			at = i
		}
	}
	stopped, _ := decode("never there", text[at:at+2])
	require.Equal(t, EndStop, stopped.End)
	require.Equal(t, text[:at], stopped.Text)
	again, _ := decode()
	require.Equal(t, whole, again, "what is kept of another answer changes nothing")

	for _, token := range []int32{-1, int32(tr.cfg.Shape.Vocab)} {
		_, err := tr.Decode(context.Background(), [][]int32{{1}, {1, token}}, Decoding{Tokens: 1}, nil, nil)
		require.ErrorContains(t, err, fmt.Sprintf("generate: token %d of prompt 1 is not in the model's vocabulary", token))
	}
	after, _ := decode()
	require.Equal(t, whole, after, "nothing ran")

	for held, want := range map[string]int{"": 0, "x": 0, "a": 1, "xab": 2, "xabab": 2, "aba": 3} {
		require.Equal(t, want, mayBegin([]byte(held), []string{"abac", "abz"}), held)
	}
	require.Equal(t, 1, firstOf([]byte("xabz"), []string{"z", "ab"}))
	for _, bad := range []Decoding{{}, {Tokens: 1, Stop: []string{""}}, {Tokens: 1, Sampling: Sampling{TopK: -1}}} {
		_, err := tr.Decode(context.Background(), nil, bad, nil, nil)
		require.ErrorIs(t, err, config.ErrRefused)
	}
}

// TestGenerationBetweenSteps generates texts between training steps. Each text must begin with its
// prompt alone: results must equal those without the key/value cache.
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

// TestKeptKeysAreInThePlan checks that the plan contains the key/value cache: two rows of the
// key/value heads' width per layer, position and row, in the precision's type.
func TestKeptKeysAreInThePlan(t *testing.T) {
	t.Parallel()
	kept := func(seq, rows int, precision string) (bytes int64) {
		c := generation("llama-tied", seq)
		c.Batch, c.Precision = rows, precision
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
	require.Equal(t, int64(2*h.Layers*h.KVHeads*h.HeadDim*4*24), kept(24, 1, "fp32"))
	require.Equal(t, 2*kept(16, 1, "fp32"), kept(32, 1, "fp32"))
	require.Equal(t, 6*kept(16, 1, "bf16"), kept(16, 3, "fp32"))
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
	// e^3 is 64 % of the sum; e^3 + e^2 are 88 %; with e^1 they are 97 %.
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

// TestInferenceSaysItsPrecision checks that a note says that weights trained in 16 bits are
// evaluated in fp32. Weights trained in fp32 need no note.
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

// BenchmarkDecode measures tokens per second of GPT-2 with random weights, for prompts one at a
// time and 64 together. Run: go test ./train -run none -bench Decode -benchtime 1x.
func BenchmarkDecode(b *testing.B) {
	prompts := make([][]int32, 64)
	for i := range prompts {
		for k := range 8 {
			prompts[i] = append(prompts[i], int32(i*311+k*17))
		}
	}
	for _, rows := range []int{1, 64} {
		b.Run(fmt.Sprint(rows), func(b *testing.B) {
			c := request{Config: config.Default()}
			c.Model, c.Tokenizer, c.Inference, c.Generate, c.Batch, c.Seq = "gpt2", "gpt2", true, true, rows, 40
			tr, err := c.start(context.Background())
			require.NoError(b, err)
			defer tr.Close()
			how, of := Decoding{Tokens: 32}, prompts
			if rows == 1 {
				of = prompts[:4]
			}
			made := 0
			for b.Loop() {
				n, err := tr.Decode(context.Background(), of, how, nil, nil)
				require.NoError(b, err)
				made += n
			}
			b.ReportMetric(float64(made)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}
