package infer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/planner"
	trainer "github.com/spillway-ml/spillway/train"
)

// generation holds the arguments of generate and the values derived from them.
type generation struct {
	c             spillway.Config
	how           trainer.Decoding
	prompt, file  string
	system        string
	chat, clipped bool // clipped: --tokens is the default, which the positions may lower
	rows          int  // --batch; 0: not given
	jsonPath      string
	questions     []data.Question
	note          string // about the window
}

// mostRows is the default maximum of prompts of a file that are continued at once.
const mostRows = 16

// GenerateCommand returns the command generate.
func GenerateCommand() *cobra.Command {
	var g generation
	cmd := &cobra.Command{
		Use:   "generate",
		Short: "Continue a text with a trained model, or answer prompts",
		Long: `Continue a text with the model of a Hugging Face folder, of a checkpoint, or of a
folder of checkpoints. The text is printed while it is generated, after the prompt.
With --chat the prompt is formatted as a message by the model's chat template, and
only the answer is printed.

--prompts continues each prompt of a file, --batch of them at once: a line of
text, or a record of JSON lines (field prompt, or conversations whose last
answer is left out). The bits of an answer do not depend on the batch. Standard
output has a line of JSON for each prompt.

Keys and values of earlier tokens are stored in memory that is planned before the
start. Generation ends at the model's end tokens, before a --stop, or after
--tokens. A token attends to a sliding window: the row length of the checkpoint's
run, or --seq N tokens. Without --seq generation beyond the model's
positions is refused.`,
		Example: "  spillway generate --model run1 --prompt 'Once upon a time' --tokens 100",
		Args:    cli.NoArguments,
	}
	fs := cmd.Flags()
	modelFlag(fs, &g.c)
	inferenceFlags(fs, &g.c)
	samplingFlags(fs, &g.how)
	templateFlag(fs, &g.c)
	fs.StringVar(&g.prompt, "prompt", "", "`TEXT` to continue, - for standard input")
	fs.StringVar(&g.file, "prompts", "", "`FILE` of prompts, each continued separately")
	fs.BoolVar(&g.chat, "chat", false, "treat a prompt as a message that the model answers")
	fs.StringVar(&g.system, "system", "", "with --chat, `TEXT` of a system message before each prompt")
	fs.IntVar(&g.how.Tokens, "tokens", 100, "maximum tokens to generate for a prompt")
	fs.IntVar(&g.c.Seq, "seq", 0, "tokens that a token attends to (default: all, up to the --seq of the checkpoint's run)")
	fs.IntVar(&g.rows, "batch", 0, fmt.Sprintf("prompts continued at once (default: all, up to %d)", mostRows))
	fs.BoolVar(&g.how.LogProbs, "logprobs", false, "write the log probability of each token to standard error, or to the JSON")
	fs.StringVar(&g.jsonPath, "json", "", "write prompts and answers as JSON to `FILE`, - for stdout")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		given := fs.Changed
		g.clipped = !given("tokens")
		switch {
		case given("prompt") && given("prompts"):
			return errors.New("--prompt with --prompts: both give the text to continue; leave one out")
		case !given("prompt") && !given("prompts"):
			return errors.New("--prompt is missing: the text to continue, or - for standard input")
		case g.how.Tokens < 1:
			return fmt.Errorf("--tokens %d: at least 1 is needed", g.how.Tokens)
		case given("seq") && g.c.Seq < 1:
			return fmt.Errorf("--seq %d: at least 1 token is needed; leave it out for all", g.c.Seq)
		case given("batch") && g.rows < 1:
			return fmt.Errorf("--batch %d: at least 1 row is needed", g.rows)
		case !g.chat && (given("system") || given("template")):
			return errors.New("--system and --template need --chat: without it the prompt is continued as it is")
		case given("system") && given("prompts"):
			return errors.New("--system with --prompts: give the file's conversations a message of role system")
		}
		if err := refuseSampling(fs, &g.how); err != nil {
			return err
		}
		if err := cli.RefuseOverwriting(fs); err != nil {
			return err
		}
		if g.prompt == "-" {
			text, err := io.ReadAll(io.LimitReader(cmd.InOrStdin(), maxPrompt+1))
			if err != nil {
				return fmt.Errorf("--prompt -: %w", err)
			}
			if len(text) > maxPrompt {
				return fmt.Errorf("--prompt -: standard input is over %d bytes", maxPrompt)
			}
			g.prompt = string(text)
		}
		if given("prompt") && g.prompt == "" {
			return errors.New("--prompt is empty: give the text to continue")
		}
		return g.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
	}
	return cmd
}

// maxPrompt is the largest prompt on standard input, in bytes.
const maxPrompt = 16 << 20

// prepare tokenizes the prompts and derives the number of rows and their length.
func (g *generation) prepare(c *spillway.Config, m *planner.Model) error {
	p, err := trainer.OpenPrompts(*c, m, g.chat)
	if err != nil {
		return err
	}
	if g.questions, err = g.read(p); err != nil {
		return err
	}
	longest := slices.MaxFunc(g.questions, func(a, b data.Question) int { return len(a.Prompt) - len(b.Prompt) })
	if c.Seq == 0 {
		if g.how.Tokens, err = room(p.Positions, longest, g.how.Tokens, g.clipped); err != nil {
			return err
		}
		c.Seq = len(longest.Prompt) + g.how.Tokens
		trained, err := m.TrainedSeq()
		if err != nil {
			return err
		}
		if trained > 0 && trained < c.Seq {
			g.note = fmt.Sprintf("the model was trained on rows of %d tokens: beyond them a token "+
				"looks back at that many, which are computed again for it; --seq %d looks back at all", trained, c.Seq)
			c.Seq = trained
		}
	}
	c.Tokenizer, c.Generate, c.Batch, c.Steps = p.Name, true, min(len(g.questions), mostRows), 1
	if g.rows > 0 {
		c.Batch = min(g.rows, len(g.questions))
	}
	return nil
}

// read returns the prompts.
func (g *generation) read(p *trainer.Prompts) ([]data.Question, error) {
	if g.file != "" {
		list, err := data.ReadQuestions(g.file, p.Tokenizer, p.Dialog)
		if err != nil {
			if errors.Is(err, data.ErrNoTemplate) {
				err = fmt.Errorf("%w; give --chat, which uses the model's, or --chat --template FILE", err)
			}
			return nil, fmt.Errorf("--prompts: %w", err)
		}
		return list, nil
	}
	q := data.Question{Text: g.prompt, Place: "--prompt"}
	if !g.chat {
		q.Prompt = token.Prompt(p.Tokenizer, g.prompt)
		return []data.Question{q}, nil
	}
	var messages []data.Message
	if g.system != "" {
		messages = append(messages, data.Message{Role: "system", Content: g.system})
	}
	var err error
	q.Prompt, err = p.Dialog.Prompt(append(messages, data.Message{Role: "user", Content: g.prompt}))
	return []data.Question{q}, err
}

// room returns n, the tokens to generate after the longest prompt, if the model's positions
// suffice. Otherwise it returns an error, or with clipped the tokens that fit.
func room(positions int, longest data.Question, n int, clipped bool) (int, error) {
	left := positions - len(longest.Prompt)
	switch {
	case left < 1:
		return 0, fmt.Errorf("%s: the prompt has %d tokens, and the model %d positions, which leave none to generate; shorten it", longest.Place, len(longest.Prompt), positions)
	case n <= left || clipped:
		return min(n, left), nil
	}
	return 0, fmt.Errorf("--tokens %d: %s has %d tokens, and the model's %d positions leave %d; give --tokens %d, or --seq %d for a window that moves along",
		n, longest.Place, len(longest.Prompt), positions, left, left, positions)
}

// Answer is a prompt and the model's continuation, as generate writes it.
type Answer struct {
	Prompt       string          `json:"prompt"`
	Text         string          `json:"text"`
	End          trainer.End     `json:"end"` // end: an end token; stop: --stop; length: --tokens
	PromptTokens int             `json:"prompt_tokens"`
	AnswerTokens int             `json:"answer_tokens"`
	Tokens       []trainer.Token `json:"tokens,omitempty"` // with --logprobs
}

// Generated is the document that `generate --json` writes.
type Generated struct {
	Model   string   `json:"model"` // the folder of the weights
	Answers []Answer `json:"answers"`
	Tokens  int      `json:"tokens"` // of all answers
	Seconds float64  `json:"seconds"`
}

// answer returns the answer to prompt i.
func (g *generation) answer(i int, c trainer.Continuation) Answer {
	q := g.questions[i]
	a := Answer{Prompt: q.Text, Text: c.Text, End: c.End, PromptTokens: len(q.Prompt), AnswerTokens: len(c.Tokens)}
	if g.how.LogProbs {
		a.Tokens = c.Tokens
	}
	return a
}

func (g *generation) run(ctx context.Context, stdout, stderr io.Writer) (err error) {
	g.c.Warn = func(text string) { fmt.Fprintln(stderr, "warning:", cli.Flagged(text)) }
	t, closeAll, err := newInference(ctx, &g.c, stderr, g.prepare)
	if errors.Is(err, context.Canceled) {
		return cli.Interrupted("interrupted before the first token")
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	for _, note := range append(cli.FlaggedAll(t.Notes()), g.note) {
		if note != "" {
			fmt.Fprintln(stderr, note)
		}
	}
	prompts := make([][]int32, len(g.questions))
	for i := range prompts {
		prompts[i] = g.questions[i].Prompt
	}
	doc := Generated{Model: g.c.Model, Answers: make([]Answer, len(prompts))}
	text, done := g.streams(&doc, stdout)
	if text != nil && !g.chat {
		if _, err := io.WriteString(stdout, printable(stdout)(g.prompt)); err != nil {
			return err
		}
	}
	began := time.Now()
	doc.Tokens, err = t.Decode(ctx, prompts, g.how, text, done)
	doc.Seconds = time.Since(began).Seconds()
	if text != nil {
		fmt.Fprintln(stdout)
	}
	if errors.Is(err, context.Canceled) {
		return cli.Interrupted(fmt.Sprintf("interrupted after %d tokens", doc.Tokens))
	}
	if err != nil {
		return cli.Fault(err)
	}
	if g.how.LogProbs && g.file == "" && g.jsonPath == "" {
		for _, token := range doc.Answers[0].Tokens {
			fmt.Fprintf(stderr, "%9.4f  %q\n", token.LogProb, token.Text)
		}
	}
	if cli.IsTerminal(stderr) {
		fmt.Fprintf(stderr, "%d tokens, %.1f a second\n", doc.Tokens, float64(doc.Tokens)/doc.Seconds)
	}
	return cli.WriteJSON(stdout, g.jsonPath, doc)
}

// streams returns the callbacks of Decode. text prints a single prompt's continuation as it is
// generated; done prints a line for each prompt of a file, in their order.
func (g *generation) streams(doc *Generated, stdout io.Writer) (text func(int, string) error, done func(int, trainer.Continuation) error) {
	clean := printable(stdout)
	ended, next := make([]bool, len(doc.Answers)), 0
	done = func(i int, c trainer.Continuation) error {
		doc.Answers[i], ended[i] = g.answer(i, c), true
		for ; g.file != "" && g.jsonPath != "-" && next < len(ended) && ended[next]; next++ {
			line, err := json.Marshal(doc.Answers[next])
			if err == nil {
				_, err = fmt.Fprintf(stdout, "%s\n", line)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	if g.file != "" || g.jsonPath == "-" {
		return nil, done
	}
	return func(_ int, s string) error {
		_, err := io.WriteString(stdout, clean(s))
		return err
	}, done
}
