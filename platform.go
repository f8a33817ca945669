package spillway

import (
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/inproc"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/kernels"
	kernelscpu "github.com/spillway-ml/spillway/kernels/cpu"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
)

// platform is what a run takes from its device: contexts, kernels, groups.
// Everything else is the same on every device.
type platform interface {
	// hardware is what the time of a step is predicted on.
	hardware() Hardware
	// refused says of a refusal where its cap comes from.
	refused(err error) error
	// preflight refuses a plan that fits its caps and not the machine.
	preflight(p *plan.Plan) error
	// start makes what the ranks share, once the plan is there.
	start(t *Trainer) error
	// rank gives a rank's context and its groups by mesh axis, −1 for all ranks. It
	// is called on the rank's goroutine.
	rank(i int) (device.Context, map[int]comm.Group, error)
	// library binds operations to contexts that rank has given.
	library() kernels.Library
	// about describes the device in a line, "" for nothing to say.
	about() string
	// close ends what the ranks share, once they are closed.
	close() error
}

// newPlatform opens the device that cfg names and puts into cfg what only the
// device knows: what it has free, and what is outside the arenas.
func newPlatform(cfg *Config) (platform, error) {
	if strings.EqualFold(cfg.Device, "cuda") {
		return newCUDAPlatform(cfg)
	}
	if cfg.Ranks > maxLocalRanks {
		return nil, fmt.Errorf("--ranks %d: one process runs at most %d CPU ranks", cfg.Ranks, maxLocalRanks)
	}
	return &cpuPlatform{cfg: cfg}, nil
}

// DeviceHardware is what the time of a step is predicted on for the device that
// cfg names, on this machine. It puts into cfg what only the device knows: its
// cap, and what is outside the arenas.
func DeviceHardware(cfg *Config) (Hardware, error) {
	if !strings.EqualFold(cfg.Device, "cuda") {
		hw, _ := KnownHardware(cfg.threads())
		return hw, nil
	}
	p, err := newPlatform(cfg)
	if err != nil {
		return Hardware{}, err
	}
	return p.hardware(), p.close()
}

// plannedHardware is DeviceHardware for a plan that looks at no device: a GPU is
// then one of a usual kind.
func plannedHardware(cfg *Config) Hardware {
	if !strings.EqualFold(cfg.Device, "cuda") {
		return CPUHardware(cfg.threads())
	}
	return gpuHardware(gpus.Usual())
}

// gpuHardware is a GPU that all ranks share.
func gpuHardware(g gpus.GPU) Hardware {
	return Hardware{HalfPrecision: true, Machine: func(ranks int) *cost.Machine { return g.Shared(ranks) }}
}

// cpuPlatform is the CPU device.
type cpuPlatform struct {
	cfg   *Config
	opt   cpu.Options
	world *inproc.World
	lib   kernels.Library
}

func (c *cpuPlatform) hardware() Hardware           { return CPUHardware(c.cfg.threads()) }
func (c *cpuPlatform) refused(err error) error      { return err }
func (c *cpuPlatform) preflight(p *plan.Plan) error { return onThisMachine(*c.cfg, p) }
func (c *cpuPlatform) library() kernels.Library     { return c.lib }
func (c *cpuPlatform) about() string                { return "" }
func (c *cpuPlatform) close() error                 { return nil }

func (c *cpuPlatform) start(t *Trainer) (err error) {
	c.opt = cpu.Options{Capacity: t.plan.Config.Capacity, Poison: t.cfg.Poison}
	if t.cfg.CheckWrites {
		c.opt.Checker = cpu.NewChecker()
	}
	t.memoryOptions(&c.opt)
	c.lib = kernelscpu.New(t.pool)
	c.world, err = inproc.New(t.plan.Program.Mesh, inproc.Options{Timeout: t.cfg.Timeout})
	return err
}

func (c *cpuPlatform) rank(i int) (device.Context, map[int]comm.Group, error) {
	groups, err := c.world.Groups(i)
	if err != nil {
		return nil, nil, err
	}
	return cpu.New(i, c.opt), groups, nil
}
