package plan

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

// The planned extent of device memory is at most 2 % above the largest sum of live bytes. The test
// plans a sixth of the presets, each with one of twelve pairs of stage and recomputation; the long
// form makes all 480 plans.
func TestExtentsAreNearTheBound(t *testing.T) {
	policies := []string{"none", "selective", "full"}
	combos := 4 * len(policies)
	seen := map[int]bool{}
	worst := 0.0
	for i, pr := range model.Presets() {
		if !long.Keep(pr.Name, 6) {
			continue
		}
		m := preset(t, pr.Name)
		fwd := forwardOf(t, m, 4, min(256, m.Positions), true)
		picked := []int{(5 * i) % combos}
		if long.On() {
			picked = picked[:0]
			for k := range combos {
				picked = append(picked, k)
			}
		}
		for _, k := range picked {
			seen[k] = true
			again, err := recompute.Parse(policies[k/4])
			require.NoError(t, err)
			c := Config{Ranks: 4, Stage: zero.Stage(k % 4), Accum: 1, Prefetch: 1, Recompute: again, Optimizer: adamW, Target: graph.CPUTarget()}
			p, err := Build(fwd, c)
			require.NoError(t, err)
			for sp, use := range p.Layout.Spaces {
				if use.LowerBound == 0 {
					continue
				}
				ratio := float64(use.Peak) / float64(use.LowerBound)
				require.GreaterOrEqual(t, ratio, 1.0)
				require.LessOrEqual(t, ratio, 1.02, "%s at stage %d, recompute %s: %s", pr.Name, k%4, policies[k/4], graph.Space(sp))
				worst = max(worst, ratio)
			}
		}
	}
	require.GreaterOrEqual(t, len(seen), combos/6)
	t.Logf("at most %.4f of the bound", worst)
}
