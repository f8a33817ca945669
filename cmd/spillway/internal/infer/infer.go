// Package infer is the commands generate and eval.
package infer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/host"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/planner"
	trainer "github.com/spillway-ml/spillway/train"
)

// inferenceFlags binds what generate and eval have in common with train.
func inferenceFlags(fs *pflag.FlagSet, c *spillway.Config) {
	*c = spillway.Default()
	c.Inference = true
	fs.StringVar(&c.Model, "model", "", "a Hugging Face folder, a checkpoint, or a folder of checkpoints (its newest): `DIR`")
	fs.StringVar(&c.Tokenizer, "tokenizer", "", "bytes, gpt2, or a tokenizer.json `FILE` (default: the model's own)")
	fs.IntVar(&c.Ranks, "ranks", 1, "world size")
	fs.IntVar(&c.Zero, "zero", c.Zero, "ZeRO stage: 0, 1, 2 or 3; at 3 each rank holds a part of the parameters")
	fs.IntVar(&c.Prefetch, "prefetch", c.Prefetch, "units gathered ahead of their use")
	fs.StringVar(&c.Device, "device", c.Device, "cpu, or cuda: this machine's NVIDIA GPUs, over which the ranks are spread")
	fs.IntVar(&c.Threads, "threads", 0, "computing threads, shared by the ranks (default: all cores)")
	fs.Var(cli.Size(&c.DeviceMemory), "device-memory", "cap on a rank's device memory")
	fs.Var(cli.Size(&c.HostMemory), "host-memory", "cap on a rank's host memory")
	fs.DurationVar(&c.Timeout, "timeout", c.Timeout, "longest wait of a collective")
}

// openModel opens what --model names, with its config and weights verified: files, or
// checkpoint.AsLoaded.
func openModel(ctx context.Context, c *spillway.Config, stderr io.Writer, weights string) (*planner.Model, error) {
	if c.Model == "" {
		return nil, errors.New("--model is missing: a Hugging Face folder, a checkpoint, or a folder of checkpoints")
	}
	if st, err := os.Stat(c.Model); err != nil || !st.IsDir() {
		return nil, fmt.Errorf("--model %s: no such folder; a Hugging Face folder, a checkpoint or a folder of checkpoints is needed (a preset has no weights)", c.Model)
	}
	m, err := planner.OpenModel(ctx, c.Model, weights)
	if err != nil {
		return nil, fmt.Errorf("--model %s: %w", c.Model, err)
	}
	for _, p := range m.Passed {
		fmt.Fprintln(stderr, "warning:", p)
	}
	if m.Chosen {
		fmt.Fprintf(stderr, "model: %s\n", cli.OnOneLine(m.Path))
	} else if !m.Readable() {
		return nil, fmt.Errorf("--model %s: there is neither a config.json nor a checkpoint", c.Model)
	}
	if m.Path == filepath.Base(m.Path) {
		m.Path = "." + string(filepath.Separator) + m.Path // never a preset's name
	}
	c.Model, c.Init = m.Path, m.Path
	return m, nil
}

// newInference makes what computes with the model of c.Model; prepare completes c once the
// model is found. A folder of checkpoints is searched again where the weights turn out
// damaged as they are loaded.
func newInference(ctx context.Context, c *spillway.Config, stderr io.Writer, prepare func(*spillway.Config, *planner.Model) error) (*spillway.Trainer, func() error, error) {
	given := *c
	t, closeAll, err := tryInference(ctx, c, stderr, checkpoint.AsLoaded, prepare)
	if errors.Is(err, checkpoint.ErrDamaged) {
		*c = given
		t, closeAll, err = tryInference(ctx, c, stderr, safetensors.FileName, prepare)
	}
	return t, closeAll, err
}

func tryInference(ctx context.Context, c *spillway.Config, stderr io.Writer, weights string, prepare func(*spillway.Config, *planner.Model) error) (t *spillway.Trainer, closeAll func() error, err error) {
	m, err := openModel(ctx, c, stderr, weights)
	if err != nil {
		return nil, nil, err
	}
	if err = prepare(c, m); err == nil {
		t, closeAll, err = host.NewTrainer(ctx, *c, func(ctx context.Context, c spillway.Config) (*spillway.Trainer, error) {
			return trainer.NewFrom(ctx, c, m)
		})
	}
	if cerr := m.Close(); err == nil && cerr != nil {
		err = errors.Join(cerr, closeAll())
	}
	return t, closeAll, err
}

// GenerateCommand is generate.
func GenerateCommand() *cobra.Command {
	var c spillway.Config
	var prompt string
	var n int
	how := spillway.Sampling{Temperature: 0.8, TopK: 50}
	cmd := &cobra.Command{
		Use:   "generate",
		Short: "Continue a text with a trained model",
		Long: `Continue a text with the model of a Hugging Face folder, of a checkpoint, or of a
folder of checkpoints. The text appears as it is made, after the prompt. Keys and
values of earlier tokens are kept in memory that is planned before the start. It
computes in fp32, whatever the weights were trained in.`,
		Example: "  spillway generate --model run1 --prompt 'Once upon a time' --tokens 100",
		Args:    cli.NoArguments,
	}
	fs := cmd.Flags()
	inferenceFlags(fs, &c)
	fs.StringVar(&prompt, "prompt", "", "the `TEXT` to continue, - for standard input")
	fs.IntVar(&n, "tokens", 100, "tokens to generate, at most")
	fs.Float64Var(&how.Temperature, "temperature", how.Temperature, "divides the logits; 0 takes the likeliest token")
	fs.IntVar(&how.TopK, "top-k", how.TopK, "consider only the likeliest; 0: all")
	fs.Float64Var(&how.TopP, "top-p", 1, "consider only the likeliest whose probabilities reach this sum; 1: all")
	fs.Uint64Var(&how.Seed, "seed", 1, "seed of the draws")
	fs.IntVar(&c.Seq, "seq", 0, "tokens that are looked back at (default: all, up to the model's positions)")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch {
		case !fs.Changed("prompt"):
			return errors.New("--prompt is missing: the text to continue, or - for standard input")
		case n < 1:
			return fmt.Errorf("--tokens %d: at least 1 is needed", n)
		case fs.Changed("seq") && c.Seq < 1:
			return fmt.Errorf("--seq %d: at least 1 token is needed; leave it out for all", c.Seq)
		}
		if err := how.Validate(); err != nil {
			return err
		}
		if prompt == "-" {
			text, err := io.ReadAll(io.LimitReader(cmd.InOrStdin(), maxPrompt+1))
			if err != nil {
				return fmt.Errorf("--prompt -: %w", err)
			}
			if len(text) > maxPrompt {
				return fmt.Errorf("--prompt -: standard input is over %d bytes", maxPrompt)
			}
			prompt = string(text)
		}
		if prompt == "" {
			return errors.New("--prompt is empty: give the text to continue")
		}
		return generate(cmd.Context(), c, prompt, n, how, cmd.OutOrStdout(), cmd.ErrOrStderr())
	}
	return cmd
}

// maxPrompt bounds what is read of standard input.
const maxPrompt = 16 << 20

func generate(ctx context.Context, c spillway.Config, prompt string, n int, how spillway.Sampling, stdout, stderr io.Writer) (err error) {
	c.Generate, c.Batch, c.Steps = true, 1, 1
	c.Warn = func(text string) { fmt.Fprintln(stderr, "warning:", cli.Flagged(text)) }
	t, closeAll, err := newInference(ctx, &c, stderr, func(c *spillway.Config, m *planner.Model) (err error) {
		if c.Seq == 0 {
			c.Seq, err = trainer.ContextFor(*c, m, prompt, n)
		}
		return err
	})
	if errors.Is(err, context.Canceled) {
		return cli.Interrupted("interrupted before the first token")
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	for _, note := range t.Notes() {
		fmt.Fprintln(stderr, note)
	}
	clean := func(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
	if cli.IsTerminal(stdout) {
		clean = cli.Visible
	}
	if _, err := io.WriteString(stdout, clean(strings.ToValidUTF8(prompt, "\uFFFD"))); err != nil {
		return err
	}
	began := time.Now()
	made, err := t.GenerateTo(ctx, prompt, n, how, func(text string) error {
		_, err := io.WriteString(stdout, clean(text))
		return err
	})
	fmt.Fprintln(stdout)
	if errors.Is(err, context.Canceled) {
		return cli.Interrupted(fmt.Sprintf("interrupted after %d tokens", made))
	}
	if err != nil {
		return cli.Fault(err)
	}
	if cli.IsTerminal(stderr) {
		fmt.Fprintf(stderr, "%d tokens, %.1f a second\n", made, float64(made)/time.Since(began).Seconds())
	}
	return nil
}

// EvalCommand is eval.
func EvalCommand() *cobra.Command {
	var c spillway.Config
	var path, jsonPath string
	cmd := &cobra.Command{
		Use:   "eval",
		Short: "Measure a trained model's loss on a data set",
		Long: `Measure the mean loss of the model of a Hugging Face folder, of a checkpoint, or of
a folder of checkpoints over all of a data set: in rows of --seq tokens, each
target once. It computes in fp32, whatever the weights were trained in.`,
		Example: "  spillway eval --model run1 --data held-out.txt",
		Args:    cli.NoArguments,
	}
	fs := cmd.Flags()
	inferenceFlags(fs, &c)
	fs.StringVar(&path, "data", "", "`PATH` of tokens (*.bin), of text or JSON lines (each also as .gz or .zst), or a folder of them")
	fs.StringVar(&c.TextField, "text-field", "", "the `NAME` of the field of JSON lines (*.jsonl) that holds the text")
	fs.StringVar(&c.EvalGlob, "data-glob", "", "take only a folder's files whose name matches `PATTERN`")
	fs.IntVar(&c.Batch, "batch", c.Batch, "rows of a batch, a rank")
	fs.IntVar(&c.Seq, "seq", 0, "tokens of a row (default: the smaller of 1024 and the model's positions)")
	fs.StringVar(&jsonPath, "json", "", "write the loss and the number of targets as JSON to `FILE`, - for stdout")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if path == "" {
			return errors.New("--data is missing: the text, tokens or folder to evaluate on")
		}
		if fs.Changed("seq") && c.Seq < 1 {
			return fmt.Errorf("--seq %d: at least 1 token is needed; leave it out for the smaller of 1024 and the model's positions", c.Seq)
		}
		if err := cli.RefuseOverwriting(fs); err != nil {
			return err
		}
		c.EvalData = path
		return ofData(evaluate(cmd.Context(), c, jsonPath, cmd.OutOrStdout(), cmd.ErrOrStderr()))
	}
	return cmd
}

// dataError is an error about held-out data of a command whose only data they are.
type dataError struct{ error }

func (e dataError) Error() string {
	return strings.ReplaceAll(cli.Flagged(e.error.Error()), "--eval-data", "--data")
}

func (e dataError) Unwrap() error { return e.error }

// ofData names the flag that the command has.
func ofData(err error) error {
	if err == nil || !strings.Contains(cli.Flagged(err.Error()), "--eval-data") {
		return err
	}
	return dataError{err}
}

// Evaluation is what `eval --json` writes; loss and targets are contracted.
type Evaluation struct {
	Loss        float32 `json:"loss"` // mean, nats a token
	Targets     int64   `json:"targets"`
	Perplexity  float64 `json:"perplexity"`
	BitsPerByte float64 `json:"bits_per_byte,omitempty"` // where a token is a byte
	Seconds     float64 `json:"seconds"`
	Model       string  `json:"model"` // the folder of the weights
}

// evalProgress tells how far an evaluation is: on a terminal in a line that fits it, else in
// a plain line every few seconds.
type evalProgress struct {
	w             io.Writer
	live          *cli.LiveLine
	began, told   time.Time
	first         int // batches done when began
	done, batches int
}

func newEvalProgress(w io.Writer) *evalProgress {
	now := time.Now()
	return &evalProgress{w: w, live: cli.NewLiveLine(w), began: now, told: now}
}

// batch takes the news of a batch: the mean loss so far.
func (p *evalProgress) batch(done, of int, loss float64) {
	if p.batches == 0 {
		p.first, p.began = done, time.Now() // the first has memory to touch, and says little of the others
	}
	p.done, p.batches = done, of
	left := ""
	if n := done - p.first; n > 0 {
		left = fmt.Sprintf("%s left", time.Duration(float64(time.Since(p.began))/float64(n)*float64(of-done)).Round(time.Second))
	}
	switch {
	case p.live != nil:
		p.live.Show([]string{fmt.Sprintf("batch %d/%d %s", done, of, cli.Gauge(int64(done), int64(of))), fmt.Sprintf("loss %.4f", loss), left}, done == of)
	case time.Since(p.told) >= cli.TellEvery:
		p.told = time.Now()
		fmt.Fprintln(p.w, strings.TrimSpace(fmt.Sprintf("batch %d/%d  loss %.4f  %s", done, of, loss, left)))
	}
}

func (p *evalProgress) finish() {
	if p.live != nil {
		p.live.End()
	}
}

// reached says where a signal ended it.
func (p *evalProgress) reached() string {
	if p.done == 0 {
		return "interrupted in the first batch"
	}
	return fmt.Sprintf("interrupted after batch %d of %d", p.done, p.batches)
}

func evaluate(ctx context.Context, c spillway.Config, jsonPath string, stdout, stderr io.Writer) (err error) {
	c.Warn = func(text string) { fmt.Fprintln(stderr, "warning:", cli.Flagged(text)) }
	t, closeAll, err := newInference(ctx, &c, stderr, func(c *spillway.Config, m *planner.Model) error {
		if c.Seq != 0 {
			return nil
		}
		h, err := m.Config()
		c.Seq = min(1024, h.Positions)
		return err
	})
	if errors.Is(err, context.Canceled) {
		return cli.Interrupted("interrupted before the first batch")
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	for _, note := range cli.FlaggedAll(t.Notes()) {
		fmt.Fprintln(stderr, strings.Replace(note, "--eval-data", "--data", 1))
	}
	p := newEvalProgress(stderr)
	r, err := t.EvaluateTold(ctx, p.batch)
	p.finish()
	if errors.Is(err, context.Canceled) {
		return cli.Interrupted(p.reached())
	}
	if err != nil {
		return cli.Fault(err)
	}
	isBytes := cli.TokensAreBytes(t, c.EvalData)
	e := Evaluation{Loss: r.Loss, Targets: r.Targets, Perplexity: math.Exp(float64(r.Loss)), Seconds: r.Seconds, Model: c.Model}
	if isBytes {
		e.BitsPerByte = float64(r.Loss) / math.Ln2
	}
	if f := float64(r.Loss); math.IsNaN(f) || math.IsInf(e.Perplexity, 1) {
		return cli.Fault(fmt.Errorf("the loss on %s is %v: the model's weights are not those of this architecture, or damaged", c.EvalData, f))
	}
	if jsonPath != "-" {
		fmt.Fprintf(stdout, "loss %s over %d targets\n", cli.LossText(r.Loss, isBytes), r.Targets)
	}
	if jsonPath == "" {
		return nil
	}
	var doc bytes.Buffer
	enc := json.NewEncoder(&doc)
	enc.SetIndent("", "  ")
	if err := enc.Encode(e); err != nil {
		return err
	}
	if jsonPath == "-" {
		_, err = stdout.Write(doc.Bytes())
		return err
	}
	if err := cli.WriteNew(jsonPath, doc.Bytes()); err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	return nil
}
