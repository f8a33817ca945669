package train

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// watched is a context that is canceled at a look at it.
type watched struct {
	context.Context
	end   context.CancelFunc
	at    int64
	looks atomic.Int64
}

func watchedTo(look int64) *watched {
	l := &watched{at: look}
	l.Context, l.end = context.WithCancel(context.Background())
	return l
}

func (l *watched) Err() error {
	if l.looks.Add(1) >= l.at {
		l.end()
	}
	return l.Context.Err()
}

// leaves cancels a call at its first look at the context, at the second, and in the
// middle of those that it takes when it is left alone.
func leaves(t *testing.T, name string, least int64, call func(context.Context) error) {
	t.Helper()
	whole := watchedTo(math.MaxInt64)
	require.NoError(t, call(whole), name)
	n := whole.looks.Load()
	require.GreaterOrEqual(t, n, least, "%s looks at its context", name)
	for _, at := range []int64{1, min(2, n), max(n/2, 1)} {
		ctx := watchedTo(at)
		require.ErrorIs(t, call(ctx), context.Canceled, "%s, at look %d of %d", name, at, n)
		ctx.end()
	}
	whole.end()
}

// Plans and searches end where their context does, a single plan between its passes.
func TestACanceledContextEndsAPlan(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Batch, c.Seq = 2, 1, 8
	m := cost.CPU(2, 2)
	leaves(t, "Build", 20, func(ctx context.Context) error { _, err := c.plan(ctx); return err })
	leaves(t, "Predict", 20, func(ctx context.Context) error { _, err := c.predict(ctx, m); return err })
	leaves(t, "Passes", 20, func(ctx context.Context) error {
		return Passes(ctx, c.Config, func(string, *graph.Program) error { return nil })
	})
	auto := c
	auto.Batch, auto.Seq, auto.Recompute = 8, 40, "full"
	auto.DeviceMemory = peakOf(t, auto)
	auto.Recompute = "auto"
	leaves(t, "Build, auto", 40, func(ctx context.Context) error { _, err := auto.plan(ctx); return err })
	leaves(t, "Fit", 100, func(ctx context.Context) error { _, err := c.fit(ctx, Fixed{}, 0, CPUHardware(1)); return err })
}

// A run ends where its context does, wherever that is, and what was done stays: after
// a call that was canceled the next one goes on from there.
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
	leaves(t, "New", 30, func(ctx context.Context) error { return run(c, ctx) })

	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	leaves(t, "Evaluate", 3, func(ctx context.Context) error { _, err := tr.Evaluate(ctx); return err })
	leaves(t, "Generate", 4, func(ctx context.Context) error { _, err := tr.Generate(ctx, "a", 4, Sampling{}); return err })
	_, err = tr.Step(context.Background())
	require.NoError(t, err)
	for _, at := range []int64{1, 2} {
		_, err = tr.Save(watchedTo(at))
		require.ErrorIs(t, err, context.Canceled, "Save, at look %d", at)
		saved, err := checkpoint.Scan(c.Checkpoint)
		require.NoError(t, err)
		require.Empty(t, saved, "nothing of it is left")
	}
	_, err = tr.Save(context.Background())
	require.NoError(t, err)
	require.ErrorIs(t, tr.Run(watchedTo(1), nil), context.Canceled)
	require.NoError(t, tr.Run(context.Background(), nil))
	require.Equal(t, 2, tr.Done())

	again := c
	again.Resume, again.Steps = true, 3
	again.Checkpoint = filepath.Join(scratch(t), "copy")
	require.NoError(t, os.CopyFS(again.Checkpoint, os.DirFS(c.Checkpoint)))
	leaves(t, "New, resumed", 30, func(ctx context.Context) error { return run(again, ctx) })
}

// A process that lends its ranks ends with its context, and the job with it.
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
	_ = tr.Close() // of a job that is lost

	_, others = joined(t, 2)
	began, err := Work(ctx, others[0], nil)
	require.False(t, began)
	require.True(t, errors.Is(err, context.Canceled), "%v", err)
}
