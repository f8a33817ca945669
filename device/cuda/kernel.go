// Package cuda is the CUDA device: a rank's arenas, streams and copies through
// the driver API.
package cuda

import (
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// Kernel is an operation that runs on the GPU.
type Kernel interface {
	device.Kernel
	// Enqueue adds its work to the stream. It is called at every launch, on the
	// rank's locked thread with its context current, and must not allocate.
	Enqueue(api driver.API, s driver.Stream) error
}

// HostKernel is an operation that runs on the host between device work of its
// stream: updates of states that rest in host memory, transfers of the disk.
type HostKernel interface {
	device.Kernel
	Run() error
}

// Addressed is an arena that kernels of the GPU reach: device memory, and
// page-locked host memory.
type Addressed interface {
	device.Arena
	// Address is where the arena's first byte lies.
	Address() driver.Address
}

// Hosted is an arena in host memory, which the CPU's kernels reach as well.
type Hosted interface {
	device.Arena
	// CPU is the same memory as an arena of device/cpu.
	CPU() device.Arena
}

// Checked is a Kernel that can find its data wrong as it runs (a token outside
// the vocabulary). Check says what it found, once it has run; the device asks
// when it learns that it has.
type Checked interface {
	Kernel
	Check() error
}

// Accessor is a Kernel or HostKernel that tells its reads from its writes, for
// a driver.Observer. Of one that doesn't, every range that it touches counts as
// written. Its slices are made at bind.
type Accessor interface {
	Reads() []device.Ptr
	Writes() []device.Ptr // an accumulated output is a write
}
