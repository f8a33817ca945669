package run

import (
	"errors"
	"fmt"
	"time"

	"github.com/spillway-ml/spillway/graph"
)

// Greet introduces this process to the leader and returns what it is to run. A
// Task without a Config says that there is nothing, in good order or, with Err,
// not.
func (l *Link) Greet(h Hello) (Task, error) {
	var t Task
	if err := l.send(h); err != nil {
		return t, err
	}
	err := l.receive(&t)
	return t, err
}

// Welcome gives a process its task, once it has said who it is.
func (l *Link) Welcome() (Hello, error) {
	var h Hello
	err := l.receive(&h)
	return h, err
}

// Assign sends the task.
func (l *Link) Assign(t Task) error { return l.send(t) }

// Refused tells the leader that the task can't be run here. notFit: the machine
// is too small for it.
func (l *Link) Refused(err error, notFit bool) error {
	kind := failInput
	if notFit {
		kind = failFit
	}
	return l.send(opened{toWire(err, kind)})
}

// Opened waits until the process has opened its rank.
func (l *Link) Opened() error {
	var o opened
	if err := l.receive(&o); err != nil {
		return err
	}
	if o.Err != nil {
		return &RemoteError{l.Rank, *o.Err}
	}
	return nil
}

// worker runs a rank for the leader.
type worker struct {
	link *Link
	rank *Rank
	work chan request
}

// Serve tells the leader that the rank is open, and does what it asks until it
// closes the rank (nil), or is gone.
func (l *Link) Serve(rs *Ranks) error {
	w := &worker{link: l, rank: rs.First(), work: make(chan request, 16)}
	if err := l.send(opened{}); err != nil {
		return err
	}
	gone := make(chan error, 1)
	go func() {
		defer close(w.work)
		for {
			var q request
			if err := l.receive(&q); err != nil {
				time.Sleep(endGrace)
				w.rank.Exec.Abort(err)
				gone <- err
				return
			}
			switch q.Verb {
			case verbAbort:
				w.rank.Exec.Abort(errors.New(q.Err.Text))
			case verbRunning:
				_ = l.send(reply{ID: q.ID, List: w.rank.Exec.Running()})
			default:
				w.work <- q
			}
		}
	}()
	for q := range w.work {
		if q.Verb == verbClose {
			return l.send(reply{ID: q.ID, State: w.state()})
		}
		m := w.do(q)
		m.ID, m.State = q.ID, w.state()
		if err := l.send(m); err != nil {
			return err
		}
	}
	return <-gone
}

func (w *worker) state() *state {
	s := &state{Comm: w.rank.Exec.CommStats(), Disk: w.rank.Exec.DiskTraffic()}
	for sp := range graph.NumSpaces {
		s.Touched[sp] = w.rank.Exec.Touched(sp)
	}
	return s
}

// do serves a request on the rank's goroutine.
func (w *worker) do(q request) (m reply) {
	err := w.rank.do(func() (err error) {
		switch q.Verb {
		case verbRun:
			w.rank.Exec.SetStep(q.Step)
			var before func(*graph.Phase, int) error
			if q.N != 0 {
				before = func(ph *graph.Phase, repeat int) error { return w.before(q.ID, ph, repeat) }
			}
			return w.rank.Exec.RunSection(q.Name, before)
		case verbWrite:
			return w.rank.Exec.Write(q.Buf, q.Off, q.Data)
		case verbRead:
			if q.N < 0 || q.N > 1<<34 {
				return fmt.Errorf("read of %d bytes", q.N)
			}
			m.Data = make([]byte, q.N)
			return w.rank.Exec.Read(q.Buf, q.Off, m.Data)
		case verbHost:
			m.Data, err = w.rank.Exec.HostBytes(q.Buf)
			return err
		}
		return fmt.Errorf("the leader asks for something unknown (%d)", q.Verb)
	})
	m.Err = toWire(err, failRun)
	return m
}

// before has the leader fill the host's inputs of a phase.
func (w *worker) before(id uint64, ph *graph.Phase, repeat int) error {
	if err := w.link.send(reply{ID: id, Phase: ph.Name, Repeat: repeat}); err != nil {
		return err
	}
	for q := range w.work {
		if q.Verb == verbHost {
			data, err := w.rank.Exec.HostBytes(q.Buf)
			if err := w.link.send(reply{ID: q.ID, Data: data, Err: toWire(err, failRun)}); err != nil {
				return err
			}
			continue
		}
		if q.Verb != verbGo {
			return fmt.Errorf("the leader asks for something else (%d) in phase %s", q.Verb, ph.Name)
		}
		for _, h := range q.Host {
			data, err := w.rank.Exec.HostBytes(h.Buf)
			if err != nil {
				return err
			}
			if copy(data, h.Data) != len(h.Data) {
				return fmt.Errorf("the leader sends %d bytes for buffer %d of %d", len(h.Data), h.Buf, len(data))
			}
		}
		if q.Err != nil {
			return errors.New(q.Err.Text)
		}
		return nil
	}
	return fmt.Errorf("the process of rank %d, which leads the job, has ended", w.link.Rank)
}
