package plan

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/interp"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/zero"
)

// withSmallUnits is a model whose positions (one block of 256 elements) have fewer blocks than
// ranks. On 6 ranks this also holds for the embedding (4) and the final norm (2), but not for the
// layer.
var withSmallUnits = model.Config{Family: model.GPT2, Layers: 1, Width: 16, Heads: 2, Vocab: 60, Positions: 8, TiedHead: true}

// At every stage a small unit is complete on every rank, without padding for shards. No section
// gathers any of it.
func TestSmallUnitsStayWhole(t *testing.T) {
	fwd := forwardOf(t, withSmallUnits, 1, 8, true)
	for _, n := range []int{2, 6} {
		for stage := range zero.Stage(4) {
			for _, accum := range []int{1, 3} {
				for _, prec := range []precision.Precision{precision.FP32, precision.BF16} {
					what := fmt.Sprintf("%d ranks, stage %d, accum %d, %v", n, stage, accum, prec)
					p, err := Build(fwd, Config{Ranks: n, Stage: stage, Accum: accum, Prefetch: 1, Clip: 1, Optimizer: adamW, Target: graph.CPUTarget(), Precision: prec, Verify: true})
					require.NoError(t, err, what)
					q := p.Program
					small := 0
					for u := range q.Units {
						unit := &q.Units[u]
						if !tooSmall(unit, n) {
							continue
						}
						small++
						require.Equal(t, map[int]int64{2: 256, 6: (blocksOf(unit) + 2) / 3 * 768}[n], unit.FlatLen, what)
						for _, s := range append([]graph.State{unit.Value, unit.Compute}, unit.States...) {
							require.Equal(t, -1, s.Axis, "%s: %s of %s", what, s.Name, unit.Name)
						}
						require.False(t, unit.Grad.Parted, what)
						require.Zero(t, countOps(q, u, graph.AllGather)+countOps(q, u, graph.ReduceScatter), "%s: %s", what, unit.Name)
						require.Positive(t, countOps(q, u, graph.AllReduce), "%s: %s", what, unit.Name)
					}
					require.Equal(t, map[int]int{2: 1, 6: 3}[n], small, what)
				}
			}
		}
	}
}

// blocksOf counts the blocks of 256 elements of a unit; each parameter starts a new block.
func blocksOf(u *graph.Unit) (n int64) {
	for _, s := range u.Segments {
		n += (s.Len + 255) / 256
	}
	return n
}

func tooSmall(u *graph.Unit, ranks int) bool { return blocksOf(u) < int64(ranks) }

func countOps(p *graph.Program, unit int, kind graph.Kind) (n int) {
	for i := range p.Sections {
		for j := range p.Sections[i].Phases {
			for _, op := range p.Sections[i].Phases[j].Ops {
				if op.Unit == unit && op.Kind == kind {
					n++
				}
			}
		}
	}
	return n
}

// The gradient norm includes a small unit's squares exactly once, at every stage and for any number
// of replicas. Every gradient is 2, so the norm is the root of 4 times their number.
func TestSquaresOfSmallUnitsCountOnce(t *testing.T) {
	fwd := forwardOf(t, withSmallUnits, 1, 8, false)
	for _, shape := range [][2]int{{2, 2}, {6, 6}, {6, 3}, {6, 2}, {1, 1}} {
		for stage := range zero.Stage(4) {
			p, err := Build(fwd, Config{Ranks: shape[0], ShardSize: shape[1], Stage: stage, Accum: 1, Clip: 1, Optimizer: adamW, Target: graph.CPUTarget()})
			require.NoError(t, err)
			q, w := p.Program, interp.New[float32](p.Program)
			acc := graph.NoBuf
			var sums, norm []graph.Op
			for _, ph := range q.Section("step").Phases {
				for _, op := range ph.Ops {
					switch {
					case op.Kind == graph.SqSum:
						sums = append(sums, op)
						acc = op.Out[0].Buf
					case op.Kind == graph.AllReduce && op.Name == "grad_norm/all_reduce":
						norm = append(norm, op)
					}
				}
			}
			for r := range w.Ranks() {
				v, err := w.I64(r, acc)
				require.NoError(t, err)
				clear(v)
				for _, op := range sums {
					g, err := w.Floats(r, op.In[0])
					require.NoError(t, err)
					for i := range g {
						g[i] = 2
					}
				}
			}
			require.NoError(t, w.RunPhase(&graph.Phase{Name: "norm", Ops: append(sums, norm...)}))
			elems := int64(0)
			for i := range q.Params {
				elems += q.Params[i].Elems()
			}
			for r := range w.Ranks() {
				v, err := w.I64(r, acc)
				require.NoError(t, err)
				require.Equal(t, float64(4*elems), exact.Accumulator(v).Float64(), "%v, stage %d, rank %d", shape, stage, r)
			}
		}
	}
}
