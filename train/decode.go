package train

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/run"
)

// Decoding says how Decode continues prompts.
type Decoding struct {
	Sampling
	Tokens   int      // of a continuation, at most
	Stop     []string // texts that end a continuation and are not part of it
	LogProbs bool     // fills in Token.LogProb
}

// Validate returns an error that names the first invalid field.
func (d Decoding) Validate() error {
	if d.Tokens < 1 {
		return config.Refuse("Decoding.Tokens %d: at least 1 is needed", d.Tokens)
	}
	if slices.Contains(d.Stop, "") {
		return config.Refuse("Decoding.Stop: a text is empty; leave it out")
	}
	return d.Sampling.Validate()
}

// Token is one token that Decode generated.
type Token struct {
	ID   int32  `json:"id"`
	Text string `json:"text"`
	// LogProb is the natural logarithm of the token's probability in the softmax of the
	// model's logits, whatever the Sampling is.
	LogProb float64 `json:"logprob,omitempty"`
}

// End says why a continuation ends.
type End string

// Ends.
const (
	EndToken  End = "end"    // an end token, which is not among the continuation's tokens
	EndStop   End = "stop"   // one of Decoding.Stop
	EndLength End = "length" // Decoding.Tokens
)

// Continuation is the text and tokens that Decode generated for a prompt.
type Continuation struct {
	Text   string
	Tokens []Token
	End    End
}

var errNoGeneration = errors.New("generate: the run was not planned with Config.Generate")

// Decode continues prompts of tokens, as many at once as the run has rows: Config.Batch with
// Config.Inference, otherwise one. A continuation does not depend on the other prompts: its
// bits are as if it ran alone, and its random draws depend on Seed and its index. text is
// called with each piece of a continuation as it is generated, in whole characters, and done
// with the complete continuation; both may be nil. Decode returns the number of generated
// tokens. A token's context is the last Config.Seq tokens before it. The run must have been
// configured with Generate.
func (t *Trainer) Decode(ctx context.Context, prompts [][]int32, how Decoding, text func(prompt int, text string) error, done func(prompt int, c Continuation) error) (made int, err error) {
	if t.fatal != nil {
		return 0, t.fatal
	}
	if !t.cfg.Generate {
		return 0, errNoGeneration
	}
	if err := how.Validate(); err != nil {
		return 0, err
	}
	if i := slices.IndexFunc(prompts, func(p []int32) bool { return len(p) == 0 }); i >= 0 {
		return 0, errors.New("generate: the prompt is empty")
	}
	for i, p := range prompts {
		for _, token := range p {
			if token < 0 || int(token) >= t.cfg.Shape.Vocab {
				return 0, fmt.Errorf("generate: token %d of prompt %d is not in the model's vocabulary; give tokens from 0 to %d",
					token, i, t.cfg.Shape.Vocab-1)
			}
		}
	}
	if err := t.flush(); err != nil {
		return 0, err
	}
	if t.decoder == nil || !t.cfg.Inference { // training steps may have changed the weights
		t.decoder = newDecoder(t)
	}
	d := decoding{decoder: t.decoder, how: how, ends: token.SpecialsOf(t.tokenizer).Ends, rows: make([]*answer, len(t.decoder.kept)), text: text, done: done}
	for next := 0; ; {
		busy := false
		for slot := range d.rows {
			if d.rows[slot] == nil && next < len(prompts) {
				d.rows[slot] = &answer{prompt: next, tokens: slices.Clone(prompts[next]), rng: rand.New(rand.NewPCG(how.Seed, uint64(next)))}
				next++
			}
			busy = busy || d.rows[slot] != nil
		}
		if !busy {
			return d.made, nil
		}
		if err := d.step(ctx); err != nil {
			return d.made, err
		}
	}
}

// decoding is the state of a running Decode.
type decoding struct {
	*decoder
	how  Decoding
	ends []int32
	rows []*answer // by slot; nil: the slot is free
	made int
	text func(prompt int, text string) error
	done func(prompt int, c Continuation) error
}

// answer is a continuation in progress.
type answer struct {
	prompt int
	tokens []int32 // of the prompt and the continuation
	rng    *rand.Rand
	held   []byte // text not given out yet: an incomplete character, or the possible beginning of a stop text
	out    Continuation
}

// step generates the next token of every row.
func (d *decoding) step(ctx context.Context) error {
	rows := make([][]int32, len(d.rows))
	for slot, a := range d.rows {
		if a != nil {
			rows[slot] = a.tokens
		}
	}
	if err := d.next(ctx, rows); err != nil {
		return err
	}
	for slot, a := range d.rows {
		if a == nil {
			continue
		}
		logits, err := d.read(slot)
		if err == nil {
			err = d.take(slot, logits)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// take draws a row's next token from its logits.
func (d *decoding) take(slot int, logits []float32) error {
	a := d.rows[slot]
	token := d.how.pick(logits, a.rng)
	if !isFinite(float64(logits[token])) {
		return fmt.Errorf("generate: the logits are not finite (got %g); the model's weights are not those of this architecture, or damaged", logits[token])
	}
	if slices.Contains(d.ends, token) {
		return d.end(slot, EndToken, len(a.held))
	}
	d.made++
	text := d.t.tokenizer.Decode([]int32{token})
	made := Token{ID: token, Text: text}
	if d.how.LogProbs {
		made.LogProb = logProb(logits, token)
	}
	a.tokens, a.held, a.out.Tokens = append(a.tokens, token), append(a.held, text...), append(a.out.Tokens, made)
	if at := firstOf(a.held, d.how.Stop); at >= 0 {
		return d.end(slot, EndStop, at)
	}
	if len(a.out.Tokens) == d.how.Tokens {
		return d.end(slot, EndLength, len(a.held))
	}
	whole := wholeRunes(a.held)
	return d.give(a, min(whole, len(a.held)-mayBegin(a.held, d.how.Stop)))
}

// give passes the first n bytes of the held text to the caller.
func (d *decoding) give(a *answer, n int) error {
	if n == 0 {
		return nil
	}
	text := strings.ToValidUTF8(string(a.held[:n]), "\uFFFD")
	a.held = a.held[:copy(a.held, a.held[n:])]
	a.out.Text += text
	if d.text == nil {
		return nil
	}
	return d.text(a.prompt, text)
}

// end ends a row; the first n bytes of its held text belong to the continuation.
func (d *decoding) end(slot int, why End, n int) error {
	a := d.rows[slot]
	d.rows[slot] = nil
	if err := d.give(a, n); err != nil {
		return err
	}
	a.out.End = why
	if d.done == nil {
		return nil
	}
	return d.done(a.prompt, a.out)
}

// firstOf returns where the first of the texts occurs in held; -1 if none does.
func firstOf(held []byte, texts []string) int {
	first := -1
	for _, s := range texts {
		if at := bytes.Index(held, []byte(s)); at >= 0 && (first < 0 || at < first) {
			first = at
		}
	}
	return first
}

// mayBegin returns how many of the last bytes may be the beginning of one of the texts.
func mayBegin(held []byte, texts []string) (most int) {
	for _, s := range texts {
		for n := min(len(s)-1, len(held)); n > most; n-- {
			if strings.HasPrefix(s, string(held[len(held)-n:])) {
				most = n
			}
		}
	}
	return most
}

func newDecoder(t *Trainer) *decoder {
	p := t.plan.Program
	shape := p.Buf(p.Logits).Shape
	d := &decoder{t: t, keeps: p.SectionOf(graph.SectionGenerate, graph.FormNext) != nil, logits: make([]float32, shape[len(shape)-1])}
	d.kept = make([][]int32, p.Buf(p.Logits).Elems()/int64(len(d.logits)))
	return d
}

// window returns the part of a row that the model attends to.
func (d *decoder) window(tokens []int32) []int32 { return tokens[max(0, len(tokens)-d.t.cfg.Seq):] }

// next computes the logits after each row; rows are indexed by slot. A slot whose row is nil
// loses its cache.
func (d *decoder) next(ctx context.Context, rows [][]int32) error {
	if !d.keeps {
		window := d.window(rows[0])
		if err := ctx.Err(); err != nil {
			return err
		}
		return d.run(graph.FormWhole, window, nil, map[int]int{graph.KeyRow: len(window) - 1, graph.KeyValid: len(window)})
	}
	tokens, positions := make([]int32, len(rows)), make([]int32, len(rows))
	for slot, row := range rows {
		window := d.window(row)
		if len(window) == 0 {
			d.kept[slot] = nil
			continue
		}
		last := len(window) - 1
		if err := d.prompt(ctx, slot, window[:last]); err != nil {
			return err
		}
		tokens[slot], positions[slot] = window[last], int32(last)
		d.kept[slot] = append(d.kept[slot][:last], window[last])
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return d.run(graph.FormNext, tokens, positions, map[int]int{graph.KeyValid: 1})
}

// prompt computes the tokens that are missing in a slot's cache.
func (d *decoder) prompt(ctx context.Context, slot int, tokens []int32) error {
	kept := d.kept[slot]
	from := 0
	for from < min(len(tokens), len(kept)) && kept[from] == tokens[from] {
		from++
	}
	if from == len(tokens) {
		return nil
	}
	d.kept[slot] = slices.Clone(kept[:from])
	rows := model.PromptRows(d.t.cfg.Seq)
	for from < len(tokens) {
		if err := ctx.Err(); err != nil {
			return err
		}
		first := min(from, d.t.cfg.Seq-rows) // recomputed positions get the same bits
		end := min(first+rows, len(tokens))
		positions := make([]int32, rows)
		for i := range positions {
			positions[i] = int32(first + i)
		}
		if err := d.run(graph.FormWhole, tokens[first:end], positions, map[int]int{graph.KeySlot: slot, graph.KeyValid: end - first}); err != nil {
			return err
		}
		d.kept[slot] = append(d.kept[slot], tokens[from:end]...)
		from = end
	}
	return nil
}

// run runs one section of the program: the generation section for a graph.Form, such as prompt
// or single token.
func (d *decoder) run(form graph.Form, tokens, positions []int32, slots map[int]int) error {
	t := d.t
	var key [graph.NumKey]int64
	key[graph.KeySeed] = t.cfg.Seed
	for i, v := range slots {
		key[i] = int64(v)
	}
	err := t.ranks.Each("the generation", func(r *run.Rank) error {
		return r.Exec.RunSection(graph.SectionName(graph.SectionGenerate, form), func(*graph.Phase, int) error {
			for port, v := range map[graph.Port][]int32{graph.PortTokens: tokens, graph.PortPositions: positions} {
				if t.ports[port] == graph.NoBuf {
					continue
				}
				dst, err := r.Exec.HostI32(t.ports[port])
				if err != nil {
					return err
				}
				clear(dst)
				copy(dst, v)
			}
			return fillHost(r, r.Exec.HostI64, t.ports[graph.PortKey], key[:])
		})
	})
	if err != nil {
		return t.fail(t.at.Step, fmt.Errorf("generate: %w", err))
	}
	return nil
}

// read returns the logits of a row; they are valid until the next read.
func (d *decoder) read(row int) ([]float32, error) {
	raw := run.Float32Bytes(d.logits)
	if err := d.t.ranks.First().Read(d.t.plan.Program.Logits, int64(row*len(raw)), raw); err != nil {
		return nil, d.t.fail(d.t.at.Step, fmt.Errorf("generate: %w", err))
	}
	return d.logits, nil
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

// GenerateTo is Generate that passes on the continuation, without the prompt, as it is
// generated, in whole characters. It returns the number of generated tokens. A token's context
// is the last Config.Seq tokens before it.
func (t *Trainer) GenerateTo(ctx context.Context, prompt string, n int, how Sampling, emit func(text string) error) (int, error) {
	if t.tokenizer == nil {
		return 0, errNoGeneration
	}
	return t.Decode(ctx, [][]int32{token.Prompt(t.tokenizer, prompt)}, Decoding{Sampling: how, Tokens: n},
		func(_ int, text string) error { return emit(text) }, nil)
}
