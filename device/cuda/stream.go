package cuda

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
)

// Stream is an in-order queue of device and host work. Events and device work are enqueued on
// the CUDA stream at once. Host kernels run on a goroutine, ordered with the CUDA stream by two
// words in memory (see hostWork).
type Stream struct {
	ctx    *Context
	id     graph.StreamID
	handle driver.Stream
	fence  driver.Event // recorded by Sync
	host   hostWork
	mark   word // launches that have run, as of the last mark

	// The following fields are used only by the driving goroutine.
	behind   bool  // the CUDA stream does not wait for the latest host kernel yet
	ahead    bool  // the CUDA stream has work that the latest host kernel did not wait for
	unmarked int   // launches since the last mark
	waitErr  error // error of a Wait, returned by the next operation
	touched  []touch
	checked  map[Checked]struct{} // launched kernels that check their data
	timing   *timings             // nil: the stream is not timed
	reads    []driver.Range
	writes   []driver.Range

	mu       sync.Mutex // guards the fields below, which Running reads
	launched uint64
	synced   uint64 // launches that have run, as of the last Sync
	recent   [1024]device.Kernel
	// The mark's memory is given back.
	destroyed bool
}

// touch is the highest byte of an arena that work since the last Sync accesses.
type touch struct {
	arena *Arena
	end   int64
}

type event struct {
	ctx      *Context
	handle   driver.Event
	recorded bool
	stream   *Stream // stream of the latest Record
}

// NewStream creates a stream that does not synchronize with the default stream.
func (c *Context) NewStream(id graph.StreamID) (device.Stream, error) {
	if c.closed {
		return nil, errClosed
	}
	s := &Stream{ctx: c, id: id, ahead: true, checked: map[Checked]struct{}{}}
	fail := func(err error) (device.Stream, error) {
		return nil, fmt.Errorf("rank %d, stream %s: %w", c.rank, id, errors.Join(append([]error{err}, s.destroy()...)...))
	}
	var err error
	for _, w := range []*word{&s.host.reached, &s.host.done, &s.mark} {
		if *w, err = c.words.next(); err != nil {
			return fail(err)
		}
	}
	if s.handle, err = c.api.NewStream(); err != nil {
		return fail(err)
	}
	if s.fence, err = c.api.NewEvent(true); err != nil {
		return fail(err)
	}
	s.host.s, s.host.queue = s, make(chan hostItem, c.opts.Queue)
	s.host.stop, s.host.ended = make(chan struct{}), make(chan struct{})
	c.mu.Lock()
	c.streams = append(c.streams, s)
	failed := c.err != nil
	c.mu.Unlock()
	if failed {
		s.host.release()
	}
	go s.host.work()
	return s, nil
}

func (s *Stream) opError(k device.Kernel, err error) error {
	return &device.OpError{Rank: s.ctx.rank, Where: s.ctx.opts.Where, Stream: s.id, Kernel: k, Err: err}
}

// stop makes the error of a failed driver call sticky. The error names k. But any call may
// return an asynchronous error of earlier device work: such an error names the first operation
// of the stream that is not known to have run.
func (s *Stream) stop(k device.Kernel, doing string, err error) error {
	if e, ok := errors.AsType[*driver.Error](err); ok && asynchronous(e.Code) {
		if first := s.atHand(); first != nil {
			k, doing = first, "this is the first operation of the stream that is not known to have run"
			if _, ok := k.(*graphKernel); ok {
				doing = "one of these is the first operation of the stream that is not known to have run (a run without CUDA graphs names it)"
			}
		}
	}
	if doing != "" {
		err = fmt.Errorf("%s: %w", doing, err)
	}
	if k != nil {
		err = s.opError(k, err)
	} else {
		err = fmt.Errorf("rank %d, stream %s: %w", s.ctx.rank, s.id, err)
	}
	s.ctx.fail(err)
	return s.ctx.Err()
}

// asynchronous tells whether code is the error of a kernel or copy that failed while it ran.
func asynchronous(code int) bool {
	switch code {
	case 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719:
		return true
	}
	return false
}

// latest returns the last launched operation, nil if none.
func (s *Stream) latest() device.Kernel {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.launched == 0 {
		return nil
	}
	return s.recent[(s.launched-1)%uint64(len(s.recent))]
}

// atHand returns the operation that the stream is running, or the first one that is not
// known to have run; nil if none.
func (s *Stream) atHand() device.Kernel {
	if k := s.host.current(); k != nil {
		return k
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.synced
	if s.ctx.memOps && !s.destroyed {
		n = max(n, s.launched-uint64(uint32(s.launched)-s.mark.host.Load()))
	}
	if n >= s.launched {
		return nil
	}
	if s.launched-n > uint64(len(s.recent)) {
		n = s.launched - uint64(len(s.recent))
	}
	return s.recent[n%uint64(len(s.recent))]
}

func (s *Stream) usable() error {
	if s.ctx.closed {
		return errClosed
	}
	return s.ctx.Err()
}

// Launch enqueues a Kernel or a HostKernel. All ranges that it touches must lie in the rank's
// own arenas.
func (s *Stream) Launch(k device.Kernel) error {
	if err := s.usable(); err != nil {
		return err
	}
	gpu, onGPU := k.(Kernel)
	host, onHost := k.(HostKernel)
	if !onGPU && !onHost {
		return fmt.Errorf("rank %d, stream %s, operation %q: not a kernel of the CUDA device (%T)", s.ctx.rank, s.id, k.Label(), k)
	}
	for _, p := range k.Touches() {
		if _, err := s.ctx.own(p); err != nil {
			return s.opError(k, fmt.Errorf("operand: %w", err))
		}
	}
	s.mu.Lock()
	s.recent[s.launched%uint64(len(s.recent))] = k
	s.launched++
	s.mu.Unlock()
	if onGPU {
		return s.launch(gpu)
	}
	return s.launchHost(host)
}

func (s *Stream) launch(k Kernel) error {
	api := s.ctx.api
	if err := s.catchUp(); err != nil {
		return s.stop(k, "before it", err)
	}
	_, many := k.(*graphKernel)
	if many && s.unmarked > 0 {
		if err := s.markProgress(s.launched - 1); err != nil {
			return s.stop(k, "mark the progress before it", err)
		}
	}
	if o := s.ctx.observer; o != nil {
		s.reads, s.writes = s.ctx.accesses(k, s.reads[:0], s.writes[:0])
		o.Access(k.Label(), s.handle, s.reads, s.writes)
	}
	var t *timing
	if s.timing != nil {
		var err error
		if t, err = s.next(false); err == nil {
			err = api.Record(t.start, s.handle)
		}
		if err != nil {
			return s.stop(k, "time it", err)
		}
	}
	if err := s.call(k); err != nil {
		return s.stop(k, "", err)
	}
	s.ahead = true
	if t != nil {
		if err := api.Record(t.end, s.handle); err != nil {
			return s.stop(k, "time it", err)
		}
	}
	for _, p := range k.Touches() {
		s.touch(p.Arena.(*Arena), p.Off+p.Len)
	}
	if c, ok := k.(Checked); ok {
		s.checked[c] = struct{}{} // one entry per kernel: the map stops growing after the first step
	}
	if s.unmarked++; many || s.unmarked >= s.ctx.opts.Marks {
		if err := s.markProgress(s.launched); err != nil {
			return s.stop(k, "mark the progress after it", err)
		}
	}
	return nil
}

// markProgress makes the stream store the number of launches when they have run, if the
// device has stream memory operations.
func (s *Stream) markProgress(launches uint64) error {
	s.unmarked = 0
	if !s.ctx.memOps {
		return nil
	}
	return s.ctx.api.WriteValue(s.handle, s.mark.at, uint32(launches))
}

// call calls k.Enqueue.
func (s *Stream) call(k Kernel) error {
	return crash.Caught("launch", func() error { return k.Enqueue(s.ctx.api, s.handle) })
}

func (s *Stream) touch(a *Arena, end int64) {
	for i := range s.touched {
		if t := &s.touched[i]; t.arena == a {
			t.end = max(t.end, end)
			return
		}
	}
	s.touched = append(s.touched, touch{a, end})
}

// launchHost enqueues a host kernel. It makes the CUDA stream signal the kernel's turn, unless
// there is no device work since the previous host kernel.
func (s *Stream) launchHost(k HostKernel) error {
	if !s.ctx.memOps {
		return s.stop(k, "", errors.New("it runs on the host between device work, which needs stream memory operations (cuStreamWaitValue32): this GPU, or its driver, has none"))
	}
	if s.waitErr != nil {
		return s.stop(k, "wait for an event before it", s.waitErr)
	}
	i := hostItem{kernel: k, number: s.host.number.Load() + 1, reach: s.ahead}
	if s.timing != nil {
		var err error
		if i.timing, err = s.next(true); err != nil {
			return s.stop(k, "time it", err)
		}
	}
	s.host.number.Store(i.number)
	if s.ahead {
		if err := s.ctx.api.WriteValue(s.handle, s.host.reached.at, i.number); err != nil {
			return s.stop(k, "announce its turn", err)
		}
		s.ahead = false
	}
	s.behind = true
	return s.host.push(i)
}

// catchUp makes the CUDA stream wait for the latest host kernel.
func (s *Stream) catchUp() error {
	if s.waitErr != nil {
		return fmt.Errorf("wait for an event: %w", s.waitErr)
	}
	if !s.behind {
		return nil
	}
	if err := s.ctx.api.WaitValue(s.handle, s.host.done.at, s.host.number.Load()); err != nil {
		return fmt.Errorf("wait for a host kernel: %w", err)
	}
	s.behind = false
	return nil
}

// Record makes the event mark the work enqueued on the stream so far.
func (s *Stream) Record(e device.Event) error {
	ev, ok := e.(*event)
	if !ok || ev.ctx != s.ctx {
		return fmt.Errorf("rank %d, stream %s: record: not an event of this context (%T)", s.ctx.rank, s.id, e)
	}
	if err := s.usable(); err != nil {
		return err
	}
	err := s.catchUp()
	if err == nil {
		err = s.ctx.api.Record(ev.handle, s.handle)
	}
	if err != nil {
		return s.stop(s.latest(), "record an event after it", err)
	}
	ev.recorded, ev.stream = true, s
	return nil
}

// Wait makes work enqueued after it run after the event's latest Record. The next operation
// returns the driver's error, if any, because it is the one that waits.
func (s *Stream) Wait(e device.Event) error {
	ev, ok := e.(*event)
	if !ok || ev.ctx != s.ctx {
		return fmt.Errorf("rank %d, stream %s: wait: not an event of this context (%T)", s.ctx.rank, s.id, e)
	}
	if err := s.usable(); err != nil {
		return err
	}
	if !ev.recorded || ev.stream == s {
		return nil
	}
	if s.waitErr == nil {
		s.waitErr = s.ctx.api.Wait(s.handle, ev.handle)
	}
	s.ahead = true
	return nil
}

// Sync returns when the stream has run everything, or with the sticky error.
func (s *Stream) Sync() error {
	if err := s.usable(); err != nil {
		return err
	}
	err := s.catchUp()
	if err == nil {
		err = s.ctx.api.Record(s.fence, s.handle)
	}
	if err == nil {
		err = s.await(s.fence)
	}
	if err == nil && s.timing != nil {
		err = s.collect()
	}
	if err != nil {
		if s.ctx.failed.Load() {
			return s.ctx.Err()
		}
		return s.stop(s.latest(), "wait for it", err)
	}
	for k := range s.checked {
		if err := k.Check(); err != nil {
			s.ctx.fail(s.opError(k, err))
			return s.ctx.Err()
		}
	}
	for i := range s.touched {
		s.touched[i].arena.touch(s.touched[i].end)
	}
	s.mu.Lock()
	s.synced = s.launched
	s.mu.Unlock()
	s.ahead = true // the next host kernel must be ordered after this
	return s.ctx.Err()
}

// await returns when an event has passed, or on failure. It polls, because an abort could not
// interrupt a blocking driver call.
func (s *Stream) await(e driver.Event) error {
	began := time.Now()
	looked := began
	for p := (pause{}); ; p.next(began) {
		if done, err := s.ctx.api.Done(e); done || err != nil {
			return err
		}
		if p.sleep > 0 && time.Since(looked) > lookAfter {
			for _, f := range s.ctx.waiting {
				f()
			}
			looked = time.Now()
		}
		if s.ctx.failed.Load() {
			return s.ctx.Err()
		}
	}
}

// lookAfter is the interval at which a wait calls the functions registered by WhileWaiting.
const lookAfter = 5 * time.Millisecond

// end waits until the stream's remaining work has run. No more work may be enqueued.
func (s *Stream) end(deadline time.Time) error {
	close(s.host.queue)
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	select {
	case <-s.host.ended:
	case <-timer.C:
		return s.stuck()
	}
	if !s.ctx.failed.Load() {
		return nil // Sync returned
	}
	if err := s.ctx.api.Record(s.fence, s.handle); err != nil {
		return nil // the context is lost: nothing runs any more
	}
	for began, p := time.Now(), (pause{}); ; p.next(began) {
		if done, err := s.ctx.api.Done(s.fence); done || err != nil {
			return nil
		}
		if time.Now().After(deadline) {
			return s.stuck()
		}
	}
}

func (s *Stream) stuck() error {
	what := "what it was given"
	if k := s.atHand(); k != nil {
		what = fmt.Sprintf("operation %q", k.Label())
	}
	return fmt.Errorf("stream %s still runs %s after %v", s.id, what, closeGrace)
}

// destroy releases the stream's driver objects. Its words are invalid afterwards.
func (s *Stream) destroy() (errs []error) {
	s.host.retire()
	s.mu.Lock()
	s.synced = s.launched
	s.destroyed = true
	s.mu.Unlock()
	api := s.ctx.api
	note := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	if s.timing != nil {
		for _, e := range s.timing.events() {
			note(api.DestroyEvent(e))
		}
	}
	if s.fence != 0 {
		note(api.DestroyEvent(s.fence))
	}
	if s.handle != 0 {
		note(api.DestroyStream(s.handle))
	}
	return errs
}
