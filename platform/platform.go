// Package platform is what a run takes from its device: contexts, kernels and groups of
// ranks. It has the CPU's; package platform/gpu has that of NVIDIA GPUs.
package platform

import (
	"errors"
	"fmt"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/comm/inproc"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/kernels"
	kernelscpu "github.com/spillway-ml/spillway/kernels/cpu"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/plan"
)

// MaxLocalRanks bounds the ranks of one process: each has a thread, streams
// and an arena of its own, and every pair of them a record in the group.
const MaxLocalRanks = 1024

// Platform is what a run takes from its device: contexts, kernels, groups.
// Everything else is the same on every device.
type Platform interface {
	// GPU is the preset of the GPU that each of the run's is like; nil on the CPU.
	GPU() *gpus.GPU
	// Cards is how many GPUs there are for the ranks.
	Cards() int
	// Limits is what only the device knows of its memory.
	Limits() Limits
	// Refused says of a refusal where its cap comes from.
	Refused(err error) error
	// InMachine lists the spaces whose arenas lie in the machine's own memory.
	InMachine() []graph.Space
	// Measure learns from a plan that fits what the device takes beside the ranks'
	// arenas: Limits are then those that were measured.
	Measure(p *plan.Plan) error
	// Start makes what the ranks share, once the plan is there.
	Start(s Setup) error
	// Rank gives a rank's context and its groups by mesh axis, −1 for all ranks. It
	// is called on the rank's goroutine.
	Rank(i int) (device.Context, map[int]comm.Group, error)
	// Library binds operations to the context that Rank has given a rank.
	Library(rank int) kernels.Library
	// About describes the device in a line, "" for nothing to say.
	About() string
	// Close ends what the ranks share, once they are closed.
	Close() error
}

// Meeter is a Platform whose ranks may meet those of other processes in Rank.
type Meeter interface {
	// Meets tells whether they do, once it is started.
	Meets() bool
	// Abort ends the job: ranks that wait for others get err.
	Abort(err error)
}

// Options are what a platform is opened with.
type Options struct {
	Device string // cpu or cuda, in any case
	World  World
	// DeviceMemory is the cap that was asked for, bytes a rank; 0: none.
	DeviceMemory int64
	// Outside is what a rank is said to need of each space outside its arena; 0:
	// the device says.
	Outside [graph.NumSpaces]int64
	Timeout time.Duration // of any collective
	Poison  bool
	// CheckWrites watches kernels' writes. For tests, on the CPU.
	CheckWrites   bool
	RequirePinned bool
	Warn          func(string)
	// PortableBF16 gives bf16 products on the CPU the same bits on every CPU.
	PortableBF16 bool
	// Graphs says that a step's operations are launched as CUDA graphs, which take memory of
	// the device.
	Graphs bool
	// Transport joins the ranks of several processes, each with its own part of
	// the world; nil: all ranks are in this process.
	Transport Transport
	// Local is this process's place among those of its host: its GPU has that number.
	Local int
}

// Transport is how CPU ranks of several processes meet; ranks on GPUs meet by it too, and then
// exchange over NCCL.
type Transport interface {
	// Join makes this process the one that runs the given ranks of a mesh.
	Join(mesh []graph.Axis, local []int, timeout time.Duration, warn func(string)) (Joined, error)
}

// TransportMemory is a Transport that takes memory of a process outside its ranks'
// arenas and what their sums land in, in bytes, of so many processes with so many ranks.
type TransportMemory interface {
	OutsideBytes(processes, each int) int64
}

// Joined is a process's part of a job over processes.
type Joined interface {
	Groups(rank int) (map[int]comm.Group, error)
	// Map makes the memory of a rank's arenas (see cpu.Options); nil: any will do.
	Map(rank int) func(space graph.Space, bytes int64) ([]byte, func() error, error)
	OnError(func(error))
	Close() error
}

// Limits are a rank's part of a device's memory, in bytes.
type Limits struct {
	DeviceMemory int64 // the least of what was asked for and what is free; 0: no cap
	Outside      [graph.NumSpaces]int64
}

// Setup is what a platform starts with.
type Setup struct {
	Plan *plan.Plan
	Pool *pool.Pool
	// Disk makes a rank's file of the disk tier; nil: there is none.
	Disk func(rank int, bytes int64, initial byte) (device.Disk, error)
	// Failed is told the error that ends a job over processes; nil: nobody is.
	Failed func(error)
	// Collectives is the algorithm of collectives, "": auto; PerHost how many neighbouring
	// ranks each host has, 0: nobody knows.
	Collectives algo.Name
	PerHost     int
	// Fastest is what auto chooses by where ranks send messages.
	Fastest algo.Table
}

// NewCPU is the CPU device.
func NewCPU(o Options) (Platform, error) {
	if err := o.World.Check(); err != nil {
		return nil, err
	}
	if o.Transport != nil && o.CheckWrites {
		return nil, errors.New("CheckWrites watches the kernels of one process only")
	}
	if n := len(o.World.Local); n > MaxLocalRanks {
		return nil, fmt.Errorf("Config.Ranks %d: one process runs at most %d CPU ranks", n, MaxLocalRanks)
	}
	return &cpuPlatform{o: o}, nil
}

// cpuPlatform is the CPU device.
type cpuPlatform struct {
	o     Options
	opt   cpu.Options
	world interface {
		Groups(rank int) (map[int]comm.Group, error)
	}
	joined  Joined // nil: one process
	setup   Setup
	scratch []*cpu.Context // memory of the ranks' algorithms
	lib     kernels.Library
}

func (c *cpuPlatform) GPU() *gpus.GPU              { return nil }
func (c *cpuPlatform) Cards() int                  { return 0 }
func (c *cpuPlatform) Limits() Limits              { return Limits{c.o.DeviceMemory, c.o.Outside} }
func (c *cpuPlatform) Refused(err error) error     { return err }
func (c *cpuPlatform) Measure(*plan.Plan) error    { return nil }
func (c *cpuPlatform) InMachine() []graph.Space    { return []graph.Space{graph.Device, graph.Host} }
func (c *cpuPlatform) Library(int) kernels.Library { return c.lib }
func (c *cpuPlatform) About() string               { return "" }

func (c *cpuPlatform) Start(s Setup) (err error) {
	c.opt = cpu.Options{Capacity: s.Plan.Config.Capacity, Poison: c.o.Poison, Warn: c.o.Warn, RequirePinned: c.o.RequirePinned,
		Pin: usesHostTier(s.Plan), Disk: s.Disk}
	if c.o.CheckWrites {
		c.opt.Checker = cpu.NewChecker()
	}
	c.lib = kernelscpu.New(s.Pool)
	if c.o.PortableBF16 {
		c.lib = kernelscpu.NewPortable(s.Pool)
	}
	c.setup = s
	if err := s.checkCollectives(c.o.World.Size); err != nil {
		return err
	}
	if c.o.Transport == nil {
		c.world, err = inproc.New(s.Plan.Program.Mesh, inproc.Options{Timeout: c.o.Timeout})
		return err
	}
	joined, err := c.o.Transport.Join(s.Plan.Program.Mesh, c.o.World.Local, c.o.Timeout, c.o.Warn)
	if err != nil {
		return err // joined may be an interface around nothing
	}
	c.joined, c.world = joined, joined
	if s.Failed != nil {
		c.joined.OnError(s.Failed)
	}
	return nil
}

func (c *cpuPlatform) Close() error {
	var errs []error
	for _, s := range c.scratch {
		errs = append(errs, s.Close())
	}
	c.scratch = nil
	if c.joined != nil {
		errs = append(errs, c.joined.Close())
		c.joined = nil
	}
	return errors.Join(errs...)
}

func (c *cpuPlatform) Rank(i int) (device.Context, map[int]comm.Group, error) {
	groups, err := c.world.Groups(i)
	if err != nil {
		return nil, nil, err
	}
	opt := c.opt
	if c.joined != nil {
		opt.Map = c.joined.Map(i)
	}
	if err := c.wrap(i, opt, groups); err != nil {
		return nil, nil, err
	}
	return cpu.New(i, opt), groups, nil
}

// usesHostTier tells whether a plan keeps more in host memory than what every
// run has there, inputs and the staging of its states: only then is locking
// worth a warning where it is refused.
func usesHostTier(p *plan.Plan) bool {
	if p.Layout.Spaces[graph.Disk].Peak > 0 {
		return true
	}
	for class := range graph.NumClasses {
		switch class {
		case graph.Inputs, graph.Communication, graph.Padding:
		default:
			if p.Layout.Spaces[graph.Host].ClassPeak[class] > 0 {
				return true
			}
		}
	}
	return false
}

// MissingDevice is the error of a device, or a library that it needs, that is
// not on this machine. It says what was looked for and where.
type MissingDevice struct {
	Device string
	Err    error
}

// ErrNoDevice is what errors.Is finds in every *MissingDevice.
var ErrNoDevice = errors.New("the device is not on this machine")

// Is says that the error is an ErrNoDevice.
func (e *MissingDevice) Is(target error) bool { return target == ErrNoDevice }

func (e *MissingDevice) Error() string { return fmt.Sprintf("Config.Device %s: %v", e.Device, e.Err) }

// Unwrap returns the cause.
func (e *MissingDevice) Unwrap() error { return e.Err }
