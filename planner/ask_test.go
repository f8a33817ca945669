package planner

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
)

// More ranks do not always need less memory each: a unit with fewer blocks than ranks is not
// sharded. For this model 104 ranks need less than 64 or 128, and at 32,768 ranks no unit is
// sharded.
func TestAskLooksAtRanksWithLittlePadding(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(folder, "config.json"), []byte(`{
		"model_type": "llama", "hidden_size": 128, "intermediate_size": 352,
		"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
		 "vocab_size": 256, "max_position_embeddings": 512, "tie_word_embeddings": false}`), 0o600))
	c := Request{Config: config.Default()}
	c.Model, c.Batch, c.Seq, c.Recompute, c.Prefetch, c.Zero, c.Threads = folder, 4, 64, "full", 0, 3, 2
	fixed := Fixed{Zero: true, Prefetch: true, Recompute: true, Offload: true}
	ask := func(device int64) *Answer {
		a, err := Ask(t.Context(), Question{Count: 1 << 15, Easier: true, Ranks: true, Fixed: fixed,
			At: func(i int) (Request, Hardware) {
				q := c
				q.Ranks, q.DeviceMemory = i+1, device
				return q, CPUHardware(2)
			}})
		require.NoError(t, err)
		return a
	}
	found := ask(4_900_000)
	require.NotNil(t, found.Best)
	require.Equal(t, 104-1, found.Value)
	require.Equal(t, 103-1, found.Neighbour)
	none := ask(4_000_000)
	require.Nil(t, none.Best)
	require.Equal(t, 104-1, none.Neighbour)
	require.Less(t, none.None.Smallest.Plan.Layout.Spaces[graph.Device].Peak, int64(4_900_000))

	// A plan for 24 ranks fits, beyond the first few that an answer evaluates. For 23 ranks none is
	// found.
	fixed.Recompute, c.Recompute = false, "none"
	found = ask(4813 << 10)
	require.Equal(t, 24-1, found.Value)
	require.Equal(t, 23-1, found.Neighbour)
	require.NoError(t, found.Best.Plan.Fit())
}
