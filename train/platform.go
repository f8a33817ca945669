package train

import (
	"context"
	"strings"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/platform/gpu"
	"github.com/spillway-ml/spillway/train/job"
)

// MissingDevice is the error for a device, or a library that it needs, that this machine lacks.
// It says what was looked for and where.
type MissingDevice = platform.MissingDevice

// newPlatform opens the device that a request names. The returned Config also has what only the
// device knows: its free memory, and the bytes needed outside the arenas.
func newPlatform(cfg request) (platform.Platform, config.Config, error) {
	o := platform.Options{Device: cfg.Device, World: job.World(&cfg.Config), Transport: job.Transport(&cfg.Config), Local: job.Place(&cfg.Config), DeviceMemory: cfg.DeviceMemory, Outside: cfg.Outside,
		Timeout: cfg.Timeout, Poison: cfg.poison, CheckWrites: cfg.checkWrites, RequirePinned: cfg.RequirePinned, Warn: cfg.Warn, PortableBF16: cfg.PortableBF16(), Graphs: cfg.WithoutGraphs() == ""}
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

// hardwareOf returns the rates from which the time of a step is predicted.
func hardwareOf(p platform.Platform, cfg *config.Config) planner.Hardware {
	if g := p.GPU(); g != nil {
		return planner.GPUHardware(*g, p.Cards())
	}
	return planner.CPUHardware(cfg.ComputeThreads())
}

// DeviceHardware returns the rates from which the time of a step is predicted on the device
// that cfg names, on this machine; for the CPU they are typical rates. The returned Config also
// has what only the device knows: its memory cap, and the bytes needed outside the arenas.
func DeviceHardware(cfg config.Config) (planner.Hardware, config.Config, error) {
	if !strings.EqualFold(cfg.Device, "cuda") {
		return planner.CPUHardware(cfg.ComputeThreads()), cfg, nil
	}
	p, cfg, err := newPlatform(request{Config: cfg})
	if err != nil {
		return planner.Hardware{}, cfg, err
	}
	return hardwareOf(p, &cfg), cfg, p.Close()
}

// FitHere is planner.FitHere for a run on this machine, or for a job on its hosts, which first
// report their memory.
func FitHere(ctx context.Context, cfg config.Config, fixed planner.Fixed, rows int, hw planner.Hardware) (*planner.Fitted, error) {
	cfg, err := job.Greet(cfg)
	if err != nil {
		return nil, err
	}
	return planner.FitHere(ctx, cfg, fixed, rows, hw)
}
