package training

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
)

// In a pipe a long evaluation prints a line every 1.5 s, after the line of its step.
func TestALongEvaluationIsTold(t *testing.T) {
	var out strings.Builder
	p := newProgress(&out, 0, 2, false)
	p.step(spillway.StepResult{Step: 1})
	p.evaluating(spillway.StepResult{Step: 2}, 0, 9, 0)
	require.Equal(t, 2, p.done(), "the step is done before its evaluation")
	p.evaluating(spillway.StepResult{Step: 2}, 1, 9, 5)
	require.Equal(t, 1, strings.Count(out.String(), "\n"), out.String())
	p.told = p.told.Add(-cli.TellWithin)
	p.pace.Began = p.pace.Began.Add(-time.Hour)
	p.evaluating(spillway.StepResult{Step: 2}, 4, 9, 4.5)
	p.step(spillway.StepResult{Step: 2, Eval: &spillway.EvalResult{Step: 2, Loss: 4}})
	p.finish()
	require.Regexp(t, `^step 1/2 .*\nstep 2/2 .*\n  batch 4/9 of the evaluation  held-out 4\.5000 so far  1h40m[0-9]+s left\n  held-out loss 4\.0.*\n$`, out.String())
}

// In a pipe a long step or batch prints a line every 1.5 s, and so does a completed step.
func TestALongStepIsTold(t *testing.T) {
	var out strings.Builder
	p := newProgress(&out, 4, 9, false)
	later := func() {
		p.told, p.since, p.started = p.told.Add(-cli.TellWithin), p.since.Add(-cli.TellWithin), p.started.Add(-cli.TellWithin)
		p.beat()
		p.beat()
	}
	p.beat()
	require.Empty(t, out.String())
	later()
	p.step(spillway.StepResult{Step: 5})
	later()
	p.evaluating(spillway.StepResult{Step: 9}, 0, 3, 0)
	later()
	later()
	p.step(spillway.StepResult{Step: 9, Eval: &spillway.EvalResult{Step: 9, Loss: 4}})
	later()
	require.Regexp(t, `^  step 5/9 … 1\.5 s\nstep 5/9  loss .*\n`+
		`step 9/9  loss .*\n  batch 1/3 of the evaluation … 3\.0 s\n`+
		`  held-out loss 4\.0.*\n  after step 9/9 … 1\.5 s\n$`, out.String())
}
