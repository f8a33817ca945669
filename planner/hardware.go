package planner

import (
	"strings"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// PlannedHardware is DeviceHardware for a plan that looks at no device: a GPU is
// then one of a usual kind.
func PlannedHardware(cfg *config.Config) Hardware {
	if !strings.EqualFold(cfg.Device, "cuda") {
		return CPUHardware(cfg.ComputeThreads())
	}
	return GPUHardware(gpus.Usual(), 1)
}

// GPUHardware is so many GPUs of a machine, over which ranks are spread.
func GPUHardware(g gpus.GPU, cards int) Hardware {
	return Hardware{HalfPrecision: true, Machine: func(ranks int) *cost.Machine { return g.Spread(ranks, cards) }}
}
