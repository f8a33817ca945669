package train

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/internal/testkit/fault"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/train/saving"
)

// TestALostRankEndsTheJob checks that a rank that fails or hangs ends the job on every rank within
// the timeout. The error must name the rank, operation and step. Nothing after the last checkpoint
// is written. By default half of the cases run.
func TestALostRankEndsTheJob(t *testing.T) {
	const timeout, sick = 3 * time.Second, 2 // a busy machine can delay a rank by a second
	modes := map[string]fault.Mode{"fails at launch": fault.AtLaunch, "fails when run": fault.WhenRun, "panics": fault.Panic, "hangs": fault.Hang}
	for _, label := range []string{"h.1.mlp.c_fc", "h.0/all_gather", "h.1/reduce_scatter", "adamw", "tokens/in", "loss/all_reduce"} {
		for name, mode := range modes {
			if !long.Keep(label+" "+name, 2) {
				continue
			}
			t.Run(label+" "+name, func(t *testing.T) {
				t.Parallel()
				c := tiny("gpt2")
				c.Ranks, c.Zero, c.Steps, c.Timeout, c.poison = 4, 3, 100, 20*time.Second, false // a busy machine is slow
				if mode == fault.Hang {
					c.Timeout = timeout
				}
				c.Checkpoint, c.SaveEvery = scratch(t), 1
				var hurt *fault.Context
				c.wrapDevice = func(rank int, ctx device.Context) device.Context {
					if rank != sick {
						return ctx
					}
					// Fail after some launches: steps are done, and more would follow.
					hurt = fault.Wrap(ctx, fault.Plan{Launch: 15, Label: label, Mode: mode})
					return hurt
				}
				tr, err := c.start(context.Background())
				require.NoError(t, err)
				done := make(chan error, 1)
				began := time.Now()
				go func() { done <- tr.Run(context.Background(), nil) }()
				select {
				case err = <-done:
				case <-time.After(30 * time.Second):
					t.Fatal("the job hangs")
				}
				require.True(t, hurt.Fired())
				require.Error(t, err)
				require.Less(t, time.Since(began), timeout+15*time.Second) // generous, because the machine may be busy
				step := tr.Done() + 1
				require.Positive(t, tr.Done(), "it failed before the first step: %v", err)
				t.Log(err)
				require.ErrorContains(t, err, fmt.Sprintf("step %d", step))
				require.ErrorContains(t, err, fmt.Sprint(sick), "the rank")
				if mode == fault.Hang { // the other ranks know the collective in which it is missing
					require.ErrorIs(t, err, comm.ErrTimeout)
					if label == "adamw" { // at stage 3 no collective of the step follows it
						require.ErrorContains(t, err, fmt.Sprintf("rank %d (in operation norm/adamw on stream compute) did not end step %d", sick, step))
					} else {
						require.ErrorContains(t, err, fmt.Sprintf("rank %d did not arrive within %s", sick, timeout))
						require.ErrorContains(t, err, `"only/`)
					}
				} else {
					require.ErrorContains(t, err, fmt.Sprintf("rank %d, step %d", sick, step))
					require.ErrorContains(t, err, "operation ")
					require.ErrorContains(t, err, label)
					require.ErrorContains(t, err, fault.ErrInjected.Error())
				}

				_, again := tr.Step(context.Background())
				require.Equal(t, err, again, "after a failed step nothing runs")
				closed := make(chan error, 1)
				go func() { closed <- tr.Close() }()
				select {
				case <-closed:
				case <-time.After(30 * time.Second):
					t.Fatal("Close hangs")
				}
				list, err := checkpoint.List(c.Checkpoint)
				require.NoError(t, err)
				require.Len(t, list, tr.Done(), "the steps that were done are there")
				m, err := checkpoint.Verify(context.Background(), list[len(list)-1])
				require.NoError(t, err)
				require.Equal(t, tr.Done(), m.Step)
			})
		}
	}
}

// TestNewCleansUp checks that New leaves nothing behind if memory cannot be allocated.
func TestNewCleansUp(t *testing.T) {
	before, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Skip("needs /proc")
	}
	for range 20 {
		c := tiny("gpt2")
		c.Ranks = 3
		c.wrapDevice = func(rank int, ctx device.Context) device.Context {
			if rank == 1 {
				return fault.Wrap(ctx, fault.Plan{Alloc: true})
			}
			return ctx
		}
		_, err := c.start(context.Background())
		require.ErrorIs(t, err, fault.ErrInjected)
		require.ErrorContains(t, err, "rank 1")
	}
	// Ranks are locked to threads; the threads of ended jobs must end.
	require.Eventually(t, func() bool {
		after, err := os.ReadDir("/proc/self/task")
		return err == nil && len(after) < len(before)+30
	}, time.Minute, 50*time.Millisecond)
}

// TestALostRankInASave checks that a rank lost during a save ends the job: the save is not retried
// and no warning says that training continues.
func TestALostRankInASave(t *testing.T) {
	var warned []string
	tr := Trainer{cfg: &resolved{Resolved: &planner.Resolved{}}, at: saving.Progress{Step: 7}, saver: &saving.Saver{}}
	tr.cfg.Warn = func(text string) { warned = append(warned, text) }
	for _, kind := range []error{comm.ErrLost, comm.ErrTimeout, comm.ErrMismatch, comm.ErrAborted} {
		err := tr.goOn(fmt.Errorf("rank 2: %w", kind))
		require.ErrorIs(t, err, kind)
		require.ErrorContains(t, err, "step 7: the checkpoint: rank 2: ")
	}
	require.Empty(t, warned)
	require.NoError(t, tr.goOn(os.ErrPermission))
	require.Len(t, warned, 1)
	require.Contains(t, warned[0], "training goes on")
}
