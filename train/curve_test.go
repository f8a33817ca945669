package train

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/planner"
	"github.com/stretchr/testify/require"
)

// leavesOf is the micro-batches of a step in the tests below.
const leavesOf = 24

var (
	curveWorlds   = []int{1, 2, 3, 4, 6, 8, 12, 24}
	curveFeatures = []struct {
		name   string
		change func(*request)
	}{
		{"plain", func(*request) {}},
		{"recompute full", func(c *request) { c.Recompute = "full" }},
		{"optimizer on disk", func(c *request) { c.Offload = "optimizer=disk" }},
		{"clipping", func(c *request) { c.Clip = 0.3 }},
		{"dropout", func(c *request) { c.Dropout = 0.1 }},
		{"lamb", func(c *request) { c.Optimizer = "lamb" }},
		{"evaluation", func(c *request) { c.EvalData, c.EvalEvery, c.EvalSteps = c.Data, 1, 2 }},
		{"gradients on the host", func(c *request) { c.Offload = "gradients=host,optimizer=host,parameters=host" }},
		{"bf16", func(c *request) { c.Precision = "bf16" }},
		{"bf16, reduce fp32", func(c *request) { c.Precision, c.Reduce = "bf16", "fp32" }},
		{"fp16", func(c *request) { c.Precision = "fp16" }},
		{"8-bit moments", func(c *request) { c.Int8 = []string{"optimizer"} }},
		{"bf16, int8 gather", func(c *request) { c.Precision, c.Int8 = "bf16", []string{"gather"} }},
		{"int8 reduce", func(c *request) { c.Int8 = []string{"reduce"} }},
		{"bf16, int8 gather and reduce", func(c *request) { c.Precision, c.Int8 = "bf16", []string{"gather", "reduce"} }},
		{"fp16, int8 reduce", func(c *request) { c.Precision, c.Int8 = "fp16", []string{"reduce"} }},
		{"bf16, int8 activations and products", func(c *request) { c.Precision, c.Int8 = "bf16", []string{"activations", "matmul"} }},
		{"bf16 moments, stochastic rounding", func(c *request) { c.Precision, c.OptimizerDType, c.StochasticRounding = "bf16", "bf16", true }},
		{"llama, untied", func(c *request) { c.Model, c.Init = "../testdata/llama-untied", "../testdata/llama-untied" }},
	}
)

// curve is what a run computes at each step, and in the end.
type curve struct {
	losses, norms, evals []string
	sha                  string
}

// curveOf runs leavesOf micro-batches a step over so many ranks.
func curveOf(t testing.TB, c request, ranks int) (o curve) {
	t.Helper()
	return curveOver(t, c, ranks, leavesOf)
}

// curveOver is curveOf with another number of micro-batches.
func curveOver(t testing.TB, c request, ranks, leaves int) (o curve) {
	t.Helper()
	c.Ranks, c.Accum, c.Reproducible = ranks, leaves/ranks, true
	if c.Offload != "" {
		c.Disk = scratch(t)
	}
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
		o.losses = append(o.losses, fmt.Sprint(r.Loss))
		o.norms = append(o.norms, fmt.Sprint(r.GradNorm))
		if r.Eval != nil {
			o.evals = append(o.evals, fmt.Sprint(r.Eval.Loss, r.Eval.Targets))
		}
		require.Equal(t, r.Planned, r.Peak, "touched peak = plan")
		require.Equal(t, tr.Plan().CommBytes*int64(ranks), r.CommBytes, "planned = sent bytes")
		return nil
	}))
	o.sha, err = tr.ParamsSHA256()
	require.NoError(t, err)
	return o
}

// One curve: the same losses, norms, evaluations and parameters at every number of
// ranks that divides the step's micro-batches, at every stage, whatever else is on.
// Each feature takes turns over ranks and stages; all of them with SPILLWAY_LONG=all.
func TestOneCurveAtAnyNumberOfRanks(t *testing.T) {
	t.Parallel()
	for f, feature := range curveFeatures {
		t.Run(feature.name, func(t *testing.T) {
			c := tiny("gpt2")
			c.Steps, c.Batch, c.Seq, c.Threads = 2, 1, 8, 1
			feature.change(&c)
			var want curve
			for i, w := range curveWorlds {
				for zero := range 4 {
					turn := (i+f)%4 == zero && (i+f)%3 == 0
					if !long.All() && !turn || w == 1 && zero > 0 {
						continue
					}
					d := c
					d.Zero, d.Prefetch = zero, (zero+i)%3
					got := curveOf(t, d, w)
					if want.sha == "" {
						want = got
						require.Len(t, got.losses, c.Steps)
					}
					require.Equal(t, want, got, "%d ranks, stage %d", w, zero)
				}
			}
		})
	}
}

// A run that moves between numbers of ranks at any steps, and between stages, is the run
// on one rank.
func TestOneCurveMovesBetweenRanks(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Steps, c.Batch, c.Seq, c.Threads, c.Clip, c.Dropout, c.Zero = 8, 1, 8, 1, 0.5, 0.1, 3
	c.GlobalBatch = leavesOf
	at := func(c request, ranks int) request {
		c.Ranks, c.Reproducible = ranks, true
		var err error
		c.Config, err = c.FollowGlobalBatch(false)
		require.NoError(t, err)
		require.Equal(t, leavesOf/ranks, c.Accum)
		return c
	}
	want := runOf(t, at(c, 1))
	r := rand.New(rand.NewPCG(4, 3))
	var losses []float32
	c.Checkpoint = t.TempDir()
	for i, ranks := range []int{4, 3, 8, 1} {
		part := at(c, ranks)
		part.Zero, part.Resume = (i+3)%4, i > 0
		part.Steps = c.Steps
		if i < 3 {
			part.Steps = len(losses) + 1 + r.IntN(2)
		}
		losses = append(losses, runOf(t, part).losses...)
		if i == 3 {
			tr, err := part.start(context.Background())
			require.NoError(t, err)
			sha, err := tr.ParamsSHA256()
			require.NoError(t, errors.Join(err, tr.Close()))
			require.Equal(t, want.sha, sha)
		}
	}
	require.Equal(t, want.losses, losses)
}

// Where each rank's shard begins and ends, and how much padding it has, depends on the
// number of ranks; nothing else does, with any optimizer that has norms of its own.
func TestOneCurveOverOddShards(t *testing.T) {
	t.Parallel()
	for i, optimizer := range []string{"lars", "novograd", "larc"} {
		c := tiny("gpt2")
		c.Steps, c.Batch, c.Seq, c.Threads, c.Clip, c.Optimizer, c.Zero = 2, 1, 8, 1, 0.5, optimizer, 3
		var want curve
		for _, ranks := range []int{1, 5, 7} {
			got := curveOver(t, c, ranks, 35)
			if want.sha == "" {
				want = got
			}
			require.Equal(t, want, got, "%s, %d ranks, case %d", optimizer, ranks, i)
		}
	}
}

// A search within a cap plans with the sums that the flag keeps: what it chooses fits as
// it runs, and still has the bits of every other placement.
func TestFitKnowsTheSumsOfAReproducibleRun(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Batch, c.Seq, c.Ranks, c.Accum, c.Zero, c.Steps, c.Threads = 1, 8, 2, 2, 0, 1, 1
	peak := func(reproducible bool) int64 {
		d := c
		d.Reproducible = reproducible
		p, err := d.planned().Plan(t.Context())
		require.NoError(t, err)
		return p.Layout.Spaces[graph.Device].Peak
	}
	require.Greater(t, peak(true), peak(false), "at stage 0 the parts' sums are apart")
	want := curveOver(t, c, 2, 4)
	c.DeviceMemory, c.Reproducible = peak(false), true
	_, err := c.planned().Plan(t.Context())
	require.ErrorContains(t, err, "does not fit")
	best, err := c.planned().Fit(t.Context(), planner.Fixed{}, 0, planner.CPUHardware(1))
	require.NoError(t, err)
	require.True(t, best.Forecast.Config.Reproducible)
	require.LessOrEqual(t, best.Forecast.Plan.Layout.Spaces[graph.Device].Peak, c.DeviceMemory)
	c.Config = best.Forecast.Config
	require.Equal(t, want, curveOver(t, c, 2, 4))
}
