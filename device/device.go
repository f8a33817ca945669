// Package device is what the executor needs of an accelerator: arenas, in-order
// streams, events and copies, shaped by the CUDA driver API so that a GPU is
// one more implementation beside the CPU.
//
// One goroutine drives one rank's Context. Launch, Record and Wait enqueue and
// return; errors of enqueued work are sticky and come back from Sync (and from
// later calls), naming the operation.
package device

import "github.com/spillway-ml/spillway/graph"

// Arena is one rank's memory in one space. Its contents are reached by kernels
// and copies only.
type Arena interface {
	Space() graph.Space
	Size() int64
	// Touched returns the highest offset + length that executed work has
	// touched, recorded as it ran.
	Touched() int64
}

// Ptr is a range of an arena.
type Ptr struct {
	Arena Arena
	Off   int64 // bytes
	Len   int64 // bytes
}

// Kernel is an operation bound to its operands. Each device defines what it can
// launch; launching another device's kernel is an error.
type Kernel interface {
	// Touches returns the ranges that an execution reads or writes. The device
	// records them when the kernel has run.
	Touches() []Ptr
	// Label names the operation in errors and traces.
	Label() string
}

// Event marks a point of a stream. It may be recorded again: a Wait refers to
// the latest Record enqueued before it.
type Event interface{}

// Stream is an in-order queue of a rank.
type Stream interface {
	Launch(k Kernel) error
	Record(e Event) error
	Wait(e Event) error
	// Sync returns when everything enqueued has run, or the sticky error.
	Sync() error
}

// Context is one rank's use of a device.
type Context interface {
	Rank() int
	Alloc(space graph.Space, bytes int64) (Arena, error)
	NewStream(id graph.StreamID) (Stream, error)
	NewEvent() (Event, error)
	// Copy binds an asynchronous copy of src to dst (same length, any spaces).
	Copy(label string, dst, src Ptr) (Kernel, error)
	// HostBytes gives the host's own view of memory in graph.Host, to fill inputs
	// and read results. The caller orders its use with Sync.
	HostBytes(p Ptr) ([]byte, error)
	// Abort releases every wait of the context's streams; they end with err.
	Abort(err error)
	Close() error
}
