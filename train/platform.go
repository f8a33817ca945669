package train

import (
	"strings"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/platform/gpu"
)

// MissingDevice is the error of a device, or a library that it needs, that is
// not on this machine. It says what was looked for and where.
type MissingDevice = platform.MissingDevice

// newPlatform opens the device that a request names. The Config that comes back has what
// only the device knows: what it has free, and what is outside the arenas.
func newPlatform(cfg request) (platform.Platform, config.Config, error) {
	o := platform.Options{Device: cfg.Device, World: world(&cfg.Config), Transport: transport(&cfg.Config), Local: place(&cfg.Config), DeviceMemory: cfg.DeviceMemory, Outside: cfg.Outside,
		Timeout: cfg.Timeout, Poison: cfg.poison, CheckWrites: cfg.checkWrites, RequirePinned: cfg.RequirePinned, Warn: cfg.Warn, Graphs: cfg.WithoutGraphs() == ""}
	var p platform.Platform
	var err error
	if strings.EqualFold(cfg.Device, "cuda") {
		p, err = gpu.New(o, cfg.cuda)
	} else {
		p, err = platform.NewCPU(o)
	}
	if err != nil {
		return nil, cfg.Config, err
	}
	limits := p.Limits()
	cfg.DeviceMemory, cfg.Outside = limits.DeviceMemory, limits.Outside
	return p, cfg.Config, nil
}

// hardwareOf is what the time of a step is predicted on.
func hardwareOf(p platform.Platform, cfg *config.Config) Hardware {
	if g := p.GPU(); g != nil {
		return gpuHardware(*g, p.Cards())
	}
	return CPUHardware(cfg.ComputeThreads())
}

// DeviceHardware is what the time of a step is predicted on for the device that
// cfg names, on this machine; of the CPU by typical rates. The Config that comes back has what
// only the device knows: its cap, and what is outside the arenas.
func DeviceHardware(cfg config.Config) (Hardware, config.Config, error) {
	if !strings.EqualFold(cfg.Device, "cuda") {
		return CPUHardware(cfg.ComputeThreads()), cfg, nil
	}
	p, cfg, err := newPlatform(request{Config: cfg})
	if err != nil {
		return Hardware{}, cfg, err
	}
	return hardwareOf(p, &cfg), cfg, p.Close()
}

// plannedHardware is DeviceHardware for a plan that looks at no device: a GPU is
// then one of a usual kind.
func plannedHardware(cfg *config.Config) Hardware {
	if !strings.EqualFold(cfg.Device, "cuda") {
		return CPUHardware(cfg.ComputeThreads())
	}
	return gpuHardware(gpus.Usual(), 1)
}

// gpuHardware is so many GPUs of a machine, over which ranks are spread.
func gpuHardware(g gpus.GPU, cards int) Hardware {
	return Hardware{HalfPrecision: true, Machine: func(ranks int) *cost.Machine { return g.Spread(ranks, cards) }}
}
