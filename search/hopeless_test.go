package search

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/precision"
)

// prunedJobs returns searches on CPUs and GPUs, over stages, micro-batches and both layer orders.
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

// If a job's resting buffers exceed the caps of all memory spaces together, the search evaluates at
// most four plans a base. With one more byte it searches.
func TestWhatCannotFitIsNotSearched(t *testing.T) {
	for name, start := range prunedJobs(t) {
		t.Run(name, func(t *testing.T) {
			s, d := start()
			bases, least := d.bases(), int64(math.MaxInt64)
			for _, b := range bases {
				set, err := s.moves(b)
				require.NoError(t, err)
				m := s.measure(s.plain(b, set))
				require.NoError(t, m.err)
				require.False(t, s.hopeless(m), "without caps")
				least = min(least, m.rests)
			}
			try := func(all int64) (tried int, hopeless bool) {
				s, d := start()
				s.spec.Capacity[graph.Device] = all / 2
				s.spec.Capacity[graph.Host] = all - all/2
				if s.spec.Disk {
					s.spec.Capacity[graph.Disk], s.spec.Capacity[graph.Host] = 1, all-all/2-1
				}
				best, _, _, _ := s.fastest(d.bases())
				require.Nil(t, best, "activations need room too")
				require.False(t, s.nearest().Fits())
				set, err := s.moves(d.bases()[0])
				require.NoError(t, err)
				return s.tried, s.hopeless(s.measure(s.plain(d.bases()[0], set)))
			}
			tried, hopeless := try(least - 1)
			require.True(t, hopeless)
			require.LessOrEqual(t, tried, 4*len(bases))
			more, hopeless := try(least)
			require.False(t, hopeless)
			require.Greater(t, more, tried)
		})
	}
}

// If one operation's buffers exceed the device and no move makes them smaller, the search evaluates
// at most four plans a base, although everything else would fit elsewhere.
func TestWhatNoMoveMakesSmallEnoughIsNotSearched(t *testing.T) {
	for name, start := range prunedJobs(t) {
		t.Run(name, func(t *testing.T) {
			s, d := start()
			bases, most := d.bases(), int64(0)
			for _, b := range bases {
				set, err := s.moves(b)
				require.NoError(t, err)
				most = max(most, s.measure(s.plain(b, set)).atOnce)
			}
			try := func(device int64) (tried int) {
				s, d := start()
				s.spec.Capacity = [graph.NumSpaces]int64{graph.Device: device}
				best, _, _, _ := s.fastest(d.bases())
				require.Nil(t, best)
				require.False(t, s.nearest().Fits())
				return s.tried
			}
			least := try(1)
			require.LessOrEqual(t, least, 4*len(bases))
			require.Greater(t, try(most), least, "%d bytes are enough for each operation by itself", most)
		})
	}
}
