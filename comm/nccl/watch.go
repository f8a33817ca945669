package nccl

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/crash"
)

// progress tracks how far the rank's stream has come in the calls of a group. The stream
// stores the numbers of the last call at which it arrived and of the last one that it
// completed (passed). Numbers are compared by their int32 difference, so they may wrap.
type progress struct {
	ok                  bool // the device can store to memory in stream order
	arrived, passed     *atomic.Uint32
	arrivedAt, passedAt driver.Address

	shown uint64 // call last shown to the watchdog; only the watching goroutine uses shown, moved and wait
	moved bool   // the stream has progressed since the wait was last checked
	wait  comm.Wait

	mu     sync.Mutex
	last   uint64      // the latest enqueued call
	recent [256]called // the latest calls, by number modulo 256
}

// called is a call of a group, and when it was enqueued.
type called struct {
	call uint64
	k    *kernel
	at   time.Time
}

// words allocates the words that the stream writes.
func (p *progress) words(ctx *cuda.Context) (err error) {
	if p.arrived, p.arrivedAt, p.ok, err = ctx.Word(); err != nil || !p.ok {
		return err
	}
	p.passed, p.passedAt, p.ok, err = ctx.Word()
	return err
}

func (p *progress) enter(api driver.API, s driver.Stream, k *kernel, call uint64) error {
	if !p.ok {
		return nil
	}
	p.mu.Lock()
	p.last, p.recent[call%uint64(len(p.recent))] = call, called{call, k, time.Now()}
	p.mu.Unlock()
	return api.WriteValue(s, p.arrivedAt, uint32(call))
}

func (p *progress) pass(api driver.API, s driver.Stream, call uint64) error {
	if !p.ok {
		return nil
	}
	return api.WriteValue(s, p.passedAt, uint32(call))
}

// look returns the stream's progress. Between two looks there must be fewer than 2^31
// calls.
func (p *progress) look() watch.Progress {
	passed := p.passed.Load()
	arrived := p.arrived.Load() // loaded after passed, so it is never behind passed
	if arrived != uint32(p.shown) || arrived == passed {
		p.moved = true
	}
	p.shown += uint64(arrived - uint32(p.shown))
	if int32(arrived-passed) <= 0 {
		return watch.Progress{Call: p.shown}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.recent[p.shown%uint64(len(p.recent))].k
	return watch.Progress{Call: p.shown, Phase: watch.Waiting, Sig: k.sig, Op: k.text}
}

// flight describes the last calls that the rank's streams reached in each group, at most n
// each, oldest first; "" if there are none. Call it before anything is aborted: an abort lets
// streams pass the calls in which they wait.
func (r *rank) flight(n int) string {
	var s strings.Builder
	r.mu.Lock() // a rank that leaves frees the words
	for _, m := range r.members {
		m.progress.tell(&s, m.name, uint64(n))
	}
	r.mu.Unlock()
	if s.Len() == 0 {
		return ""
	}
	return fmt.Sprintf("the last operations of rank %d over NCCL:%s", r.index, &s)
}

func (p *progress) tell(s *strings.Builder, group string, n uint64) {
	if !p.ok {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	passed := p.last - uint64(uint32(p.last)-p.passed.Load())
	arrived := p.last - uint64(uint32(p.last)-p.arrived.Load())
	for call := arrived - min(arrived, n) + 1; call <= arrived; call++ {
		c := p.recent[call%uint64(len(p.recent))]
		if c.call != call { // overwritten by a later call
			continue
		}
		how := "passed"
		if call > passed {
			how = "not passed"
		}
		fmt.Fprintf(s, "\n  %s group, call %d: %s, %d bytes, enqueued %v ago, %s", group, call, c.k.text, c.k.Sig.Bytes, time.Since(c.at).Round(time.Millisecond), how)
	}
	if behind := p.last - arrived; behind > 0 {
		fmt.Fprintf(s, "\n  %s group: %d enqueued behind", group, behind)
	}
}

// lookEvery is the interval at which a rank reports its progress and polls its
// communicators.
const lookEvery = 50 * time.Millisecond

// watch reports the progress of the rank's stream to the watchdog and ends the job with
// NCCL's asynchronous errors, until the rank has left or the job has ended.
func (r *rank) watch() {
	defer crash.Guard()
	defer close(r.watched)
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-r.left:
			for slot, m := range r.members { // or others would seem to wait for a rank that has left
				r.show(slot, m)
			}
			return
		case <-tick.C:
		}
		for slot, m := range r.members {
			if m.Ranks == 1 {
				continue
			}
			if err := r.sound(m, r.show(slot, m)); err != nil {
				r.w.o.Control.Abort(err)
				return
			}
		}
	}
}

// show reports the rank's progress in a group to the watchdog.
func (r *rank) show(slot int, m *member) (p watch.Progress) {
	if m.Ranks > 1 && m.progress.ok {
		p = m.progress.look()
		r.w.o.Control.Show(r.index, slot, p)
	}
	return p
}

// sound asks a group's communicator what has gone wrong in it, and looks how long the rank
// has been in one call.
func (r *rank) sound(m *member, p watch.Progress) error {
	err := r.call(func() error {
		if m.comm.handle == 0 {
			return nil
		}
		_, err := r.w.o.API.State(m.comm.handle)
		return err
	})
	if err == nil && p.Phase != watch.Idle {
		err = m.progress.stuck(r.w.o.Timeout)
	}
	if err == nil {
		return r.w.o.Control.Err()
	}
	return r.failed(m, p.Op, p.Call, err)
}

// stuck is the error of a call that has not ended for so long that the watchdog would have
// named the rank that it waits for: all have come to it.
func (p *progress) stuck(timeout time.Duration) error {
	if p.moved {
		p.wait, p.moved = comm.NewWait(timeout), false
	}
	if p.wait.Look(); p.wait.Counted > timeout+timeout/4+lookEvery {
		return fmt.Errorf("%w: NCCL has not ended it for %v, and no rank is missing", comm.ErrTimeout, p.wait.Counted.Round(time.Millisecond))
	}
	return nil
}

// failed is the job's error, or what NCCL says of a call in a group.
func (r *rank) failed(m *member, what string, call uint64, err error) error {
	if job := r.w.o.Control.Err(); job != nil {
		return job
	}
	var e *Error
	if !errors.As(err, &e) && !errors.Is(err, comm.ErrTimeout) {
		return err
	}
	if what != "" {
		err = fmt.Errorf("%s (call %d): %w", what, call, err)
	}
	err = fmt.Errorf("rank %d in the %s group: %w", r.index, m.name, err)
	if e != nil && (e.Code == RemoteError || e.Code == systemError) {
		err = fmt.Errorf("%w: %w", comm.ErrLost, err)
	}
	return err
}

// drain returns when a stream has run everything, or with the job's error.
func (r *rank) drain(api driver.API, s driver.Stream) error {
	e, err := api.NewEvent(false)
	if err != nil {
		return err
	}
	err = api.Record(e, s)
	for began, pause := time.Now(), firstPause; err == nil; pause = min(2*pause, longPause) {
		var done bool
		if done, err = api.Done(e); err != nil {
			break
		}
		if err = r.w.o.Control.Err(); done || err != nil { // an abort lets a stream pass
			break
		}
		if time.Since(began) > r.w.o.Timeout {
			err = fmt.Errorf("%w: NCCL's first calls are not done after %v", comm.ErrTimeout, r.w.o.Timeout)
		}
		time.Sleep(pause)
	}
	return errors.Join(err, api.DestroyEvent(e))
}
