package infer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/planner"
	trainer "github.com/spillway-ml/spillway/train"
)

// EvalCommand returns the command eval.
func EvalCommand() *cobra.Command {
	var c spillway.Config
	var path, jsonPath string
	a := accuracy{how: trainer.Decoding{}}
	cmd := &cobra.Command{
		Use:   "eval",
		Short: "Measure a trained model's loss on a data set, and the accuracy of its answers",
		Long: `Measure the mean loss of the model of a Hugging Face folder, of a checkpoint, or of
a folder of checkpoints over a complete data set, in rows of --seq tokens. Each
target counts once.

With --accuracy the data must be conversations. The model answers the messages before
the last answer of each, at temperature 0. An answer is correct if it equals the
data's except for white space at both ends. --batch prompts are answered at once;
--tokens limits an answer.`,
		Example: "  spillway eval --model run1 --data held-out.txt",
		Args:    cli.NoArguments,
	}
	fs := cmd.Flags()
	modelFlag(fs, &c)
	inferenceFlags(fs, &c)
	fs.StringVar(&path, "data", "", "`PATH` of tokens (*.bin), of text or JSON lines (each also as .gz or .zst), or a folder of them")
	fs.StringVar(&c.TextField, "text-field", "", "`NAME` of the field with the text in JSON lines (*.jsonl)")
	fs.StringVar(&c.EvalGlob, "data-glob", "", "read only the files of a folder whose names match `PATTERN`")
	fs.IntVar(&c.Batch, "batch", c.Batch, "rows of a rank's batch")
	fs.IntVar(&c.Seq, "seq", 0, "tokens of a row (default: the --seq of the checkpoint's run, else 1024; at most the model's positions)")
	templateFlag(fs, &c)
	fs.StringVar(&c.LossOn, "loss-on", "", "tokens of conversations that count in the loss: answers or all (default: answers)")
	fs.BoolVar(&a.wanted, "accuracy", false, "also count the answers that equal those of the data")
	fs.IntVar(&a.how.Tokens, "tokens", 0, "with --accuracy, maximum tokens of an answer (default: 16 more than twice the data's longest)")
	fs.StringArrayVar(&a.how.Stop, "stop", nil, "with --accuracy, end an answer before this `TEXT`; may be repeated")
	fs.StringVar(&jsonPath, "json", "", "write the loss and the number of targets as JSON to `FILE`, - for stdout")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if path == "" {
			return errors.New("--data is missing: the text, tokens or folder to evaluate on")
		}
		if fs.Changed("seq") && c.Seq < 1 {
			return fmt.Errorf("--seq %d: at least 1 token is needed; leave it out for what the model was trained at", c.Seq)
		}
		switch {
		case !a.wanted && (fs.Changed("tokens") || fs.Changed("stop")):
			return errors.New("--tokens and --stop need --accuracy: without it nothing is answered")
		case fs.Changed("tokens") && a.how.Tokens < 1:
			return fmt.Errorf("--tokens %d: at least 1 is needed", a.how.Tokens)
		}
		if err := cmp.Or(refuseSampling(fs, &a.how), cli.RefuseOverwriting(fs)); err != nil {
			return err
		}
		c.EvalData = path
		return ofData(evaluate(cmd.Context(), c, &a, jsonPath, cmd.OutOrStdout(), cmd.ErrOrStderr()))
	}
	return cmd
}

// dataError is an error about held-out data in a command that has no other data: it names --data.
type dataError struct{ error }

func (e dataError) Error() string {
	return strings.ReplaceAll(cli.Flagged(e.error.Error()), "--eval-data", "--data")
}

func (e dataError) Unwrap() error { return e.error }

// ofData renames --eval-data in an error to --data, the command's flag.
func ofData(err error) error {
	if err == nil || !strings.Contains(cli.Flagged(err.Error()), "--eval-data") {
		return err
	}
	return dataError{err}
}

// Evaluation is the document that `eval --json` writes. Its keys loss and targets are guaranteed.
type Evaluation struct {
	Loss        float32 `json:"loss"` // mean, nats a token
	Targets     int64   `json:"targets"`
	Perplexity  float64 `json:"perplexity"`
	BitsPerByte float64 `json:"bits_per_byte,omitempty"` // if a token is a byte
	Seconds     float64 `json:"seconds"`
	Model       string  `json:"model"` // the folder of the weights
	*Accuracy           // with --accuracy
}

// evalProgress shows the progress of an evaluation: in a live line on a terminal, otherwise in a
// plain line every cli.TellWithin, also during a batch.
type evalProgress struct {
	w             io.Writer
	live          *cli.LiveLine
	pace          cli.Pace
	told          time.Time
	done, batches int
	mu            sync.Mutex
	since         time.Time // when the running batch began
}

func newEvalProgress(w io.Writer) *evalProgress {
	return &evalProgress{w: w, live: cli.NewLiveLine(w), told: time.Now(), since: time.Now()}
}

// batch shows that a batch is completed; loss is the mean so far.
func (p *evalProgress) batch(done, of int, loss float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done, p.batches, p.since = done, of, time.Now()
	left := p.pace.Left(done, of)
	switch {
	case p.live != nil:
		p.live.Show([]string{fmt.Sprintf("batch %d/%d %s", done, of, cli.Gauge(int64(done), int64(of))), fmt.Sprintf("loss %.4f", loss), left}, done == of)
	case time.Since(p.told) >= cli.TellWithin:
		p.told = time.Now()
		fmt.Fprintln(p.w, strings.TrimSpace(fmt.Sprintf("batch %d/%d  loss %.4f  %s", done, of, loss, left)))
	}
}

// beat shows a batch that takes long. cli.Beat calls it.
func (p *evalProgress) beat() {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.live == nil && !cli.Due(p.told, p.since):
		return
	case p.live != nil && time.Since(p.since) < cli.TellWithin: // the line still shows the previous batch
		return
	}
	what := "batch " + strconv.Itoa(p.done+1)
	if p.batches > 0 {
		what += "/" + strconv.Itoa(p.batches)
	}
	p.told = time.Now()
	if what += " " + cli.Took(p.since); p.live != nil {
		p.live.Show([]string{what}, true)
		return
	}
	fmt.Fprintln(p.w, what)
}

// reached describes the progress when a signal ended the evaluation.
func (p *evalProgress) reached() string {
	if p.done == 0 {
		return "interrupted in the first batch"
	}
	return fmt.Sprintf("interrupted after batch %d of %d", p.done, p.batches)
}

func evaluate(ctx context.Context, c spillway.Config, a *accuracy, jsonPath string, stdout, stderr io.Writer) (err error) {
	c.Warn = func(text string) { fmt.Fprintln(stderr, "warning:", cli.Flagged(text)) }
	t, closeAll, err := newInference(ctx, &c, stderr, func(c *spillway.Config, m *planner.Model) error {
		if a.wanted {
			return a.prepare(c, m)
		}
		if c.Seq != 0 {
			return nil
		}
		h, err := m.Config()
		if err == nil {
			c.Seq, err = seqOf(m, h.Positions)
		}
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
	still := cli.Beat(p.beat)
	r, err := t.EvaluateTold(ctx, p.batch)
	still()
	p.live.End()
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
	if e.Accuracy, err = a.measure(ctx, t, stderr); err != nil {
		return err
	}
	if jsonPath != "-" {
		fmt.Fprintf(stdout, "loss %s over %d targets\n", cli.LossText(r.Loss, isBytes), r.Targets)
		if e.Accuracy != nil {
			fmt.Fprintln(stdout, e.Accuracy)
		}
	}
	return cli.WriteJSON(stdout, jsonPath, e)
}
