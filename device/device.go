// Package device defines what the executor needs from an accelerator: arenas, in-order
// streams, events and copies. The interfaces follow the CUDA driver API, so that the CPU and
// GPUs are implementations of the same interfaces.
//
// One goroutine drives one rank's Context. Launch, Record and Wait enqueue and return. Errors
// of enqueued work are sticky: Sync and later calls return them as an *OpError, which names
// the operation.
package device

import (
	"fmt"
	"time"

	"github.com/spillway-ml/spillway/graph"
)

// Arena is one rank's memory in one space. Only kernels and copies access its contents.
type Arena interface {
	Space() graph.Space
	Size() int64
	// Touched returns the highest offset + length that executed work has accessed, recorded as it
	// ran.
	Touched() int64
}

// Ptr is a range of an arena.
type Ptr struct {
	Arena Arena
	Off   int64 // offset in the arena, in bytes
	Len   int64 // length in bytes
}

// Check returns an error if p has no arena or exceeds it.
func (p Ptr) Check() error {
	if p.Arena == nil {
		return fmt.Errorf("no arena")
	}
	if p.Off < 0 || p.Len < 0 || p.Off > p.Arena.Size()-p.Len {
		return fmt.Errorf("bytes [%d, %d) are outside the %s arena of %d bytes",
			p.Off, p.Off+p.Len, p.Arena.Space(), p.Arena.Size())
	}
	return nil
}

// Overlaps tells whether p and q share a byte.
func (p Ptr) Overlaps(q Ptr) bool {
	return p.Arena != nil && p.Arena == q.Arena && p.Off < q.Off+q.Len && q.Off < p.Off+p.Len
}

// Kernel is an operation bound to its operands. Each device defines what it can
// launch; launching another device's kernel is an error.
type Kernel interface {
	// Touches returns the ranges that an execution reads or writes, all of them in arenas of
	// the rank that launches it. The device updates Arena.Touched with them when the kernel
	// has run. Touches is called at every launch and must not allocate.
	Touches() []Ptr
	// Label names the operation in errors and traces.
	Label() string
}

// Event marks a point of a stream. It may be recorded again, on any stream of
// its context: a Wait refers to the latest Record enqueued before it. A Wait
// for an event that was never recorded returns at once.
type Event interface{}

// Stream is an in-order queue of a rank.
type Stream interface {
	Launch(k Kernel) error
	Record(e Event) error
	Wait(e Event) error
	// Sync returns when everything enqueued has run, or with the sticky error. After an
	// error it does not wait for a kernel that is still running; Close does.
	Sync() error
}

// Timed is a Stream that can report the times at which its kernels ran.
type Timed interface {
	// Time requests one call of t.Ran for each kernel launched from now on, in launch
	// order. There is no call for kernels that did not run because of an error.
	Time(t Timer) error
}

// Capturer is a Stream that can combine several kernels into one, such as a CUDA graph.
type Capturer interface {
	// Captures tells whether a kernel can be part of a combined kernel.
	Captures(k Kernel) bool
	// Capture returns a kernel that runs all kernels of list in order, with less launch
	// overhead on the host. Each of them must have been launched on the stream before. They
	// can still be launched individually, even if Capture fails, unless the context failed.
	Capture(label string, list []Kernel) (Kernel, error)
}

// Timer receives the times at which a stream's kernels ran, as returned by Now. It is called
// from a goroutine of the device, or from Sync.
type Timer interface {
	Ran(start, end time.Duration)
}

var epoch = time.Now()

// Now returns the time on Timer's clock: monotonic time since the process started.
func Now() time.Duration { return time.Since(epoch) }

// Reachable is a Context whose memory the host can access without a copy.
type Reachable interface {
	// Reach returns the host's view of a range in any space, or false if the host cannot
	// access it. The rules of Context.HostBytes apply.
	Reach(p Ptr) ([]byte, bool)
}

// Epoch returns the wall-clock time at which Now was zero.
func Epoch() time.Time { return epoch }

// Context is one rank's use of a device.
type Context interface {
	Rank() int
	Alloc(space graph.Space, bytes int64) (Arena, error)
	NewStream(id graph.StreamID) (Stream, error)
	NewEvent() (Event, error)
	// Copy binds an asynchronous copy of src to dst (same length, any spaces).
	Copy(label string, dst, src Ptr) (Kernel, error)
	// HostBytes returns the host's view of memory in graph.Host, to write inputs and read
	// results, valid until Close. The caller orders its accesses with Sync. They do not count
	// in Arena.Touched, which covers executed operations only.
	HostBytes(p Ptr) ([]byte, error)
	// OnError registers f to be called once with the first sticky error, as soon as the device
	// detects it, so that other ranks that wait for this one (comm) can be released. f may run on
	// any goroutine; the only method of the context that it may call is Abort. Call OnError before
	// the first Launch.
	OnError(f func(error))
	// Abort makes err the sticky error, unless there is one already, and releases
	// every wait of the context's streams. It may be called from any goroutine.
	Abort(err error)
	// Close waits until all enqueued work has run or, after an error, until running work has
	// ended. Then it ends the streams and frees the memory.
	Close() error
}

// Poisoner is a Context that can fill memory with a pattern that is NaN in every float type.
// In tests this reveals operations that read memory before it is written.
type Poisoner interface {
	Poison(label string, p Ptr) (Kernel, error)
}

// Observer is a Context that can report the operations that its streams are running, for messages
// about a stuck rank.
type Observer interface {
	// Running returns entries "operation LABEL on stream NAME". Any goroutine may call it.
	Running() []string
}

// OpError is the failure of an enqueued operation.
type OpError struct {
	Rank   int
	Where  string // the rank's device if the job has several, such as "GPU 1"
	Stream graph.StreamID
	Kernel Kernel
	Err    error
}

func (e *OpError) Error() string {
	where := ""
	if e.Where != "" {
		where = " (" + e.Where + ")"
	}
	return fmt.Sprintf("rank %d%s, stream %s, operation %q: %v", e.Rank, where, e.Stream, e.Kernel.Label(), e.Err)
}

// Unwrap returns the cause.
func (e *OpError) Unwrap() error { return e.Err }
