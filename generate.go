package spillway

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/run"
)

// Sampling says how the next token is drawn.
type Sampling struct {
	Temperature float64 // 0 takes the likeliest token
	TopK        int     // 0 considers all
	Seed        uint64
}

// Generate continues a prompt by n tokens and returns the text of prompt and
// continuation. Every token is a forward pass over the window of the last
// Config.Seq tokens, sharded as training is. The run must have been configured
// with Generate.
func (t *Trainer) Generate(ctx context.Context, prompt string, n int, how Sampling) (string, error) {
	p := t.plan.Program
	if p.SectionOf(graph.SectionGenerate, graph.FormWhole) == nil {
		return "", errors.New("generate: the run was not planned with Config.Generate")
	}
	if err := t.flush(); err != nil {
		return "", err
	}
	tokens := t.tokenizer.Encode(prompt)
	if len(tokens) == 0 {
		return "", errors.New("generate: the prompt is empty")
	}
	rng := rand.New(rand.NewPCG(how.Seed, 0))
	vocab := p.Buf(p.Logits).Elems()
	logits := make([]float32, vocab)
	for range n {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		window := tokens[max(0, len(tokens)-t.cfg.Seq):]
		err := t.ranks.Each("the generation", func(r *run.Rank) error {
			return r.Exec.RunSection(graph.SectionGenerate.String(), func(*graph.Phase, int) error {
				dst, err := r.Exec.HostI32(t.ports[graph.PortTokens])
				if err != nil {
					return err
				}
				clear(dst)
				copy(dst, window)
				var key [graph.NumKey]int64
				key[graph.KeySeed] = t.cfg.Seed
				key[graph.KeyRow] = int64(len(window) - 1)
				key[graph.KeyValid] = int64(len(window))
				return fillHost(r.Exec.HostI64, t.ports[graph.PortKey], key[:])
			})
		})
		if err != nil {
			return "", t.fail(t.step, fmt.Errorf("generate: %w", err))
		}
		if err := t.ranks.First().Read(p.Logits, 0, run.Float32Bytes(logits)); err != nil {
			return "", fmt.Errorf("generate: %w", err)
		}
		tokens = append(tokens, how.pick(logits, rng))
	}
	return t.tokenizer.Decode(tokens), nil
}

// pick draws a token from the softmax of logits.
func (how Sampling) pick(logits []float32, rng *rand.Rand) int32 {
	order := make([]int32, len(logits))
	for i := range order {
		order[i] = int32(i)
	}
	slices.SortStableFunc(order, func(a, b int32) int {
		switch x, y := logits[a], logits[b]; {
		case x > y:
			return -1
		case x < y:
			return 1
		}
		return 0
	})
	if how.Temperature <= 0 {
		return order[0]
	}
	if how.TopK > 0 && how.TopK < len(order) {
		order = order[:how.TopK]
	}
	top := float64(logits[order[0]])
	weights, sum := make([]float64, len(order)), 0.0
	for i, tok := range order {
		weights[i] = math.Exp((float64(logits[tok]) - top) / how.Temperature)
		sum += weights[i]
	}
	u := rng.Float64() * sum
	for i, w := range weights {
		if u -= w; u < 0 {
			return order[i]
		}
	}
	return order[len(order)-1]
}
