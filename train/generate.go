package train

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/run"
)

// Sampling says how the next token is drawn.
type Sampling struct {
	Temperature float64 // divides the logits; 0 takes the likeliest token
	TopK        int     // only the k likeliest are considered; 0: all
	TopP        float64 // only the likeliest whose probabilities, summed in order, reach p (Holtzman et al. 2019); 0 or 1: all
	Seed        uint64
}

// Validate names what makes no distribution.
func (s Sampling) Validate() error {
	switch {
	case !(s.Temperature >= 0) || math.IsInf(s.Temperature, 1):
		return config.Refuse("Sampling.Temperature %g: a number of at least 0 is needed; 0 takes the likeliest token", s.Temperature)
	case s.TopK < 0:
		return config.Refuse("Sampling.TopK %d: at least 1 token is needed; leave it out to consider all", s.TopK)
	case !(s.TopP >= 0 && s.TopP <= 1):
		return config.Refuse("Sampling.TopP %g: a probability is needed, over 0 and at most 1", s.TopP)
	}
	return nil
}

// Generate continues a prompt by n tokens, or up to one of the tokenizer's end tokens,
// and returns the text of prompt and continuation: UTF-8, with U+FFFD for other
// bytes. The run must have been configured with Generate.
func (t *Trainer) Generate(ctx context.Context, prompt string, n int, how Sampling) (string, error) {
	var text strings.Builder
	text.WriteString(strings.ToValidUTF8(prompt, "\uFFFD"))
	_, err := t.GenerateTo(ctx, prompt, n, how, func(s string) error {
		text.WriteString(s)
		return nil
	})
	return text.String(), err
}

// GenerateTo is Generate that hands on the continuation, without the prompt, as it
// comes: whole characters. It returns the number of tokens that were generated.
// The context of a token is the last Config.Seq tokens before it.
func (t *Trainer) GenerateTo(ctx context.Context, prompt string, n int, how Sampling, emit func(text string) error) (int, error) {
	if !t.cfg.Generate {
		return 0, errors.New("generate: the run was not planned with Config.Generate")
	}
	if err := how.Validate(); err != nil {
		return 0, err
	}
	if err := t.flush(); err != nil {
		return 0, err
	}
	tokens := data.Prompt(t.tokenizer, prompt)
	if len(tokens) == 0 {
		return 0, errors.New("generate: the prompt is empty")
	}
	ends := data.SpecialsOf(t.tokenizer).Ends
	rng := rand.New(rand.NewPCG(how.Seed, 0))
	logits := make([]float32, t.plan.Program.Buf(t.plan.Program.Logits).Elems())
	d := decoder{t: t}
	var held []byte // of a character that is not whole yet
	for made := range n {
		if err := ctx.Err(); err != nil {
			return made, err
		}
		if err := d.next(tokens, logits); err != nil {
			return made, t.fail(t.at.Step, fmt.Errorf("generate: %w", err))
		}
		next := how.pick(logits, rng)
		if slices.Contains(ends, next) {
			n = made
			break
		}
		tokens = append(tokens, next)
		held = append(held, t.tokenizer.Decode([]int32{next})...)
		whole := wholeRunes(held)
		if whole == 0 {
			continue
		}
		if err := emit(strings.ToValidUTF8(string(held[:whole]), "\uFFFD")); err != nil {
			return made + 1, err
		}
		held = held[:copy(held, held[whole:])]
	}
	if len(held) > 0 {
		return n, emit("\uFFFD")
	}
	return n, nil
}

// wholeRunes is how many of the bytes are not the start of a character that more
// bytes may complete.
func wholeRunes(b []byte) int {
	for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			if !utf8.FullRune(b[len(b)-i:]) {
				return len(b) - i
			}
			break
		}
	}
	return len(b)
}

// decoder runs the program's generation over a growing row of tokens. Where the
// plan keeps keys and values, only tokens that it has not seen are computed, as
// long as the row fits into Config.Seq; then each token is a forward over the last
// Seq of them, whose positions move with every token.
type decoder struct {
	t    *Trainer
	seen int // tokens whose keys and values are kept
}

// next gives the logits of the token after the given ones.
func (d *decoder) next(tokens []int32, logits []float32) error {
	t, form := d.t, graph.FormWhole
	window := tokens[max(0, len(tokens)-t.cfg.Seq):]
	var key [graph.NumKey]int64
	key[graph.KeySeed] = t.cfg.Seed
	key[graph.KeyRow] = int64(len(window) - 1)
	key[graph.KeyValid] = int64(len(window))
	last := len(tokens) - 1
	if t.plan.Program.SectionOf(graph.SectionGenerate, graph.FormNext) != nil && d.seen > 0 && d.seen == last && len(tokens) <= t.cfg.Seq {
		form, window = graph.FormNext, tokens[last:]
		key[graph.KeyStart], key[graph.KeyValid] = int64(last), 1
	}
	err := t.ranks.Each("the generation", func(r *run.Rank) error {
		return r.Exec.RunSection(graph.SectionName(graph.SectionGenerate, form), func(*graph.Phase, int) error {
			dst, err := r.Exec.HostI32(t.ports[graph.PortTokens])
			if err != nil {
				return err
			}
			clear(dst)
			copy(dst, window)
			return fillHost(r.Exec.HostI64, t.ports[graph.PortKey], key[:])
		})
	})
	if err != nil {
		return err
	}
	d.seen = len(tokens)
	return t.ranks.First().Read(t.plan.Program.Logits, 0, run.Float32Bytes(logits))
}

// pick draws a token from the softmax of logits; of equal logits the smaller token
// comes first.
func (s Sampling) pick(logits []float32, rng *rand.Rand) int32 {
	if s.Temperature <= 0 {
		best := 0
		for i, v := range logits {
			if v > logits[best] {
				best = i
			}
		}
		return int32(best)
	}
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
	if s.TopK > 0 && s.TopK < len(order) {
		order = order[:s.TopK]
	}
	top := float64(logits[order[0]])
	weights, sum := make([]float64, len(order)), 0.0
	for i, tok := range order {
		weights[i] = math.Exp((float64(logits[tok]) - top) / s.Temperature)
		sum += weights[i]
	}
	if s.TopP > 0 && s.TopP < 1 {
		kept, reached := 0, 0.0
		for kept < len(weights) && reached < s.TopP*sum {
			reached += weights[kept]
			kept++
		}
		order, weights, sum = order[:kept], weights[:kept], reached
	}
	u := rng.Float64() * sum
	for i, w := range weights {
		if u -= w; u < 0 {
			return order[i]
		}
	}
	return order[len(order)-1]
}
