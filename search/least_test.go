package search

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/precision"
)

// prunedJobs are searches on CPUs and GPUs, over stages, micro-batches and both orders.
func prunedJobs(t *testing.T) map[string]func() (*searcher, fitDomain) {
	card, err := gpus.Lookup("a100-40")
	require.NoError(t, err)
	onCard := Hardware{Machine: func(ranks int) *cost.Machine { return card.Machine(ranks) }}
	start := func(of *job, change func(*Spec), hw Hardware, rows int) func() (*searcher, fitDomain) {
		return func() (*searcher, fitDomain) {
			c := of.spec(2, 4, 64)
			change(&c)
			d, err := newFitDomain(&c, Given{Stage: c.Stage != 3}, nil, rows)
			require.NoError(t, err)
			return newSearcher(t.Context(), c, hw.Machine(c.Ranks), true, c.tiers()), d
		}
	}
	gpu := func(s *Spec) { s.Ranks, s.Stage, s.Job.(*job).target = 1, 2, graph.CUDATarget() }
	return map[string]func() (*searcher, fitDomain){
		"CPU":               start(gpt2(2, 64), func(*Spec) {}, CPUHardware(2), 0),
		"CPU, batches":      start(gpt2(2, 64), func(s *Spec) { s.Stage, s.Precision = 1, precision.BF16 }, CPUHardware(2), 16),
		"GPU, batches":      start(gpt2(2, 256), gpu, onCard, 8),
		"CPU, disk, a rank": start(gpt2(2, 64), func(s *Spec) { s.Ranks, s.Stage, s.Disk = 1, 3, true }, CPUHardware(1), 0),
	}
}

// No point of a base takes less than what is said of it without a plan, nor less than the
// classes that leave the device take alone; and what is computed again makes most of what
// is said of it.
func TestBoundsOfTimesHold(t *testing.T) {
	for name, start := range prunedJobs(t) {
		t.Run(name, func(t *testing.T) {
			s, d := start()
			q := newQueue(s)
			rng := rand.New(rand.NewPCG(7, 49))
			bases := d.bases()
			rng.Shuffle(len(bases), func(i, k int) { bases[i], bases[k] = bases[k], bases[i] })
			again, all := 0, 0
			for _, at := range bases[:min(len(bases), 3)] {
				set, err := s.moves(at)
				require.NoError(t, err)
				from := s.measure(s.plain(at, set))
				require.NoError(t, from.err)
				require.NotNil(t, from.least)
				require.Positive(t, from.atOnce)
				b := &bounded{base: at, set: s.priced(at, set, from), from: from}
				points := s.presets(at, b.set)
				for range 15 {
					points = append(points, randomPoint(rng, s.plain(at, b.set)))
				}
				for _, p := range points {
					m := s.measure(p)
					if m.err != nil {
						continue // a class that this stage cannot place
					}
					c, time := s.whole(p), s.perToken(p, m.seconds)
					require.GreaterOrEqual(t, m.rests, from.rests, "%v %v %v", at, c.Recompute, c.Offload)
					require.GreaterOrEqual(t, m.need[graph.Device], from.atOnce, "%v %v %v", at, c.Recompute, c.Offload)
					least := q.atLeast(p, from)
					require.Positive(t, least)
					require.LessOrEqual(t, least, time, "%v %v %v", at, c.Recompute, c.Offload)
					require.LessOrEqual(t, q.cheapest(b, p), time, "%v %v %v", at, c.Recompute, c.Offload)
					require.LessOrEqual(t, q.countsFrom(b, p), time, "%v %v %v", at, c.Recompute, c.Offload)
					all++
					if c.Recompute.Active() && !c.Offload.Active() {
						more := s.perToken(p, from.seconds)
						require.Greater(t, least-q.atLeast(s.plain(at, set), from), 0.5*(time-more), "%v %v", at, c.Recompute)
						again++
					}
				}
			}
			require.Greater(t, all, 40)
			require.GreaterOrEqual(t, again, 6)
		})
	}
}

// randomPoint makes some of the moves of a base, of a kind of activation one at most.
func randomPoint(rng *rand.Rand, p *point) *point {
	taken := map[string]bool{}
	for _, i := range rng.Perm(len(p.x)) {
		mv := &p.set.moves[i]
		of := mv.before + "|" + mv.after + mv.class.String()
		if mv.kind != placeMove {
			of = mv.before + "|" + mv.after
		}
		if !taken[of] && rng.IntN(3) == 0 {
			taken[of], p.x[i] = true, 1
			if mv.kind != placeMove && rng.IntN(2) == 0 {
				p.x[i] = 0.5
			}
		}
	}
	return p
}

// What is left out for what it is sure to take would not have been chosen: a search that
// first looks at every position of every ladder, and all parts and presets that a
// bisection comes to, chooses the same.
func TestLeavingOutChangesNoChoice(t *testing.T) {
	for name, start := range prunedJobs(t) {
		t.Run(name, func(t *testing.T) {
			s, d := start()
			var bases []base // two, so that it takes seconds
			for i, all := 0, d.bases(); i < 2; i++ {
				bases = append(bases, all[i*len(all)/2])
			}
			f, err := predict(t.Context(), s.spec, s.machine, 0, bounds)
			require.NoError(t, err)
			most := f.Plan.Layout.Spaces[graph.Device].LowerBound
			few, many := 0, 0
			chosen := map[string]bool{}
			for i, share := range []float64{0.9, 0.6} {
				caps := [graph.NumSpaces]int64{}
				caps[graph.Device] = int64(share * float64(most))
				if i%2 == 1 {
					caps[graph.Host] = most / 2
				}
				look := func(all bool) (string, int) {
					s, _ := start()
					s.spec.Capacity = caps
					q := newQueue(s)
					q.begin(bases)
					if all {
						q.lookAtAll()
					}
					best, _, _ := q.fastest()
					if best == nil {
						return "", s.tried
					}
					require.NoError(t, best.Plan.Fit())
					return keyOf(&best.Spec), s.tried
				}
				want, n := look(true)
				got, m := look(false)
				require.Equal(t, want, got, "caps %v", caps)
				many, few, chosen[got] = many+n, few+m, true
			}
			require.Greater(t, len(chosen), 1)
			require.Less(t, few, many)
		})
	}
}

// lookAtAll opens all that waits, until points alone do.
func (q *queue) lookAtAll() {
	for {
		k := slices.IndexFunc(q.open, func(w waiting) bool { return w.point == nil })
		if k < 0 {
			return
		}
		w := q.open[k]
		q.open = slices.Delete(q.open, k, k+1)
		if w.climb == nil {
			w.open()
			continue
		}
		q.climb(w.climb, math.Inf(1))
		q.climbed(w.climb)
	}
}
