package planner

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
)

// Each option that needs host memory outside the arenas is counted exactly once.
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
	traced := func(steps int) int64 {
		return host(func(c *Request) { c.Trace, c.Steps = "trace.json", steps }) - plain
	}
	require.Positive(t, traced(1))
	require.InEpsilon(t, 2, float64(traced(1000)-traced(500))/float64(traced(500)-traced(250)), 0.25, "each step records as many operations")
	require.Equal(t, traced(1_000_000), traced(2_000_000), "what exceeds the trace is not recorded")
	require.GreaterOrEqual(t, traced(1_000_000), exec.TraceBytes(TraceSpans))
	require.Greater(t, host(func(c *Request) { c.Disk, c.Offload = "d", "optimizer=disk" }), plain+16<<20, "the disk tier's buffers")
	// Ranks of one process share its fixed memory.
	shared := host(func(c *Request) { c.Ranks = 4 })
	require.Less(t, shared, plain/2)
	require.Greater(t, host(func(c *Request) { c.Ranks, c.LocalRanks = 4, 1 }), plain)
}
