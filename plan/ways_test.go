package plan

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/zero"
)

// The contracts of accumulating, reducing and gathering do not hold before those
// passes have run, and hold behind them, at every stage, of one step and of several.
func TestGradientsGoTheirWay(t *testing.T) {
	fwd := forwardOf(t, model.Config{Family: model.GPT2, Layers: 1, Width: 16, Heads: 2, Vocab: 20, Positions: 8, TiedHead: true}, 1, 8, false)
	for stage := range 4 {
		for _, accum := range []int{1, 3} {
			for _, shards := range []int{0, 2} {
				cfg := Config{Ranks: 4, ShardSize: shards, Stage: zero.Stage(stage), Accum: accum, Optimizer: adamW, Target: graph.CPUTarget()}
				until := func(pass string) *graph.Program {
					p, err := rewrite(Spec{cfg, fwd}, pass)
					require.NoError(t, err)
					return p
				}
				p := until("accumulate")
				require.NoError(t, hold(p, has(ways)))
				require.ErrorContains(t, hold(until("reduce"), has(reduced)), "the program is not reduced")
				p = until("unshard")
				require.NoError(t, hold(p, has(reduced)))
				if stage == 3 {
					require.ErrorContains(t, hold(p, has(gathered)), "is whole, and unit")
				}
				p = until("offload")
				require.NoError(t, hold(p, has(reduced, gathered)))

				// Without its last collective a gradient is not reduced.
				q := p.Clone()
				last := q.SectionOf(graph.SectionStep, graph.FormWhole).LastMicro()
				for i := len(last.Ops) - 1; i >= 0; i-- {
					if k := last.Ops[i].Kind; last.Ops[i].Unit >= 0 && (k == graph.ReduceScatter || k == graph.AllReduce) {
						last.Ops = append(last.Ops[:i], last.Ops[i+1:]...)
						break
					}
				}
				require.ErrorContains(t, hold(q, has(reduced)), "the program is not reduced")

				// A way that does not fit its unit is no program.
				q = p.Clone()
				q.Units[0].Grad.Replicas = 7
				require.ErrorContains(t, graph.VerifyStructure(q), "its gradient goes over mesh axis 7")
			}
		}
	}
}
