package cuda

import (
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/internal/thread"
)

// hostWork runs a stream's host kernels, in order, on a separate goroutine. Two words in
// page-locked memory synchronize it with the CUDA stream:
//
//	stream  …device work │ WriteValue(reached, n)      WaitValue(finished, n) │ device work…
//	worker                 sees reached ≥ n → kernel n → finished = n
//
// Numbers only grow and are compared by their int32 difference, so they may wrap. An event that
// the next micro-step records again refers to the later number.
type hostWork struct {
	s       *Stream
	queue   chan hostItem
	stop    chan struct{} // closed when the context has failed
	ended   chan struct{}
	reached word
	done    word // finished

	mu       sync.Mutex
	released bool
	now      HostKernel    // running; under mu
	number   atomic.Uint32 // of the latest host kernel enqueued
}

type hostItem struct {
	kernel HostKernel
	number uint32
	reach  bool // the stream announces that it has come here
	timing *timing
}

// farAhead is added to the current number to release every number that a stream waits for.
const farAhead = 1 << 30

// release ends all waits of the stream for host kernels, after a failure.
func (h *hostWork) release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.released {
		return
	}
	h.released = true
	h.done.host.Store(h.number.Load() + farAhead)
	close(h.stop)
}

// retire is called before the words are freed: no stream waits on them any more.
func (h *hostWork) retire() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.released = true
}

// finish signals to the stream that a host kernel has run.
func (h *hostWork) finish(number uint32) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.released {
		return
	}
	if o := h.s.ctx.observer; o != nil {
		o.HostSet(h.agent(), h.done.at)
	}
	h.done.host.Store(number)
}

func (h *hostWork) agent() uintptr { return uintptr(unsafe.Pointer(h)) }

func (h *hostWork) push(i hostItem) error {
	select {
	case h.queue <- i:
		return nil
	case <-h.stop:
		return h.s.ctx.Err()
	}
}

func (h *hostWork) work() {
	defer crash.Guard()
	defer close(h.ended)
	debug.SetPanicOnFault(true) // a kernel that runs out of an arena may hit an unreadable page
	for i := range h.queue {
		if i.reach {
			h.await(i.number)
		}
		if !h.s.ctx.failed.Load() { // on failure await returns before the kernel's turn has come
			h.run(i)
		}
	}
}

// await returns when the stream has reached a number, or on failure.
func (h *hostWork) await(number uint32) {
	began := time.Now()
	for p := (pause{}); int32(h.reached.host.Load()-number) < 0; p.next(began) {
		if h.s.ctx.failed.Load() {
			return
		}
	}
	if o := h.s.ctx.observer; o != nil {
		o.HostSaw(h.agent(), h.reached.at)
	}
}

// pause polls for the GPU, which sends no notification: without sleeping for spinTime, then at
// growing intervals.
type pause struct{ sleep time.Duration }

const (
	spinTime   = 100 * time.Microsecond
	firstSleep = 10 * time.Microsecond
	longSleep  = 50 * time.Microsecond // short: the GPU idles until the host sees that it is done
)

func (p *pause) next(began time.Time) {
	if p.sleep == 0 && time.Since(began) < spinTime {
		runtime.Gosched()
		return
	}
	p.sleep = min(longSleep, max(firstSleep, p.sleep*3/2))
	thread.Nap(p.sleep)
}

func (h *hostWork) setNow(k HostKernel) {
	h.mu.Lock()
	h.now = k
	h.mu.Unlock()
}

func (h *hostWork) current() HostKernel {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.now
}

func (h *hostWork) run(i hostItem) {
	h.setNow(i.kernel)
	defer h.setNow(nil)
	c := h.s.ctx
	if c.observer != nil {
		reads, writes := c.accesses(i.kernel, nil, nil)
		c.observer.HostAccess(h.agent(), i.kernel.Label(), reads, writes)
	}
	start := device.Now()
	if err := crash.Caught("kernel", i.kernel.Run); err != nil {
		c.fail(h.s.opError(i.kernel, err))
		return
	}
	if i.timing != nil {
		i.timing.from, i.timing.to = start, device.Now()
		i.timing.ran.Store(true)
	}
	for _, p := range i.kernel.Touches() {
		p.Arena.(*Arena).touch(p.Off + p.Len)
	}
	h.finish(i.number)
}

// accesses lists the address ranges that a kernel reads and writes, for an observer. Disk
// memory has no address and is left out.
func (c *Context) accesses(k device.Kernel, reads, writes []driver.Range) (r, w []driver.Range) {
	add := func(to []driver.Range, list []device.Ptr) []driver.Range {
		for _, p := range list {
			if at, err := Address(p); err == nil {
				to = append(to, driver.Range{At: at, Len: p.Len})
			}
		}
		return to
	}
	if a, ok := k.(Accessor); ok {
		return add(reads, a.Reads()), add(writes, a.Writes())
	}
	return reads, add(writes, k.Touches())
}
