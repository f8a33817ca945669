package train

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// dueContext is canceled after a given number of queries.
type dueContext struct {
	context.Context
	asked, due atomic.Int64
}

func dueAfter(n int64) *dueContext {
	c := &dueContext{Context: context.Background()}
	c.due.Store(n)
	return c
}

func (c *dueContext) Err() error {
	if c.asked.Add(1) > c.due.Load() {
		return context.Canceled
	}
	return nil
}

// TestAStepIsLeftBetweenMicroSteps cancels a step: all ranks must abandon it before the same
// micro-step. The state is that of the previous step, and later steps give the bits of an
// uninterrupted run. By default about half of the cases run.
func TestAStepIsLeftBetweenMicroSteps(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*request){
		"stage 0":                func(c *request) { c.Zero = 0 },
		"stage 3":                func(c *request) {},
		"stage 2, recompute":     func(c *request) { c.Zero, c.Recompute = 2, "full" },
		"updates in the forward": func(c *request) { c.Clip, c.Offload = 0.1, "optimizer=host,gradients=host" },
		"beside the backward":    func(c *request) { c.Zero, c.Offload = 1, "optimizer=host" },
		"skip, offloaded":        func(c *request) { c.OnNonFinite, c.Offload = "skip", "optimizer=host" },
		"fp16, offloaded":        func(c *request) { c.Precision, c.Offload = "fp16", "optimizer=host" },
		"everything on disk":     func(c *request) { c.Clip, c.Offload, c.Disk = 0.1, placements[9], t.TempDir() },
		"frozen layers": func(c *request) {
			c.Freeze, c.FrozenCache = []string{"wte*", "wpe*", "h.0.*"}, config.FrozenCache{Tier: graph.Host, Bytes: 1 << 20}
		},
	} {
		if !long.Keep(name, 2) {
			continue
		}
		t.Run(name, func(t *testing.T) {
			c := tiny("gpt2")
			c.Ranks, c.Batch, c.Seq, c.Accum, c.Steps = 3, 1, 16, 3, 3
			change(&c)
			want := runOf(t, c)
			one := c
			one.Steps = 1
			first := runOf(t, one)
			for micro := range int64(c.Accum) {
				tr, err := c.start(context.Background())
				require.NoError(t, err)
				defer func() { require.NoError(t, tr.Close()) }()
				_, err = tr.Step(context.Background())
				require.NoError(t, err)
				ctx := dueAfter(1 + micro)
				_, err = tr.Step(ctx)
				if micro == int64(c.Accum)-1 { // no further query: the last micro-step has begun
					require.NoError(t, err)
					require.Equal(t, micro+1, ctx.asked.Load())
					continue
				}
				require.ErrorIs(t, err, context.Canceled)
				require.Equal(t, 2+micro, ctx.asked.Load(), "once a micro-step, not once a rank")
				require.Equal(t, 1, tr.Done())
				if micro != 1 { // with micro 1, the run continues from the abandoned step directly
					sha, err := tr.ParamsSHA256()
					require.NoError(t, err)
					require.Equal(t, first.sha, sha)
				}
				got := append([]float32(nil), first.losses...)
				require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
					got = append(got, r.Loss)
					return nil
				}))
				require.Equal(t, want.losses, got)
				sha, err := tr.ParamsSHA256()
				require.NoError(t, err)
				require.Equal(t, want.sha, sha)
			}
		})
	}
}

// TestALeftStepIsResumed checks that a run with an abandoned step is saved as after any step and
// resumes to the same bits.
func TestALeftStepIsResumed(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Batch, c.Seq, c.Accum, c.Steps, c.Clip, c.Offload = 2, 1, 16, 3, 4, 0.1, "optimizer=host"
	want := runOf(t, c)
	c.Checkpoint = t.TempDir()
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	require.ErrorIs(t, tr.Run(dueAfter(3*2+2), nil), context.Canceled) // each of two steps queries three times
	require.Equal(t, 2, tr.Done())
	require.NoError(t, tr.Close())
	c.Resume = true
	got := runOf(t, c)
	require.Equal(t, want.losses[2:], got.losses)
	require.Equal(t, want.sha, got.sha)
}

// TestALeftEvaluationIsResumed interrupts an evaluation, also the one after the last step. The next
// run must repeat it first. Steps, evaluations and losses must be those of an uninterrupted run.
func TestALeftEvaluationIsResumed(t *testing.T) {
	t.Parallel()
	type line struct {
		step       int
		loss, held float32
	}
	c := tiny("gpt2")
	c.Batch, c.Seq, c.Steps, c.EvalData, c.EvalEvery, c.EvalSteps = 1, 16, 3, c.Data, 2, 3
	// runs interrupts the evaluation after step, before batch, and returns the reported losses.
	runs := func(step, batch int, want error) (lines []line) {
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		defer func() { require.NoError(t, tr.Close()) }()
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		require.ErrorIs(t, tr.RunTold(ctx, func(r StepResult) error {
			if !r.EvalOnly {
				lines = append(lines, line{r.Step, r.Loss, 0})
			}
			if r.Eval != nil {
				lines = append(lines, line{r.Eval.Step, 0, r.Eval.Loss})
			}
			return nil
		}, func(r StepResult, done, of int, _ float64) {
			require.Equal(t, 3, of)
			if r.Step == step && done == batch {
				cancel()
			}
		}), want)
		require.Equal(t, want != nil, tr.EvalDue())
		return lines
	}
	want := runs(0, 0, nil)
	require.Len(t, want, 5)
	c.Checkpoint, c.Resume = t.TempDir(), true
	require.Equal(t, want[:2], runs(2, 1, context.Canceled), "steps 1 and 2")
	require.Empty(t, runs(2, 0, context.Canceled))
	require.Equal(t, want[2:4], runs(3, 2, context.Canceled), "the evaluation, and step 3")
	require.Equal(t, want[4:], runs(0, 0, nil), "the evaluation after all steps")
	require.Empty(t, runs(0, 0, nil), "it is remembered")
}
