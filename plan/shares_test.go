package plan

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/precision"
)

// A rank without a micro-batch leaves out what is for the micro-batch, in every round in
// which it has none, and nothing else: each of its other operations reads what is there.
func TestIdleRanksLeaveOutTheMicroBatch(t *testing.T) {
	fwd := forwardOf(t, smallLlama, 1, 16, true)
	for _, layers := range []bool{false, true} {
		cfg := mixed(3, 3)
		cfg.Accum, cfg.Shares, cfg.LayerOrder, cfg.Reproducible, cfg.Int8Reduce, cfg.Precision = 4, []int{2, 4, 1}, layers, true, true, precision.BF16
		p, err := Build(fwd, cfg)
		require.NoError(t, err)
		q := p.Program
		runs := [3]map[int]bool{{}, {}, {}} // by rank: rounds with a product
		rounds := 0
		step := q.SectionOf(graph.SectionStep, graph.FormWhole)
		for i := range step.Phases {
			ph := &step.Phases[i]
			if ph.Kind != graph.MicroPhase {
				continue
			}
			rounds += max(ph.Repeat, ph.MicroBatches())
			for k := range ph.Ops {
				op := &ph.Ops[k]
				for rank := range 3 {
					idle := q.Idle(ph, op, rank)
					if _, together := op.Attr.(graph.GroupAttr); together || op.Pass == graph.Update {
						require.False(t, idle, "%s/%s", ph.Name, op.Name)
					}
					for r := range ph.Repeat {
						if round := ph.Round + r + op.Micro; op.Kind == graph.Linear && op.Pass == graph.Forward {
							require.Equal(t, round >= cfg.Shares[rank], idle, "%s/%s, rank %d, round %d", ph.Name, op.Name, rank, round)
							runs[rank][round] = runs[rank][round] || !idle
						}
					}
				}
			}
		}
		require.Equal(t, 4, rounds)
		for rank, n := range cfg.Shares {
			for round := range 4 {
				require.Equal(t, round < n, runs[rank][round], "rank %d, round %d", rank, round)
			}
		}

		broken := q.Clone()
		step = broken.SectionOf(graph.SectionStep, graph.FormWhole)
		last := &step.Phases[len(step.Phases)-2]
		if layers {
			last = &step.Phases[0]
		}
		for k := range last.Ops { // what was exchanged, from what this rank has not quantised
			if op := &last.Ops[k]; op.Kind == graph.AllToAll && broken.Present(last, op) != nil {
				for j := k + 1; j < len(last.Ops); j++ {
					if sum := &last.Ops[j]; sum.Kind == graph.DequantizeSum && sum.In[0] == op.Out[0].Buf {
						sum.In[0] = op.In[0]
					}
				}
			}
		}
		require.ErrorContains(t, graph.VerifyStructure(broken), "which a rank without a micro-batch has not")

		for _, shares := range [][]int{{4, 4}, {0, 4, 1}, {2, 3, 1}} {
			broken = q.Clone()
			broken.Shares = shares
			require.Error(t, graph.VerifyStructure(broken), "%v", shares)
		}
	}
}
