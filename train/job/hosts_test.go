package job

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/run"
)

// The least is by rank, of hosts that tell.
func TestLeastOf(t *testing.T) {
	for _, c := range []struct {
		all  []run.Hello
		want string
	}{
		{[]run.Hello{{Host: "a"}, {Host: "b"}}, ""},
		{[]run.Hello{{Host: "a", Memory: 100, LocalRanks: 2}, {Host: "a", Memory: 100, LocalRanks: 2}, {Host: "b", Memory: 60, LocalRanks: 1}}, "a"},
		{[]run.Hello{{Host: "a", Memory: 100}, {Host: "b", Memory: 100}, {Host: "b", Memory: 100}}, "b"}, // no launcher says how many
		{[]run.Hello{{Host: "a"}, {Host: "b", Memory: 1}}, "b"},
	} {
		least := leastOf(c.all, 1, func(h run.Hello) int64 { return h.Memory })
		if c.want == "" {
			require.Nil(t, least)
			continue
		}
		require.Equal(t, c.want, least.Host)
	}
}
