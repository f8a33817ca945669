package nccl

import (
	"fmt"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/internal/crash"
)

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

// sound polls a group's communicator for an asynchronous error, and checks how long the rank has
// been in one call.
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
