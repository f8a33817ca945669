package train

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// batched returns a reproducible run whose steps have 4, 4, 7, 3, 12 and 12 rows.
func batched() request {
	c := tiny("gpt2")
	c.Steps, c.Seq, c.Batch, c.Reproducible = 6, 16, 1, true
	c.BatchSchedule = config.BatchSchedule{{Step: 0, Rows: 4}, {Step: 2, Rows: 7}, {Step: 3, Rows: 3}, {Step: 4, Rows: 12}}
	return c
}

// scheduledCurve holds the values that a run's steps report, and the hash of its final parameters.
type scheduledCurve struct {
	rows   []int
	losses []float32
	norms  []float64
	rates  []float64
	noise  []string
	sha    string
}

// scheduledRun runs or resumes c. A run of all steps must touch exactly the planned memory.
func scheduledRun(t *testing.T, c request) (o scheduledCurve) {
	t.Helper()
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	whole := tr.Done() == 0
	require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
		o.rows, o.losses, o.norms, o.rates = append(o.rows, r.Rows), append(o.losses, r.Loss), append(o.norms, r.GradNorm), append(o.rates, r.LR)
		o.noise = append(o.noise, fmt.Sprint(r.Noise))
		for sp := range graph.NumSpaces {
			for rank, peak := range r.Peak[sp] {
				require.LessOrEqual(t, peak, r.Planned[sp][rank])
				if whole && r.Step == 6 {
					require.Equal(t, r.Planned[sp][rank], peak, "%s of rank %d", sp, rank)
				}
			}
		}
		return nil
	}))
	o.sha, err = tr.ParamsSHA256()
	require.NoError(t, err)
	return o
}

// from returns the part of the curve from the given step on.
func (o scheduledCurve) from(step int) scheduledCurve {
	return scheduledCurve{o.rows[step:], o.losses[step:], o.norms[step:], o.rates[step:], o.noise[step:], o.sha}
}

// TestBatchScheduleHasOneCurve checks that a run with a batch schedule has the same curve at every
// stage, number of ranks and placement. Resuming at any step, within or between batches, must not
// change it.
func TestBatchScheduleHasOneCurve(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]func(c *request){
		"plain": func(*request) {},
		"scaled": func(c *request) {
			c.LRScale, c.LRBaseBatch, c.Clip, c.Warmup, c.LRSchedule = "sqrt", 4, 0.3, 2, "cosine"
		},
		"bf16": func(c *request) { c.Precision, c.Dropout = "bf16", 0.1 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := batched()
			set(&c)
			want := scheduledRun(t, c)
			require.Equal(t, []int{4, 4, 7, 3, 12, 12}, want.rows)
			for i, way := range []func(c *request){
				func(c *request) { c.Ranks, c.Zero = 3, 0 },
				func(c *request) { c.Ranks, c.Zero, c.Prefetch, c.Recompute = 2, 3, 2, "full" },
				func(c *request) { c.Ranks, c.Zero, c.Offload = 3, 2, "optimizer=host,gradients=host,activations=host" },
			} {
				d := c
				way(&d)
				d.Checkpoint, d.SaveEvery = scratch(t), 1
				require.Equal(t, want, scheduledRun(t, d), "way %d", i)
				for _, at := range long.Or([][]int{{1}, {5}, {3}}, [][]int{{1, 4}, {2, 5}, {3}})[i] {
					e := d
					e.Checkpoint, e.SaveEvery = scratch(t), 0
					e.Steps = at
					if e.LRSchedule == "cosine" {
						continue // the rate of cosine depends on the number of steps
					}
					scheduledRun(t, e)
					e.Steps, e.Resume, e.Ranks, e.Zero = 6, true, 1+(e.Ranks+at)%3, (e.Zero+at)%4
					require.Equal(t, want.from(at), scheduledRun(t, e), "way %d, resumed behind step %d at %d ranks", i, at, e.Ranks)
				}
			}
		})
	}
}

// TestBatchScheduleStepsAreThoseOfOneBatch checks that a step of a schedule equals the step of a
// run with that batch only.
func TestBatchScheduleStepsAreThoseOfOneBatch(t *testing.T) {
	t.Parallel()
	for _, reproducible := range []bool{true, false} {
		c := batched()
		c.Ranks, c.Reproducible, c.Zero = 2, reproducible, 2
		c.BatchSchedule = config.BatchSchedule{{Step: 0, Rows: 4}, {Step: 2, Rows: 12}, {Step: 3, Rows: 2}, {Step: 4, Rows: 12}}
		want := scheduledRun(t, c)
		c.Checkpoint = scratch(t)
		c.BatchSchedule = nil
		for _, part := range []struct{ to, rows, from int }{{2, 4, 0}, {3, 12, 2}, {4, 2, 3}, {6, 12, 4}} {
			d := c
			d.Steps, d.GlobalBatch, d.Resume = part.to, part.rows, part.from > 0
			got := scheduledRun(t, d)
			require.Equal(t, want.losses[part.from:part.to], got.losses, "reproducible %v, rows %d", reproducible, part.rows)
			if part.to == 6 {
				require.Equal(t, want.sha, got.sha)
			}
		}
	}
}

// TestResumeKnowsTheBatchSchedule checks that a checkpoint records the rows of its steps. A
// schedule that contradicts them is refused; other rows for later steps give a note.
func TestResumeKnowsTheBatchSchedule(t *testing.T) {
	t.Parallel()
	c := batched()
	c.Steps, c.Checkpoint = 3, scratch(t)
	want := scheduledRun(t, c)
	c.Resume, c.Steps = true, 5
	other := func(text string) request {
		d := c
		var err error
		d.BatchSchedule, err = config.ParseBatchSchedule(text)
		require.NoError(t, err)
		return d
	}
	refused(t, other("0:4,1:7,3:3"), "the 3 steps of step-00000003 had the rows of Config.BatchSchedule 0:4,2:7, and this run's would have had those of 0:4,1:7", "Config.AcceptChanges")
	refused(t, other("0:4"), "Config.BatchSchedule 0:4,2:7, and", "those of 0:4;")
	d := other("none")
	d.GlobalBatch = 4
	refused(t, d, "those of 0:4;")

	d = other("0:4,2:7,4:2")
	require.Contains(t, ended(t, d), "changed since step-00000003: Config.BatchSchedule: 0:4,2:7,3:3,4:12 → 0:4,2:7,4:2")
	require.Len(t, want.rows, 3)

	d = other("0:5")
	d.AcceptChanges, d.Steps = true, 6
	require.Contains(t, ended(t, d), "changed since step-00000005: Config.BatchSchedule: 0:4,2:7,4:2 → 0:5")

	// A run with one batch continues with a schedule that begins with that batch.
	c = batched()
	c.Checkpoint, c.Steps, c.BatchSchedule, c.GlobalBatch = scratch(t), 2, nil, 7
	scheduledRun(t, c)
	c.Resume, c.Steps, c.GlobalBatch, c.BatchSchedule = true, 4, 0, config.BatchSchedule{{Step: 0, Rows: 7}, {Step: 3, Rows: 9}}
	require.Equal(t, []int{7, 9}, scheduledRun(t, c).rows)
}

// TestBatchScheduleWithFrozenCache checks a schedule for both forms of a step: with and without
// cached outputs of frozen layers.
func TestBatchScheduleWithFrozenCache(t *testing.T) {
	t.Parallel()
	c := frozenRun(t, "gpt2", 12, 16)
	c.Steps, c.Batch, c.Reproducible, c.BatchSchedule = 8, 1, true, config.BatchSchedule{{Step: 0, Rows: 12}, {Step: 3, Rows: 4}, {Step: 5, Rows: 8}, {Step: 7, Rows: 3}}
	want := scheduledRun(t, c)
	c.FrozenCache, c.Ranks = config.FrozenCache{Tier: graph.Host, Bytes: 1 << 20}, 3
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	var losses []float32
	require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
		losses = append(losses, r.Loss)
		require.Equal(t, r.Step > 1, r.Cached, "step %d", r.Step)
		return nil
	}))
	require.Equal(t, want.losses, losses)
}
