package train

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// TestPendingUpdatesAreThereWhenNeeded checks updates that wait for the next step, with a changing
// rate. Evaluations and parameter hashes between steps must see the states after the step, and must
// change no bit. By default half of the cases run.
func TestPendingUpdatesAreThereWhenNeeded(t *testing.T) {
	t.Parallel()
	for i, placement := range []string{"optimizer=host", "optimizer=disk", placements[8], placements[9], "optimizer=host:55%", "optimizer=host:30%+disk:30%"} {
		c := tiny("gpt2")
		c.Ranks, c.Zero, c.Steps, c.Clip, c.Dropout = 1+i%2, i%4, 4, 0.5, 0.1
		c.LRSchedule, c.Warmup, c.MinLR = "cosine", 2, 1e-5
		c.EvalData, c.EvalSteps = c.Data, 1
		type seen struct {
			loss, eval float32
			sha        string
		}
		run := func(c request, look func(step int) bool) (list []seen) {
			tr, err := c.start(context.Background())
			require.NoError(t, err)
			defer func() { require.NoError(t, tr.Close()) }()
			for s := range c.Steps {
				r, err := tr.Step(context.Background())
				require.NoError(t, err)
				v := seen{loss: r.Loss}
				if look(s) {
					e, err := tr.Evaluate(context.Background())
					require.NoError(t, err)
					v.eval = e.Loss
					v.sha, err = tr.ParamsSHA256()
					require.NoError(t, err)
				}
				list = append(list, v)
			}
			return list
		}
		want := run(c, func(int) bool { return true })
		c.Offload, c.Disk, c.Prefetch, c.offloadChunk = placement, t.TempDir(), 1+i%3, 1024
		p, err := c.planned().Plan(t.Context())
		require.NoError(t, err)
		require.NotNil(t, p.Program.Section("flush"), "%s: the update waits for the next step", placement)
		for name, look := range map[string]func(int) bool{
			"always": func(int) bool { return true }, "at the end": func(s int) bool { return s == c.Steps-1 }, "in between": func(s int) bool { return s%2 == 1 },
		} {
			if !long.Keep(placement+name, 2) {
				continue
			}
			for s, got := range run(c, look) {
				at := fmt.Sprintf("%s, step %d, looking %s", placement, s+1, name)
				require.Equal(t, want[s].loss, got.loss, at)
				if look(s) {
					require.Equal(t, want[s], got, at)
				}
			}
		}
	}
}

// TestPendingUpdatesAreSaved checks that a checkpoint includes the step's own update, so that a
// resumed run has no pending update.
func TestPendingUpdatesAreSaved(t *testing.T) {
	t.Parallel()
	c := tiny("llama-untied")
	c.Ranks, c.Steps, c.Clip, c.LRSchedule, c.Accum = 2, 4, 1, "cosine", 2
	want := runOf(t, c)
	c.Offload, c.Prefetch, c.Checkpoint, c.SaveEvery = "optimizer=host", 1, t.TempDir(), 1
	got := runOf(t, c)
	require.Equal(t, want.losses, got.losses)
	require.Equal(t, want.sha, got.sha)
	c.Resume = true
	for step := c.Steps - 1; step > 0; step-- {
		require.NoError(t, os.RemoveAll(filepath.Join(c.Checkpoint, fmt.Sprintf("step-%08d", step+1))))
		d := c
		d.SaveEvery = c.Steps // saves only at the end; the next iteration removes that checkpoint
		got := runOf(t, d)
		require.Equal(t, want.losses[step:], got.losses)
		require.Equal(t, want.sha, got.sha)
		require.NoError(t, os.RemoveAll(filepath.Join(c.Checkpoint, fmt.Sprintf("step-%08d", c.Steps))))
	}
}

// TestWithoutOverlapTheBitsAreTheSame runs collectives on the compute stream. Bits must be the same
// at every stage and with updates on the host. Touched memory must equal the plan.
func TestWithoutOverlapTheBitsAreTheSame(t *testing.T) {
	t.Parallel()
	for zero := range 4 {
		for _, placement := range []string{"", "optimizer=host"} {
			c := tiny("gpt2")
			c.Ranks, c.Zero, c.Steps, c.Accum, c.Offload = 3, zero, 2, 2, placement
			run := func(overlap string) (losses []float32, sha string) {
				c.Overlap = overlap
				tr, err := c.start(context.Background())
				require.NoError(t, err)
				defer func() { require.NoError(t, tr.Close()) }()
				require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
					losses = append(losses, r.Loss)
					require.Equal(t, r.Planned, r.Peak)
					return nil
				}))
				compute := map[bool]bool{}
				for _, ph := range tr.Plan().Program.Section("step").Phases {
					for _, op := range ph.Ops {
						if op.Kind == graph.AllReduce || op.Kind == graph.AllGather {
							compute[op.Stream == graph.Compute] = true
						}
					}
				}
				require.Equal(t, map[bool]bool{overlap == "off": true}, compute)
				sha, err = tr.ParamsSHA256()
				require.NoError(t, err)
				return losses, sha
			}
			losses, sha := run("on")
			serial, same := run("off")
			require.Equal(t, losses, serial, "stage %d %s", zero, placement)
			require.Equal(t, sha, same, "stage %d %s", zero, placement)
		}
	}
	c := tiny("gpt2")
	c.Overlap, c.Device = "off", "cuda"
	require.ErrorContains(t, c.Validate(), "Config.Overlap off with Config.Device cuda")
	c.Overlap, c.Device = "maybe", "cpu"
	require.ErrorContains(t, c.Validate(), "Config.Overlap")
}
