package train

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/planner"
)

// leavesOf is the number of micro-batches of a step in the tests below.
const leavesOf = 24

var (
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
		{"lars", func(c *request) { c.Optimizer = "lars" }},
		{"larc", func(c *request) { c.Optimizer = "larc" }},
		{"novograd", func(c *request) { c.Optimizer = "novograd" }},
		{"muon", func(c *request) { c.Optimizer = "muon" }},
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
		{"layer order", func(c *request) {
			c.Model, c.Init, c.AccumOrder = "../testdata/llama-untied", "../testdata/llama-untied", "layer"
		}},
		{"padding", func(c *request) { c.Batch, c.GlobalBatch = 2, 2*leavesOf-1 }},
		{"a frozen beginning", func(c *request) {
			c.Freeze, c.FrozenCache = []string{"*wte.weight", "*wpe.weight", "*h.0.*"}, config.FrozenCache{Tier: graph.Host, Bytes: 1 << 20}
			c.Batch, c.GlobalBatch = 2, 2*leavesOf-1
		}},
		{"llama, untied", func(c *request) { c.Model, c.Init = "../testdata/llama-untied", "../testdata/llama-untied" }},
	}
)

// curve holds the results of each step and the final parameters' hash.
type curve struct {
	losses, norms, evals []string
	sha                  string
}

// curveOf runs c over the given number of ranks. shares are the micro-batches per rank; nil divides
// them as evenly as possible.
func curveOf(t testing.TB, c request, ranks int, shares []int) (o curve) {
	t.Helper()
	c.Ranks, c.RankShares, c.Reproducible = ranks, shares, true
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
		requireTouched(t, tr, r)
		require.Equal(t, tr.Plan().CommBytes*int64(ranks), r.CommBytes, "planned = sent bytes")
		return nil
	}))
	o.sha, err = tr.ParamsSHA256()
	require.NoError(t, err)
	return o
}

// TestOneCurveAtAnyNumberOfRanks checks that losses, norms, evaluations and parameters are the same
// at every number of ranks, with any shares and stage. By default a random half of the features
// have one draw; with SPILLWAY_LONG all have twelve. SPILLWAY_TEST_SEED repeats the seed that a
// failure prints.
func TestOneCurveAtAnyNumberOfRanks(t *testing.T) {
	t.Parallel()
	seed, _ := seedOf(t)
	draws := long.Or(1, 12)
	all := make([]int, len(curveFeatures))
	for f := range all {
		all[f] = f
	}
	for _, f := range long.Sample(seed, len(all)/2, all) {
		feature := curveFeatures[f]
		t.Run(feature.name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, uint64(f)))
			c := tiny("gpt2")
			c.Steps, c.Batch, c.Seq, c.Threads, c.GlobalBatch = 2, 1, 8, 1, leavesOf
			feature.change(&c)
			want := curveOf(t, c, 1, nil)
			require.Len(t, want.losses, c.Steps)
			for range draws {
				d := c
				d.Zero, d.Prefetch = r.IntN(4), r.IntN(3)
				ranks := 2 + r.IntN(leavesOf-1)
				var shares []int
				if r.IntN(2) == 0 {
					shares = randomShares(r, ranks)
				}
				require.Equal(t, want, curveOf(t, d, ranks, shares), "%s=%d: %d ranks, shares %v, stage %d, prefetch %d", seedVariable, seed, ranks, shares, d.Zero, d.Prefetch)
			}
		})
	}
}

// randomShares distributes a step's micro-batches to the ranks at random, at least one to each.
func randomShares(r *rand.Rand, ranks int) []int {
	shares := make([]int, ranks)
	for i := range leavesOf {
		if i < ranks {
			shares[i]++
		} else {
			shares[r.IntN(ranks)]++
		}
	}
	return shares
}

// TestRanksShareAnyNumberOfRows checks that 3 ranks share 1,024 rows as 86, 85 and 85 micro-batches
// of 4. Without Reproducible this is refused.
func TestRanksShareAnyNumberOfRows(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Batch, c.GlobalBatch, c.Reproducible = 3, 4, 1024, true
	r, err := c.planned().Resolve()
	require.NoError(t, err)
	require.Equal(t, []int{86, 85, 85}, r.Shares())
	require.Equal(t, 86, r.Accum)
	require.Equal(t, 1024, r.StepRows())
	c.Reproducible = false
	_, err = c.planned().Resolve()
	var refused *config.FieldError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, []string{"Reproducible"}, refused.Instead)
	require.ErrorContains(t, err, "Config.Reproducible")
}

// TestOneCurveMovesBetweenRanks resumes a run at other numbers of ranks and stages. The losses must
// be those of the run on one rank.
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
		return c
	}
	want := runOf(t, at(c, 1))
	r := rand.New(rand.NewPCG(4, 3))
	var losses []float32
	c.Checkpoint = t.TempDir()
	for i, ranks := range []int{8, 7, 5, 1} {
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

// TestFitKnowsTheSumsOfAReproducibleRun checks that a search plans with the sums that Reproducible
// keeps. Its result must fit within the cap and give the same bits.
func TestFitKnowsTheSumsOfAReproducibleRun(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Batch, c.Seq, c.Ranks, c.GlobalBatch, c.Zero, c.Steps, c.Threads = 1, 8, 2, 5, 0, 1, 1
	peak := func(reproducible bool) int64 {
		d := c
		d.Reproducible, d.GlobalBatch, d.Accum = reproducible, 0, 3
		p, err := d.planned().Plan(t.Context())
		require.NoError(t, err)
		return p.Layout.Spaces[graph.Device].Peak
	}
	require.Greater(t, peak(true), peak(false), "at stage 0 the parts' sums are apart")
	want := curveOf(t, c, 2, nil)
	c.DeviceMemory, c.Reproducible = peak(false), true
	_, err := c.planned().Plan(t.Context())
	require.ErrorContains(t, err, "does not fit")
	best, err := c.planned().Fit(t.Context(), planner.Fixed{}, 0, briefly(1))
	require.NoError(t, err)
	require.True(t, best.Forecast.Config.Reproducible)
	require.LessOrEqual(t, best.Forecast.Plan.Layout.Spaces[graph.Device].Peak, c.DeviceMemory)
	c.Config = best.Forecast.Config
	require.Equal(t, want, curveOf(t, c, 2, nil))
}
