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

// HostKernel is an operation that runs on the host, in order with the device work of its
// stream: updates of optimizer state in host memory, and disk transfers.
type HostKernel interface {
	device.Kernel
	Run() error
}

// Addressed is an arena that GPU kernels can access: device memory or page-locked host
// memory.
type Addressed interface {
	device.Arena
	// Address is the GPU address of the arena's first byte.
	Address() driver.Address
}

// Checked is a Kernel that can detect invalid data while it runs, such as a token outside the
// vocabulary. The device calls Check when it learns that the kernel has run; Check returns the
// error found.
type Checked interface {
	Kernel
	Check() error
}

// Accessor is a Kernel or HostKernel that distinguishes its reads from its writes, for a
// driver.Observer. For other kernels every touched range counts as written. The slices are
// allocated at bind.
type Accessor interface {
	Reads() []device.Ptr
	Writes() []device.Ptr // includes accumulated outputs
}
