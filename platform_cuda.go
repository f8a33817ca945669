package spillway

import (
	"errors"
	"fmt"
	"runtime"

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

func (e *MissingDevice) Error() string { return fmt.Sprintf("--device %s: %v", e.Device, e.Err) }

// Unwrap returns the cause.
func (e *MissingDevice) Unwrap() error { return e.Err }

// gpuKernels is the kernels of a GPU that its ranks share.
type gpuKernels interface {
	kernels.Library
	// sum adds buffers of the ranks.
	sum(dtype graph.DType) (onegpu.Sum, error)
	close() error
}

// cudaParts is where the driver, the kernels and what NVML says come from.
type cudaParts struct {
	driver  func() (driver.API, error)
	kernels func(cfg *Config, api driver.API, dev driver.Device, host kernels.Library) (gpuKernels, error)
	// used is the bytes that all processes together use of a GPU's memory.
	used func(uuid [16]byte) (int64, error)
}

// realCUDA is the machine's own.
var realCUDA = cudaParts{driver: driver.Open, kernels: openGPUKernels, used: gpus.Used}

// laterOutside is what kernels and cuBLASLt take of device memory beside the
// context when operations are bound: code of modules, handles. An estimate until
// it is measured.
const laterOutside = 48 << 20

// cudaPlatform is one GPU, which all ranks share: its first.
type cudaPlatform struct {
	cfg    *Config
	parts  cudaParts
	api    driver.API
	gpu    driver.Device
	preset gpus.GPU
	host   *thread // with the GPU's context current

	asked     int64 // --device-memory, 0: none
	available int64 // bytes of the GPU that this process may take, its context included
	others    int64 // bytes that others use; −1: not known

	opt   cuda.Options
	world *onegpu.World
	lib   gpuKernels
}

// thread is a goroutine that is locked to its thread.
type thread struct{ work chan func() }

func newThread() *thread {
	t := &thread{work: make(chan func())}
	go func() {
		runtime.LockOSThread()
		for f := range t.work {
			f()
		}
	}()
	return t
}

// do runs f there and returns its error.
func (t *thread) do(f func() error) error {
	done := make(chan error, 1)
	t.work <- func() { done <- f() }
	return <-done
}

func newCUDAPlatform(cfg *Config) (_ *cudaPlatform, err error) {
	switch {
	case cfg.CheckWrites:
		return nil, errors.New("--device cuda: CheckWrites watches kernels of the CPU device only")
	case cfg.Ranks > kernelscuda.MostRanks:
		return nil, fmt.Errorf("--ranks %d: at most %d ranks share a GPU", cfg.Ranks, kernelscuda.MostRanks)
	}
	c := &cudaPlatform{cfg: cfg, parts: realCUDA, asked: cfg.DeviceMemory}
	if cfg.cuda != nil {
		c.parts = *cfg.cuda
	}
	if c.api, err = c.parts.driver(); err != nil {
		return nil, &MissingDevice{cfg.Device, err}
	}
	list, err := c.api.Devices()
	if err != nil {
		return nil, fmt.Errorf("--device cuda: %w", err)
	}
	if len(list) == 0 {
		return nil, &MissingDevice{cfg.Device, errors.New("the driver shows no GPU (CUDA_VISIBLE_DEVICES hides them, where it is set)")}
	}
	c.gpu = list[0]
	c.preset = gpus.Product(c.gpu.Name, c.gpu.Memory)
	c.host = newThread()
	if err := c.host.do(c.measure); err != nil {
		close(c.host.work)
		return nil, fmt.Errorf("--device cuda: %w", err)
	}
	return c, nil
}

// measure makes the GPU's context current and finds what memory there is. What
// the context takes is measured where NVML tells what was in use before.
func (c *cudaPlatform) measure() error {
	used, nvmlErr := c.parts.used(c.gpu.UUID)
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
		outside = c.available - free + laterOutside
	} else {
		c.others = -1
		c.available = min(total, free+outside)
	}
	ranks := int64(c.cfg.Ranks)
	share := max(c.available/ranks, 1)
	if c.asked == 0 || c.asked > share {
		c.cfg.DeviceMemory = share
	}
	for space, bytes := range map[graph.Space]int64{graph.Device: outside, graph.Host: gpus.HostOutsideBytes} {
		if c.cfg.Outside[space] == 0 {
			c.cfg.Outside[space] = (bytes + ranks - 1) / ranks
		}
	}
	return nil
}

func (c *cudaPlatform) hardware() Hardware { return gpuHardware(c.preset) }

func (c *cudaPlatform) about() string {
	line := fmt.Sprintf("GPU %d, %s (compute capability %d.%d, %d multiprocessors): %s, of which %s were free", c.gpu.Ordinal, c.gpu.Name,
		c.gpu.Major, c.gpu.Minor, c.gpu.SMs, plan.Bytes(c.gpu.Memory), plan.Bytes(c.available))
	if c.others > 0 {
		line += fmt.Sprintf(" and %s in use", plan.Bytes(c.others))
	}
	return line
}

// refused says which of the two caps it was: the one that was asked for, or what
// is really free.
func (c *cudaPlatform) refused(err error) error {
	var r *plan.DoesNotFit
	if !errors.As(err, &r) || r.Space != graph.Device {
		return err
	}
	if c.cfg.DeviceMemory == c.asked {
		return fmt.Errorf("%w; this cap is --device-memory (the GPU has %s free)", err, plan.Bytes(c.available))
	}
	text := fmt.Sprintf("this cap is what is free on GPU %d, %s: %s", c.gpu.Ordinal, c.gpu.Name, plan.Bytes(c.available))
	if c.cfg.Ranks > 1 {
		text += fmt.Sprintf(" over %d ranks", c.cfg.Ranks)
	}
	if c.others > 0 {
		text += fmt.Sprintf(", where others use %s", plan.Bytes(c.others))
	}
	if c.asked > 0 {
		text += fmt.Sprintf("; --device-memory allows %s", plan.Bytes(c.asked))
	}
	return fmt.Errorf("%w; %s", err, text)
}

// preflight looks at host memory: page-locked, it must be there whole.
func (c *cudaPlatform) preflight(p *plan.Plan) error {
	total := machineMemory()
	rank := p.Layout.Spaces[graph.Host].Peak + p.Config.Outside[graph.Host]
	if total == 0 || rank <= total/int64(c.cfg.Ranks) {
		return nil
	}
	return &MachineTooSmall{c.cfg.Ranks, rank * int64(c.cfg.Ranks), total}
}

func (c *cudaPlatform) start(t *Trainer) error {
	c.opt = cuda.Options{Driver: c.api, Ordinal: c.gpu.Ordinal, Capacity: t.plan.Config.Capacity, Poison: t.cfg.Poison}
	if t.disk != nil {
		c.opt.Disk = t.disk.Create
	}
	err := c.host.do(func() (err error) {
		c.lib, err = c.parts.kernels(&t.cfg, c.api, c.gpu, kernelscpu.New(t.pool))
		return err
	})
	if err != nil {
		return err
	}
	c.world, err = onegpu.New(t.plan.Program.Mesh, onegpu.Options{Timeout: t.cfg.Timeout, Sum: c.lib.sum})
	return err
}

func (c *cudaPlatform) rank(i int) (device.Context, map[int]comm.Group, error) {
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

func (c *cudaPlatform) library() kernels.Library { return c.lib }

func (c *cudaPlatform) close() error {
	err := c.host.do(func() (err error) {
		if c.lib != nil {
			err = c.lib.close()
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

func openGPUKernels(cfg *Config, api driver.API, dev driver.Device, host kernels.Library) (gpuKernels, error) {
	compiler, err := nvrtc.Open(nvrtc.Options{Warn: cfg.Warn})
	if err != nil {
		return nil, &MissingDevice{cfg.Device, err}
	}
	products, err := blas.Open()
	if err != nil {
		return nil, &MissingDevice{cfg.Device, err}
	}
	return newGPUKernels(kernelscuda.Options{API: api, Device: dev, Compiler: compiler, Products: products, Host: host})
}

func newGPUKernels(o kernelscuda.Options) (gpuKernels, error) {
	lib, err := kernelscuda.New(o)
	if err != nil {
		return nil, errors.Join(err, o.Products.Close())
	}
	return &compiledKernels{lib, o.Products}, nil
}

func (k *compiledKernels) sum(dtype graph.DType) (onegpu.Sum, error) { return k.RankSum(dtype) }

func (k *compiledKernels) close() error { return errors.Join(k.Close(), k.products.Close()) }
