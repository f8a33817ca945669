package train

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
)

// TestFrozenCacheWantsEveryMicroBatch checks that a step of several micro-batches uses the cache
// only if it holds the rows of all of them.
func TestFrozenCacheWantsEveryMicroBatch(t *testing.T) {
	t.Parallel()
	for _, order := range []string{"micro", "layer"} {
		c := frozenRun(t, "gpt2", 8, 40) // an epoch is two steps of two micro-batches of two rows
		c.Ranks, c.Accum, c.Steps, c.AccumOrder = 1, 2, 6, order
		want := cachedRun(t, c)
		p, err := c.planned().Plan(t.Context())
		require.NoError(t, err)
		row := int64(c.Seq) * 4
		for i := range p.Program.Params {
			if prm := &p.Program.Params[i]; prm.Name == "wpe.weight" {
				row *= prm.Shape[1]
			}
		}
		for rows, cached := range map[int64][]bool{
			2: {false, false, false, false, false, false}, // the rows of the first micro-batch of the first step
			3: {false, false, false, false, false, false},
			4: {false, false, true, false, true, false},
			8: {false, false, true, true, true, true},
		} {
			c.FrozenCache = config.FrozenCache{Tier: graph.Host, Bytes: rows * row}
			got := cachedRun(t, c)
			require.Equal(t, cached, got.cached, "%s order, %d rows", order, rows)
			require.Equal(t, want.losses, got.losses, "%s order, %d rows", order, rows)
			require.Equal(t, want.sha, got.sha, "%s order, %d rows", order, rows)
		}
	}
}

// TestFrozenCacheWantsEveryRank checks that the cache serves a step only once it has the rows of
// every rank.
func TestFrozenCacheWantsEveryRank(t *testing.T) {
	t.Parallel()
	c := frozenRun(t, "gpt2", 8, 40)
	c.Ranks, c.Accum, c.FrozenCache = 2, 1, config.FrozenCache{Tier: graph.Host, Bytes: 1 << 20}
	tr, err := c.start(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	for rank := range c.Ranks {
		require.False(t, tr.prefix.has(tr.train, &tr.cfg.Config, 0), "the rows of %d ranks", rank)
		require.NoError(t, tr.prefix.take(tr.train, 0, 0, rank, make([]byte, int64(c.Batch)*tr.prefix.row)))
	}
	require.True(t, tr.prefix.has(tr.train, &tr.cfg.Config, 0))
}

// TestInt8GatherLeavesFrozenUnits checks that an int8 gather does not quantize frozen units, which
// have no master copy. Stage 3, which gathers them, must give the bits of stage 0.
func TestInt8GatherLeavesFrozenUnits(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Precision, c.Int8, c.Zero = 2, 3, "bf16", []string{"gather"}, 0
	c.Freeze = []string{"*wte.weight", "*h.0.*"}
	want := runOf(t, c)
	c.Zero = 3
	got := runOf(t, c)
	require.Equal(t, want.losses, got.losses)
	require.Equal(t, want.sha, got.sha)
}
