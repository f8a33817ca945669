package train

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/memplan"
	"github.com/spillway-ml/spillway/plan"
)

// tiny returns a run of the reference checkpoint with the given name.
func tiny(model string) request {
	c := request{Config: config.Default().Sharing()} // the runs of a test share plans
	c.Model, c.Init, c.Data, c.Order = "../testdata/"+model, "../testdata/"+model, "../testdata/text.bin", "sequential"
	c.Batch, c.Seq, c.Steps = 2, 40, 20
	c.poison = true
	return c
}

// outcome holds the values that must not depend on stage, placement or recomputation, and the
// planned device peak.
type outcome struct {
	losses []float32
	sha    string
	peak   int64
}

// requireTouched checks that a step touched exactly the planned memory. In layer order, ranks with
// fewer micro-batches than others may touch less.
func requireTouched(t testing.TB, tr *Trainer, r StepResult) {
	t.Helper()
	for sp := range graph.NumSpaces {
		for rank, peak := range r.Peak[sp] {
			planned := tr.Plan().Of(rank).Layout.Spaces[sp]
			require.Equal(t, planned.Peak, r.Planned[sp][rank])
			if shares := tr.cfg.Shares(); tr.cfg.InLayers() && shares != nil && shares[rank] < tr.cfg.Accum {
				require.LessOrEqual(t, peak, planned.Peak, "%s of rank %d, step %d", sp, rank, r.Step)
				continue
			}
			require.Equal(t, planned.Peak, peak, "promise 2: touched peak = plan, %s of rank %d, step %d", sp, rank, r.Step)
			// The token caches of a generating run are touched later. So may be a peak of deferred
			// updates (requireFlushed).
			if !tr.cfg.Generate && !inFlush(planned) {
				require.Equal(t, planned.ByClass, r.Classes[rank][sp], "and so by class, %s of rank %d, step %d", sp, rank, r.Step)
			}
		}
	}
}

// inFlush reports whether a space's peak is in the section that runs deferred updates.
func inFlush(use memplan.SpaceUse) bool {
	return strings.HasPrefix(use.PeakAt, graph.SectionFlush.String()+"/")
}

// requireFlushed checks peaks in deferred updates by class, after these have run.
func requireFlushed(t testing.TB, tr *Trainer) {
	t.Helper()
	for rank, classes := range tr.ranks.Classes() {
		for sp, got := range classes {
			if planned := tr.Plan().Of(rank).Layout.Spaces[sp]; inFlush(planned) {
				require.Equal(t, planned.ByClass, got, "by class after the run, %s of rank %d", graph.Space(sp), rank)
			}
		}
	}
}

func runOf(t testing.TB, c request) outcome {
	t.Helper()
	return runPlanned(t, c, func(*plan.Plan) {})
}

// runPlanned is runOf that calls show with the plan before the first step.
func runPlanned(t testing.TB, c request, show func(*plan.Plan)) outcome {
	t.Helper()
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	show(tr.Plan())
	var o outcome
	require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
		o.losses = append(o.losses, r.Loss)
		requireTouched(t, tr, r)
		var sent int64
		for rank := range c.Ranks {
			sent += tr.Plan().Of(rank).CommBytes
		}
		require.Equal(t, sent, r.CommBytes, "planned = sent bytes")
		return nil
	}))
	o.sha, err = tr.ParamsSHA256()
	require.NoError(t, err)
	requireFlushed(t, tr) // the hash of the parameters has run the deferred updates
	o.peak = tr.Plan().Layout.Spaces[graph.Device].Peak
	return o
}

type reference struct {
	MadeBy string `json:"made_by"`
	Batch  int
	Seq    int
	LR     float64
	Cases  []struct {
		Model  string
		Ranks  int
		Accum  int
		Clip   float64
		Losses []float64
	}
}

func readReference(t testing.TB) (r reference) {
	text, err := os.ReadFile("../testdata/losses.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &r))
	require.NotEmpty(t, r.Cases)
	return r
}

// alternate selects every other reference case so that each model and setting is included.
// TestHalfLossesFollowPyTorch runs the others.
func alternate(i int) bool { return (i+i/2)%2 == 0 }

// TestLossesFollowPyTorch compares 20 losses with PyTorch's on the same weights and tokens
// (testdata/reference.py). By default it runs alternate cases, with SPILLWAY_LONG all.
func TestLossesFollowPyTorch(t *testing.T) {
	t.Parallel()
	for i, want := range readReference(t).Cases {
		if !long.On() && !alternate(i) {
			continue
		}
		t.Run(fmt.Sprintf("%s/%d ranks/accum %d/clip %g", want.Model, want.Ranks, want.Accum, want.Clip), func(t *testing.T) {
			c := tiny(want.Model)
			c.Ranks, c.Accum, c.Clip = want.Ranks, want.Accum, want.Clip
			c.Zero = i / 2 % 4
			got := runOf(t, c)
			require.Len(t, got.losses, len(want.Losses))
			for s := range want.Losses {
				require.InEpsilon(t, want.Losses[s], float64(got.losses[s]), 1e-4, "step %d", s+1)
			}
		})
	}
}

// TestStagesGiveTheSameBits checks that at a given number of ranks all stages, prefetch distances
// and numbers of processors give the same bits.
func TestStagesGiveTheSameBits(t *testing.T) {
	all := []int{1, 2, 3, 4, 5, 8}
	worlds := map[string][]int{"gpt2": long.Or([]int{1, 2, 5, 8}, all), "llama-untied": long.Or([]int{3}, []int{2, 3, 8}),
		"qwen2": {2}, "qwen3": {3}, "olmo2": {2}}
	for model, numbers := range worlds {
		if long.All() {
			numbers = all
		}
		for _, ranks := range numbers {
			c := tiny(model)
			c.Ranks, c.Steps, c.Clip = ranks, 3, 1
			c.Zero = 0
			want := runOf(t, c)
			for zero := range 4 {
				distances := []int{0, 1, 5}
				if zero < 3 { // prefetch matters most at stage 3
					distances = inTurn(ranks+zero, distances)
				}
				for _, prefetch := range distances {
					c.Zero, c.Prefetch = zero, prefetch
					procs := 1 + (zero+prefetch)%2
					before := runtime.GOMAXPROCS(procs)
					got := runOf(t, c)
					runtime.GOMAXPROCS(before)
					require.Equal(t, want.losses, got.losses, "%s, %d ranks, stage %d, prefetch %d", model, ranks, zero, prefetch)
					require.Equal(t, want.sha, got.sha, "%s, %d ranks, stage %d, prefetch %d", model, ranks, zero, prefetch)
				}
			}
		}
	}
}

// TestAccumulationAgreesWithinItsHalves checks that with accumulation stages 0 and 1 agree, and
// stages 2 and 3. Reproducible runs agree at all four.
func TestAccumulationAgreesWithinItsHalves(t *testing.T) {
	t.Parallel()
	for _, ranks := range []int{1, 2, 3} {
		for k, accum := range []int{2, 3, 4} {
			if !long.All() && k != ranks%3 {
				continue
			}
			c := tiny("gpt2")
			c.Ranks, c.Accum, c.Steps, c.Clip = ranks, accum, 3, 0.5
			var plain, reproducible [4]outcome
			for z := range 4 {
				c.Zero, c.Reproducible = z, false
				plain[z] = runOf(t, c)
				c.Reproducible = true
				reproducible[z] = runOf(t, c)
			}
			same := func(a, b outcome, what string) {
				require.Equal(t, a.losses, b.losses, "%s, %d ranks, accum %d", what, ranks, accum)
				require.Equal(t, a.sha, b.sha, "%s, %d ranks, accum %d", what, ranks, accum)
			}
			same(plain[0], plain[1], "stages 0 and 1")
			same(plain[2], plain[3], "stages 2 and 3")
			for z := range 4 {
				same(reproducible[0], reproducible[z], fmt.Sprintf("reproducible stages 0 and %d", z))
			}
		}
	}
}

// TestTheWall checks that a run with a cap equal to the plan's peak gives the same bits. One byte
// less is refused before any allocation.
func TestTheWall(t *testing.T) {
	t.Parallel()
	for zero := range 4 {
		c := tiny("gpt2")
		c.Ranks, c.Zero, c.Steps = 4, zero, 2
		free := runOf(t, c)
		c.DeviceMemory = free.peak
		capped := runOf(t, c)
		require.Equal(t, free.losses, capped.losses)
		require.Equal(t, free.sha, capped.sha)
		c.DeviceMemory--
		_, err := c.start(context.Background())
		require.ErrorContains(t, err, "does not fit")
		require.ErrorContains(t, err, "1 byte over")
	}
}

// TestPeaksFallWithTheStage checks that the planned device peak falls from stage 0 to 1 and from 1
// to 3. This holds for models whose states are larger than two complete units, as all published
// ones are.
func TestPeaksFallWithTheStage(t *testing.T) {
	t.Parallel()
	for i, model := range []string{"spillway-ledger", "gpt2", "llama-3.2-1b", "llama-2-7b"} {
		for _, ranks := range append([]int{2}, inTurn(i, []int{3, 4, 8})...) {
			var peak [4]int64
			for z := range 4 {
				c := tiny("gpt2")
				c.Model, c.Init = model, "random"
				c.Ranks, c.Zero, c.Batch = ranks, z, 1
				p, err := c.planned().Plan(t.Context())
				require.NoError(t, err)
				peak[z] = p.Layout.Spaces[graph.Device].Peak
			}
			require.Greater(t, peak[0], peak[1], "%s at %d ranks", model, ranks)
			require.Greater(t, peak[1], peak[3], "%s at %d ranks", model, ranks)
		}
	}
}

func TestOptimizersAgreeAtEveryStage(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"sgd", "lamb", "lars", "larc", "novograd", "muon"} {
		c := tiny("gpt2")
		c.Ranks, c.Steps, c.Optimizer, c.Clip = 3, 4, name, 1
		var want outcome
		for z := range 4 {
			c.Zero = z
			got := runOf(t, c)
			if z == 0 {
				want = got
				for _, l := range got.losses {
					require.False(t, math.IsNaN(float64(l)), name)
				}
				require.Less(t, got.losses[3], got.losses[0]+0.05, "%s diverges", name)
				continue
			}
			require.Equal(t, want.losses, got.losses, "%s, stage %d", name, z)
			require.Equal(t, want.sha, got.sha, "%s, stage %d", name, z)
		}
	}
}

// TestGenerateAtEveryStage checks that the generated text is the same at every stage, although
// released memory is filled with NaN.
func TestGenerateAtEveryStage(t *testing.T) {
	t.Parallel()
	var want string
	for zero := range 4 {
		c := tiny("gpt2")
		c.Ranks, c.Zero, c.Steps, c.Generate = 2, zero, 2, true
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		require.NoError(t, tr.Run(context.Background(), nil))
		text, err := tr.Generate(context.Background(), "We the", 60, Sampling{Temperature: 0.8, TopK: 40, Seed: 3})
		require.NoError(t, err)
		require.NoError(t, tr.Close())
		if zero == 0 {
			want = text
			require.Greater(t, len(text), len("We the"))
		}
		require.Equal(t, want, text, "stage %d", zero)
	}
}

// TestHeldOutLossIsTheLoss checks that the held-out loss is the mean of the training losses of the
// same rows and weights. For one batch it must be PyTorch's first loss.
func TestHeldOutLossIsTheLoss(t *testing.T) {
	t.Parallel()
	for _, want := range readReference(t).Cases {
		if want.Accum != 1 {
			continue
		}
		c := tiny(want.Model)
		c.Ranks, c.EvalData = want.Ranks, c.Data
		evaluate := func(c request) float32 {
			tr, err := c.start(context.Background())
			require.NoError(t, err)
			defer func() { require.NoError(t, tr.Close()) }()
			held, err := tr.Evaluate(context.Background())
			require.NoError(t, err)
			require.Equal(t, int64(c.EvalSteps*c.Ranks*c.Batch*c.Seq), held.Targets)
			return held.Loss
		}
		c.EvalSteps = 1
		require.InEpsilon(t, want.Losses[0], float64(evaluate(c)), 1e-4, "%s at %d ranks against PyTorch", want.Model, want.Ranks)

		c.EvalSteps, c.Steps, c.LR = 5, 5, 0 // the weights stay
		held := evaluate(c)
		c.EvalData = ""
		mean := 0.0
		for _, l := range runOf(t, c).losses {
			mean += float64(l) / float64(c.Steps)
		}
		require.InEpsilon(t, mean, float64(held), 1e-6, "%s at %d ranks", want.Model, want.Ranks)
	}
}

// TestDropoutGoesBySample checks that dropout masks depend on the sample, not on its rank or
// micro-batch. Any split of the same rows gives the same losses except for rounding.
func TestDropoutGoesBySample(t *testing.T) {
	t.Parallel()
	losses := func(ranks, accum, batch int, seed int64) []float32 {
		c := tiny("gpt2")
		c.Ranks, c.Accum, c.Batch, c.Dropout, c.Steps, c.Seed, c.LR = ranks, accum, batch, 0.3, 4, seed, 1e-4
		return runOf(t, c).losses
	}
	want := losses(1, 1, 4, 1)
	for _, split := range [][3]int{{4, 1, 1}, {2, 1, 2}, {1, 4, 1}, {2, 2, 1}} {
		got := losses(split[0], split[1], split[2], 1)
		for s := range want {
			require.InEpsilon(t, want[s], got[s], 2e-5, "%d ranks, %d micro-batches of %d rows, step %d", split[0], split[1], split[2], s+1)
		}
	}
	other, off := losses(1, 1, 4, 2), 0.0
	for s := range want {
		off = max(off, math.Abs(float64(want[s]-other[s])/float64(want[s])))
	}
	require.Greater(t, off, 1e-3, "another seed shows what other masks are worth")
}
