package plan

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/zero"
)

func preset(t testing.TB, name string) model.Config {
	p, err := model.LookupPreset(name)
	require.NoError(t, err)
	return p.Config
}

// states holds a plan's bytes of model states by class, the model's number of parameters (psi), and
// the average number that a rank holds of them, rounded up for each unit (sliced).
type states struct {
	classPeak   [graph.NumClasses]int64
	psi, sliced int64
}

func (s states) total() int64 {
	return s.classPeak[graph.Parameters] + s.classPeak[graph.Gradients] + s.classPeak[graph.Optimizer]
}

func statesOf(t testing.TB, fwd Forward, c Config, shards int) states {
	p, err := Build(fwd, c)
	require.NoError(t, err)
	s := states{classPeak: p.Layout.Spaces[graph.Device].ClassPeak}
	for u := range p.Program.Units {
		var n int64
		for _, seg := range p.Program.Units[u].Segments {
			n += seg.Len
		}
		s.psi += n
		if tooSmall(&p.Program.Units[u], shards) {
			s.sliced += n // too small to be sharded: complete on every rank
			continue
		}
		s.sliced += (n + int64(shards) - 1) / int64(shards)
	}
	return s
}

func mixed(ranks int, stage zero.Stage) Config {
	return Config{Ranks: ranks, Stage: stage, Accum: 1, Optimizer: adamW, Target: graph.CPUTarget(), Precision: precision.BF16}
}

// 16 bytes a parameter: 2 for the bf16 parameter, 2 for its gradient, 12 for the fp32 master and
// Adam's two moments (Rajbhandari et al., ZeRO, section 3.1). The shape of 17.2B is Turing-NLG's:
// 78 layers, 4,256 wide.
func TestSixteenBytesAParameter(t *testing.T) {
	for _, c := range []struct {
		name     string
		model    model.Config
		billions float64 // as published
		giga     float64 // bytes / 1e9
	}{
		{"0.32B", model.Config{Family: model.GPT2, Layers: 24, Width: 1024, Heads: 16, Vocab: 16000, Positions: 1024, TiedHead: true}, 0.32, 5.12},
		{"gpt2-xl", preset(t, "gpt2-xl"), 1.5, 24},
		{"turing-nlg", model.Config{Family: model.GPT2, Layers: 78, Width: 4256, Heads: 28, Vocab: 50257, Positions: 1024, TiedHead: true}, 17.2, 275},
		{"gpt3-175b", preset(t, "gpt3-175b"), 175, 2800},
	} {
		t.Run(c.name, func(t *testing.T) {
			fwd := forwardOf(t, c.model, 1, 64, false)
			s := statesOf(t, fwd, mixed(1, zero.Replicate), 1)
			require.Equal(t, 2*s.psi, s.classPeak[graph.Parameters])
			require.Equal(t, 2*s.psi, s.classPeak[graph.Gradients])
			require.Equal(t, 12*s.psi, s.classPeak[graph.Optimizer])
			require.InEpsilon(t, 16*c.billions, c.giga, 0.002, "the table is 16 bytes a parameter")
			require.InEpsilon(t, c.giga*1e9, s.total(), 0.04, "the published sizes are rounded")

			half := mixed(1, zero.Replicate)
			half.Precision = precision.FP16
			require.Equal(t, s.total()+8*graph.NumScale, statesOf(t, fwd, half, 1).total(), "and the loss scale")
		})
	}
}

// The class peaks of plans equal ZeRO's formulas (figure 1 of the paper). A shard counts as the
// mean over ranks, rounded up for each unit.
func TestZeROFormulas(t *testing.T) {
	fwd := forwardOf(t, preset(t, "gpt2"), 1, 64, false)
	for _, n := range []int{2, 3, 8, 64} {
		for stage := range zero.Stage(4) {
			what := fmt.Sprintf("stage %d of %d ranks", stage, n)
			cut := func(yes bool, s states) int64 {
				if yes {
					return s.sliced
				}
				return s.psi
			}
			check := func(s states, grad int64, what string) {
				require.Equal(t, 2*cut(stage.ShardsParams(), s), s.classPeak[graph.Parameters], what)
				require.Equal(t, grad, s.classPeak[graph.Gradients], what)
				require.Equal(t, 12*cut(stage.ShardsStates(), s), s.classPeak[graph.Optimizer], what)
			}
			c := mixed(n, stage)
			s := statesOf(t, fwd, c, n)
			check(s, 2*cut(stage.ShardsGrads(), s), what)
			require.InEpsilon(t, stage.ModelStateBytes(float64(s.psi), float64(n), 2, 2, 12), s.total(), 1e-3, what) // 64 ranks: the final norm is not sharded

			c.Reduce32 = true
			check(statesOf(t, fwd, c, n), 4*cut(stage.ShardsGrads(), s), what+", gradients in fp32")

			// Two axes: the size depends on the shards of n ranks, not on the replicas.
			c = mixed(3*n, stage)
			c.ShardSize = n
			check(statesOf(t, fwd, c, n), 2*cut(stage.ShardsGrads(), s), what+", 3 replicas")
		}
	}
}

// Over several micro-batches, gradients accumulate in fp32, 4 bytes each. At stages 2 and 3 this is
// the shard; a unit's 16-bit gradients (class unsharded) live until they are reduced. At stages 0
// and 1 the sum has all parameters. It is reduced as a 16-bit copy, unit by unit.
func TestAccumulatorsAreFP32(t *testing.T) {
	fwd := forwardOf(t, preset(t, "gpt2"), 1, 64, false)
	const n = 4
	for stage := range zero.Stage(4) {
		c := mixed(n, stage)
		c.Accum = 3
		s := statesOf(t, fwd, c, n)
		grads := s.classPeak[graph.Gradients]
		if stage.ShardsGrads() {
			require.Equal(t, 4*s.sliced, grads, "stage %d", stage)
			continue
		}
		require.GreaterOrEqual(t, grads, 4*s.psi, "stage %d", stage)
		require.Less(t, grads, 5*s.psi, "stage %d: not a 16-bit copy of all", stage)
		c.Ranks = 1
		s = statesOf(t, fwd, c, 1)
		require.Equal(t, 4*s.psi, s.classPeak[graph.Gradients], "one rank has nobody to send to")
	}
}

// A trillion parameters over 1,024 ranks can be planned and verified in seconds, as one shard group
// and as 128 groups of 8.
func TestTrillionParameters(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the largest programs")
	}
	fwd := forwardOf(t, preset(t, "megatron-1t"), 1, 2048, false)
	for _, shards := range []int{0, 8} {
		c := mixed(1024, zero.PartitionParams)
		c.ShardSize, c.Prefetch, c.Clip = shards, 1, 1
		began := time.Now()
		p, err := Build(fwd, c)
		require.NoError(t, err)
		built := time.Since(began)
		require.NoError(t, graph.Verify(p.Program))
		ops := 0
		for _, ph := range p.Program.Section("step").Phases {
			ops += len(ph.Ops)
		}
		t.Logf("shard size %d: %d operations, %d buffers: planned in %v, verified in %v", shards, ops, len(p.Program.Buffers), built, time.Since(began)-built)
		n := int64(1024)
		if shards > 0 {
			n = int64(shards)
		}
		use := p.Layout.Spaces[graph.Device]
		var psi, held int64
		for u := range p.Program.Units {
			unit, elems := &p.Program.Units[u], int64(0)
			for _, s := range unit.Segments {
				elems += s.Len
			}
			psi += elems
			if tooSmall(unit, int(n)) { // the final norm, on 1,024 ranks
				held += elems * (n - 1)
			}
			held += elems
		}
		require.InEpsilon(t, 1.008e12, float64(psi), 0.01)
		for class, bytes := range map[graph.Class]int64{graph.Parameters: 2, graph.Gradients: 2, graph.Optimizer: 12} {
			require.InEpsilon(t, bytes*held/n, use.ClassPeak[class], 1e-6, "%v", class)
		}
	}
}
