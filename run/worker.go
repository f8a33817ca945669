package run

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/internal/filesys"
)

// Greet introduces this process to the leader and returns its task. A Task without a Config means
// that there is no work; Err says whether that is an error. If the leader asks about the disk
// tier's folder, Greet first answers with the fields that look sets in h.
func (l *Link) Greet(h Hello, look func(dir string, h *Hello)) (Task, error) {
	l.speak()
	for {
		if err := l.send(h); err != nil {
			return Task{}, err
		}
		t, err := l.task()
		if err != nil || t.Disk == "" {
			return t, err
		}
		look(t.Disk, &h)
	}
}

// task waits for the leader's Task.
func (l *Link) task() (t Task, err error) {
	defer l.patient()()
	for {
		t = Task{}
		if err := l.receive(&t); err != nil || t.Here == "" {
			return t, err
		}
		l.seen(t.Here)
	}
}

// Welcome waits for the Hello of a process.
func (l *Link) Welcome() (h Hello, err error) {
	defer l.patient()()
	for {
		h = Hello{}
		if err := l.receive(&h); err != nil || h.Here == "" {
			return h, err
		}
		l.seen(h.Here)
	}
}

// Assign sends the task.
func (l *Link) Assign(t Task) error {
	if t.Disk == "" {
		l.speak()
	}
	return l.send(t)
}

// Refused tells the leader that this process cannot run the task. notFit says that the machine is
// too small for it.
func (l *Link) Refused(err error, notFit bool) error {
	kind := failInput
	if notFit {
		kind = failFit
	}
	return l.send(opened{toWire(err, kind)})
}

// Opened waits until the process has opened its ranks.
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

// worker runs one of this process's ranks for the leader.
type worker struct {
	link *Link
	rank *Rank
	of   *Ranks
	p    *graph.Program
	work chan request

	writing sync.WaitGroup // writes of staged checkpoints
}

// Serve tells the leader that the process's ranks are open, and executes its requests until the
// leader has closed all ranks (then the error is nil or a *NotJoined) or has ended.
func (l *Link) Serve(rs *Ranks) error {
	var list []*worker
	for _, r := range rs.list {
		list = append(list, &worker{link: l, rank: r, of: rs, p: rs.plan.Of(r.Index).Program, work: make(chan request, 16)})
	}
	if err := l.send(opened{}); err != nil {
		return err
	}
	l.serve()
	gone := make(chan error, 1)
	var serving sync.Mutex // held while ranks are aborted, so that they are not closed meanwhile
	over := false
	defer func() {
		serving.Lock()
		defer serving.Unlock()
		over = true
	}()
	go func() {
		defer crash.Guard()
		err := l.distribute(list)
		l.linger()
		serving.Lock()
		defer serving.Unlock()
		for _, w := range list {
			if !over {
				w.rank.Exec.Abort(err)
			}
			close(w.work)
		}
		gone <- err
	}()
	type end struct {
		closed bool
		err    error
	}
	ends := make(chan end, len(list))
	for _, w := range list {
		go func() {
			defer crash.Guard()
			closed, err := w.loop()
			ends <- end{closed, err}
		}()
	}
	all := true
	for range list {
		e := <-ends
		if e.err != nil {
			return e.err
		}
		all = all && e.closed
	}
	if all {
		return rs.refused
	}
	return <-gone
}

// Interrupt asks the leader to end the job in good order, as an interrupt of its own process does.
// If the leader does not read replies yet, the request waits until the ranks are open.
func (l *Link) Interrupt() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.interrupted = true
	l.passInterrupt()
}

// serve records that the leader now reads replies.
func (l *Link) serve() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.serving = true
	l.passInterrupt()
}

func (l *Link) passInterrupt() {
	if l.serving && l.interrupted {
		_ = l.enc.Encode(reply{Interrupted: true}) // if the leader has ended, the job ends anyway
	}
}

// distribute passes the leader's requests to the workers of their ranks, until the stream ends.
func (l *Link) distribute(list []*worker) error {
	for {
		var q request
		err := l.receive(&q)
		if err == nil && (q.Slot < 0 || q.Slot >= len(list)) {
			err = fmt.Errorf("the leader sent a request for rank %d of this process, which has %d", q.Slot, len(list))
		}
		if err != nil {
			return err
		}
		switch w := list[q.Slot]; q.Verb {
		case verbAbort:
			w.rank.Exec.Abort(errors.New(q.Err.Text))
		case verbRunning:
			_ = l.send(reply{ID: q.ID, List: w.rank.Exec.Running()})
		case verbWriteStaged: // allowed during a section
			w.writing.Add(1)
			go w.writeStaged(q)
		default:
			w.work <- q
		}
	}
}

// loop executes the rank's requests until the leader closes the rank, or has ended.
func (w *worker) loop() (closed bool, err error) {
	defer w.writing.Wait() // the staged memory must exist until it is written
	for q := range w.work {
		if q.Verb == verbClose {
			return true, w.link.send(reply{ID: q.ID, State: w.state()})
		}
		m := w.do(q)
		m.ID, m.State = q.ID, w.state()
		if err := w.link.send(m); err != nil {
			return false, err
		}
	}
	return false, nil
}

func (w *worker) state() *state {
	s := &state{Classes: w.rank.Exec.TouchedClasses(), Comm: w.rank.Exec.CommStats(), Disk: w.rank.Exec.DiskTraffic(), Usage: w.rank.Exec.Usage()}
	for sp := range graph.NumSpaces {
		s.Touched[sp] = w.rank.Exec.Touched(sp)
	}
	return s
}

// do executes a request on the rank's goroutine.
func (w *worker) do(q request) (m reply) {
	var err error
	if q.Verb == verbLoad { // it writes to all ranks of the process, which are waiting
		err = w.of.loadNamed(context.Background(), q.Name)
	} else {
		err = w.rank.on.Do(func() error { return w.serve(q, &m) })
	}
	if m.Stopped = errors.Is(err, exec.ErrAbandoned); !m.Stopped {
		m.Err = toWire(err, failRun)
	}
	return m
}

func (w *worker) serve(q request, m *reply) (err error) {
	e := w.rank.Exec
	var before func(*graph.Phase, int) error
	if q.N != 0 {
		before = func(ph *graph.Phase, repeat int) error {
			_, err := w.ask(reply{ID: q.ID, Phase: ph.Name, Repeat: repeat})
			return err
		}
	}
	switch q.Verb {
	case verbRun:
		e.SetStep(q.Step, q.Repeats)
		return e.RunSection(q.Name, before)
	case verbGated:
		e.SetStep(q.Step, q.Repeats)
		m.Passed, err = e.RunGated(q.Name, before, func(norm bool) (bool, error) { return w.ask(reply{ID: q.ID, Gate: true, Norm: norm}) })
		return err
	case verbFind:
		f, err := e.FindNonFinite(q.Name, before)
		if f != nil {
			m.Found = w.place(q.Name, *f)
		}
		return err
	case verbScalar:
		m.Scalar, err = e.Scalar(q.Buf)
		return err
	case verbWrite:
		return e.Write(q.Buf, q.Off, q.Data)
	case verbRead:
		if q.N < 0 || q.N > 1<<34 {
			return fmt.Errorf("read of %d bytes", q.N)
		}
		m.Data = make([]byte, q.N)
		return e.Read(q.Buf, q.Off, m.Data)
	case verbHost:
		m.Data, err = e.HostBytes(q.Buf)
		return err
	case verbSave, verbStage:
		return w.save(q, m)
	case verbHash:
		h, err := w.of.hashing()
		if err != nil {
			return err
		}
		m.Data, err = w.rank.hash(h.shares[w.rank.Index], w.of.here())
		return err
	case verbJoin:
		w.of.refused = w.of.join(q.Name, string(q.Data))
		return w.of.refused
	case verbTrace:
		if w.of.trace == nil {
			return errors.New("the leader asks for a trace, but this process records none")
		}
		m.Data, m.Next, err = w.of.trace.Of(w.rank.Index, device.Epoch().Sub(time.Unix(0, q.N)))(q.Off)
		return err
	}
	return fmt.Errorf("the leader sent an unknown request (%d)", q.Verb)
}

// save writes or stages the rank's part of a checkpoint, on the rank's goroutine.
func (w *worker) save(q request, m *reply) error {
	part, err := w.of.part(w.rank)
	if err != nil {
		return err
	}
	if q.Verb == verbStage {
		return w.rank.image.Stage(part)
	}
	return w.of.within(q.Name, func(in filesys.Folder) error {
		f, err := checkpoint.WritePart(context.Background(), in, part)
		m.File = &f
		return err
	})
}

// writeStaged writes the staged states and answers, while the rank runs other requests.
func (w *worker) writeStaged(q request) {
	defer crash.Guard()
	defer w.writing.Done()
	var f checkpoint.File
	err := w.of.within(q.Name, func(in filesys.Folder) (err error) {
		f, err = w.rank.image.Write(context.Background(), in)
		return err
	})
	_ = w.link.send(reply{ID: q.ID, File: &f, Err: toWire(err, failRun)}) // if the leader has ended, no answer is needed
}

// place converts f, with the operation given by its indices in the section.
func (w *worker) place(section string, f exec.NonFinite) *found {
	to := newFound(&f)
	if s := w.p.Section(section); s != nil {
		for i := range s.Phases {
			for k := range s.Phases[i].Ops {
				if &s.Phases[i].Ops[k] == f.Op {
					to.InPhase, to.OfOp = i, k
				}
			}
		}
	}
	return to
}

// ask sends the leader a question during a section, and processes the answer: the host's inputs of a
// phase, or whether the update may run.
func (w *worker) ask(m reply) (bool, error) {
	if err := w.link.send(m); err != nil {
		return false, err
	}
	for q := range w.work {
		switch q.Verb {
		case verbHost, verbScalar:
			var m reply
			err := w.serve(q, &m)
			m.ID, m.Err = q.ID, toWire(err, failRun)
			if err := w.link.send(m); err != nil {
				return false, err
			}
			continue
		case verbGo:
		default:
			return false, fmt.Errorf("the leader sent another request (%d) during a section", q.Verb)
		}
		for _, h := range q.Host {
			data, err := w.rank.Exec.HostBytes(h.Buf)
			if err != nil {
				return false, err
			}
			if copy(data, h.Data) != len(h.Data) {
				return false, fmt.Errorf("the leader sends %d bytes for buffer %d of %d", len(h.Data), h.Buf, len(data))
			}
		}
		if q.Stop {
			return false, exec.ErrAbandoned
		}
		if q.Err != nil {
			return false, errors.New(q.Err.Text)
		}
		return q.Pass, nil
	}
	return false, fmt.Errorf("the process of rank %d, which leads the job, has ended", w.link.Rank)
}
