package plan

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

func drawConfig(t *testing.T, rng *rand.Rand) Config {
	of := func(list ...string) string { return list[rng.IntN(len(list))] }
	again, err := recompute.Parse(of("none", "full", "selective"))
	require.NoError(t, err)
	away, err := offload.Parse(of("", "", "optimizer=host", "activations=host", "parameters=host,gradients=host,optimizer=disk"))
	require.NoError(t, err)
	prec, err := precision.Parse(of("fp32", "fp32", "bf16", "fp16"))
	require.NoError(t, err)
	cfg := Config{
		Ranks: 2 + 2*rng.IntN(2), Stage: zero.Stage(rng.IntN(4)), Accum: 1 + rng.IntN(2), Reproducible: rng.IntN(3) == 0, Prefetch: rng.IntN(3),
		Recompute: again, Offload: away, Precision: prec, Rows: 1, Optimizer: adamW, Target: graph.CPUTarget(),
		SkipNonFinite: rng.IntN(3) == 0,
	}
	cfg.Reduce32 = cfg.Precision != precision.FP32 && rng.IntN(3) == 0
	if rng.IntN(3) == 0 && !cfg.Reproducible {
		cfg.ShardSize = 2
	}
	switch rng.IntN(6) {
	case 0:
		cfg.Int8.Activations = true
	case 1:
		cfg.Int8Gather, cfg.Int8Reduce = true, rng.IntN(2) == 0
	}
	cfg.LayerOrder = rng.IntN(3) == 0
	if rng.IntN(3) == 0 {
		cfg.Freeze = []string{"h.0.*"}
	}
	if rng.IntN(3) == 0 {
		cfg.Capacity[graph.Device] = 1 + rng.Int64N(1<<17)
		cfg.Early = rng.IntN(2) == 0
	}
	cfg.BoundsOnly = rng.IntN(4) == 0
	if rng.IntN(3) == 0 {
		cfg.Target = graph.CUDATarget()
		cfg.Epilogues = []graph.Epilogues{0, graph.NoEpilogues, graph.NoEpilogues | graph.EpilogueBGrad, graph.NoEpilogues | cfg.Target.CUDA.Epilogues}[rng.IntN(4)]
	}
	return cfg
}

// Plans built with Shared equal plans built without it, in any order and concurrently. The program
// before each pass of stemEnds depends only on its key.
func TestSharedPlansAreTheSame(t *testing.T) {
	fwd := forwardOf(t, model.Config{Family: model.GPT2, Layers: 1, Width: 16, Heads: 2, Vocab: 20, Positions: 8}, 1, 8, false)
	const seed = 1
	rng := rand.New(rand.NewPCG(seed, 0))
	var shared Shared
	made := map[string]string{} // the program's hash, by end and key
	again, planned := 0, 0
	var all sync.WaitGroup
	for i := range 60 {
		cfg := drawConfig(t, rng)
		spec := Spec{cfg, fwd}
		want, wantErr := Build(fwd, cfg)
		for k, end := range stemEnds {
			p, err := rewrite(spec, fwd.Train, "", end.before)
			if end.before == "offload" && err != nil { // a pass behind the mesh refuses the configuration
				require.EqualError(t, wantErr, err.Error())
				continue
			}
			require.NoError(t, err)
			key, cast := stemKey(k, &spec)
			id := fmt.Sprintf("%d %+v %+v", k, key, cast)
			if hash, ok := made[id]; ok {
				again++
				require.Equal(t, hash, graph.Hash(p), "before %s, configuration %d: %+v", end.before, i, cfg)
			}
			made[id] = graph.Hash(p)
		}
		if wantErr == nil {
			planned++
			copied := cfg
			copied.Observe = func(string, *graph.Program) error { return nil } // passes must not modify their input
			p, err := Build(fwd, copied)
			require.NoError(t, err)
			require.Equal(t, p.Hash(), want.Hash(), "configuration %d: passes that take programs over make another: %+v", i, cfg)
		}
		all.Go(func() {
			have, err := shared.Build(fwd, cfg)
			if wantErr != nil {
				if err == nil || err.Error() != wantErr.Error() {
					t.Errorf("configuration %d: %v, want %v", i, err, wantErr)
				}
				return
			}
			if err != nil || have.Hash() != want.Hash() || fmt.Sprint(have.Layout) != fmt.Sprint(want.Layout) || fmt.Sprintf("%+v", have.Config) != fmt.Sprintf("%+v", cfg) || have.CommBytes != want.CommBytes {
				t.Errorf("configuration %d: another plan than by itself (%v): %+v", i, err, cfg)
			}
		})
	}
	all.Wait()
	require.Greater(t, again, 20, "configurations with a program in common")
	require.Greater(t, planned, 30, "configurations that can be planned")
}

// Shared runs the passes before the mesh once for the four stages of a model. Candidates of a
// search that differ only in offloading share the passes before that one. A configuration is
// planned only once.
func TestStagesShare(t *testing.T) {
	fwd := forwardOf(t, model.Config{Family: model.GPT2, Layers: 1, Width: 16, Heads: 2, Vocab: 20, Positions: 8}, 1, 8, false)
	var shared Shared
	cfg := Config{Ranks: 2, Accum: 1, Optimizer: adamW, Target: graph.CPUTarget()}
	var plans [4]*Plan
	for z := range plans {
		cfg.Stage = zero.Stage(z)
		var err error
		plans[z], err = shared.Build(fwd, cfg)
		require.NoError(t, err)
	}
	require.Empty(t, shared.stems[len(stemEnds)-1], "whole plans do not share what is before %s", stemEnds[len(stemEnds)-1].before)
	for _, space := range []graph.Space{graph.Device, graph.Host, graph.Disk} {
		bounds := cfg
		bounds.BoundsOnly, bounds.Offload.Optimizer = true, space
		_, err := shared.Build(fwd, bounds)
		require.NoError(t, err)
	}
	for k := range stemEnds {
		require.Len(t, shared.stems[k], 1, "before %s", stemEnds[k].before)
	}
	cfg.Stage, cfg.Capacity[graph.Device] = 2, 1<<40
	again, err := shared.Build(fwd, cfg)
	require.NoError(t, err)
	require.Same(t, plans[2].Program, again.Program)
	require.Equal(t, int64(1<<40), again.Config.Capacity[graph.Device])
	cfg.Capacity[graph.Device], cfg.Early = 1, true
	_, err = shared.Build(fwd, cfg)
	var refused *DoesNotFit
	require.ErrorAs(t, err, &refused)
}
