package planner

import (
	"context"
	"testing"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/cancel"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// Plans and searches return when their context is canceled. A single plan checks it between its
// passes.
func TestACanceledContextEndsAPlan(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Batch, c.Seq = 2, 1, 8
	m := cost.CPU(2, 2)
	cancel.Leaves(t, "Build", 20, func(ctx context.Context) error { _, err := c.Plan(ctx); return err })
	cancel.Leaves(t, "Predict", 20, func(ctx context.Context) error { _, err := c.Predict(ctx, m); return err })
	cancel.Leaves(t, "Passes", 20, func(ctx context.Context) error {
		return Passes(ctx, c.Config, func(string, *graph.Program) error { return nil })
	})
	auto := c
	auto.Batch, auto.Seq, auto.Recompute = 8, 40, "full"
	auto.DeviceMemory = peakOf(t, auto)
	auto.Recompute = "auto"
	cancel.Leaves(t, "Build, auto", 40, func(ctx context.Context) error { _, err := auto.Plan(ctx); return err })
	cancel.Leaves(t, "Fit", 100, func(ctx context.Context) error { _, err := c.Fit(ctx, Fixed{}, 0, fewPlans()); return err })
}
