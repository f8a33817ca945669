package plan

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
)

// In layer order an operation that uses no buffer of a micro-batch runs once if it writes. If it
// accumulates, like a weight decay in the gradient, it runs once per micro-batch.
func TestLayerOrderRepeatsWhatAccumulates(t *testing.T) {
	const accum = 3
	fwd := forwardOf(t, model.Config{Family: model.GPT2, Layers: 1, Width: 16, Heads: 2, Vocab: 20, Positions: 8}, 1, 8, false)
	cfg := Config{Ranks: 1, Accum: accum, LayerOrder: true, Optimizer: adamW, Target: graph.CPUTarget()}
	p, err := rewrite(Spec{cfg, fwd}, fwd.Train, "", "layers")
	require.NoError(t, err)
	var prm *graph.Param
	for i := range p.Params {
		if p.Params[i].Name == "h.0.mlp.c_fc.weight" {
			prm = &p.Params[i]
		}
	}
	copied := *p.Buf(prm.Value)
	copied.Name, copied.View, copied.Life = "copied", nil, graph.LifeStep
	into := p.AddBuffer(copied)
	ph := p.SectionOf(graph.SectionTrain, graph.FormWhole).Micro()
	last := len(ph.Ops) - 1
	for _, o := range []struct {
		name string
		out  graph.Out
	}{{"decay", graph.Out{Buf: prm.Grad, Mode: graph.Accum}}, {"copy", graph.Out{Buf: into}}} {
		op := graph.NewOp(graph.Scale, o.name, []graph.BufID{prm.Value}, []graph.Out{o.out}, graph.ScaleAttr{Factor: 1})
		op.Stream, op.Pass, op.Unit = ph.Ops[last].Stream, graph.Backward, prm.Unit
		ph.Ops = append(ph.Ops, op)
	}
	q, err := layerOrder(p, accum, false)
	require.NoError(t, err)
	times := map[string]int{}
	for _, op := range q.SectionOf(graph.SectionTrain, graph.FormWhole).Micro().Ops {
		name, _, _ := strings.Cut(op.Name, "/micro.")
		times[name]++
	}
	require.Equal(t, accum, times["decay"])
	require.Equal(t, 1, times["copy"])
}
