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

// Accessor is a Kernel or HostKernel that tells its reads from its writes, for
// a driver.Observer. Of one that doesn't, every range that it touches counts as
// written. Its slices are made at bind.
type Accessor interface {
	Reads() []device.Ptr
	Writes() []device.Ptr // an accumulated output is a write
}
