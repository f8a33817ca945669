package search

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
)

// No combination of stage, prefetch, recomputation policy and complete offload classes both fits
// and is faster than the plan that Fit finds buffer by buffer. Running Fit again gives the same
// plan.
func TestFitIsAsFastAsAnyWholeChoice(t *testing.T) {
	c, hw := gpt2(2, 256).spec(2, 4, 128), CPUHardware(2)
	c.Capacity[graph.Device] = 22 << 20
	got, err := Fit(t.Context(), c, Given{}, nil, 0, hw)
	require.NoError(t, err)
	require.True(t, got.Fits())
	require.NoError(t, got.Plan.Fit())
	faster, slower := 0, 0
	for z := range 4 {
		for p := range 2 {
			for _, r := range []recompute.Options{{}, policyOf(recompute.Selective), policyOf(recompute.Full)} {
				for _, o := range wholePlacements {
					one := c
					one.Stage, one.Prefetch, one.Recompute, one.Offload = z, p, r, resting(o, graph.Host)
					f, err := predict(t.Context(), one, hw.Machine(2), 0, bounds)
					if err != nil { // a class that this stage cannot place
						require.ErrorContains(t, err, "offload")
						continue
					}
					if f.TokensPerSecond()*(1-1e-9) <= got.TokensPerSecond() {
						slower++
						continue
					}
					faster++
					f, err = predict(t.Context(), one, hw.Machine(2), 0, early) // an error if a bound exceeds a cap
					require.False(t, err == nil && f.Fits(), "stage %d, prefetch %d, %v, %v fits and is faster", z, p, r, o)
				}
			}
		}
	}
	require.Positive(t, faster)
	require.Positive(t, slower)
	again, err := Fit(t.Context(), c, Given{}, nil, 0, hw)
	require.NoError(t, err)
	require.Equal(t, keyOf(&got.Spec), keyOf(&again.Spec))
	require.Len(t, again.RunnersUp, len(got.RunnersUp))
	for i, u := range got.RunnersUp {
		require.GreaterOrEqual(t, u.Slower, 1.0, "what fits too is faster than the fastest")
		require.Equal(t, keyOf(&u.Spec), keyOf(&again.RunnersUp[i].Spec))
	}
}

// The test caps device memory at the peak with every class offloaded and everything recomputed. Fit
// must find a plan there that is at least as fast.
func TestFitFindsAllClassesTogether(t *testing.T) {
	c, hw := gpt2(2, 64).spec(1, 4, 64), CPUHardware(1)
	least := c
	least.Prefetch, least.Recompute, least.Offload = 0, policyOf(recompute.Full), resting(wholePlacements[len(wholePlacements)-1], graph.Host)
	f, err := Predict(t.Context(), least, hw.Machine(1))
	require.NoError(t, err)
	c.Capacity[graph.Device] = f.Plan.Layout.Spaces[graph.Device].Peak
	got, err := Fit(t.Context(), c, Given{}, nil, 0, hw)
	require.NoError(t, err)
	require.True(t, got.Fits())
	require.GreaterOrEqual(t, got.TokensPerSecond(), f.TokensPerSecond()*(1-1e-9))
}

// The search plans a deep model with few layers and extrapolates. Its memory and time must match
// the plan of all layers within the search's margins.
func TestExtrapolationOverLayers(t *testing.T) {
	for _, change := range []func(*Spec){
		func(*Spec) {},
		func(c *Spec) { c.Stage, c.Accum = 1, 3 },
		func(c *Spec) { c.Recompute, c.Prefetch = policyOf(recompute.Full), 0 },
		func(c *Spec) { c.Recompute, c.Precision = policyOf(recompute.Selective), precision.BF16 },
		func(c *Spec) { c.Offload = resting([]graph.Class{graph.Optimizer, graph.Activations}, graph.Host) },
	} {
		c := gpt2(36, 128).spec(4, 2, 128)
		change(&c)
		hw := Hardware{Machine: func(int) *cost.Machine { return cost.CPU(2, 4) }}
		s := newSearcher(t.Context(), c, hw.Machine(4), false, nil)
		require.True(t, s.folded)
		p := c.asPoint()
		m := s.extrapolate(&p)
		require.NoError(t, m.err)
		whole, err := Predict(t.Context(), c, hw.Machine(4))
		require.NoError(t, err)
		for sp, n := range m.need {
			bound := whole.Plan.Layout.Spaces[sp].LowerBound + whole.Plan.Config.Outside[sp]
			require.LessOrEqual(t, float64(n), foldedSlack*float64(bound), "%v: what fits would be left out", graph.Space(sp))
			require.GreaterOrEqual(t, float64(n), 0.95*float64(bound), "%v", graph.Space(sp))
		}
		require.InEpsilon(t, whole.Step.Seconds, m.seconds, 0.02)
	}
}

// Several kinds of activations, each parked in part, share one link. Alone, each copy is hidden
// behind the forward; together they are not. The estimate from few layers must include this.
func TestExtrapolationOfSeveralParts(t *testing.T) {
	t.Parallel()
	j := drawJob(t, 98) // 36 layers
	s := newSearcher(t.Context(), j.spec, j.hw.Machine(j.spec.Ranks), true, j.spec.tiers())
	require.True(t, s.folded)
	b := j.spec.asBase()
	set, err := s.moves(b)
	require.NoError(t, err)
	p := s.plain(b, set)
	layers := map[string]float64{".ln_1": 33, ".attn": 31, ".attn.add": 33, ".ln_2": 30, ".mlp.add": 33}
	for i := range set.moves {
		mv := &set.moves[i]
		switch n := layers[mv.after]; {
		case mv.kind == parkMove && mv.space == graph.Host && n > 0:
			p.x[i] = n / 36
		case mv.kind == dropMove && (mv.after == ".mlp.act" || mv.after == ".mlp.c_fc"):
			p.x[i] = 1
		}
	}
	m := s.measure(p)
	require.NoError(t, m.err)
	whole, err := predict(t.Context(), s.whole(p), s.machine, 0, bounds)
	require.NoError(t, err)
	require.InEpsilon(t, whole.Step.Seconds, m.seconds, 0.02)
	use := whole.Plan.Layout.Spaces[graph.Host]
	require.InEpsilon(t, use.LowerBound+whole.Plan.Config.Outside[graph.Host], m.need[graph.Host], 0.02)
}

// If host memory has no room for all classes, it goes to the class that frees the most device
// memory, not to the classes that a step reads most often. Two drawn jobs fit only that way.
func TestLittleHostMemoryGoesToWhatFreesMost(t *testing.T) {
	t.Parallel()
	for _, n := range []int{46, 75} {
		j := drawJob(t, n)
		fits, _, err := Feasible(t.Context(), j.spec, Given{}, 0, j.hw)
		require.NoError(t, err)
		require.True(t, fits, j.name)
	}
}

// Recomputing everything may need more memory than keeping some of it. Just below the peak of full
// recomputation, Fit and Feasible find a plan that recomputes less.
func TestFitWithLessThanFullRecomputation(t *testing.T) {
	t.Parallel()
	c, hw := gpt2(4, 64).spec(16, 4, 128), CPUHardware(2)
	c.Prefetch, c.Recompute = 0, policyOf(recompute.Full)
	full, err := Predict(t.Context(), c, hw.Machine(c.Ranks))
	require.NoError(t, err)
	c.Capacity[graph.Device] = full.Plan.Layout.Spaces[graph.Device].Peak * 995 / 1000
	given := Given{Offload: true, Stage: true, Prefetch: true}
	got, err := Fit(t.Context(), c, given, nil, 0, hw)
	require.NoError(t, err)
	require.True(t, got.Fits())
	ok, _, err := Feasible(t.Context(), c, given, 0, hw)
	require.NoError(t, err)
	require.True(t, ok)
}

// If everything fits on the device, the search recomputes nothing and evaluates fewer than 100
// plans.
func TestRoomForEverythingTakesFewPlans(t *testing.T) {
	t.Parallel()
	card, err := gpus.Lookup("a100-40")
	require.NoError(t, err)
	hw := Hardware{Machine: func(ranks int) *cost.Machine { return card.Machine(ranks) }}
	c := gpt2(24, 256).spec(8, 4, 128)
	c.Job.(*job).target, c.Capacity[graph.Device] = graph.CUDATarget(), 38<<30
	got, err := Fit(t.Context(), c, Given{}, nil, 0, hw)
	require.NoError(t, err)
	require.False(t, got.Spec.Recompute.Active(), "%v", got.Spec.Recompute)
	require.Less(t, got.Tried, 100)
}
