package nccl

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
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
	call  uint64
	sig   uint64 // hash of the signature
	text  string // operation and name
	bytes int64
	at    time.Time
}

// words allocates the words that the stream writes.
func (p *progress) words(ctx *cuda.Context) (err error) {
	if p.arrived, p.arrivedAt, p.ok, err = ctx.Word(); err != nil || !p.ok {
		return err
	}
	p.passed, p.passedAt, p.ok, err = ctx.Word()
	return err
}

func (p *progress) enter(api driver.API, s driver.Stream, c called) error {
	if !p.ok {
		return nil
	}
	c.at = time.Now()
	p.mu.Lock()
	p.last, p.recent[c.call%uint64(len(p.recent))] = c.call, c
	p.mu.Unlock()
	return api.WriteValue(s, p.arrivedAt, uint32(c.call))
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
	c := &p.recent[p.shown%uint64(len(p.recent))]
	return watch.Progress{Call: p.shown, Phase: watch.Waiting, Sig: c.sig, Op: c.text}
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
		fmt.Fprintf(s, "\n  %s group, call %d: %s, %d bytes, enqueued %v ago, %s", group, call, c.text, c.bytes, time.Since(c.at).Round(time.Millisecond), how)
	}
	if behind := p.last - arrived; behind > 0 {
		fmt.Fprintf(s, "\n  %s group: %d enqueued behind", group, behind)
	}
}

// lookEvery is the interval at which a rank reports its progress and polls its
// communicators.
const lookEvery = 50 * time.Millisecond

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
