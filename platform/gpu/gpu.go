// Package gpu is the platform for this process's NVIDIA GPUs. Each rank has one, or consecutive
// ranks share one; in a job over processes NCCL connects them.
package gpu

import (
	"errors"
	"fmt"
	"os"

	"github.com/spillway-ml/spillway/internal/thread"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/comm/nccl/libnccl"
	"github.com/spillway-ml/spillway/comm/peers"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/kernels"
	kernelscpu "github.com/spillway-ml/spillway/kernels/cpu"
	kernelscuda "github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
	"github.com/spillway-ml/spillway/kernels/cuda/images"
	"github.com/spillway-ml/spillway/kernels/cuda/nvrtc"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform"
)

// Kernels are the kernels of a GPU, shared by its ranks.
type Kernels interface {
	kernels.Library
	// Sum returns the operation that adds the ranks' buffers.
	Sum(dtype graph.DType, order graph.SumOrder) (peers.Sum, error)
	Close() error
}

// Parts are the sources of the driver, the kernels, NCCL and NVML's values.
type Parts struct {
	Driver  func() (driver.API, error)
	Kernels func(o platform.Options, api driver.API, dev driver.Device, host kernels.Library) (Kernels, error)
	// NCCL opens the library that connects processes.
	NCCL func() (nccl.API, error)
	// Used returns the bytes of a GPU's memory that all processes use together.
	Used func(uuid [16]byte) (int64, error)
}

// DoubleCUDA replaces the machine's driver, kernels, NCCL and NVML with test doubles in this
// whole process. Only tests of commands, which run as processes, call it.
func DoubleCUDA(parts Parts) { realCUDA = parts }

// realCUDA are the machine's own parts.
var realCUDA = Parts{Driver: driver.Open, Kernels: openLibrary, NCCL: libnccl.Open, Used: gpus.Used}

// tf32Override is the variable that makes NVIDIA's libraries use TF32 for fp32 products. The
// results would differ from those of the plan, the CPU and PyTorch.
const tf32Override = "NVIDIA_TF32_OVERRIDE"

// GuessedOutside is the device memory, in bytes, that kernels and cuBLASLt need beside the context
// when operations run: module code, handles and threads' local memory. It was 10 to 13 MB on an
// H200 (benchmarks/cuda). Plans that are not run use this estimate: see Measure.
const GuessedOutside = 16 << 20

// cudaPlatform is this process's GPUs: one shared by all ranks, or one for each block of
// consecutive ranks; in a job over processes one for each rank.
type cudaPlatform struct {
	o       platform.Options
	parts   Parts
	api     driver.API
	visible int // GPUs that the driver shows
	cards   []*card
	of      map[int]*card // by rank
	preset  gpus.GPU
	apart   [2]int // two GPUs that can't access each other's memory; equal if all can

	limits platform.Limits
	tight  *card // the card with the least available memory

	opt   cuda.Options
	world *peers.World
	nccl  *ncclPart   // nil: all ranks are in this process
	cpu   lateKernels // CPU kernels of the cards' libraries
}

// New opens the GPUs that the driver shows. parts replaces the machine's driver, kernels, NCCL and
// NVML in tests; nil uses the machine's.
func New(o platform.Options, parts *Parts) (_ platform.Platform, err error) {
	if err := o.World.Check(); err != nil {
		return nil, err
	}
	switch {
	case o.CheckWrites:
		return nil, errors.New("Config.Device cuda: CheckWrites watches kernels of the CPU device only")
	case os.Getenv(tf32Override) != "" && os.Getenv(tf32Override) != "0":
		return nil, fmt.Errorf("Config.Device cuda: the environment has %s=%.80q, which makes cuBLAS round fp32 products to 10 bits; unset it, or set it to 0", tf32Override, os.Getenv(tf32Override))
	case len(o.World.Local) > kernelscuda.MostRanks:
		return nil, fmt.Errorf("Config.Ranks %d: at most %d ranks of a process are on GPUs", len(o.World.Local), kernelscuda.MostRanks)
	}
	c := &cudaPlatform{o: o, parts: realCUDA, of: map[int]*card{}}
	if parts != nil {
		c.parts = *parts
	}
	var list []driver.Device
	if c.api, list, err = c.parts.devices(o.Device); err != nil {
		return nil, err
	}
	c.visible = len(list)
	if o.Transport != nil {
		if list, err = seen(o.Local, len(o.World.Local), list); err == nil {
			err = c.openNCCL()
		}
	}
	if err != nil {
		return nil, err
	}
	if c.cards, err = deal(o.World.Local, list); err != nil {
		return nil, err
	}
	for _, k := range c.cards {
		k.host = thread.New(true)
		for _, rank := range k.ranks {
			c.of[rank] = k
		}
	}
	if err := c.open(); err != nil {
		return nil, fmt.Errorf("Config.Device cuda: %w", errors.Join(err, c.Close()))
	}
	return c, nil
}

// devices opens the driver and lists the GPUs that it shows. device is Config.Device.
func (p *Parts) devices(device string) (driver.API, []driver.Device, error) {
	api, err := p.Driver()
	if err != nil {
		return nil, nil, &platform.MissingDevice{Device: device, Err: err}
	}
	list, err := api.Devices()
	if err != nil {
		return nil, nil, fmt.Errorf("Config.Device cuda: %w", err)
	}
	if len(list) == 0 {
		return nil, nil, &platform.MissingDevice{Device: device, Err: errors.New("the driver shows no GPU (CUDA_VISIBLE_DEVICES hides them, where it is set)")}
	}
	return api, list, nil
}

// open makes each GPU's context current on its thread, enables access between GPUs and measures
// the available memory.
func (c *cudaPlatform) open() error {
	c.preset = gpus.Product(c.cards[0].gpu.Name, c.cards[0].gpu.Memory)
	for _, k := range c.cards {
		if k.gpu.Memory < c.preset.Memory {
			c.preset = gpus.Product(k.gpu.Name, k.gpu.Memory)
		}
		if err := k.do(func() error { return k.retain(&c.parts, c.api) }); err != nil {
			return err
		}
	}
	if err := errors.Join(c.link(), c.probe()); err != nil {
		return err
	}
	for _, k := range c.cards {
		if err := k.do(func() error { return k.measure(c.api, c.preset.OutsideBytes()) }); err != nil {
			return err
		}
	}
	c.limit(0)
	return nil
}

// limit computes a rank's limits from the GPUs' memory. A rank needs scratch bytes for data from
// other GPUs. All ranks have the same plan, so the GPU with the least memory decides.
func (c *cudaPlatform) limit(scratch int64) {
	room := func(k *card) int64 {
		each := max(k.available/int64(len(k.ranks)), 1)
		if c.o.DeviceMemory > 0 {
			each = min(each, c.o.DeviceMemory)
		}
		return each
	}
	c.limits = platform.Limits{DeviceMemory: room(c.cards[0]), Outside: c.o.Outside}
	for _, k := range c.cards {
		c.limits.DeviceMemory = min(c.limits.DeviceMemory, room(k))
	}
	scratch += c.outsideOfNCCL() + int64(len(c.cards)-1)*mappedPeer
	said, most := c.o.Outside[graph.Device], int64(0)
	c.tight = nil
	for _, k := range c.cards {
		outside := said
		if said == 0 {
			outside = k.outside + (scratch+arenaUnit-1)/arenaUnit*arenaUnit
		}
		// Memory that a GPU has beyond the smallest one covers part of its outside bytes.
		if outside -= room(k) - c.limits.DeviceMemory; c.tight == nil || outside > most {
			c.tight, most = k, outside
		}
	}
	c.limits.Outside[graph.Device] = most
	if ranks := int64(len(c.o.World.Local)); c.limits.Outside[graph.Host] == 0 {
		c.limits.Outside[graph.Host] = (int64(len(c.cards))*gpus.HostOutsideBytes + ranks - 1) / ranks
	}
}

func (c *cudaPlatform) GPU() *gpus.GPU          { return &c.preset }
func (c *cudaPlatform) Cards() int              { return c.visible }
func (c *cudaPlatform) Limits() platform.Limits { return c.limits }

// InMachine returns host memory only: it is page-locked, so all of it must fit into physical
// memory.
func (c *cudaPlatform) InMachine() []graph.Space { return []graph.Space{graph.Host} }

// Refused adds to the error which cap applied: the configured one, or the free memory.
func (c *cudaPlatform) Refused(err error) error {
	r, ok := errors.AsType[*plan.DoesNotFit](err)
	if !ok || r.Space != graph.Device {
		return err
	}
	k := c.tight
	if c.limits.DeviceMemory == c.o.DeviceMemory {
		return fmt.Errorf("%w; this cap is Config.DeviceMemory (the GPU has %s free)", err, plan.Bytes(k.available))
	}
	text := fmt.Sprintf("this cap is what is free on GPU %d, %s: %s", k.gpu.Ordinal, k.gpu.Name, plan.Bytes(k.available))
	if n := len(k.ranks); n > 1 {
		text += fmt.Sprintf(" over %d ranks", n)
	}
	if k.others > 0 {
		text += fmt.Sprintf(", where others use %s", plan.Bytes(k.others))
	}
	if c.o.DeviceMemory > 0 {
		text += fmt.Sprintf("; Config.DeviceMemory allows %s", plan.Bytes(c.o.DeviceMemory))
	}
	return fmt.Errorf("%w; %s", err, text)
}

// gpusOf lists the GPU of each rank, by ordinal; nil if all share one, or if NCCL connects
// them.
func (c *cudaPlatform) gpusOf() (list []int) {
	if len(c.cards) == 1 || c.nccl != nil {
		return nil
	}
	for _, rank := range c.o.World.Local {
		list = append(list, c.of[rank].gpu.Ordinal)
	}
	return list
}

func (c *cudaPlatform) Start(s platform.Setup) error {
	c.opt = cuda.Options{Driver: c.api, Capacity: s.Plan.Config.Capacity, Poison: c.o.Poison, Disk: s.Disk}
	c.cpu.Library = kernelscpu.New(s.Pool)
	for _, k := range c.cards {
		if err := k.do(func() error { return c.openKernels(k) }); err != nil {
			return err
		}
	}
	if c.nccl != nil {
		return c.nccl.start(&c.o, &s, func(rank int, t graph.DType, order graph.SumOrder) (nccl.Sum, error) {
			return c.of[rank].lib.Sum(t, order)
		})
	}
	sum := func(rank int, t graph.DType, order graph.SumOrder) (peers.Sum, error) {
		return c.of[rank].lib.Sum(t, order)
	}
	list := c.gpusOf()
	var err error
	c.world, err = peers.New(s.Plan.Program.Mesh, peers.Options{Timeout: c.o.Timeout, Sum: sum, GPU: list, Scratch: peers.ScratchBytes(s.Plan.Program, list)})
	return err
}

func (c *cudaPlatform) Rank(i int) (device.Context, map[int]comm.Group, error) {
	o := c.opt
	if o.Ordinal = c.of[i].gpu.Ordinal; len(c.cards) > 1 {
		o.Where = fmt.Sprintf("GPU %d", o.Ordinal)
	}
	ctx, err := cuda.New(i, o)
	if err != nil {
		return nil, nil, err
	}
	join := c.nccl.groups
	if c.nccl == nil {
		join = c.world.Groups
	}
	groups, err := join(ctx)
	if err != nil {
		return nil, nil, errors.Join(err, ctx.Close())
	}
	return ctx, groups, nil
}

func (c *cudaPlatform) Library(rank int) kernels.Library { return c.of[rank].lib }

func (c *cudaPlatform) Close() error {
	errs := []error{c.nccl.close()}
	for _, k := range c.cards {
		errs = append(errs, k.do(func() error { return k.close(c.api) }))
		close(k.host.Work)
	}
	return errors.Join(errs...)
}

// compiledKernels are the kernels compiled by NVRTC and the products of cuBLASLt.
type compiledKernels struct {
	*kernelscuda.Library
	products blas.Library
}

func openLibrary(o platform.Options, api driver.API, dev driver.Device, host kernels.Library) (Kernels, error) {
	version, err := api.Version()
	if err != nil {
		return nil, err
	}
	compiler, err := Compiler(version, o.Warn)
	if err != nil {
		return nil, &platform.MissingDevice{Device: o.Device, Err: err}
	}
	products, err := blas.Open(version)
	if err != nil {
		return nil, &platform.MissingDevice{Device: o.Device, Err: err}
	}
	return NewKernels(kernelscuda.Options{API: api, Device: dev, Compiler: compiler, Products: products, Host: host})
}

// Compiler returns the compiler for a driver version, such as 12040. It uses this build's embedded
// kernels if it has them, and NVRTC for all others.
func Compiler(version int, warn func(string)) (kernelscuda.Compiler, error) {
	open := func() (kernelscuda.Compiler, error) { return nvrtc.Open(nvrtc.Options{Driver: version, Warn: warn}) }
	if !images.There() {
		return open()
	}
	return images.New(version, open), nil
}

// NewKernels makes the kernels that o describes.
func NewKernels(o kernelscuda.Options) (Kernels, error) {
	lib, err := kernelscuda.New(o)
	if err != nil {
		return nil, errors.Join(err, o.Products.Close())
	}
	return &compiledKernels{lib, o.Products}, nil
}

// Sum returns the operation that adds the ranks' buffers.
func (k *compiledKernels) Sum(dtype graph.DType, order graph.SumOrder) (peers.Sum, error) {
	return k.RankSum(dtype, order)
}

// Close releases the kernels and the products.
func (k *compiledKernels) Close() error { return errors.Join(k.Library.Close(), k.products.Close()) }
