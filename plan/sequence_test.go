package plan

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/mesh"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/precision"
)

// saved returns the bytes of a unit's activations that the forward writes and the backward reads.
func saved(p *graph.Program, unit string) (n int64) {
	forward, backward := map[graph.BufID]bool{}, map[graph.BufID]bool{}
	for _, op := range p.SectionOf(graph.SectionTrain, graph.FormWhole).Phases[0].Ops {
		graph.Effects(&op, func(e graph.Effect) {
			root, _ := p.Resolve(e.Buf, nil)
			switch b := p.Buf(root); {
			case b.Class != graph.Activations || b.Life != graph.LifePhase || b.Unit < 0 || p.Units[b.Unit].Name != unit:
			case op.Pass == graph.Forward && e.Write:
				forward[root] = true
			case op.Pass == graph.Backward && e.Read && forward[root]:
				backward[root] = true
			}
		})
	}
	for root := range backward {
		n += p.Buf(root).Bytes()
	}
	return n
}

// cutOver returns the program of a micro-batch in slices; rows selects whether its rows are divided
// too.
func cutOver(t *testing.T, m model.Config, b, s, tensor int, prec precision.Precision, rows bool) (Spec, *graph.Program) {
	spec := Spec{Config: Config{
		Ranks: tensor, Tensor: tensor, Slices: tensor, Accum: 1, Optimizer: adamW, Target: graph.CPUTarget(), Precision: prec,
	}, Forward: forwardOf(t, m, b, s, false)}
	p, err := rewrite(spec, spec.Forward.Train, "", "tensor")
	require.NoError(t, err)
	p.Mesh = spec.mesh()
	p, err = mesh.Tensor(p, mesh.Options{Axis: spec.axis(graph.TensorAxis), Slices: tensor, Rows: rows})
	require.NoError(t, err)
	return spec, p
}

// Korthikanti et al. 2022, sections 4.2.1 and 4.2.2: with b rows of s tokens of width h, in 16
// bits, a layer keeps s·b·h·(10 + 24/t) bytes under tensor parallelism, and s·b·h·34/t with divided
// rows too. They also keep attention's scores, 5·a·s²·b/t bytes. We recompute these and keep their
// log-sum-exp, 4·a·s·b/t. Their two dropout masks of s·b·h bytes are replaced by counters here,
// which leaves 8 and 32. They neglect the statistics of the two norms, 16·s·b bytes.
func TestSavedActivationsOfALayer(t *testing.T) {
	const b, s, h, a = 2, 64, 32, 8
	m := model.Config{Family: model.GPT2, Layers: 3, Width: h, Heads: a, Vocab: 64, Positions: s, EmbdDropout: 0.1}
	m.ResidDropout = 0.1
	for _, tensor := range []int{2, 4, 8} {
		of := func(rows bool) int64 {
			spec, p := cutOver(t, m, b, s, tensor, precision.BF16, rows)
			p, err := rewrite(spec, p, "cast", "fuse")
			require.NoError(t, err)
			return saved(p, "h.1")
		}
		n, parts := int64(b*s*h), int64(tensor)
		require.Equal(t, n*8+n*24/parts+4*a*s*b/parts+16*s*b, of(false), "%d ranks, rows whole", tensor)
		require.Equal(t, n*32/parts+4*a*s*b/parts+16*s*b/parts, of(true), "%d ranks, rows divided", tensor)
	}
}

// Dividing the rows does not change the forward's traffic: an all-gather and a reduce-scatter send
// as much as an all-reduce, N·C·(T−1)/T elements each. The backward also gathers the inputs of two
// products again, for their weights' gradients: a quarter more in total (Korthikanti et al. 2022,
// section 4.2.2).
func TestTrafficOfALayer(t *testing.T) {
	const b, s, h = 2, 16, 32
	m := cutModels["llama"]
	m.Layers, m.KVHeads = 3, 8
	for _, tensor := range []int{2, 4, 8} {
		_, cut := cutOver(t, m, b, s, tensor, precision.FP32, false)
		_, divided := cutOver(t, m, b, s, tensor, precision.FP32, true)
		for p, want := range map[*graph.Program][2]int{cut: {4, 4}, divided: {4, 6}} {
			var sent [2]int64 // elements that a rank sends in the forward and the backward
			for _, op := range p.SectionOf(graph.SectionTrain, graph.FormWhole).Phases[0].Ops {
				kind := slices.Index([]graph.Kind{graph.AllGather, graph.ReduceScatter, graph.AllReduce}, op.Kind)
				if kind < 0 || op.Unit < 0 || p.Units[op.Unit].Name != "h.1" {
					continue
				}
				n := p.Buf(op.Out[0].Buf).Elems()
				switch op.Kind {
				case graph.ReduceScatter:
					n = p.Buf(op.In[0]).Elems()
				case graph.AllReduce:
					if n == h { // a norm's weight
						continue
					}
					n *= 2
				}
				sent[op.Pass] += n * int64(tensor-1) / int64(tensor)
			}
			each := int64(b * s * h * (tensor - 1) / tensor)
			require.Equal(t, [2]int64{int64(want[0]) * each, int64(want[1]) * each}, sent, fmt.Sprint(tensor, " ranks"))
		}
	}
}

// In 16 bits, a gradient that ranks have all-reduced is widened to f32 after the reduction, in its
// own unit. Gradients then belong to the right pipeline stage, and a unit's gradients are reduced
// when its backward is done.
func TestSumsAreWidenedInTheirUnit(t *testing.T) {
	m := cutModels["qwen3"]
	spec, p := cutOver(t, m, 2, 16, 4, precision.BF16, true)
	spec.Accum = 2 // in f32
	p, err := rewrite(spec, p, "cast", "skip")
	require.NoError(t, err)
	units := map[graph.BufID]int{}
	for i := range p.Params {
		units[p.Params[i].Grad] = p.Params[i].Unit
	}
	widened := 0
	for _, op := range p.SectionOf(graph.SectionTrain, graph.FormWhole).Phases[0].Ops {
		if unit, is := units[op.Out[0].Buf]; is && op.Kind == graph.Cast {
			require.Equal(t, unit, op.Unit, op.Name)
			widened++
		}
	}
	require.Equal(t, 4*m.Layers+1, widened, "four norms in each layer, and the last one")
}

// Pipeline stages send only a rank's own rows.
func TestStagesSendARanksRows(t *testing.T) {
	const b, s, h, tensor = 2, 16, 32, 4
	m := model.Config{Family: model.GPT2, Layers: 4, Width: h, Heads: 8, Vocab: 64, Positions: s, TiedHead: true}
	for _, prec := range []precision.Precision{precision.FP32, precision.BF16} {
		p, err := Build(forwardOf(t, m, b, s, false), Config{
			Ranks: 2 * tensor, Tensor: tensor, Slices: tensor, Pipeline: 2, Stages: []int{0, 2}, Stage: 1, Accum: 2,
			Optimizer: adamW, Target: graph.CPUTarget(), Precision: prec, Verify: true,
		})
		require.NoError(t, err)
		sent := 0
		require.NoError(t, eachOp(p.Program, func(op *graph.Op) error {
			if op.Kind == graph.Send && p.Program.Buf(op.In[0]).Class == graph.Activations {
				require.EqualValues(t, b*s*h/tensor, p.Program.Buf(op.In[0]).Elems(), op.Name)
				sent++
			}
			return nil
		}))
		require.Equal(t, 2*2, sent, "forward and backward, of two micro-batches")
	}
}
