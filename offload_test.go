package spillway

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Promise 1: recomputation changes no bit, and each policy needs less device
// memory than the one before it.
func TestRecomputeGivesTheSameBits(t *testing.T) {
	for _, model := range []string{"gpt2", "llama-tied"} {
		for _, ranks := range []int{1, 2, 3} {
			for _, accum := range []int{1, 3} {
				c := tiny(model)
				c.Ranks, c.Accum, c.Steps, c.Reproducible = ranks, accum, 2, true
				if model == "gpt2" {
					c.Dropout = 0.1
				}
				c.Zero = 0
				want := runOf(t, c)
				for zero := range 4 {
					c.Zero = zero
					for _, policy := range []string{"selective", "full", "full:h.0;selective:h.1", "full:model.layers.0,h.1"} {
						c.Recompute = policy
						if policy == "full:h.0;selective:h.1" && model != "gpt2" || policy == "full:model.layers.0,h.1" {
							continue
						}
						got := runOf(t, c)
						require.Equal(t, want.losses, got.losses, "%s, %d ranks, accum %d, stage %d, %s", model, ranks, accum, zero, policy)
						require.Equal(t, want.sha, got.sha, "%s, %d ranks, accum %d, stage %d, %s", model, ranks, accum, zero, policy)
					}
					c.Recompute = ""
				}
			}
		}
	}
}
