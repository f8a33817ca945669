package cuda

import (
	"runtime"

	"github.com/spillway-ml/spillway/device"
	devcpu "github.com/spillway-ml/spillway/device/cpu"
	devcuda "github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// step is a part of a kernel's work: a launch, or a call of a library.
type step interface {
	enqueue(api driver.API, s driver.Stream) error
}

// kernel is a bound operation of the GPU.
type kernel struct {
	label   string
	touches []device.Ptr
	steps   []step // in order; none where the rank holds nothing to update
	report  *report
}

var _ devcuda.Checked = (*kernel)(nil)

func (k *kernel) Touches() []device.Ptr { return k.touches }
func (k *kernel) Label() string         { return k.label }

// Enqueue adds the operation's launches to the stream.
func (k *kernel) Enqueue(api driver.API, s driver.Stream) error {
	for _, st := range k.steps {
		if err := st.enqueue(api, s); err != nil {
			return err
		}
	}
	return nil
}

// Check returns what the kernel found wrong with its data.
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
	touches []device.Ptr
	devcpu.Kernel
}

var _ devcuda.HostKernel = (*hostKernel)(nil)

func (k *hostKernel) Touches() []device.Ptr { return k.touches }
