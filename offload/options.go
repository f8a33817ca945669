package offload

import "github.com/spillway-ml/spillway/graph"

// Options say in which space each class of buffers rests; graph.Device, the zero value, means
// that it stays on the device.
type Options struct {
	Optimizer, Parameters, Gradients, Activations graph.Space
	// Parts place classes in parts: by share, or by buffer. A class has parts or a space above.
	Parts []Part

	// Ahead is the number of stretches (see coherence.go) by which a fetch may start early. It is
	// also the number of later stretches that may start before written contents are stored. 0:
	// copies and computation alternate, which needs the least memory.
	Ahead int
	// Chunk is the largest number of elements of a unit that an update on the host, or a transfer
	// between disk and device, processes at a time. It limits the host memory of large units. It is
	// a multiple of 1024. 0: DefaultChunk, or more if a rank's parameters would make over 256
	// chunks.
	Chunk int64
	// DeviceShare is the share of the optimizer states, in bytes, that stays on the device: as many
	// complete units as fit, starting with the last unit of the program. Their updates run on the
	// device.
	DeviceShare float64
}

// DefaultChunk is the default of Options.Chunk in elements: 16 MiB of float32.
const DefaultChunk = 4 << 20

// mostChunks is the number of chunks of a rank's parameters above which chunks grow. It bounds
// the operations of a plan.
const mostChunks = 256

// chunk returns the chunk size for a rank that holds elems elements.
func (o Options) chunk(elems int64) int64 {
	if o.Chunk > 0 {
		return o.Chunk
	}
	return max(DefaultChunk, (elems/mostChunks+1023)/1024*1024)
}

// Active says whether anything is offloaded.
func (o Options) Active() bool {
	return o.Optimizer != graph.Device || o.Parameters != graph.Device || o.Gradients != graph.Device || o.Activations != graph.Device || len(o.Parts) > 0
}
