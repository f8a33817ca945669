package saving

import (
	"testing"

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
