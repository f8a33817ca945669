package planner

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/search"
)

// pipelined returns a job of a pipeline with one device per stage.
func pipelined(name string, stages int, precision string) Request {
	cfg := config.Default()
	cfg.Model, cfg.Init, cfg.Ranks, cfg.Pipeline, cfg.Zero = name, "random", stages, stages, 0
	cfg.Batch, cfg.Seq, cfg.Accum, cfg.Precision = 1, 1024, 8, precision
	if precision == "bf16" {
		cfg.Target = graph.CUDATarget()
	}
	return Request{Config: cfg}
}

// byFlops divides the layers by the forward's FLOPs alone and returns the stages as text, in the
// form of Config.Stages.
func byFlops(t *testing.T, q Request) string {
	r, err := q.Resolve()
	require.NoError(t, err)
	p, err := model.Build(r.Shape, model.Train, r.Batch, r.Seq)
	require.NoError(t, err)
	first, err := plan.Divide(p, q.Pipeline, func(op *graph.Op) float64 {
		flops, _ := graph.Cost(p, op)
		return float64(flops)
	})
	require.NoError(t, err)
	var list []string
	for i, f := range first {
		last := r.Shape.Layers - 1
		if i+1 < len(first) {
			last = first[i+1] - 1
		}
		list = append(list, fmt.Sprintf("%d-%d", f, last))
	}
	return strings.Join(list, ",")
}

// Dividing layers by predicted time gives a predicted step at most as long as dividing by the
// forward's FLOPs. The stage with a large head gets fewer layers.
func TestLayersAreDividedByTime(t *testing.T) {
	h100, err := gpus.Lookup("h100")
	require.NoError(t, err)
	apart := func(stages int) *cost.Machine { // a host for each stage
		m := cost.CPU(2, stages)
		m.Cores, m.Sharers = 0, 0
		return m
	}
	shorter := 0
	for _, name := range []string{"gpt2", "llama-3.2-1b", "qwen-2.5-0.5b"} {
		for _, stages := range []int{2, 4, 8} {
			if !long.On() && stages > 2 {
				continue
			}
			for _, on := range []struct {
				name, precision string
				machine         *cost.Machine
			}{{"cpu", "fp32", apart(stages)}, {"h100", "bf16", h100.Spread(stages, stages)}} {
				q := pipelined(name, stages, on.precision)
				got, err := q.Predict(context.Background(), on.machine)
				require.NoError(t, err)
				q.Stages = byFlops(t, q)
				before, err := q.Predict(context.Background(), on.machine)
				require.NoError(t, err)
				t.Logf("%s P=%d %s: %v %.4f s, by FLOPs %v %.4f s", name, stages, on.name,
					got.Plan.Config.Stages, got.Step.Seconds, before.Plan.Config.Stages, before.Step.Seconds)
				require.LessOrEqual(t, got.Step.Seconds, before.Step.Seconds*(1+1e-12), "%s, %d stages, %s", name, stages, on.name)
				if got.Step.Seconds < 0.999*before.Step.Seconds {
					shorter++
				}
				if name == "qwen-2.5-0.5b" {
					f := got.Plan.Config.Stages
					require.Less(t, 24-f[stages-1], 24/stages, "the last stage has a head of 151,936 tokens")
				}
			}
		}
	}
	require.Positive(t, shorter)
}

// Explain lists the recomputed buffers of all stages' layers.
func TestAllStagesAreExplained(t *testing.T) {
	q := pipelined("gpt2", 2, "fp32")
	q.Recompute = "full"
	f, err := q.Predict(t.Context(), cost.CPU(2, 2))
	require.NoError(t, err)
	groups := search.Explain(f.Plan, f.Step).Recomputed
	require.NotEmpty(t, groups)
	for _, g := range groups {
		require.Contains(t, g.Buffers, "h.{0-11}.")
		require.Equal(t, 12, g.Count)
	}
}
