package plan

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/precision"
)

// In every round in which a rank has no micro-batch, it leaves out exactly the micro-batch's
// operations. Each of its other operations still has its inputs.
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
					idle := q.Idle(step, ph, op, rank)
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
		for k := range last.Ops { // exchanged data that this rank has not quantised itself
			if op := &last.Ops[k]; op.Kind == graph.AllToAll && step.Present(last, op) != nil {
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
			broken.SectionOf(graph.SectionStep, graph.FormWhole).Shares = shares
			require.Error(t, graph.VerifyStructure(broken), "%v", shares)
		}
	}
}

// Step shapes that differ only in the number of rounds share one section; others have their own.
// One plan covers all shapes.
func TestStepsOfSeveralShapes(t *testing.T) {
	fwd := forwardOf(t, smallLlama, 1, 16, true)
	leaves := []int{31, 13, 12, 10, 9, 8, 6, 5, 3}
	for _, prefetch := range []int{0, 1} {
		cfg := mixed(3, 3)
		cfg.Reproducible, cfg.Prefetch = true, prefetch
		for _, n := range leaves {
			cfg.Shapes = append(cfg.Shapes, graph.StepShape{Rounds: (n + 2) / 3, Shares: graph.EvenShares(n, 3)})
		}
		cfg.Accum, cfg.Shares = cfg.Shapes[0].Rounds, cfg.Shapes[0].Shares
		p, err := Build(fwd, cfg)
		require.NoError(t, err)
		got := map[int]string{}
		for i, n := range leaves {
			sec, repeats := p.Program.StepOf(graph.FormWhole, cfg.Shapes[i])
			require.NotNil(t, sec, "%d leaves", n)
			rounds := repeats
			for j := range sec.Phases {
				if ph := &sec.Phases[j]; ph.Kind == graph.MicroPhase && ph.Repeat == 1 {
					rounds++
				}
			}
			require.Equal(t, cfg.Shapes[i].Rounds, rounds, "%d leaves", n)
			got[n] = sec.Name
		}
		require.Equal(t, map[int]string{31: "step", 13: "step", 12: "step-2", 10: "step", 9: "step-3", 8: "step-4", 6: "step-5", 5: "step-6", 3: "step-7"}, got)
		sec, _ := p.Program.StepOf(graph.FormWhole, graph.StepShape{Rounds: 3, Shares: []int{3, 2, 2}})
		require.Nil(t, sec, "7 leaves")
		sec, _ = p.Program.StepOf(graph.FormWhole, graph.StepShape{Rounds: 12, Shares: graph.EvenShares(34, 3)})
		require.Nil(t, sec, "more than the largest")
	}
	cfg := mixed(3, 3)
	cfg.Accum = 2
	cfg.Shapes = []graph.StepShape{{Rounds: 2}, {Rounds: 3}}
	_, err := Build(fwd, cfg)
	require.ErrorContains(t, err, "steps of 3 rounds beside those of 2")
}
