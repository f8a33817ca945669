package plan

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/zero"
)

// At every stage, with one or several micro-batches, gradients are not reduced before pass reduce
// and are reduced after it. At stage 3 parameters are not gathered before pass unshard; after it
// they are, at every stage.
func TestGradientsGoTheirWay(t *testing.T) {
	fwd := forwardOf(t, model.Config{Family: model.GPT2, Layers: 1, Width: 16, Heads: 2, Vocab: 20, Positions: 8, TiedHead: true}, 1, 8, false)
	for stage := range 4 {
		for _, accum := range []int{1, 3} {
			for _, shards := range []int{0, 2} {
				cfg := Config{Ranks: 4, ShardSize: shards, Stage: zero.Stage(stage), Accum: accum, Optimizer: adamW, Target: graph.CPUTarget()}
				until := func(pass string) *graph.Program {
					p, err := rewrite(Spec{cfg, fwd}, fwd.Train, "", pass)
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

				// VerifyStructure refuses a gradient's path that does not fit its unit.
				q = p.Clone()
				q.Units[0].Grad.Replicas = 7
				require.ErrorContains(t, graph.VerifyStructure(q), "its gradient goes over mesh axis 7")
			}
		}
	}
}

// Every update reads one set of scalars: the step's, or, for an update on the host that waits for
// the norm, a set that the next step does not overwrite.
func TestRulesReadTheirScalars(t *testing.T) {
	fwd := forwardOf(t, model.Config{Family: model.GPT2, Layers: 1, Width: 16, Heads: 2, Vocab: 20, Positions: 8}, 1, 8, false)
	for _, name := range zero.OptimizerNames() {
		cfg := Config{Ranks: 2, Stage: 2, Accum: 1, Prefetch: 1, Clip: 1, Optimizer: adamW, Target: graph.CPUTarget()}
		cfg.Optimizer.Name = name
		cfg.Offload.Optimizer = graph.Host
		p, err := rewrite(Spec{cfg, fwd}, fwd.Train, "", "offload")
		require.NoError(t, err)
		require.Len(t, p.Scalars, 1)
		require.NoError(t, hold(p, has(scalars)))
		q, err := rewrite(Spec{cfg, fwd}, fwd.Train, "", "sweep")
		require.NoError(t, err)
		require.Len(t, q.Scalars, 2, name)
		require.NotEqual(t, q.Scalars[0].Hyper, q.Scalars[1].Hyper)
		require.Equal(t, graph.LifeRun, q.Buf(q.Scalars[1].Hyper).Life, "they wait for the next step")
		require.Equal(t, graph.LifeRun, q.Buf(q.Scalars[1].Coef).Life)

		// An update that reads the rate of one set and the coefficient of another is refused.
		mixed := p.Clone()
		mixed.Scalars[0].Hyper = mixed.AddBuffer(*mixed.Buf(mixed.Scalars[0].Hyper))
		require.ErrorContains(t, hold(mixed, has(scalars)), "must read one of the 1 sets of scalars")
	}
}
