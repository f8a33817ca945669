package shm

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// Whether waiters may spin depends on the job's number of cores. A launched process is bound to its
// ranks' cores and sees no others, so it cannot count them.
func TestWaitersSpinWhereTheJobHasACoreForEachRank(t *testing.T) {
	for cores, want := range map[uint32]bool{1: false, 2: false, 3: true, 64: true} {
		j, err := Create(3)
		require.NoError(t, err)
		require.NotZero(t, j.header().Cores)
		j.header().Cores = cores
		w, err := j.Join([]graph.Axis{{Name: "data", Size: 3}}, []int{1}, Options{})
		require.NoError(t, err)
		require.Equal(t, want, w.spins, "3 ranks on %d cores", cores)
		require.NoError(t, w.Close())
		require.NoError(t, j.Close())
	}
}
