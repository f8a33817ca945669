package search

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// mostFaster is the largest factor by which a plan with less memory may be faster.
const mostFaster = 1.01

// Lower caps never give a plan that is more than 1 % faster. The caps are random, on the device
// and, in some searches, on the host. All searches of a job share their measurements. The long form
// adds jobs with several micro-batches, on GPUs, and of a model that is planned with few layers.
func TestLessMemoryIsNeverFaster(t *testing.T) {
	card, err := gpus.Lookup("a100-40")
	require.NoError(t, err)
	onCard := Hardware{Machine: func(ranks int) *cost.Machine { return card.Machine(ranks) }}
	type searched struct {
		name   string
		of     *job
		change func(*Spec)
		hw     Hardware
		global int
	}
	jobs := []searched{{"all layers", gpt2(2, 256), func(*Spec) {}, CPUHardware(2), 0}}
	if long.On() {
		jobs = append(jobs,
			searched{"batches", gpt2(2, 256), func(s *Spec) { s.Stage = 2 }, CPUHardware(2), 8},
			searched{"a GPU", gpt2(3, 256), func(s *Spec) { s.Stage, s.Job.(*job).target = 2, graph.CUDATarget() }, onCard, 0},
			searched{"one layer on a GPU", gpt2(1, 256), func(s *Spec) { s.Stage, s.Job.(*job).target = 2, graph.CUDATarget() }, onCard, 8},
			searched{"few layers", gpt2(24, 1024), func(s *Spec) { s.Ranks, s.Batch, s.Seq, s.Job.(*job).target = 4, 8, 256, graph.CUDATarget() }, onCard, 0},
		)
	}
	for _, j := range jobs {
		t.Run(j.name, func(t *testing.T) {
			s := j.of.spec(2, 4, 128)
			j.change(&s)
			lessIsNeverFaster(t, s, j.hw, j.global)
		})
	}
}

func lessIsNeverFaster(t *testing.T, c Spec, hw Hardware, global int) {
	d, err := newFitDomain(&c, Given{Stage: c.Stage != 3}, nil, global)
	require.NoError(t, err)
	s := newSearcher(t.Context(), c, hw.Machine(c.Ranks), true, c.tiers())
	from, err := predict(t.Context(), s.spec, s.machine, 0, bounds)
	require.NoError(t, err)
	most := from.Plan.Layout.Spaces[graph.Device].LowerBound
	type outcome struct {
		device, host int64 // caps; host 0: none
		seconds      float64
		flags        string
	}
	rng := rand.New(rand.NewPCG(11, 14))
	var all []outcome
	var spent []int // plans evaluated
	require.NoError(t, s.allow(&hw))
	for i := range long.Of(24, 48, 200) {
		o := outcome{device: most/2 + rng.Int64N(most*3/5)}
		if i%2 == 1 {
			o.host = most/8 + rng.Int64N(most)
		}
		if i%20 > 9 && i >= 20 { // many at the same cap on the device
			o.device = all[i-10-i%10].device
		}
		s.spec.Capacity[graph.Device], s.spec.Capacity[graph.Host] = o.device, o.host
		// As if nothing were known yet.
		s.budget, s.counted, s.lessons = NewBudget(s.effort), map[string]bool{}, map[base]*lessons{}
		if best, _, _, _ := s.fastest(d.bases()); best != nil {
			require.NoError(t, best.Plan.Fit())
			o.seconds, o.flags = 1/best.TokensPerSecond(), keyOf(&best.Spec)
		}
		all, spent = append(all, o), append(spent, s.budget.Used())
	}
	slices.Sort(spent)
	different, none := map[string]bool{}, 0
	worst, bad := 0.0, 0
	for _, a := range all {
		different[a.flags] = true
		if a.seconds == 0 {
			none++
			continue
		}
		for _, b := range all { // has no less
			if b.device < a.device || b.host > 0 && (a.host == 0 || b.host < a.host) {
				continue
			}
			worst = max(worst, b.seconds/a.seconds)
			if b.seconds == 0 || b.seconds > a.seconds*mostFaster {
				bad++
				t.Errorf("caps of %d and %d: %.6g µs a token with %s;\nwith less, %d and %d: %.6g µs with %s", b.device, b.host, b.seconds*1e6, b.flags, a.device, a.host, a.seconds*1e6, a.flags)
			}
		}
	}
	require.Greater(t, len(different), 12, "the caps make a difference")
	t.Logf("worst %.4f, %d of %d pairs over that", worst, bad, len(all)*len(all)/2)
	t.Logf("%d configurations chosen, %d caps with none, %d to %d plans a search, %d in all", len(different), none, spent[0], spent[len(spent)-1], len(s.memo.looks))
}
