package train

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// peakOf returns the planned peak of device memory without a cap.
func peakOf(t *testing.T, c request) int64 {
	t.Helper()
	p, _, err := c.build(context.Background())
	require.NoError(t, err)
	return p.Layout.Spaces[graph.Device].Peak
}

// TestAutoGivesTheSameBits checks that Recompute "auto" gives the same bits as the uncapped run. It
// varies the ZeRO stage, the number of ranks and the memory cap.
func TestAutoGivesTheSameBits(t *testing.T) {
	t.Parallel()
	for i, name := range []string{"gpt2", "llama-untied"} {
		for _, ranks := range []int{1, 2} {
			c := tiny(name)
			c.Ranks, c.Steps, c.Reproducible, c.Accum = ranks, 2, true, 2
			want := runOf(t, c)
			for _, zero := range stagesInTurn(i + ranks) {
				c.Zero, c.Recompute, c.DeviceMemory = zero, "full", 0
				least := peakOf(t, c)
				c.Recompute = "none"
				c.DeviceMemory = least + (peakOf(t, c)-least)*int64(zero)/4
				c.Recompute = "auto"
				got := runOf(t, c)
				require.Equal(t, want.losses, got.losses, "%s, %d ranks, stage %d", name, ranks, zero)
				require.Equal(t, want.sha, got.sha, "%s, %d ranks, stage %d", name, ranks, zero)
			}
		}
	}
}
