package plan

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/mesh"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

// Models of both families with four layers.
var deepModels = map[string]model.Config{
	"gpt2":  {Family: model.GPT2, Layers: 4, Width: 32, Heads: 4, Vocab: 61, Positions: 16, TiedHead: true},
	"llama": {Family: model.Llama, Layers: 4, Width: 32, FFN: 48, Heads: 4, KVHeads: 2, HeadDim: 8, Vocab: 70, Positions: 16, NormEps: 1e-5, RopeTheta: 1e4},
}

// staged is a plan of stages with as many layers each.
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
	_ = offload.Options{}
}
