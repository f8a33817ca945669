// Package device is what the executor needs of an accelerator: arenas, in-order
// streams, events and copies, shaped by the CUDA driver API so that a GPU is
// one more implementation beside the CPU.
//
// One goroutine drives one rank's Context. Launch, Record and Wait enqueue and
// return; errors of enqueued work are sticky and come back from Sync (and from
// later calls) as an *OpError, naming the operation.
package device

import (
	"fmt"
	"time"

	"github.com/spillway-ml/spillway/graph"
)

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

// Check returns an error if p has no arena or does not lie in it.
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
	// Touches returns the ranges that an execution reads or writes, all of them
	// in arenas of the rank that launches it. The device records them when the
	// kernel has run. It is called at every launch and must not allocate.
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
	// Sync returns when everything enqueued has run, or the sticky error. After
	// an error it does not wait for a kernel that is still running: Close does.
	Sync() error
}

// Timed is a Stream that can tell when its kernels ran.
type Timed interface {
	// Time asks for one call of t.Ran for each kernel launched from now on, in
	// launch order. Kernels that an error keeps from running are left out: they
	// are the last ones.
	Time(t Timer) error
}

// Capturer is a Stream that can launch kernels as one.
type Capturer interface {
	// Captures tells whether a kernel can be among them.
	Captures(k Kernel) bool
	// Capture gives a kernel that does what those of the list do, in order, at less cost
	// of the host. They have been launched on the stream before, one by one; that they can
	// be still, also after an error that is not the context's.
	Capture(label string, list []Kernel) (Kernel, error)
}

// Timer receives the times at which a stream's kernels ran, on Now's clock. Its
// calls come from the device's own goroutine, or from Sync.
type Timer interface {
	Ran(start, end time.Duration)
}

var epoch = time.Now()

// Now is the clock of Timer: monotonic time since the process started.
func Now() time.Duration { return time.Since(epoch) }

// Reachable is a Context whose memory the host may reach without a copy.
type Reachable interface {
	// Reach gives the host's own view of a range in any space, false where there is
	// none. The rest is as of Context.HostBytes.
	Reach(p Ptr) ([]byte, bool)
}

// Epoch is when Now was zero, by the machine's clock.
func Epoch() time.Time { return epoch }

// Context is one rank's use of a device.
type Context interface {
	Rank() int
	Alloc(space graph.Space, bytes int64) (Arena, error)
	NewStream(id graph.StreamID) (Stream, error)
	NewEvent() (Event, error)
	// Copy binds an asynchronous copy of src to dst (same length, any spaces).
	Copy(label string, dst, src Ptr) (Kernel, error)
	// HostBytes gives the host's own view of memory in graph.Host, to fill inputs
	// and read results, until Close. The caller orders its use with Sync. It
	// records nothing as touched: Touched counts executed operations only.
	HostBytes(p Ptr) ([]byte, error)
	// OnError registers f to be called once with the first error that becomes
	// sticky, as soon as the device learns of it, so that whoever waits for this
	// rank elsewhere (comm) can be released. f may run on any goroutine; of the
	// context it may call Abort only. Registered before the first Launch.
	OnError(f func(error))
	// Abort makes err the sticky error, unless there is one already, and releases
	// every wait of the context's streams. It may be called from any goroutine.
	Abort(err error)
	// Close ends the streams and gives the memory back, once what is enqueued has
	// run, or, after an error, once what still runs has ended.
	Close() error
}

// Poisoner is a Context that can fill memory with a pattern that is NaN in
// every float type, for tests: what an operation reads without its having been
// written then shows.
type Poisoner interface {
	Poison(label string, p Ptr) (Kernel, error)
}

// Observer is a Context that can tell what its streams are running, for a
// message about a rank that is stuck.
type Observer interface {
	// Running lists "operation LABEL on stream NAME", from any goroutine.
	Running() []string
}

// OpError is the failure of an enqueued operation.
type OpError struct {
	Rank   int
	Where  string // the rank's device, where there are several: "GPU 1"
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
