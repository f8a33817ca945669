package train

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/planner"
)

// TestAClosedTrainerRefuses checks that calls after Close return errClosed, or the error of the
// step that ended the run.
func TestAClosedTrainerRefuses(t *testing.T) {
	ctx := context.Background()
	calls := func(tr *Trainer) map[string]error {
		_, step := tr.Step(ctx)
		_, save := tr.Save(ctx)
		_, evaluate := tr.Evaluate(ctx)
		_, generate := tr.Generate(ctx, "a", 1, Sampling{})
		_, hash := tr.ParamsSHA256()
		name := tr.Parameters()[0]
		shape, values, read := tr.Parameter(name)
		require.Nil(t, shape)
		_, _, sample := tr.Sample(0, 0, 0)
		require.Empty(t, tr.Device())
		return map[string]error{"Sample": sample, "Step": step, "Save": save, "Evaluate": evaluate, "Generate": generate, "ParamsSHA256": hash,
			"Run": tr.Run(ctx, nil), "Parameter": read, "SetParameter": tr.SetParameter(name, values)}
	}
	c := tiny("gpt2")
	c.Batch, c.Seq, c.Steps, c.Tokenizer, c.Generate = 1, 8, 1, "bytes", true
	c.EvalData, c.Checkpoint = c.Data, scratch(t)
	tr, err := c.start(ctx)
	require.NoError(t, err)
	require.NoError(t, tr.Run(ctx, nil))
	require.NoError(t, tr.Close())
	require.NoError(t, tr.Close())
	for name, err := range calls(tr) {
		if name == "Run" && err == nil {
			continue // all steps are done
		}
		require.ErrorIs(t, err, errClosed, name)
	}

	c.Checkpoint, c.LR, c.Steps = "", 1e30, 20
	tr, err = c.start(ctx)
	require.NoError(t, err)
	ended := tr.Run(ctx, nil)
	require.ErrorIs(t, ended, ErrDiverged)
	require.NoError(t, tr.Close())
	for name, err := range calls(tr) {
		require.ErrorIs(t, err, ErrDiverged, name)
	}
}

// TestCallsWithNothing checks that calls without a machine, hardware or job return an error instead
// of a panic.
func TestCallsWithNothing(t *testing.T) {
	ctx := context.Background()
	c := tiny("gpt2")
	_, err := planner.Predict(ctx, c.Config, nil)
	require.ErrorContains(t, err, "no machine is given")
	_, err = planner.Fit(ctx, c.Config, planner.Fixed{}, 0, planner.Hardware{})
	require.ErrorContains(t, err, "the Hardware has no Machine")
	require.Equal(t, c.Ranks, c.Over(nil).Ranks)
	require.Empty(t, planner.Explain(nil))
	require.NoError(t, planner.Passes(ctx, c.Config, nil))

	gone, cancel := context.WithCancel(ctx)
	cancel()
	require.ErrorIs(t, planner.Passes(gone, c.Config, func(string, *graph.Program) error { return errors.New("shown") }), context.Canceled)
}
