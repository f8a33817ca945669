//go:build linux

package train

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/testkit/cancel"
)

// TestACanceledContextEndsARun cancels the context at many points of New, Evaluate, Generate, Save
// and Run. Each call must return. Completed steps stay valid, and the next call continues from
// them.
func TestACanceledContextEndsARun(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Batch, c.Seq, c.Steps, c.Zero = 2, 1, 16, 2, 3
	c.EvalData, c.EvalSteps, c.Generate, c.Tokenizer, c.Checkpoint = c.Data, 3, true, "bytes", scratch(t)
	c.AsyncSave = "off"
	run := func(c request, ctx context.Context) error {
		tr, err := c.start(ctx)
		if err == nil {
			err = tr.Close()
		}
		return err
	}
	cancel.Leaves(t, "New", 30, func(ctx context.Context) error { return run(c, ctx) })

	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	cancel.Leaves(t, "Evaluate", 3, func(ctx context.Context) error { _, err := tr.Evaluate(ctx); return err })
	cancel.Leaves(t, "Generate", 4, func(ctx context.Context) error { _, err := tr.Generate(ctx, "a", 4, Sampling{}); return err })
	_, err = tr.Step(context.Background())
	require.NoError(t, err)
	for _, at := range []int64{1, 2} {
		_, err = tr.Save(cancel.At(at))
		require.ErrorIs(t, err, context.Canceled, "Save, at look %d", at)
		saved, err := checkpoint.Scan(c.Checkpoint)
		require.NoError(t, err)
		require.Empty(t, saved, "nothing of it is left")
	}
	_, err = tr.Save(context.Background())
	require.NoError(t, err)
	require.ErrorIs(t, tr.Run(cancel.At(1), nil), context.Canceled)
	require.NoError(t, tr.Run(context.Background(), nil))
	require.Equal(t, 2, tr.Done())

	again := c
	again.Resume, again.Steps = true, 3
	again.Checkpoint = filepath.Join(scratch(t), "copy")
	require.NoError(t, os.CopyFS(again.Checkpoint, os.DirFS(c.Checkpoint)))
	cancel.Leaves(t, "New, resumed", 30, func(ctx context.Context) error { return run(again, ctx) })
}

// TestACanceledContextEndsWork checks that a canceled context ends a process that lends its ranks,
// and ends the job.
func TestACanceledContextEndsWork(t *testing.T) {
	t.Parallel()
	leader, others := joined(t, 2)
	ctx, cancel := context.WithCancel(context.Background())
	ends := make(chan error, 1)
	go func() {
		_, err := Work(ctx, others[0], nil)
		ends <- err
	}()
	c := tiny("gpt2")
	c.Batch, c.Seq, c.Steps = 1, 8, 1000
	c.Config = c.Config.Over(leader)
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	err = tr.Run(context.Background(), func(r StepResult) error {
		if r.Step == 2 {
			cancel()
		}
		return nil
	})
	require.ErrorIs(t, err, ErrLost)
	require.ErrorIs(t, <-ends, context.Canceled)
	_ = tr.Close() // the job is lost

	_, others = joined(t, 2)
	began, err := Work(ctx, others[0], nil)
	require.False(t, began)
	require.True(t, errors.Is(err, context.Canceled), "%v", err)
}
