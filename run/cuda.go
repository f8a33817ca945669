package run

import (
	"errors"
	"fmt"
	"os"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/onegpu"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/kernels"
	kernelscpu "github.com/spillway-ml/spillway/kernels/cpu"
	kernelscuda "github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
	"github.com/spillway-ml/spillway/kernels/cuda/nvrtc"
	"github.com/spillway-ml/spillway/plan"
)

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

// GPUKernels is the kernels of a GPU that its ranks share.
type GPUKernels interface {
	kernels.Library
	// Sum adds buffers of the ranks.
	Sum(dtype graph.DType, order graph.SumOrder) (onegpu.Sum, error)
	Close() error
}

// CUDAParts is where the driver, the kernels and what NVML says come from.
type CUDAParts struct {
	Driver  func() (driver.API, error)
	Kernels func(o Options, api driver.API, dev driver.Device, host kernels.Library) (GPUKernels, error)
	// Used is the bytes that all processes together use of a GPU's memory.
	Used func(uuid [16]byte) (int64, error)
}

// realCUDA is the machine's own.
var realCUDA = CUDAParts{Driver: driver.Open, Kernels: openGPUKernels, Used: gpus.Used}

// tf32Override is the variable by which NVIDIA's libraries take TF32 for products that
// ask for fp32: the numbers would be others than the plan's, the CPU's and PyTorch's.
const tf32Override = "NVIDIA_TF32_OVERRIDE"

// GuessedOutside is what kernels and cuBLASLt take of device memory beside the
// context when operations run: code of modules, handles, threads' local memory. An
// estimate, which stands where a plan is only looked at: see Measure.
const GuessedOutside = 48 << 20

// cudaPlatform is one GPU, which all ranks share: its first.
type cudaPlatform struct {
	o      Options
	parts  CUDAParts
	api    driver.API
	gpu    driver.Device
	preset gpus.GPU
	host   *thread // with the GPU's context current

	limits    Limits
	available int64 // bytes of the GPU that this process may take, its context included
	others    int64 // bytes that others use; −1: not known

	opt   cuda.Options
	world *onegpu.World
	lib   GPUKernels
	cpu   lateKernels // of lib
}

func newCUDA(o Options) (_ *cudaPlatform, err error) {
	switch {
	case o.CheckWrites:
		return nil, errors.New("Config.Device cuda: CheckWrites watches kernels of the CPU device only")
	case os.Getenv(tf32Override) != "" && os.Getenv(tf32Override) != "0":
		return nil, fmt.Errorf("Config.Device cuda: the environment has %s=%.80q, which makes cuBLAS round fp32 products to 10 bits; unset it, or set it to 0", tf32Override, os.Getenv(tf32Override))
	case len(o.World.Local) > kernelscuda.MostRanks:
		return nil, fmt.Errorf("Config.Ranks %d: at most %d ranks share a GPU", len(o.World.Local), kernelscuda.MostRanks)
	}
	c := &cudaPlatform{o: o, parts: realCUDA}
	if o.CUDA != nil {
		c.parts = *o.CUDA
	}
	if c.api, err = c.parts.Driver(); err != nil {
		return nil, &MissingDevice{o.Device, err}
	}
	list, err := c.api.Devices()
	if err != nil {
		return nil, fmt.Errorf("Config.Device cuda: %w", err)
	}
	if len(list) == 0 {
		return nil, &MissingDevice{o.Device, errors.New("the driver shows no GPU (CUDA_VISIBLE_DEVICES hides them, where it is set)")}
	}
	c.gpu = list[0]
	c.preset = gpus.Product(c.gpu.Name, c.gpu.Memory)
	c.host = newThread()
	if err := c.host.do(c.measure); err != nil {
		close(c.host.work)
		return nil, fmt.Errorf("Config.Device cuda: %w", err)
	}
	return c, nil
}

// measure makes the GPU's context current and finds what memory there is. What
// the context takes is measured where NVML tells what was in use before.
func (c *cudaPlatform) measure() error {
	used, nvmlErr := c.parts.Used(c.gpu.UUID)
	handle, err := c.api.Retain(c.gpu.Ordinal)
	if err != nil {
		return err
	}
	var free, total int64
	if err = c.api.SetCurrent(handle); err == nil {
		free, total, err = c.api.MemInfo()
	}
	if err != nil {
		return errors.Join(err, c.api.Release(c.gpu.Ordinal))
	}
	outside := c.preset.OutsideBytes()
	if nvmlErr == nil {
		c.others = used
		c.available = max(free, total-used)
		outside = c.available - free + GuessedOutside
	} else {
		c.others = -1
		c.available = min(total, free+outside)
	}
	ranks := int64(len(c.o.World.Local))
	c.limits = Limits{max(c.available/ranks, 1), c.o.Outside}
	if asked := c.o.DeviceMemory; asked > 0 {
		c.limits.DeviceMemory = min(c.limits.DeviceMemory, asked)
	}
	for space, bytes := range map[graph.Space]int64{graph.Device: outside, graph.Host: gpus.HostOutsideBytes} {
		if c.limits.Outside[space] == 0 {
			c.limits.Outside[space] = (bytes + ranks - 1) / ranks
		}
	}
	return nil
}

func (c *cudaPlatform) GPU() *gpus.GPU { return &c.preset }
func (c *cudaPlatform) Limits() Limits { return c.limits }

// InMachine is host memory alone: page-locked, it must be there whole.
func (c *cudaPlatform) InMachine() []graph.Space { return []graph.Space{graph.Host} }

func (c *cudaPlatform) About() string {
	line := fmt.Sprintf("GPU %d, %s (compute capability %d.%d, %d multiprocessors): %s, of which %s were free", c.gpu.Ordinal, c.gpu.Name,
		c.gpu.Major, c.gpu.Minor, c.gpu.SMs, plan.Bytes(c.gpu.Memory), plan.Bytes(c.available))
	if c.others > 0 {
		line += fmt.Sprintf(" and %s in use", plan.Bytes(c.others))
	}
	return line
}

// refused says which of the two caps it was: the one that was asked for, or what
// is really free.
func (c *cudaPlatform) Refused(err error) error {
	var r *plan.DoesNotFit
	if !errors.As(err, &r) || r.Space != graph.Device {
		return err
	}
	if c.limits.DeviceMemory == c.o.DeviceMemory {
		return fmt.Errorf("%w; this cap is Config.DeviceMemory (the GPU has %s free)", err, plan.Bytes(c.available))
	}
	text := fmt.Sprintf("this cap is what is free on GPU %d, %s: %s", c.gpu.Ordinal, c.gpu.Name, plan.Bytes(c.available))
	if n := len(c.o.World.Local); n > 1 {
		text += fmt.Sprintf(" over %d ranks", n)
	}
	if c.others > 0 {
		text += fmt.Sprintf(", where others use %s", plan.Bytes(c.others))
	}
	if c.o.DeviceMemory > 0 {
		text += fmt.Sprintf("; Config.DeviceMemory allows %s", plan.Bytes(c.o.DeviceMemory))
	}
	return fmt.Errorf("%w; %s", err, text)
}

func (c *cudaPlatform) Start(s Setup) error {
	c.opt = cuda.Options{Driver: c.api, Ordinal: c.gpu.Ordinal, Capacity: s.Plan.Config.Capacity, Poison: c.o.Poison, Disk: s.Disk}
	err := c.host.do(func() (err error) {
		c.cpu.Library = kernelscpu.New(s.Pool)
		return c.openKernels()
	})
	if err != nil {
		return err
	}
	c.world, err = onegpu.New(s.Plan.Program.Mesh, onegpu.Options{Timeout: c.o.Timeout, Sum: c.lib.Sum})
	return err
}

func (c *cudaPlatform) Rank(i int) (device.Context, map[int]comm.Group, error) {
	ctx, err := cuda.New(i, c.opt)
	if err != nil {
		return nil, nil, err
	}
	groups, err := c.world.Groups(ctx)
	if err != nil {
		return nil, nil, errors.Join(err, ctx.Close())
	}
	return ctx, groups, nil
}

func (c *cudaPlatform) Library() kernels.Library { return c.lib }

func (c *cudaPlatform) Close() error {
	err := c.host.do(func() (err error) {
		if c.lib != nil {
			err = c.lib.Close()
		}
		return errors.Join(err, c.api.Release(c.gpu.Ordinal))
	})
	close(c.host.work)
	return err
}

// compiledKernels is the kernels that NVRTC compiles and the products of
// cuBLASLt.
type compiledKernels struct {
	*kernelscuda.Library
	products blas.Library
}

func openGPUKernels(o Options, api driver.API, dev driver.Device, host kernels.Library) (GPUKernels, error) {
	compiler, err := nvrtc.Open(nvrtc.Options{Warn: o.Warn})
	if err != nil {
		return nil, &MissingDevice{o.Device, err}
	}
	products, err := blas.Open()
	if err != nil {
		return nil, &MissingDevice{o.Device, err}
	}
	return NewGPUKernels(kernelscuda.Options{API: api, Device: dev, Compiler: compiler, Products: products, Host: host})
}

// NewGPUKernels makes the kernels that o describes.
func NewGPUKernels(o kernelscuda.Options) (GPUKernels, error) {
	lib, err := kernelscuda.New(o)
	if err != nil {
		return nil, errors.Join(err, o.Products.Close())
	}
	return &compiledKernels{lib, o.Products}, nil
}

// Sum adds buffers of the ranks.
func (k *compiledKernels) Sum(dtype graph.DType, order graph.SumOrder) (onegpu.Sum, error) {
	return k.RankSum(dtype, order)
}

// Close ends the kernels and the products.
func (k *compiledKernels) Close() error { return errors.Join(k.Library.Close(), k.products.Close()) }
