// Package platform is the interface between a run and its device: contexts, kernels and groups
// of ranks. It implements the CPU; package platform/gpu implements NVIDIA GPUs.
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

// MaxLocalRanks bounds the ranks of one process: each has its own thread, streams and arena,
// and every pair of ranks has a record in the group.
const MaxLocalRanks = 1024

// Platform is the part of a run that depends on the device: contexts, kernels, groups. Everything
// else is the same on every device.
type Platform interface {
	// GPU returns the preset that describes each of the run's GPUs; nil on the CPU.
	GPU() *gpus.GPU
	// Cards returns the number of GPUs that the driver shows; 0 on the CPU.
	Cards() int
	// Limits returns a rank's part of the device's memory.
	Limits() Limits
	// Refused adds the source of the memory cap to the error of a plan that does not fit.
	Refused(err error) error
	// InMachine lists the memory spaces whose arenas are in the machine's main memory.
	InMachine() []graph.Space
	// Measure measures, for a plan that fits, the memory that the device needs outside the ranks'
	// arenas. Limits then returns the measured values.
	Measure(p *plan.Plan) error
	// Start creates the state that the ranks share, after planning.
	Start(s Setup) error
	// Rank returns a rank's context and its groups by mesh axis, −1 for all ranks. It is called
	// on the rank's goroutine.
	Rank(i int) (device.Context, map[int]comm.Group, error)
	// Library binds operations to the context that Rank returned for a rank.
	Library(rank int) kernels.Library
	// About describes the device in one line; "" if there is nothing to report.
	About() string
	// Close releases the state that the ranks share, after the ranks are closed.
	Close() error
}

// Meeter is a Platform whose Rank may wait for ranks of other processes.
type Meeter interface {
	// Meets reports whether Rank waits for other processes; it is valid after Start.
	Meets() bool
	// Abort ends the job: waiting ranks get err.
	Abort(err error)
}

// Options configure a platform when it is opened.
type Options struct {
	Device string // cpu or cuda, in any case
	World  World
	// DeviceMemory is the configured cap, in bytes per rank; 0: none.
	DeviceMemory int64
	// Outside is a rank's configured memory need outside its arena, in bytes by space; 0: the
	// device's default.
	Outside [graph.NumSpaces]int64
	Timeout time.Duration // of any collective
	Poison  bool
	// CheckWrites checks where kernels write. For tests, on the CPU.
	CheckWrites   bool
	RequirePinned bool
	Warn          func(string)
	// PortableBF16 makes bf16 products on the CPU give the same bits on every CPU.
	PortableBF16 bool
	// Graphs launches a step's operations as CUDA graphs, which need device memory.
	Graphs bool
	// Transport connects the ranks of several processes, each of which runs some ranks; nil: all
	// ranks are in this process.
	Transport Transport
	// Local is this process's number among those on its host, from 0. It selects the process's GPUs
	// if it sees more GPUs than it has ranks.
	Local int
}

// Transport connects CPU ranks of several processes. Ranks on GPUs also find each other through
// it, and then communicate over NCCL.
type Transport interface {
	// Join makes this process the one that runs the given ranks of a mesh.
	Join(mesh []graph.Axis, local []int, timeout time.Duration, warn func(string)) (Joined, error)
}

// TransportMemory is a Transport that needs memory outside a process's arenas and sum buffers, in
// bytes, given the numbers of processes and of ranks per process.
type TransportMemory interface {
	OutsideBytes(processes, each int) int64
}

// Joined is one process's connection to a job over processes.
type Joined interface {
	Groups(rank int) (map[int]comm.Group, error)
	// Map returns the allocator for a rank's arenas (see cpu.Options); nil: ordinary memory is
	// used.
	Map(rank int) func(space graph.Space, bytes int64) ([]byte, func() error, error)
	OnError(func(error))
	Close() error
}

// Limits are a rank's part of a device's memory, in bytes.
type Limits struct {
	DeviceMemory int64 // the smaller of the configured cap and the free memory; 0: no cap
	Outside      [graph.NumSpaces]int64
}

// Setup configures Start.
type Setup struct {
	Plan *plan.Plan
	Pool *pool.Pool
	// Disk creates a rank's file of the disk tier; nil: there is no disk tier.
	Disk func(rank int, bytes int64, initial byte) (device.Disk, error)
	// Failed is called with the error that ends a job over processes; nil: not called.
	Failed func(error)
	// Collectives is the algorithm of collectives, "": auto. PerHost is how many consecutive
	// ranks each host has; 0: unknown.
	Collectives algo.Name
	PerHost     int
	// Fastest is the table from which auto chooses an algorithm if ranks communicate by messages.
	Fastest algo.Table
}

// NewCPU opens the CPU device.
func NewCPU(o Options) (Platform, error) {
	if err := o.World.Check(); err != nil {
		return nil, err
	}
	if o.Transport != nil && o.CheckWrites {
		return nil, errors.New("CheckWrites watches the kernels of one process only")
	}
	if n := len(o.World.Local); n > MaxLocalRanks {
		return nil, plan.Refused(fmt.Errorf("Config.Ranks %d: one process runs at most %d CPU ranks", n, MaxLocalRanks))
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
	scratch []*cpu.Context // scratch memory of the ranks' collectives
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
		return err // joined may be a non-nil interface that holds nil
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

// usesHostTier reports whether a plan uses the disk, or keeps more in host memory than the inputs
// and staging of every run. Only then does memory that is not page-locked deserve a warning.
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

// MissingDevice is the error for a device, or a library that it needs, that is not on this machine.
// Err says what was searched for and where.
type MissingDevice struct {
	Device string
	Err    error
}

// ErrNoDevice matches every *MissingDevice in errors.Is.
var ErrNoDevice = errors.New("the device is not on this machine")

// Is reports whether target is ErrNoDevice.
func (e *MissingDevice) Is(target error) bool { return target == ErrNoDevice }

func (e *MissingDevice) Error() string { return fmt.Sprintf("Config.Device %s: %v", e.Device, e.Err) }

// Unwrap returns the cause.
func (e *MissingDevice) Unwrap() error { return e.Err }
