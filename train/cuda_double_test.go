//go:build linux

package train

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/direct"
	"github.com/spillway-ml/spillway/comm/peers"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/blastest"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/shim"
	"github.com/spillway-ml/spillway/kernels"
	kernelscuda "github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/platform/gpu"
)

// onDouble makes cfg run on a test double of the CUDA driver. It uses the CPU's kernels in stream
// order or, with own, the GPU's kernels compiled for the host. At the end of the run the caller
// checks the errors found by the double.
func onDouble(t testing.TB, cfg *request, o drivertest.Options, own bool) *drivertest.Driver {
	t.Helper()
	if o.Memory == 0 {
		o.Memory = 16 << 30
	}
	d := drivertest.New(o)
	cfg.Device = "cuda"
	cfg.cuda = &gpu.Parts{
		Driver: func() (driver.API, error) { return d, nil },
		Used:   func([16]byte) (int64, error) { return o.Used, nil },
	}
	if own {
		compiler, err := shim.New()
		if errors.Is(err, shim.ErrNoCompiler) {
			t.Skip(err)
		}
		require.NoError(t, err)
		cfg.cuda.Kernels = shimKernels(d, compiler)
	} else {
		cfg.Target = graph.CPUTarget() // the alignment and workspace of the CPU's kernels
		all := graph.CUDATarget().CUDA // the epilogues that a run may choose; the default has the CPU's bits
		cfg.Target.CUDA = graph.CUDAKernels{Activation: all.Activation, Epilogues: all.Epilogues}
		cfg.cuda.Kernels = func(_ platform.Options, _ driver.API, _ driver.Device, host kernels.Library) (gpu.Kernels, error) {
			return &hostKernels{d, host}, nil
		}
	}
	return d
}

func shimKernels(d *drivertest.Driver, compiler *shim.Compiler) func(platform.Options, driver.API, driver.Device, kernels.Library) (gpu.Kernels, error) {
	return func(_ platform.Options, api driver.API, dev driver.Device, host kernels.Library) (gpu.Kernels, error) {
		return gpu.NewKernels(kernelscuda.Options{API: api, Device: dev, Compiler: compiler, Products: blastest.New(d), Host: host})
	}
}

// hostKernels runs the CPU's kernels on the double's memory, in stream order. Tests of the host
// side then need no compiler.
type hostKernels struct {
	double *drivertest.Driver
	host   kernels.Library
}

// shown is a GPU arena whose memory the host can access, as on the double.
type shown struct {
	device.Arena
	mem []byte
}

func (s *shown) HostMemory() ([]byte, error) { return s.mem, nil }

type shownKernel struct {
	device.Kernel
	double                 *drivertest.Driver
	touches, reads, writes []device.Ptr
	run                    func() error
}

func (k *shownKernel) Touches() []device.Ptr { return k.touches }
func (k *shownKernel) Reads() []device.Ptr   { return k.reads }
func (k *shownKernel) Writes() []device.Ptr  { return k.writes }

type shownOnGPU struct{ *shownKernel }

func (k shownOnGPU) Fixed() {}

func (k shownOnGPU) Enqueue(_ driver.API, s driver.Stream) error {
	return k.double.Run(s, k.Label(), k.run)
}

type shownOnHost struct{ *shownKernel }

func (k shownOnHost) Run() error { return k.run() }

func (h *hostKernels) Bind(b kernels.Binding) (device.Kernel, error) {
	k := &shownKernel{double: h.double}
	onHost := true
	show := func(p device.Ptr, to *[]device.Ptr) (device.Ptr, error) {
		if p.Arena == nil {
			return p, nil
		}
		k.touches, *to = append(k.touches, p), append(*to, p)
		if p.Arena.Space() == graph.Host {
			return p, nil
		}
		onHost = false
		at, err := cuda.Address(device.Ptr{Arena: p.Arena, Len: p.Arena.Size()})
		if err != nil {
			return p, err
		}
		mem, err := h.double.Bytes(at, p.Arena.Size())
		p.Arena = &shown{p.Arena, mem}
		return p, err
	}
	shared := map[device.Arena]*shown{} // one per arena, because kernels compare arenas
	share := func(p device.Ptr, to *[]device.Ptr, err *error) device.Ptr {
		q, e := show(p, to)
		if s, ok := q.Arena.(*shown); ok {
			if shared[p.Arena] == nil {
				shared[p.Arena] = s
			}
			q.Arena = shared[p.Arena]
		}
		*err = errors.Join(*err, e)
		return q
	}
	var err error
	in, out := make([]device.Ptr, len(b.In)), make([]device.Ptr, len(b.Out))
	for i, p := range b.In {
		in[i] = share(p, &k.reads, &err)
	}
	for i, p := range b.Out {
		out[i] = share(p, &k.writes, &err)
	}
	b.In, b.Out = in, out
	b.Work, b.Skip = share(b.Work, &k.writes, &err), share(b.Skip, &k.reads, &err)
	if err != nil {
		return nil, err
	}
	bound, err := h.host.Bind(b)
	if err != nil {
		return nil, err
	}
	run, ok := bound.(cpu.Kernel)
	if !ok {
		return nil, fmt.Errorf("bound a %T", bound)
	}
	k.Kernel, k.run = bound, run.Run
	if onHost {
		return shownOnHost{k}, nil
	}
	return shownOnGPU{k}, nil
}

func (h *hostKernels) Close() error { return nil }

func (h *hostKernels) Sum(t graph.DType, order graph.SumOrder) (peers.Sum, error) {
	return &hostSum{h.double, t, order}, comm.CheckSum(t)
}

// hostSum sums on the double like the ranks of one process.
type hostSum struct {
	double *drivertest.Driver
	dtype  graph.DType
	order  graph.SumOrder
}

func (h *hostSum) Enqueue(_ driver.API, s driver.Stream, dsts, srcs []driver.Address, n int64, accumulate bool) error {
	view := func(list []driver.Address, size int64) (out [][]byte, err error) {
		for _, a := range list {
			b, err := h.double.Bytes(a, n*size)
			if err != nil {
				return nil, err
			}
			out = append(out, b)
		}
		return out, nil
	}
	size := h.dtype.Size()
	if h.order == graph.SumSequential {
		size = graph.F32.Size()
	}
	to, err := view(dsts, size)
	if err != nil {
		return err
	}
	from, err := view(srcs, h.dtype.Size())
	if err != nil {
		return err
	}
	return h.double.Run(s, "sum", func() error {
		adder, err := direct.NewAdder(h.dtype, h.order, len(from))
		if err != nil || accumulate {
			if err == nil {
				adder.Sum(to[0], from, true)
			}
			return err
		}
		sum := make([]byte, n*size)
		adder.Sum(sum, from, false)
		for _, d := range to {
			copy(d, sum)
		}
		return nil
	})
}
