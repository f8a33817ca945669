package saving

import (
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/stretchr/testify/require"
)

func TestSaves(t *testing.T) {
	for _, c := range []struct{ steps, every, done, want int }{
		{10, 0, 0, 1}, {10, 0, 9, 1}, {10, 0, 10, 0}, {10, 3, 0, 4}, {10, 3, 3, 3}, {10, 3, 4, 3}, {10, 5, 0, 2}, {10, 20, 0, 1}, {10, 3, 11, 0},
	} {
		cfg := config.Config{Steps: c.steps, SaveEvery: c.every}
		require.Equal(t, int64(c.want), saves(&cfg, c.done), "%+v", c)
	}
}

// TestALastSaveThatFails checks that the error of a failed last save names the newest checkpoint,
// and for a full disk the remedy.
func TestALastSaveThatFails(t *testing.T) {
	last := &checkpoint.Entry{Step: 280}
	full := fmt.Errorf("save checkpoint of step 300 in ck: %w", syscall.ENOSPC)
	for _, c := range []struct {
		err  error
		last *checkpoint.Entry
		want string
	}{
		{full, last, "; the newest checkpoint is of step 280: free room there, then go on from it with Config.Resume"},
		{errors.New("rank 1: " + full.Error()), nil, "; nothing is saved: free room there, then start again"},
		{errors.New("odd"), last, "; the newest checkpoint is of step 280: " +
			"remove the cause, then go on from it with Config.Resume"},
	} {
		got := lost(c.err, c.last)
		require.EqualError(t, got, c.err.Error()+c.want)
		require.ErrorIs(t, got, c.err)
	}
}
