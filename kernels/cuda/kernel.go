package cuda

import (
	"runtime"

	"github.com/spillway-ml/spillway/device"
	devcpu "github.com/spillway-ml/spillway/device/cpu"
	devcuda "github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/kernels"
)

// step is a part of a kernel's work: a launch, or a call of a library.
type step interface {
	enqueue(api driver.API, s driver.Stream) error
}

// operands holds the name of a bound operation and the memory that it touches.
type operands struct {
	label                  string
	touches, reads, writes []device.Ptr
}

// of returns the operands of a binding that Places has checked.
func of(b *kernels.Binding, touches []device.Ptr) operands {
	o := operands{label: b.Op.Name, touches: touches}
	add := func(list *[]device.Ptr, p device.Ptr) {
		if p.Arena != nil {
			*list = append(*list, p)
		}
	}
	for _, p := range b.In {
		add(&o.reads, p)
	}
	add(&o.reads, b.Skip)
	for _, p := range b.Out {
		add(&o.writes, p)
	}
	add(&o.writes, b.Work)
	return o
}

func (o *operands) Touches() []device.Ptr { return o.touches }
func (o *operands) Reads() []device.Ptr   { return o.reads }
func (o *operands) Writes() []device.Ptr  { return o.writes }
func (o *operands) Label() string         { return o.label }

// kernel is a bound operation of the GPU.
type kernel struct {
	operands
	steps  []step // in order; empty if the rank has no part of the parameters to update
	report *report
}

var (
	_ devcuda.Checked  = (*kernel)(nil)
	_ devcuda.Accessor = (*kernel)(nil)
	_ devcuda.Fixed    = (*kernel)(nil)
)

// Fixed marks a kernel whose launch arguments never change after Bind, so that a CUDA graph can
// hold them. The kernels read values that change with the step (learning rates, counts, the loss
// scale) from memory.
func (k *kernel) Fixed() {}

// Enqueue adds the operation's launches to the stream.
func (k *kernel) Enqueue(api driver.API, s driver.Stream) error {
	for _, st := range k.steps {
		if err := st.enqueue(api, s); err != nil {
			return err
		}
	}
	return nil
}

// Check returns an error if the kernel reported invalid data, such as a token out of range.
func (k *kernel) Check() error {
	if k.report == nil {
		return nil
	}
	return k.report.err()
}

// launch runs a kernel over a grid.
type launch struct {
	f           driver.Function
	grid, block driver.Dim
	shared      int // bytes of dynamic shared memory
	args        *driver.Args
}

func (l *launch) enqueue(api driver.API, s driver.Stream) error {
	p, size := l.args.Packed()
	err := api.Launch(l.f, l.grid, l.block, l.shared, s, p, size)
	runtime.KeepAlive(l.args)
	return err
}

// hostKernel is an operation of the CPU's library on page-locked memory.
type hostKernel struct {
	operands
	k devcpu.Kernel
}

var (
	_ devcuda.HostKernel = (*hostKernel)(nil)
	_ devcuda.Accessor   = (*hostKernel)(nil)
)

func (k *hostKernel) Run() error { return k.k.Run() }
