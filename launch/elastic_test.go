package launch

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestTeam(t *testing.T) {
	team := Team{Leaves: 12, Min: 1, Max: 4, Restarts: 1, Processes: 4}
	require.Equal(t, []int{4, 3, 2, 1}, team.Sizes())
	require.False(t, team.Grows(4))
	team.Lose(1)
	require.Equal(t, []int{3, 2, 1}, team.Sizes())
	require.True(t, team.Grows(3), "one joins at the next checkpoint")
	team.Join()
	require.Equal(t, 4, team.Sizes()[0])
	team.Lose(1) // no restart is left
	require.Equal(t, 3, team.Sizes()[0])
	require.False(t, team.Grows(3))

	team = Team{Leaves: 8, Min: 4, Max: 4, Restarts: 3, Processes: 4}
	team.Lose(2)
	require.Equal(t, []int{4}, team.Sizes(), "fewer than the least: those that are started join at once")
	require.Equal(t, 1, team.Restarts)
	team.Lose(2)
	require.Empty(t, team.Sizes())

	team = Team{Leaves: 8, Min: 1, Max: 8, Restarts: 9, Processes: 8}
	team.Lose(1)
	require.Equal(t, 4, team.Sizes()[0], "7, 6 and 5 do not divide 8")
	require.True(t, team.Grows(4))
	team.Uneven = true
	require.Equal(t, 7, team.Sizes()[0])
	require.True(t, team.Grows(7))
	require.Equal(t, 8, (&Team{Leaves: 8, Uneven: true, Min: 1, Max: 9, Processes: 9}).Sizes()[0], "each rank has a micro-batch")
}

// TestTeamEnds applies random losses and joins to random teams. Each loss must use up a process or
// a restart, so that the job ends. Every offered size must be within the limits and divide the
// leaves, unless shares may be uneven.
func TestTeamEnds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 12).Draw(t, "processes")
		least := rapid.IntRange(1, n).Draw(t, "min")
		team := Team{Uneven: rapid.Bool().Draw(t, "uneven"), Leaves: n * rapid.IntRange(1, 6).Draw(t, "accum"), Min: least, Max: n, Restarts: rapid.IntRange(0, 9).Draw(t, "restarts"), Processes: n}
		for losses := 0; len(team.Sizes()) > 0; losses++ {
			require.LessOrEqual(t, losses, 21)
			for _, size := range team.Sizes() {
				require.True(t, team.Uneven || team.Leaves%size == 0)
				require.GreaterOrEqual(t, size, least)
				require.LessOrEqual(t, size, min(n, team.Processes))
			}
			require.LessOrEqual(t, team.Processes+team.Joining, n)
			before := team.Processes + team.Joining + team.Restarts
			team.Lose(rapid.IntRange(1, 3).Draw(t, "lost"))
			require.Less(t, team.Processes+team.Joining+team.Restarts, before)
			if rapid.Bool().Draw(t, "checkpoint") {
				team.Join()
			}
		}
	})
}
