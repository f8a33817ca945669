package fsdp_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/zero"
)

// Sharded over S of N = S·R ranks and replicated R times, a rank holds of model
// states what it holds on S ranks alone, and sends: within the group what S ranks
// send, and across the groups an all-reduce of its part of the gradients,
// 2·(F/S)·(R−1)/R, once a step (once a micro-step where reproducible). At stage 0
// nothing is sharded: the all-reduce is over all N ranks.
func TestMeshByFormula(t *testing.T) {
	for name, c := range models {
		for _, mesh := range [][2]int{{1, 4}, {2, 1}, {2, 3}, {4, 2}} { // shards, replicas
			shards, replicas := int64(mesh[0]), int64(mesh[1])
			for _, accum := range []int{1, 3} {
				for _, reproducible := range []bool{false, true} {
					for stage := range 4 {
						where := fmt.Sprintf("%s, %d shards × %d replicas, accum %d, reproducible %v, stage %d", name, shards, replicas, accum, reproducible, stage)
						cfg := plan.Config{Ranks: int(shards * replicas), ShardSize: int(shards), Stage: zero.Stage(stage), Prefetch: 1, Accum: accum, Reproducible: reproducible}

						p := buildPlan(t, c, cfg)
						alone := cfg
						alone.Ranks, alone.ShardSize = int(shards), 0
						one := buildPlan(t, c, alone)
						var across int64
						for _, u := range forwardUnits(t, c, func(string) bool { return false }) {
							part := fp32 * u.flat(int(shards)) / shards
							times := int64(1)
							if reproducible && (stage < 2 || shards == 1) { // stages 2 and 3 accumulate within the group first
								times = int64(accum)
							}
							if stage == 0 || shards == 1 {
								n := shards * replicas
								across += times * (2*fp32*u.flat(int(shards))/n*(n-1) - 2*fp32*u.flat(int(shards))/shards*(shards-1))
							} else {
								across += times * (2 * part / replicas * (replicas - 1))
							}
						}
						require.Equal(t, one.CommBytes+across, p.CommBytes, where)
						for _, class := range []graph.Class{graph.Parameters, graph.Optimizer} {
							require.Equal(t, one.Layout.Spaces[graph.Device].ClassPeak[class], p.Layout.Spaces[graph.Device].ClassPeak[class], "%s: %s", where, class)
						}
						if replicas == 1 {
							require.Equal(t, one.Layout.Spaces, p.Layout.Spaces, where)
						}
					}
				}
			}
		}
	}
}
