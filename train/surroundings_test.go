package train

import (
	"context"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
)

// TestAFailedSaveIsTriedAgain checks that a failed save is warned about once and retried after each
// step, and that the run continues.
func TestAFailedSaveIsTriedAgain(t *testing.T) {
	c := tiny("gpt2")
	c.Steps, c.SaveEvery, c.Checkpoint = 6, 2, filepath.Join(t.TempDir(), "ck")
	var warned []string
	c.Warn = func(text string) { warned = append(warned, text) }
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
		switch r.Step {
		case 2:
			require.NoError(t, os.RemoveAll(c.Checkpoint))
			return os.WriteFile(c.Checkpoint, nil, 0o600)
		case 5:
			_ = tr.saver.Settle(true) // wait until the background save of step 4 has failed
			return os.Remove(c.Checkpoint)
		}
		return nil
	}))
	require.Len(t, warned, 2, warned)
	require.Contains(t, warned[0], "training goes on, and it is tried again after each step")
	require.Equal(t, "the checkpoint of step 5 is saved now", warned[1])
	list, err := checkpoint.List(c.Checkpoint)
	require.NoError(t, err)
	require.Len(t, list, 2, "steps 5 and 6")
}

// TestASaveThatFailsAtTheEnd checks that a failed last save is the run's error, also if the caller
// stopped the run.
func TestASaveThatFailsAtTheEnd(t *testing.T) {
	for name, stop := range map[string]error{"at the end": nil, "stopped": errors.New("enough")} {
		t.Run(name, func(t *testing.T) {
			c := tiny("gpt2")
			c.Steps, c.Checkpoint = 2, filepath.Join(t.TempDir(), "ck")
			tr, err := c.start(context.Background())
			require.NoError(t, err)
			defer tr.Close()
			err = tr.Run(context.Background(), func(r StepResult) error {
				require.NoError(t, os.RemoveAll(c.Checkpoint))
				require.NoError(t, os.WriteFile(c.Checkpoint, nil, 0o600))
				return stop
			})
			require.ErrorContains(t, err, "save checkpoint of step")
			require.ErrorContains(t, err, "; nothing is saved: remove the cause, then start again")
			require.NotErrorIs(t, err, stop, "it did not end as it was asked to")
		})
	}
}

// TestStoppingSavesFirst checks that an error returned by the caller's function ends the run after
// a save.
func TestStoppingSavesFirst(t *testing.T) {
	c := tiny("gpt2")
	c.Steps, c.Checkpoint = 5, filepath.Join(t.TempDir(), "ck")
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	enough := errors.New("enough")
	require.ErrorIs(t, tr.Run(context.Background(), func(r StepResult) error {
		if r.Step == 3 {
			return enough
		}
		return nil
	}), enough)
	list, err := checkpoint.List(c.Checkpoint)
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.Equal(t, "step-00000003", filepath.Base(list[0]))
}

// TestAnUpdateThatIsNotFinite checks that non-finite parameters after the last update are a
// divergence, with and without checkpoints. No checkpoint with them may remain.
func TestAnUpdateThatIsNotFinite(t *testing.T) {
	for name, dir := range map[string]string{"saved": filepath.Join(t.TempDir(), "ck"), "not saved": ""} {
		t.Run(name, func(t *testing.T) {
			c := tiny("gpt2")
			c.Ranks, c.Steps, c.Checkpoint = 2, 3, dir
			at := corruption{label: "h.1/adamw", operand: 3, elem: 257, first: 3, last: always}
			corrupt(&c, 0, &at)
			d := diverges(t, c)
			require.True(t, d.Update)
			require.Equal(t, "parameter", d.What)
			require.Equal(t, `"h.1.ln_1.bias"`, d.Tensor)
			require.Contains(t, d.Operation, "h.1/adamw")
			require.Equal(t, 3, d.Step)
			if dir != "" {
				list, err := checkpoint.List(dir)
				require.NoError(t, err)
				require.Empty(t, list)
			}
		})
	}
}

// TestResumeAfterADivergence checks that a divergence marks the checkpoint it started from. The
// same settings are refused from there.
func TestResumeAfterADivergence(t *testing.T) {
	c := tiny("gpt2")
	c.Steps, c.SaveEvery, c.Checkpoint = 4, 1, filepath.Join(t.TempDir(), "ck")
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	require.NoError(t, tr.Run(context.Background(), nil))
	require.NoError(t, tr.Close())

	c.Steps, c.Resume, c.LR = 8, true, 1e30
	tr, err = c.start(context.Background())
	require.NoError(t, err)
	var d *Diverged
	require.ErrorAs(t, tr.Run(context.Background(), nil), &d)
	require.NoError(t, tr.Close())
	require.Equal(t, 6, d.Step, "step 5 moved the parameters too far, and was saved")

	_, err = c.start(context.Background())
	require.ErrorContains(t, err, "Config.OnNonFinite skip")
	require.ErrorContains(t, err, "step 6")

	var warned []string
	c.LR, c.Warn = 1e-3, func(text string) { warned = append(warned, text) }
	tr, err = c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	require.Equal(t, 4, tr.Done(), "step 5 is passed over")
	require.Contains(t, strings.Join(append(warned, tr.Notes()...), "\n"), "step-00000005 is passed over")
	require.NoError(t, tr.Run(context.Background(), nil))

	whole := tiny("gpt2")
	whole.Steps = 8
	sum, err := tr.ParamsSHA256()
	require.NoError(t, err)
	require.Equal(t, runOf(t, whole).sha, sum)
}

// TestAFailingEvaluation checks that a failed evaluation is warned about and that the run
// continues.
func TestAFailingEvaluation(t *testing.T) {
	c := tiny("gpt2")
	c.Steps, c.EvalData, c.EvalEvery = 2, c.Data, 1
	var warned []string
	c.Warn = func(text string) { warned = append(warned, text) }
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	tr.eval.all = false // as for data whose targets must be counted and that cannot be read
	tr.eval.scratch = [2][]int32{}
	require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
		require.Nil(t, r.Eval)
		return nil
	}))
	tr.eval.all = true
	require.Len(t, warned, 2)
	require.Contains(t, warned[0], "step 1: the evaluation failed: ")
}

// TestMetricsAreCutBack checks that a resumed run cuts the metrics file after its step and removes
// an incomplete line.
func TestMetricsAreCutBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.jsonl")
	lines := `{"step":1,"loss":5}` + "\n" + `{"event":"eval","step":1}` + "\n" + `{"step":2,"loss":4}` + "\n"
	for rest, ahead := range map[string]int{"": 0, `{"step":3,"lo`: 0, `{"step":3}` + "\n" + `{"step":4}` + "\n" + `{"step":5,`: 4, "\x00\x00\x00": 0, `{"event":"done","step":9}` + "\n": 9, `{"event":"done","step":2}` + "\n": 0} {
		require.NoError(t, os.WriteFile(path, []byte(lines+rest), 0o600))
		m, err := OpenMetrics(path, 2)
		require.NoError(t, err)
		require.Equal(t, ahead, m.Dropped(), rest)
		require.NoError(t, m.Done(3, "x"))
		require.NoError(t, m.Close())
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, lines+`{"event":"done","step":3,"params_sha256":"x"}`+"\n", string(text))
	}
	m, err := OpenMetrics(path, -1)
	require.NoError(t, err)
	require.Zero(t, m.Dropped())
	require.NoError(t, m.Close())
	st, err := os.Stat(path)
	require.NoError(t, err)
	require.Zero(t, st.Size())
}

// TestMetricsOfTwoRuns checks that two runs cannot write to one metrics file, and that a file with
// other content is refused unchanged. A resumed run waits until the earlier process has ended.
func TestMetricsOfTwoRuns(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.jsonl")
	first, err := OpenMetrics(path, -1)
	require.NoError(t, err)
	require.NoError(t, first.Done(1, "x"))
	_, err = OpenMetrics(path, -1)
	require.ErrorContains(t, err, "Config.Metrics: ")
	require.ErrorContains(t, err, "another run writes its lines there")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, `{"event":"done","step":1,"params_sha256":"x"}`+"\n", string(text))
	opened := make(chan *MetricsWriter, 1)
	go func() {
		again, err := OpenMetrics(path, 1)
		if err != nil {
			t.Error(err)
		}
		opened <- again
	}()
	require.NoError(t, first.Close())
	require.NoError(t, (<-opened).Close())
	again, err := OpenMetrics(path, -1)
	require.NoError(t, err, "the first run has ended")
	require.NoError(t, again.Close())

	notes := filepath.Join(t.TempDir(), "notes.txt")
	require.NoError(t, os.WriteFile(notes, []byte("to remember\n"), 0o600))
	for _, step := range []int{-1, 2} {
		_, err = OpenMetrics(notes, step)
		require.ErrorContains(t, err, "is there already and holds no metrics")
		text, err = os.ReadFile(notes)
		require.NoError(t, err)
		require.Equal(t, "to remember\n", string(text))
	}
}

// TestWriteAside checks that a file is replaced completely or, on an error, stays unchanged, and
// that no other file remains.
func TestWriteAside(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.json")
	require.NoError(t, os.WriteFile(path, []byte("old"), 0o600))
	broken := errors.New("broken")
	require.ErrorIs(t, writeAside(path, func(w io.Writer) error {
		_, _ = w.Write([]byte("new, in p"))
		return broken
	}), broken)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "old", string(text))
	require.NoError(t, writeAside(path, func(w io.Writer) error {
		_, err := w.Write([]byte("new"))
		return err
	}))
	text, err = os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "new", string(text))
	list, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.False(t, isFinite(math.Inf(1)))
}
