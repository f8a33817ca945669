package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// progress is the live line of a run on a terminal; elsewhere a plain line now
// and then.
type progress struct {
	w       io.Writer
	bar     *progressbar.ProgressBar
	steps   int
	started time.Time
	first   int // steps done before this process
	told    time.Time
	last    spillway.StepResult
	pending bool
}

// tellEvery is the least time between two lines where there is no terminal.
const tellEvery = 5 * time.Second

func newProgress(w io.Writer, done, steps int) *progress {
	p := &progress{w: w, steps: steps, started: time.Now(), first: done}
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		p.bar = progressbar.NewOptions(steps, progressbar.OptionSetWriter(w), progressbar.OptionSetPredictTime(true),
			progressbar.OptionShowCount(), progressbar.OptionSetWidth(20), progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionFullWidth())
		_ = p.bar.Set(done)
	}
	return p
}

func describeStep(r spillway.StepResult) string {
	var peak, planned int64
	for _, v := range r.Peak[graph.Device] {
		peak = max(peak, v)
	}
	for _, v := range r.Planned[graph.Device] {
		planned = max(planned, v)
	}
	return fmt.Sprintf("loss %.4f  %.0f tokens/s  device %s of %s planned", r.Loss, r.TokensPerS, plan.Bytes(peak), plan.Bytes(planned))
}

func (p *progress) step(r spillway.StepResult) {
	p.last, p.pending = r, true
	if p.bar != nil {
		p.bar.Describe(describeStep(r))
		_ = p.bar.Set(r.Step)
		return
	}
	if time.Since(p.told) >= tellEvery || r.Eval != nil {
		p.line()
	}
}

func (p *progress) line() {
	r := p.last
	left := time.Duration(0)
	if n := r.Step - p.first; n > 0 {
		left = time.Duration(float64(time.Since(p.started)) / float64(n) * float64(p.steps-r.Step)).Round(time.Second)
	}
	fmt.Fprintf(p.w, "step %d/%d  %s  %s left\n", r.Step, p.steps, describeStep(r), left)
	if r.Eval != nil {
		fmt.Fprintf(p.w, "  held-out loss %.4f over %d targets\n", r.Eval.Loss, r.Eval.Targets)
	}
	p.told, p.pending = time.Now(), false
}

func (p *progress) finish() {
	if p.bar != nil {
		_ = p.bar.Exit()
		fmt.Fprintln(p.w)
		return
	}
	if p.pending {
		p.line()
	}
}
