package cpu

import (
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
)

// Stream is an in-order queue with a goroutine that runs its work.
//
// Every Record gives the stream's next mark, a number. An event is the pair
// (stream, mark) of its latest Record, known to the enqueuing goroutine alone;
// Wait enqueues that pair, and the waiting stream sleeps until the other has
// passed the mark. So re-recording, even on another stream, cannot release an
// earlier Wait too soon, and events hold no state that goroutines share.
//
// Queues are bounded. That cannot deadlock: a Wait's Record was enqueued before
// it, so the oldest operation in program order that has not run can always run.
type Stream struct {
	ctx   *Context
	id    graph.StreamID
	queue chan item
	ended chan struct{}
	marks uint64 // records enqueued
	timer device.Timer

	mu     sync.Mutex
	cond   *sync.Cond
	passed atomic.Uint64 // the last mark passed; stored under mu
	now    Kernel        // the running kernel; guarded by mu
}

type event struct {
	ctx    *Context
	stream *Stream // stream of the latest Record, nil before the first
	mark   uint64
}

// item is a kernel to launch, or a mark to record (stream nil), or a mark of
// another stream to wait for.
type item struct {
	kernel Kernel
	timer  device.Timer
	stream *Stream
	mark   uint64
}

// NewStream starts a stream.
func (c *Context) NewStream(id graph.StreamID) (device.Stream, error) {
	if c.closed {
		return nil, errClosed
	}
	s := &Stream{ctx: c, id: id, queue: make(chan item, c.opts.Queue), ended: make(chan struct{})}
	s.cond = sync.NewCond(&s.mu)
	c.mu.Lock()
	c.streams = append(c.streams, s)
	c.mu.Unlock()
	go s.work()
	return s, nil
}

func (s *Stream) enqueue(i item) error {
	if s.ctx.closed {
		return errClosed
	}
	if err := s.ctx.Err(); err != nil {
		return err
	}
	s.queue <- i
	return nil
}

// Launch enqueues a Kernel. All ranges that it touches must lie in the rank's own arenas.
func (s *Stream) Launch(k device.Kernel) error {
	kernel, ok := k.(Kernel)
	if !ok {
		return fmt.Errorf("rank %d, stream %s, operation %q: not a kernel of the CPU device (%T)", s.ctx.rank, s.id, k.Label(), k)
	}
	for _, p := range kernel.Touches() {
		if _, err := s.ctx.own(p); err != nil {
			return &device.OpError{Rank: s.ctx.rank, Stream: s.id, Kernel: k, Err: fmt.Errorf("operand: %w", err)}
		}
	}
	return s.enqueue(item{kernel: kernel, timer: s.timer})
}

// Record enqueues a mark and points the event at it.
func (s *Stream) Record(e device.Event) error {
	ev, ok := e.(*event)
	if !ok || ev.ctx != s.ctx {
		return fmt.Errorf("rank %d, stream %s: record: not an event of this context (%T)", s.ctx.rank, s.id, e)
	}
	s.marks++
	ev.stream, ev.mark = s, s.marks
	return s.enqueue(item{mark: s.marks})
}

// Wait makes work enqueued after it run after the event's latest Record.
func (s *Stream) Wait(e device.Event) error {
	ev, ok := e.(*event)
	if !ok || ev.ctx != s.ctx {
		return fmt.Errorf("rank %d, stream %s: wait: not an event of this context (%T)", s.ctx.rank, s.id, e)
	}
	if ev.stream == nil || ev.stream == s || ev.stream.passed.Load() >= ev.mark {
		return s.ctx.Err()
	}
	return s.enqueue(item{stream: ev.stream, mark: ev.mark})
}

// Sync returns when the stream has run everything, or with the sticky error.
func (s *Stream) Sync() error {
	if s.ctx.closed {
		return errClosed
	}
	return s.drain()
}

func (s *Stream) drain() error {
	s.marks++
	if !s.ctx.failed.Load() {
		s.queue <- item{mark: s.marks}
		s.await(s.marks)
	}
	return s.ctx.Err()
}

// Time sends the times of kernels launched from now on to t.
func (s *Stream) Time(t device.Timer) error {
	s.timer = t
	return nil
}

// await sleeps until s has passed mark or the context has failed.
func (s *Stream) await(mark uint64) {
	if s.passed.Load() >= mark {
		return
	}
	s.mu.Lock()
	for s.passed.Load() < mark && !s.ctx.failed.Load() {
		s.cond.Wait()
	}
	s.mu.Unlock()
}

// Running lists the operations that the streams are running.
func (c *Context) Running() (list []string) {
	c.mu.Lock()
	streams := slices.Clone(c.streams)
	c.mu.Unlock()
	for _, s := range streams {
		s.mu.Lock()
		if s.now != nil {
			list = append(list, fmt.Sprintf("operation %s on stream %s", s.now.Label(), s.id))
		}
		s.mu.Unlock()
	}
	return list
}

func (s *Stream) current() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now == nil {
		return "none"
	}
	return s.now.Label()
}

// work runs the queue until it is closed; after a failure it drops the remaining items.
func (s *Stream) work() {
	defer crash.Guard()
	defer close(s.ended)
	debug.SetPanicOnFault(true) // a kernel that runs out of an arena hits an unreadable page
	for i := range s.queue {
		switch {
		case s.ctx.failed.Load():
		case i.kernel != nil:
			s.run(i)
		case i.stream != nil:
			i.stream.await(i.mark)
		default:
			s.mu.Lock()
			s.passed.Store(i.mark)
			s.cond.Broadcast()
			s.mu.Unlock()
		}
	}
}

func (s *Stream) run(i item) {
	s.setNow(i.kernel)
	defer s.setNow(nil)
	start := device.Now()
	if err := s.call(i.kernel); err != nil {
		s.ctx.fail(&device.OpError{Rank: s.ctx.rank, Stream: s.id, Kernel: i.kernel, Err: err})
		return
	}
	if i.timer != nil {
		i.timer.Ran(start, device.Now())
	}
	for _, p := range i.kernel.Touches() {
		p.Arena.(*Arena).touch(p.Off + p.Len)
	}
}

func (s *Stream) setNow(k Kernel) {
	s.mu.Lock()
	s.now = k
	s.mu.Unlock()
}

// call runs a kernel.
func (s *Stream) call(k Kernel) error {
	return crash.Caught("kernel", func() error {
		if c := s.ctx.opts.Checker; c != nil {
			return c.run(k)
		}
		return k.Run()
	})
}
