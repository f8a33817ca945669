package plan

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/interp"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

// interpreted runs a step of a plan. It returns the loss and the parameters after it, each unit's
// shards of all ranks one after another without padding. Micro-batch m of rank r has the same
// tokens, and the initial parameters are the same, in every plan of a model.
func interpreted(t *testing.T, pl *Plan) (units [][]float64, loss float64) {
	t.Helper()
	p, ranks := pl.Program, pl.Config.Ranks
	w := interp.New[float64](p)
	require.NoError(t, w.Run(graph.SectionInit.String()))
	value := func(u, rank int) []float64 {
		f, err := w.Floats(rank, p.Units[u].Value.Buf)
		require.NoError(t, err)
		return f
	}
	for u := range p.Units {
		for r := range ranks {
			f := value(u, r)
			for _, s := range p.Units[u].Segments {
				for i := range s.Len {
					at := s.Flat + i
					if p.Units[u].Value.Axis >= 0 {
						if at -= int64(r * len(f)); at < 0 || at >= int64(len(f)) {
							continue
						}
					}
					f[at] = float64((i*7+int64(s.Param)*3)%13)/50 - 0.1
				}
			}
		}
	}
	fill := func(rank, micro, slot int) {
		for k, port := range []graph.Port{graph.PortTokens, graph.PortTargets} {
			id := p.PortOf(port, slot)
			require.NotEqual(t, graph.NoBuf, id)
			s, err := w.I32(rank, id)
			require.NoError(t, err)
			for i := range s {
				s[i] = int32((i*5 + micro*3 + rank*2 + k) % 20)
			}
		}
		h, err := w.F64(rank, p.Port(graph.PortHyper))
		require.NoError(t, err)
		h[graph.HyperLR], h[graph.HyperInvCount], h[graph.HyperLossScale], h[graph.HyperBC1], h[graph.HyperBC2] = 1e-2, 1.0/48, 1, 0.1, 0.05
	}
	micro := 0
	sec := p.SectionOf(graph.SectionStep, graph.FormWhole)
	for i := range sec.Phases {
		ph := &sec.Phases[i]
		for range ph.Repeat {
			if ph.Kind == graph.MicroPhase {
				for slot := range ph.MicroBatches() {
					for r := range ranks {
						fill(r, micro, slot)
					}
					micro++
				}
			}
			require.NoError(t, w.RunPhase(ph))
		}
	}
	require.Equal(t, pl.Config.Accum, micro)
	if p.SectionOf(graph.SectionFlush, graph.FormWhole) != nil {
		require.NoError(t, w.Run(graph.SectionFlush.String()))
	}
	for u := range p.Units {
		var all []float64
		for r := range ranks {
			if r == 0 || p.Units[u].Value.Axis >= 0 {
				all = append(all, value(u, r)...)
			}
		}
		units = append(units, all)
	}
	l, err := w.F64(0, p.Port(graph.PortLoss))
	require.NoError(t, err)
	return units, l[0]
}

// In the interpreter, a step in layer order gives the same loss and parameters as a step of stage 0
// in micro order, with recomputation, offloading and other rewrites.
func TestLayerOrderComputesTheSameStep(t *testing.T) {
	m := model.Config{Family: model.GPT2, Layers: 2, Width: 16, Heads: 2, Vocab: 20, Positions: 8}
	fwd := forwardOf(t, m, 1, 8, false)
	for _, c := range []struct {
		ranks, stage, accum      int
		recompute, offload, kept string
	}{
		{ranks: 1, stage: 0, accum: 2},
		{ranks: 2, stage: 3, accum: 3, recompute: "full", offload: "optimizer=host,parameters=disk,activations=host"},
		{ranks: 3, stage: 2, accum: 3, recompute: "selective", offload: "gradients=host"},
		{ranks: 2, stage: 1, accum: 4, offload: "activations=disk:h.*.mlp.act;h.0.ln_1", kept: "h.0.*"},
	} {
		cfg := Config{Ranks: c.ranks, Accum: c.accum, Prefetch: 1, Optimizer: adamW, Target: graph.CPUTarget(), Verify: true}
		if c.kept != "" {
			cfg.Freeze = []string{c.kept}
		}
		base, err := Build(fwd, cfg)
		require.NoError(t, err)
		cfg.Stage, cfg.LayerOrder = zero.Stage(c.stage), true
		cfg.Recompute, err = recompute.Parse(c.recompute)
		require.NoError(t, err)
		cfg.Offload, err = offload.Parse(c.offload)
		require.NoError(t, err)
		pl, err := Build(fwd, cfg)
		require.NoError(t, err)
		require.Empty(t, pl.OwnSums())
		want, wantLoss := interpreted(t, base)
		got, loss := interpreted(t, pl)
		require.Equal(t, wantLoss, loss)
		require.Equal(t, want, got)
	}
}

// In layer order the step gathers and reduces as much as with one micro-batch, for any number of
// micro-batches and in every precision.
func TestLayerOrderSendsOnce(t *testing.T) {
	for i, prec := range []precision.Precision{precision.FP32, precision.BF16, precision.FP16} {
		for stage := range 4 {
			fwd := forwardOf(t, []model.Config{smallGPT, smallLlama}[(i+stage)%2], 1, 16, false)
			cfg := Config{Ranks: 4, Stage: zero.Stage(stage), Accum: 1, Prefetch: 1, Optimizer: adamW, Target: graph.CPUTarget(), Precision: prec, BoundsOnly: true}
			if stage > 1 && i > 0 {
				cfg.ShardSize = 2
			}
			one, err := Build(fwd, cfg)
			require.NoError(t, err)
			cfg.Accum, cfg.LayerOrder = 8, true
			got, err := Build(fwd, cfg)
			require.NoError(t, err)
			require.Equal(t, one.CommBytes, got.CommBytes, "%v stage %d", prec, stage)
			cfg.LayerOrder = false
			if micro, err := Build(fwd, cfg); stage == 3 {
				require.NoError(t, err)
				require.Greater(t, micro.CommBytes, 4*got.CommBytes)
			}
		}
	}
}

func TestLayerOrderOfSharedParameters(t *testing.T) {
	cfg := Config{Ranks: 2, Stage: zero.PartitionParams, Accum: 2, LayerOrder: true, Optimizer: adamW, Target: graph.CPUTarget(), BoundsOnly: true}
	pl, err := Build(forwardOf(t, smallGPT, 1, 16, false), cfg)
	require.NoError(t, err)
	require.Equal(t, []string{"wte.weight"}, pl.UsedTwice)
	require.Contains(t, pl.OwnSums(), "wte.weight is used by several blocks")
	cfg.Freeze = []string{"wte.*"}
	pl, err = Build(forwardOf(t, smallGPT, 1, 16, false), cfg)
	require.NoError(t, err)
	require.Empty(t, pl.OwnSums(), "what is frozen has no gradient")
	cfg.Freeze, cfg.Reproducible = nil, true
	_, err = Build(forwardOf(t, smallGPT, 1, 16, false), cfg)
	require.ErrorContains(t, err, "Config.AccumOrder layer with Config.Reproducible: embed is used by several blocks")
	_, err = Build(forwardOf(t, smallLlama, 1, 16, false), cfg)
	require.NoError(t, err)
	cfg.Accum = 1 // one micro-batch has only one order
	_, err = Build(forwardOf(t, smallGPT, 1, 16, false), cfg)
	require.NoError(t, err)
}

// layerOrder refuses a section that has more than the phase of one micro-batch.
func TestLayerOrderNeedsOneMicroBatch(t *testing.T) {
	fwd := forwardOf(t, smallMLP, 2, 1, false)
	q := fwd.Train.Clone()
	q.Sections[0].Become(graph.SectionTrain)
	q.Sections[0].Phases = append(q.Sections[0].Phases, q.Sections[0].Phases[0])
	_, err := layerOrder(q, 2, false)
	require.ErrorContains(t, err, `section "train" has 2 phases, want the one of a micro-batch`)
}

// A plan in layer order contains every micro-batch's operations. Build refuses so many
// micro-batches that the program would be too large.
func TestLayerOrderIsBounded(t *testing.T) {
	cfg := Config{Ranks: 1, Accum: 1 << 22, LayerOrder: true, Optimizer: adamW, Target: graph.CPUTarget()}
	_, err := Build(forwardOf(t, smallMLP, 2, 1, false), cfg)
	require.ErrorContains(t, err, "Config.AccumOrder layer with Config.Accum 4194304: a step would have ")
	require.ErrorContains(t, err, " or less, or Config.AccumOrder micro")
}
