package cuda

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// timings records the times of a stream's latest launches in a ring buffer: device work by
// a pair of events, host kernels by the host's clock.
type timings struct {
	timer    device.Timer
	base     driver.Event // an event whose host time is known; others are measured relative to it
	baseTime time.Duration
	ring     [256]timing
	first    int // the oldest launch not yet reported to the timer
	n        int
}

type timing struct {
	start, end driver.Event
	host       bool
	from, to   time.Duration // start and end of a host kernel
	ran        atomic.Bool   // the host kernel has run
}

func (t *timings) events() (list []driver.Event) {
	if t.base != 0 {
		list = append(list, t.base)
	}
	for i := range t.ring {
		for _, e := range [2]driver.Event{t.ring[i].start, t.ring[i].end} {
			if e != 0 {
				list = append(list, e)
			}
		}
	}
	return list
}

// Time sends the times of kernels launched from now on to timer; nil ends it.
func (s *Stream) Time(timer device.Timer) error {
	fail := func(err error) error { return s.stop(nil, "time what follows", err) }
	if err := s.Sync(); err != nil {
		return err
	}
	if s.timing == nil {
		if timer == nil {
			return nil
		}
		api := s.ctx.api
		t := &timings{}
		s.timing = t // destroy releases it, even if it is incomplete
		for _, e := range t.unmade() {
			var err error
			if *e, err = api.NewEvent(true); err != nil {
				return fail(err)
			}
		}
		if err := s.setBase(); err != nil {
			return fail(err)
		}
	}
	s.timing.timer = timer
	return nil
}

// setBase records several events and keeps as the base the one whose time on the host's
// clock is known most precisely: it lies between the call that records the event and the answer
// that it has passed.
func (s *Stream) setBase() error {
	const tries = 8
	t := s.timing
	closest := time.Duration(-1)
	for i := range tries {
		e := &t.ring[i].start
		before := device.Now()
		if err := s.ctx.api.Record(*e, s.handle); err != nil {
			return err
		}
		if err := s.await(*e); err != nil {
			return err
		}
		after := device.Now()
		if closest < 0 || after-before < closest {
			closest = after - before
			t.base, *e, t.baseTime = *e, t.base, after
		}
	}
	return nil
}

func (t *timings) unmade() []*driver.Event {
	list := []*driver.Event{&t.base}
	for i := range t.ring {
		list = append(list, &t.ring[i].start, &t.ring[i].end)
	}
	return list
}

// next returns the slot for the next launch.
func (s *Stream) next(host bool) (*timing, error) {
	t := s.timing
	for t.n == len(t.ring) {
		if err := s.tell(); err != nil {
			return nil, err
		}
	}
	slot := &t.ring[(t.first+t.n)%len(t.ring)]
	slot.host = host
	slot.ran.Store(false)
	t.n++
	return slot, nil
}

// tell waits for the oldest unreported launch and reports its time to the timer.
func (s *Stream) tell() error {
	t := s.timing
	slot := &t.ring[t.first]
	if slot.host {
		began := time.Now()
		for p := (pause{}); !slot.ran.Load(); p.next(began) {
			if s.ctx.failed.Load() {
				return s.ctx.Err()
			}
		}
	} else {
		if err := s.await(slot.end); err != nil {
			return err
		}
		var err error
		if slot.from, err = s.since(slot.start); err != nil {
			return err
		}
		if slot.to, err = s.since(slot.end); err != nil {
			return err
		}
	}
	t.first = (t.first + 1) % len(t.ring)
	t.n--
	if t.timer != nil {
		t.timer.Ran(slot.from, max(slot.from, slot.to))
	}
	return nil
}

func (s *Stream) since(e driver.Event) (time.Duration, error) {
	ms, err := s.ctx.api.Elapsed(s.timing.base, e)
	if err != nil {
		return 0, fmt.Errorf("time of a launch: %w", err)
	}
	return s.timing.baseTime + time.Duration(float64(ms)*float64(time.Millisecond)), nil
}

// collect reports all remaining launches to the timer. The stream's fence, which has passed
// after all of them, becomes the new base: the driver returns time differences as float32
// milliseconds, which are imprecise over hours.
func (s *Stream) collect() error {
	for s.timing.n > 0 {
		if err := s.tell(); err != nil {
			return err
		}
	}
	at, err := s.since(s.fence)
	if err != nil {
		return err
	}
	s.timing.base, s.fence, s.timing.baseTime = s.fence, s.timing.base, at
	return nil
}
