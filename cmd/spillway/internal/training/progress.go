package training

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// progress shows a run: on a terminal in a live line, with permanent lines above it; elsewhere in a
// plain line every cli.TellWithin, also during a step. The code that watches the ranks may print
// lines at any time.
type progress struct {
	mu      sync.Mutex // of step, note, beat and finish
	w       io.Writer
	live    *cli.LiveLine // nil: not a terminal
	bytes   bool          // a token of the held-out data is a byte
	steps   int
	started time.Time
	first   int // steps done before this process
	told    time.Time
	last    spillway.StepResult
	eval    *spillway.EvalResult // the last one
	pending bool                 // the last step is not printed yet
	pace    cli.Pace             // of the current evaluation
	batch   string               // the running batch of the current evaluation; "": none
	since   time.Time            // when the running step or batch began
}

func newProgress(w io.Writer, done, steps int, bytes bool) *progress {
	now := time.Now()
	return &progress{w: w, live: cli.NewLiveLine(w), steps: steps, started: now, since: now, first: done, bytes: bytes}
}

// memory formats the highest touched byte of any rank, and the planned size.
func memory(r spillway.StepResult) string {
	return fmt.Sprintf("device %s of %s planned", plan.Bytes(most(r.Peak[graph.Device])), plan.Bytes(most(r.Planned[graph.Device])))
}

func evalText(e *spillway.EvalResult, bytes bool) string {
	return fmt.Sprintf("held-out loss %s over %d targets", cli.LossText(e.Loss, bytes), e.Targets)
}

func (p *progress) step(r spillway.StepResult) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.take(r)
	p.batch, p.since = "", time.Now()
	if r.Eval != nil {
		p.eval = r.Eval
	}
	if p.live == nil {
		if p.pending && (time.Since(p.told) >= cli.TellWithin || r.Eval != nil) {
			p.line()
		}
		if r.Eval != nil {
			fmt.Fprintf(p.w, "  %s\n", evalText(r.Eval, p.bytes))
		}
		return
	}
	if r.Eval != nil {
		cli.Above(p.live, p.w, fmt.Sprintf("step %d: %s", r.Step, evalText(r.Eval, p.bytes)))
	}
	if !r.EvalOnly {
		p.live.Show(p.fields(), r.Step == p.steps)
	}
}

// take records a completed step, once.
func (p *progress) take(r spillway.StepResult) {
	if r.Step == max(p.first, p.last.Step) {
		return
	}
	p.last, p.pending = r, true
}

// evaluating shows the evaluation after a step: the completed batches and the mean loss so far.
func (p *progress) evaluating(r spillway.StepResult, done, of int, loss float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.take(r)
	p.batch, p.since = fmt.Sprintf("batch %d/%d of the evaluation", min(done+1, of), of), time.Now()
	batches, soFar, left := fmt.Sprintf("batch %d/%d of the evaluation", done, of), "", ""
	if done == 0 {
		p.pace = cli.Pace{}
	} else {
		soFar, left = fmt.Sprintf("held-out %.4f so far", loss), p.pace.Left(done, of)
	}
	switch {
	case p.live != nil:
		p.live.Show([]string{fmt.Sprintf("step %d/%d", r.Step, p.steps), batches + " " + cli.Gauge(int64(done), int64(of)), soFar, left}, done == 0)
	case time.Since(p.told) >= cli.TellWithin:
		if p.pending {
			p.line()
		}
		p.told = time.Now()
		fmt.Fprintln(p.w, strings.TrimRight(fmt.Sprintf("  %s  %s  %s", batches, soFar, left), " "))
	}
}

// beat shows a step or batch that takes long. cli.Beat calls it.
func (p *progress) beat() {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.live != nil && time.Since(p.since) < cli.TellWithin:
	case p.live != nil && p.last.Step == 0:
		p.live.Show([]string{p.runs()}, false)
	case p.live != nil:
		p.live.Show(append([]string{p.runs()}, p.fields()[1:]...), false)
	case time.Since(p.told) < cli.TellWithin || time.Since(p.started) < cli.TellWithin:
	case p.pending:
		p.line()
	case cli.Due(p.told, p.since):
		p.told = time.Now()
		fmt.Fprintf(p.w, "  %s\n", p.runs())
	}
}

// runs formats the current work and its time so far.
func (p *progress) runs() string {
	done, what := max(p.first, p.last.Step), p.batch
	switch {
	case what != "":
	case done < p.steps:
		what = fmt.Sprintf("step %d/%d", done+1, p.steps)
	default:
		what = fmt.Sprintf("after step %d/%d", done, p.steps)
	}
	return what + " " + cli.Took(p.since)
}

// done returns the number of completed steps.
func (p *progress) done() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(p.first, p.last.Step)
}

// note prints a permanent line.
func (p *progress) note(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	cli.Above(p.live, p.w, text)
}

// left predicts the time until the last step from the steps of this process.
func (p *progress) left() time.Duration {
	n := p.last.Step - p.first
	if n <= 0 {
		return 0
	}
	return time.Duration(float64(time.Since(p.started)) / float64(n) * float64(p.steps-p.last.Step)).Round(time.Second)
}

// fields returns the fields of the live line, the most important first.
func (p *progress) fields() []string {
	r := p.last
	held := ""
	if p.eval != nil {
		held = fmt.Sprintf("held-out %.4f", p.eval.Loss)
	}
	return []string{fmt.Sprintf("step %d/%d %s", r.Step, p.steps, cli.Gauge(int64(r.Step), int64(p.steps))), fmt.Sprintf("loss %.4f", r.Loss),
		held, skipped(r), fmt.Sprintf("%s left", p.left()), cli.Count(r.TokensPerS) + " tokens/s", memory(r)}
}

// skipped formats the number of steps without an update, "" if there were none.
func skipped(r spillway.StepResult) string {
	if r.SkippedAll == 0 {
		return ""
	}
	return fmt.Sprintf("%d skipped", r.SkippedAll)
}

func (p *progress) line() {
	r := p.last
	left := ""
	if s := skipped(r); s != "" {
		left = s + "  "
	}
	fmt.Fprintf(p.w, "step %d/%d  loss %.4f  %s%s tokens/s  %s  %s left\n", r.Step, p.steps, r.Loss, left, cli.Count(r.TokensPerS), memory(r), p.left())
	p.told, p.pending = time.Now(), false
}

func (p *progress) finish() {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.live != nil:
		p.live.End()
	case p.pending:
		p.line()
	}
}
