package plan

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/layouts"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/internal/testkit/progtext"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

var adamW = zero.Optimizer{Name: "adamw", Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1}

func forwardOf(t testing.TB, c model.Config, batch, seq int, all bool) Forward {
	var f Forward
	var err error
	f.Train, err = model.Build(c, model.Train, batch, seq)
	require.NoError(t, err)
	if all {
		f.Eval, err = model.Build(c, model.Eval, batch, seq)
		require.NoError(t, err)
		if c.Family == model.GPT2 || c.Family == model.Llama {
			f.Generate, err = model.Build(c, model.Generate, 1, seq)
			require.NoError(t, err)
		}
	}
	return f
}

var (
	smallGPT   = model.Config{Family: model.GPT2, Layers: 2, Width: 48, Heads: 3, Vocab: 300, Positions: 16, TiedHead: true, EmbdDropout: 0.1, ResidDropout: 0.1}
	smallLlama = model.Config{Family: model.Llama, Layers: 2, Width: 48, Heads: 4, KVHeads: 2, FFN: 100, Vocab: 300, Positions: 16}
	smallMLP   = model.Config{Family: model.MLP, Inputs: 20, Hidden: []int{30, 30}, Classes: 7}
	smallCNN   = model.Config{Family: model.CNN, Height: 12, ImgWidth: 12, Chans: 3, Hidden: []int{8, 16}, Classes: 7}
)

// Random mixed-precision configurations give programs that verify after each pass, and layouts
// without overlap.
func TestMixedPrecisionPlans(t *testing.T) {
	models := []model.Config{smallGPT, smallLlama, smallMLP, smallCNN}
	var forwards []Forward
	for _, m := range models {
		seq := 16
		if m.Family == model.MLP || m.Family == model.CNN {
			seq = 1
		}
		forwards = append(forwards, forwardOf(t, m, 2, seq, true))
	}
	r := rand.New(rand.NewPCG(6, 12))
	draws := 40
	if long.On() {
		draws = 400
	}
	for range draws {
		m, mesh := r.IntN(len(models)), [][2]int{{1, 0}, {3, 0}, {4, 2}, {4, 1}, {6, 3}}[r.IntN(5)]
		c := Config{Ranks: mesh[0], ShardSize: mesh[1], Stage: zero.Stage(r.IntN(4)), Accum: 1 + r.IntN(3), Prefetch: 1, Optimizer: adamW, Clip: 1, Target: graph.CPUTarget(), Verify: true,
			Precision: []precision.Precision{precision.BF16, precision.FP16}[r.IntN(2)], Reduce32: r.IntN(3) == 0, Reproducible: r.IntN(2) == 0 && (mesh[1] == 0 || mesh[1] == mesh[0])}
		again, err := recompute.Parse([]string{"none", "selective", "full", "full:*1"}[r.IntN(4)])
		require.NoError(t, err)
		c.Recompute = again
		c.Optimizer.Name = zero.OptimizerNames()[r.IntN(6)]
		if r.IntN(3) == 0 && models[m].Family == model.GPT2 {
			c.Freeze = []string{"h.0.*", "wpe.*"}
		}
		c.Int8Gather, c.Int8Reduce = r.IntN(3) == 0, r.IntN(3) == 0
		c.Int8 = precision.Int8{Activations: r.IntN(3) == 0, Matmul: r.IntN(3) == 0}
		what := fmt.Sprintf("%s %v stage %d mesh %v accum %d %s reduce32 %v reproducible %v", models[m].Family, c.Precision, c.Stage, mesh, c.Accum, c.Optimizer.Name, c.Reduce32, c.Reproducible)
		p, err := Build(forwards[m], c)
		require.NoError(t, err, what)
		require.NoError(t, layouts.Check(p.Program, p.Layout), what)
		back, err := progtext.Parse(graph.Format(p.Program), zero.Operations()...)
		require.NoError(t, err, what)
		require.Equal(t, p.Hash(), graph.Hash(back), what)
		require.Equal(t, c.Precision == precision.FP16, p.Program.Scaler != nil)
	}
}

func TestMeshAndPrecisionAreValidated(t *testing.T) {
	fwd := forwardOf(t, smallMLP, 2, 1, false)
	for want, change := range map[string]func(*Config){
		"Config.ShardSize 4 with Config.Ranks 6: states are sharded over 6 ranks, and 4 does not divide 6; use 3 or 6": func(c *Config) { c.ShardSize = 4 },
		"and 7 does not divide 6; use 6": func(c *Config) { c.ShardSize = 7 },
		"Config.ShardSize 2 with Config.Tensor 2, Config.Pipeline 3 and Config.Ranks 6: states are sharded over 1 rank, and 2 does not divide 1; leave it out": func(c *Config) {
			c.Stage, c.Tensor, c.Slices, c.Pipeline, c.ShardSize = 1, 2, 2, 3, 2
		},
		"size: -1 is negative":                     func(c *Config) { c.ShardSize = -1 },
		"in fp32 gradients travel in fp32 already": func(c *Config) { c.Reduce32, c.Precision = true, precision.FP32 },
		"precision(7) does not exist":              func(c *Config) { c.Precision = 7 },
	} {
		c := mixed(6, zero.PartitionParams)
		change(&c)
		_, err := Build(fwd, c)
		require.ErrorContains(t, err, want)
	}
}
