package jobs

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/internal/rollcall"
	"github.com/spillway-ml/spillway/launch"
)

func TestSurvivorsRefusals(t *testing.T) {
	over := func(transport string, min, world int, ck string) error {
		p := &Place{Transport: transport, Min: min}
		p.Env.World = world
		return p.refuseSurvivors(&spillway.Config{Checkpoint: ck})
	}
	require.NoError(t, over(cluster.InProc, 0, 1, ""))
	require.NoError(t, over(cluster.NCCL, 2, 2, "ck"))
	for _, transport := range []string{cluster.InProc, cluster.SHM, cluster.MPI} {
		require.ErrorContains(t, over(transport, 1, 2, "ck"), "spillway launch --min-ranks M")
	}
	require.ErrorContains(t, over(cluster.NCCL, -1, 2, "ck"), "--min-ranks -1: at least 1 rank goes on")
	require.ErrorContains(t, over(cluster.NCCL, 1, 2, ""), "--min-ranks needs --checkpoint")
	require.ErrorContains(t, over(cluster.NCCL, 3, 2, "ck"), "--min-ranks 3 is over the job's 2 processes")
}

// If the remaining ranks do not divide a job's step, fewer continue, unless they share it unevenly.
// With shard groups, complete groups continue.
func TestSurvivorsDecide(t *testing.T) {
	for _, c := range []struct {
		leaves, min, shard int
		here, lost         []int
		want               []int // nil: the job ends
		uneven             bool
	}{
		{6, 1, 1, []int{0, 2}, []int{1}, []int{0, 2}, false},
		{6, 1, 1, []int{0, 2, 3, 5}, []int{1, 4}, []int{0, 2, 3}, false},
		{6, 1, 1, []int{0, 2, 3, 5}, []int{1, 4}, []int{0, 2, 3, 5}, true},
		{24, 1, 1, []int{0, 1, 2, 4, 5, 6, 7}, []int{3}, []int{0, 1, 2, 4, 5, 6, 7}, true},
		{8, 1, 2, []int{0, 1, 3}, []int{2}, []int{0, 1}, false},
		{8, 2, 4, []int{0, 1, 3}, []int{2}, nil, false},
		{8, 3, 1, []int{0, 1}, []int{2}, nil, false},
		{8, 3, 1, []int{0, 1}, []int{2}, nil, true},
		{8, 1, 1, []int{0, 1}, nil, nil, false},
	} {
		s := &survivors{p: &Place{Min: c.min}, step: launch.Team{Leaves: c.leaves, Uneven: c.uneven, Min: c.min}, shard: c.shard}
		v := s.decide(c.here, c.lost)
		require.Equal(t, rollcall.Verdict{On: c.want != nil, Go: c.want, Why: v.Why}, v)
	}
}
