package plan

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/zero"
)

// cutModels are models of both families whose heads, widths and padded vocabularies four slices
// divide.
var cutModels = map[string]model.Config{
	"gpt2":  {Family: model.GPT2, Layers: 2, Width: 32, Heads: 4, Vocab: 61, Positions: 16, TiedHead: true},
	"llama": {Family: model.Llama, Layers: 2, Width: 32, FFN: 48, Heads: 8, KVHeads: 4, HeadDim: 4, Vocab: 70, Positions: 16, NormEps: 1e-5, RopeTheta: 1e4},
	"qwen3": {Family: model.Llama, Layers: 1, Width: 32, FFN: 48, Heads: 4, KVHeads: 4, HeadDim: 8, Vocab: 64, Positions: 16, NormEps: 1e-5, RopeTheta: 1e4, NormHeads: true, TiedHead: true},
}

func TestPlansOfSlices(t *testing.T) {
	for name, m := range cutModels {
		fwd := forwardOf(t, m, 1, 8, true)
		fwd.Generate = nil
		for _, tensor := range []int{1, 2, 4} {
			for _, slices := range []int{2, 4} {
				if slices%tensor > 0 {
					continue
				}
				for _, stage := range []zero.Stage{zero.Replicate, 3} {
					for _, prec := range []precision.Precision{precision.FP32, precision.BF16} {
						what := fmt.Sprintf("%s, %d slices over %d ranks, stage %d, %v", name, slices, tensor, stage, prec)
						_, err := Build(fwd, Config{Ranks: 2 * tensor, Tensor: tensor, Slices: slices, Stage: stage, Accum: 2, Prefetch: 1, Clip: 1, Optimizer: adamW, Target: graph.CPUTarget(), Precision: prec, Verify: true})
						require.NoError(t, err, what)
					}
				}
			}
		}
	}
}

// In layer order the gradient of a layer's sliced parameters may be reduced before its other
// parameters are updated on the host. The reduction must not wait for that update.
func TestEarlyUpdatesOfSlices(t *testing.T) {
	fwd := forwardOf(t, cutModels["llama"], 1, 8, false)
	cfg := Config{Ranks: 4, Tensor: 2, Slices: 4, Stage: 2, Accum: 3, LayerOrder: true, Optimizer: adamW, Target: graph.CPUTarget(), Verify: true,
		Freeze: []string{"*.post_attention_layernorm.weight"}}
	var err error
	cfg.Offload, err = offload.Parse("optimizer=host,gradients=host")
	require.NoError(t, err)
	_, err = Build(fwd, cfg)
	require.NoError(t, err)
}

// A frozen unit's unsliced parameters form a separate unit without gradients.
func TestFrozenUnitsOfSlices(t *testing.T) {
	p, err := Build(forwardOf(t, cutModels["llama"], 1, 8, false), Config{Ranks: 2, Tensor: 2, Slices: 2, Accum: 1, Optimizer: adamW, Target: graph.CPUTarget(), Verify: true,
		Freeze: []string{"model.layers.0.*"}})
	require.NoError(t, err)
	for _, prm := range p.Program.Params {
		u := &p.Program.Units[prm.Unit]
		require.Equal(t, prm.Frozen, u.Frozen, prm.Name)
		require.Equal(t, prm.Frozen, len(u.States) == 0, prm.Name)
	}
}
