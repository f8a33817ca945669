package planner

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// Each option that takes host memory outside the arenas is counted, once.
func TestOutsideCountsEachOption(t *testing.T) {
	host := func(change func(*Request)) int64 {
		c := tiny("gpt2")
		change(&c)
		p, err := c.Plan(t.Context())
		require.NoError(t, err)
		require.Zero(t, p.Config.Outside[graph.Disk])
		return p.Config.Outside[graph.Host]
	}
	plain := host(func(*Request) {})
	require.GreaterOrEqual(t, plain, int64(processOutside))
	require.Equal(t, plain+100<<20, host(func(c *Request) { c.Outside[graph.Host] = 100 << 20 }))
	require.Equal(t, plain+64<<20, host(func(c *Request) { c.Disk, c.DiskCache = "d", 64<<20 }))
	require.Equal(t, plain+tokenizerOutside, host(func(c *Request) { c.Tokenizer = "GPT2" }))
	require.Greater(t, host(func(c *Request) { c.Trace = "trace.json" }), plain+1<<20)
	require.Greater(t, host(func(c *Request) { c.Disk, c.Offload = "d", "optimizer=disk" }), plain+16<<20, "the disk tier's buffers")
	// Ranks of a process share what there is once.
	shared := host(func(c *Request) { c.Ranks = 4 })
	require.Less(t, shared, plain/2)
	require.Greater(t, host(func(c *Request) { c.Ranks, c.LocalRanks = 4, 1 }), plain)
}
