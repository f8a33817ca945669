package job

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/run"
)

// TestLeastOf checks that the host with the least memory per rank is returned, among hosts that
// report their memory.
func TestLeastOf(t *testing.T) {
	for _, c := range []struct {
		all  []run.Hello
		want string
	}{
		{[]run.Hello{{Host: "a"}, {Host: "b"}}, ""},
		{[]run.Hello{{Host: "a", Memory: 100, LocalRanks: 2}, {Host: "a", Memory: 100, LocalRanks: 2}, {Host: "b", Memory: 60, LocalRanks: 1}}, "a"},
		{[]run.Hello{{Host: "a", Memory: 100}, {Host: "b", Memory: 100}, {Host: "b", Memory: 100}}, "b"}, // without LocalRanks from a launcher, the ranks of a host are counted
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
