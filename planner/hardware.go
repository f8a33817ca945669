package planner

import (
	"strings"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// PlannedHardware is DeviceHardware without access to a device: it assumes a usual kind of GPU.
func PlannedHardware(cfg *config.Config) Hardware {
	if !strings.EqualFold(cfg.Device, "cuda") {
		return CPUHardware(cfg.ComputeThreads())
	}
	return GPUHardware(gpus.Usual(), 1)
}

// GPUHardware returns the hardware of ranks that are spread over a machine's cards GPUs.
func GPUHardware(g gpus.GPU, cards int) Hardware {
	return Hardware{HalfPrecision: true, Machine: func(ranks int) *cost.Machine { return g.Spread(ranks, cards) }}
}
