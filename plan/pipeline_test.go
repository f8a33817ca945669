package plan

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/mesh"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

// deepModels are models of both families with four layers.
var deepModels = map[string]model.Config{
	"gpt2":  {Family: model.GPT2, Layers: 4, Width: 32, Heads: 4, Vocab: 61, Positions: 16, TiedHead: true},
	"llama": {Family: model.Llama, Layers: 4, Width: 32, FFN: 48, Heads: 4, KVHeads: 2, HeadDim: 8, Vocab: 70, Positions: 16, NormEps: 1e-5, RopeTheta: 1e4},
}

// staged returns a configuration with pipeline stages of equal numbers of layers.
func staged(pipeline, accum int, schedule mesh.Schedule) Config {
	c := Config{Ranks: 2 * pipeline, Pipeline: pipeline, Schedule: schedule, Accum: accum, Prefetch: 1, Clip: 1, Optimizer: adamW, Target: graph.CPUTarget(), Verify: true}
	for i := range pipeline {
		c.Stages = append(c.Stages, 4/pipeline*i)
	}
	return c
}

func TestPlansOfPipelines(t *testing.T) {
	for name, m := range deepModels {
		fwd := forwardOf(t, m, 1, 8, true)
		fwd.Generate = nil
		for _, pipeline := range []int{2, 4} {
			for schedule := range mesh.NumSchedules {
				for _, stage := range []zero.Stage{0, 1} {
					for _, accum := range []int{1, 3} {
						for _, prec := range []precision.Precision{precision.FP32, precision.BF16} {
							for _, reproducible := range []bool{false, true} {
								for _, rc := range []string{"none", "full"} {
									what := fmt.Sprintf("%s, %d stages, %v, ZeRO %d, accum %d, %v, reproducible %v, recompute %s", name, pipeline, schedule, stage, accum, prec, reproducible, rc)
									if !long.Keep(what, 3) {
										continue
									}
									c := staged(pipeline, accum, schedule)
									c.Stage, c.Precision, c.Reproducible = stage, prec, reproducible
									var err error
									c.Recompute, err = recompute.Parse(rc)
									require.NoError(t, err)
									p, err := Build(fwd, c)
									require.NoError(t, err, what)
									require.Len(t, p.Roles, pipeline, what)
								}
							}
						}
					}
				}
			}
		}
	}
}

// A stage contains only copies that its own operations read, even if other stages update on the
// host.
func TestStagesCopyWhatTheyRead(t *testing.T) {
	fwd := forwardOf(t, deepModels["llama"], 1, 8, false)
	c := staged(2, 2, mesh.OneForwardOneBackward)
	var err error
	c.Offload, err = offload.Parse("optimizer=host:30%")
	require.NoError(t, err)
	p, err := Build(fwd, c)
	require.NoError(t, err)
	for stage, role := range p.Roles {
		q := role.Program
		read, copied := map[graph.BufID]bool{}, map[graph.BufID]string{}
		for i := range q.Sections {
			for _, ph := range q.Sections[i].Phases {
				for k := range ph.Ops {
					graph.Effects(&ph.Ops[k], func(e graph.Effect) {
						root, _ := q.Resolve(e.Buf, nil)
						read[root] = read[root] || e.Read
						if b := q.Buf(root); e.Write && ph.Ops[k].Kind == graph.Copy && b.Port == graph.NoPort && b.Life != graph.LifeRun {
							copied[root] = ph.Ops[k].Name
						}
					})
				}
			}
		}
		for id, name := range copied {
			require.True(t, read[id], "stage %d: %s", stage, name)
		}
	}
}

// even returns a model whose layers divide into stages of equal time: a vocabulary of two makes the
// head negligible.
func even(layers int) model.Config {
	return model.Config{Family: model.Llama, Layers: layers, Width: 64, FFN: 256, Heads: 4, KVHeads: 4, HeadDim: 16, Vocab: 2, Positions: 16, NormEps: 1e-5, RopeTheta: 1e4}
}

// products returns a machine on which only matrix products need time.
func products() *cost.Machine {
	free := cost.Link{Bandwidth: 1e18}
	return &cost.Machine{Name: "test", Matrix: map[graph.DType]float64{graph.F32: 1e9}, Vector: 1e18, Memory: 1e18, AttentionShare: 1e9, Intra: free, Inter: free}
}

// With P equal stages and M micro-batches the bubble is (P−1)/(M+P−1) of a step, both for GPipe
// (Huang et al. 2019, section 2.3) and for 1F1B (Narayanan et al. 2021, section 2.2). No
// combination of stages and micro-batches deadlocks.
func TestBubblesOfPipelines(t *testing.T) {
	const layers = 8
	fwd := forwardOf(t, even(layers), 1, 16, true)
	fwd.Generate, fwd.Eval = nil, nil
	for schedule := range mesh.NumSchedules {
		for pipeline := 2; pipeline <= layers; pipeline++ {
			for _, accum := range []int{1, 2, 3, 4, 7, 12} {
				c := staged(2, accum, schedule)
				c.Ranks, c.Pipeline, c.Stages, c.BoundsOnly, c.Verify = pipeline, pipeline, nil, true, false
				p, err := Build(fwd, c)
				require.NoError(t, err)
				runs, err := cost.SimulateStages(p.Programs(), "step", products())
				require.NoError(t, err, "%d stages, %d micro-batches, %v", pipeline, accum, schedule)
				if layers%pipeline != 0 {
					continue
				}
				for s, r := range runs {
					want := float64(pipeline-1) / float64(accum+pipeline-1)
					require.InDelta(t, want, r.Exposed/r.Seconds, 0.01, "stage %d of %d, %d micro-batches, %v", s, pipeline, accum, schedule)
				}
			}
		}
	}
}

// GPipe keeps the activations of all micro-batches for the backward. Under 1F1B stage s of P keeps
// those of at most P−s (Narayanan et al. 2021, section 2.2).
func TestActivationsOfPipelines(t *testing.T) {
	const stages = 4
	fwd := forwardOf(t, even(stages), 1, 16, true)
	fwd.Generate, fwd.Eval = nil, nil
	peak := func(schedule mesh.Schedule, accum, stage int) int64 {
		c := staged(stages, accum, schedule)
		c.Verify = false
		p, err := Build(fwd, c)
		require.NoError(t, err)
		return p.Roles[stage].Layout.Spaces[graph.Device].ClassPeak[graph.Activations]
	}
	for s := 1; s < stages-1; s++ { // without embedding and head
		kept := peak(mesh.GPipe, 9, s) - peak(mesh.GPipe, 8, s) // of one micro-batch
		require.Positive(t, kept)
		require.Equal(t, 3*kept, peak(mesh.GPipe, 12, s)-peak(mesh.GPipe, 9, s))
		for _, accum := range []int{1, 2, 3, 4, 8, 12} {
			inFlight := min(stages-s, accum)
			want := peak(mesh.GPipe, inFlight, s)
			if accum > inFlight { // the next forward needs memory before the gradient of the input is sent
				want += 16 * 64 * graph.F32.Size()
			}
			require.Equal(t, want, peak(mesh.OneForwardOneBackward, accum, s), "stage %d, %d micro-batches", s, accum)
		}
	}
}
