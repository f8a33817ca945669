package run

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/plan"
)

// Executor drives one rank's part of the program, in this process (ofRole) or in another (remote).
// Buffers are those of the plan's program.
type Executor interface {
	SetStep(step int64, repeats int)
	RunSection(name string, before func(phase *graph.Phase, repeat int) error) error
	RunGated(name string, before func(phase *graph.Phase, repeat int) error, pass func(norm bool) (bool, error)) (bool, error)
	FindNonFinite(name string, before func(phase *graph.Phase, repeat int) error) (*exec.NonFinite, error)
	Scalar(buf graph.BufID) (float64, error)
	Write(buf graph.BufID, off int64, data []byte) error
	Read(buf graph.BufID, off int64, data []byte) error
	HostF64(buf graph.BufID) ([]float64, error)
	HostF32(buf graph.BufID) ([]float32, error)
	HostI64(buf graph.BufID) ([]int64, error)
	HostI32(buf graph.BufID) ([]int32, error)
	HostBytes(buf graph.BufID) ([]byte, error)
	Abort(err error)
	Running() []string
	Touched(space graph.Space) int64
	TouchedClasses() exec.Classes
	CommStats() comm.Stats
	DiskTraffic() device.Traffic
	Usage() exec.Usage
	Close() error
}

// channel is the leader's end of the stream to another process, shared by the remotes of that
// process's ranks.
type channel struct {
	link *Link

	mu      sync.Mutex
	waiting map[uint64]*waiter
	next    uint64
	err     error // the error that ended the stream
	told    bool  // some caller has received err
	open    int   // number of remotes that are not closed
}

// waiter receives the replies to a request.
type waiter struct {
	c  chan reply
	of *remote
}

// remote is the Executor of a rank in another process. It has copies of the rank's buffers in host
// memory. If RunSection's before changes a copy, it is sent before the phase runs.
type remote struct {
	*channel
	rank, slot int // in the world, and among the ranks of its process
	role       *plan.Role
	step       int64
	repeats    int
	host       map[graph.BufID]*hostCopy
	last       state // under channel.mu
}

// hostCopy is a buffer of the rank's host memory: here is the local copy, there the rank's last
// known contents.
type hostCopy struct{ here, there []byte }

var _ Executor = (*remote)(nil)

func newChannel(link *Link) *channel {
	c := &channel{link: link, waiting: map[uint64]*waiter{}}
	go c.receive()
	return c
}

// remote returns the remote of the channel's next rank.
func (c *channel) remote(rank int, role *plan.Role) *remote {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &remote{channel: c, rank: rank, slot: c.open, role: role, host: map[graph.BufID]*hostCopy{}}
	c.open++
	return r
}

// receive passes replies to their waiters, until the stream ends.
func (c *channel) receive() {
	defer crash.Guard()
	for {
		var m reply
		if err := c.link.receive(&m); err != nil {
			c.link.linger()
			c.fail(err)
			return
		}
		if m.Interrupted && c.link.Interrupted != nil {
			c.link.Interrupted()
		}
		c.mu.Lock()
		w := c.waiting[m.ID]
		if w != nil && m.State != nil {
			w.of.last = *m.State
		}
		c.mu.Unlock()
		if w != nil {
			w.c <- m
		}
	}
}

// fail ends all waiting requests, and later ones, with err.
func (c *channel) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	c.err = err
	for _, w := range c.waiting {
		close(w.c)
	}
	c.waiting = map[uint64]*waiter{}
}

// end returns the error that ended the stream, nil if it has not ended. mu must be held.
func (c *channel) end() error {
	c.told = c.told || c.err != nil
	return c.err
}

// isTold says whether some caller has received the error that ended the stream. Errors caused by it
// then add no information.
func (c *channel) isTold() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.told
}

// send sends a request. If that fails, the stream has ended.
func (c *channel) send(q request) error {
	err := c.link.send(q)
	if err == nil {
		return nil
	}
	c.fail(err)
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.end()
}

func (c *channel) forget(id uint64) {
	c.mu.Lock()
	delete(c.waiting, id)
	c.mu.Unlock()
}

// closed records that a remote is closed. The stream ends with the last one.
func (c *channel) closed() error {
	c.mu.Lock()
	c.open--
	last := c.open == 0
	c.mu.Unlock()
	if !last {
		return nil
	}
	return c.link.Close()
}

// ask sends a request and returns the channel for its replies.
func (r *remote) ask(q request) (uint64, chan reply, error) {
	r.mu.Lock()
	if err := r.end(); err != nil {
		r.mu.Unlock()
		return 0, nil, err
	}
	r.next++
	q.ID, q.Slot = r.next, r.slot
	c := make(chan reply, 2)
	r.waiting[q.ID] = &waiter{c, r}
	r.mu.Unlock()
	return q.ID, c, r.send(q)
}

// answer waits for a reply.
func (r *remote) answer(c chan reply) (reply, error) {
	m, ok := <-c
	if !ok {
		r.mu.Lock()
		defer r.mu.Unlock()
		return reply{}, r.end()
	}
	if m.Err != nil {
		return m, &RemoteError{r.rank, *m.Err}
	}
	return m, nil
}

// call sends a request and waits for the reply.
func (r *remote) call(q request) (reply, error) {
	id, c, err := r.ask(q)
	if err != nil {
		return reply{}, err
	}
	defer r.forget(id)
	return r.answer(c)
}

func (r *remote) SetStep(step int64, repeats int) { r.step, r.repeats = step, repeats }

// RunSection runs a section in the rank's process. before is called in this process.
func (r *remote) RunSection(name string, before func(*graph.Phase, int) error) error {
	_, err := r.section(verbRun, name, before, nil)
	return err
}

// RunGated runs a section in the rank's process. before and pass are called in this process.
func (r *remote) RunGated(name string, before func(*graph.Phase, int) error, pass func(bool) (bool, error)) (bool, error) {
	m, err := r.section(verbGated, name, before, pass)
	return m.Passed, err
}

// FindNonFinite runs in the rank's process. before is called in this process.
func (r *remote) FindNonFinite(name string, before func(*graph.Phase, int) error) (*exec.NonFinite, error) {
	m, err := r.section(verbFind, name, before, nil)
	if err != nil || m.Found == nil {
		return nil, err
	}
	f := m.Found.nonFinite()
	s := r.role.Program.Section(name)
	if s == nil || m.Found.InPhase < 0 || m.Found.InPhase >= len(s.Phases) || m.Found.OfOp < 0 || m.Found.OfOp >= len(s.Phases[m.Found.InPhase].Ops) {
		return nil, fmt.Errorf("rank %d names operation %d of phase %d of section %q, which has none", r.rank, m.Found.OfOp, m.Found.InPhase, name)
	}
	f.Op = &s.Phases[m.Found.InPhase].Ops[m.Found.OfOp]
	return &f, nil
}

// section runs a section in the rank's process, and answers that process's questions during the
// run.
func (r *remote) section(v verb, name string, before func(*graph.Phase, int) error, pass func(bool) (bool, error)) (reply, error) {
	id, c, err := r.ask(request{Verb: v, Name: name, Step: r.step, Repeats: r.repeats, N: int64(b2i(before != nil))})
	if err != nil {
		return reply{}, err
	}
	defer r.forget(id)
	for {
		m, err := r.answer(c)
		if err != nil {
			return m, err
		}
		next := request{ID: id, Slot: r.slot, Verb: verbGo}
		switch {
		case m.Gate:
			next.Pass, err = pass(m.Norm)
		case m.Phase != "":
			err = before(phaseOf(r.role.Program, name, m.Phase), m.Repeat)
		case m.Stopped:
			return m, exec.ErrAbandoned
		default:
			return m, nil
		}
		if next.Stop = errors.Is(err, exec.ErrAbandoned); !next.Stop {
			next.Err = toWire(err, failRun)
		}
		next.Host = r.changed()
		if err := r.send(next); err != nil {
			return m, err
		}
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func phaseOf(p *graph.Program, section, name string) *graph.Phase {
	if s := p.Section(section); s != nil {
		for i := range s.Phases {
			if s.Phases[i].Name == name {
				return &s.Phases[i]
			}
		}
	}
	return &graph.Phase{Name: name}
}

// trace returns events of the rank's trace, with times on this process's clock.
func (r *remote) trace(from int64) ([]byte, int64, error) {
	m, err := r.call(request{Verb: verbTrace, Off: from, N: device.Epoch().UnixNano()})
	return m.Data, m.Next, err
}

// changed returns the host buffers that differ from the rank's contents.
func (r *remote) changed() (list []hostData) {
	for id, b := range r.host {
		if !bytes.Equal(b.here, b.there) {
			copy(b.there, b.here)
			list = append(list, hostData{id, b.here})
		}
	}
	return list
}

func (r *remote) Write(buf graph.BufID, off int64, data []byte) error {
	_, err := r.call(request{Verb: verbWrite, Buf: buf, Off: off, Data: data})
	return err
}

func (r *remote) Read(buf graph.BufID, off int64, data []byte) error {
	m, err := r.call(request{Verb: verbRead, Buf: buf, Off: off, N: int64(len(data))})
	if err == nil && copy(data, m.Data) != len(data) {
		err = fmt.Errorf("rank %d sent %d bytes of %d", r.rank, len(m.Data), len(data))
	}
	return err
}

// Scalar reads an f64 of one element.
func (r *remote) Scalar(buf graph.BufID) (float64, error) {
	m, err := r.call(request{Verb: verbScalar, Buf: buf})
	return m.Scalar, err
}

// isInput says whether only the host writes a buffer, so that the rank has the contents that were
// sent last.
func (r *remote) isInput(buf graph.BufID) bool {
	switch r.role.Program.Buf(r.role.Own(buf)).Port {
	case graph.PortTokens, graph.PortTargets, graph.PortPositions, graph.PortInput, graph.PortHyper, graph.PortKey:
		return true
	}
	return false
}

// HostBytes returns the local copy of a buffer in the rank's host memory.
func (r *remote) HostBytes(buf graph.BufID) ([]byte, error) {
	if own := r.role.Own(buf); own < 0 || int(own) >= len(r.role.Program.Buffers) {
		return nil, fmt.Errorf("rank %d: host view of buffer %d: the program lacks it", r.rank, buf)
	}
	b := r.host[buf]
	if b != nil && r.isInput(buf) {
		return b.here, nil
	}
	m, err := r.call(request{Verb: verbHost, Buf: buf})
	if err != nil {
		return nil, err
	}
	if b == nil {
		b = &hostCopy{make([]byte, len(m.Data)), nil}
		r.host[buf] = b
	}
	copy(b.here, m.Data)
	b.there = m.Data
	return b.here, nil
}

func (r *remote) HostF64(buf graph.BufID) ([]float64, error) { return hostAs[float64](r, buf) }
func (r *remote) HostF32(buf graph.BufID) ([]float32, error) { return hostAs[float32](r, buf) }
func (r *remote) HostI64(buf graph.BufID) ([]int64, error)   { return hostAs[int64](r, buf) }
func (r *remote) HostI32(buf graph.BufID) ([]int32, error)   { return hostAs[int32](r, buf) }

func hostAs[T float64 | float32 | int64 | int32](r *remote, buf graph.BufID) ([]T, error) {
	b, err := r.HostBytes(buf)
	if err != nil || len(b) == 0 {
		return nil, err
	}
	var zero T
	return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), len(b)/int(unsafe.Sizeof(zero))), nil
}

// Abort also ends the job in the rank's process. It does not wait, because the rank may be stuck.
func (r *remote) Abort(err error) {
	go func() {
		defer crash.Guard()
		_ = r.link.send(request{Slot: r.slot, Verb: verbAbort, Err: toWire(err, failAborted)})
	}()
}

// Running returns the operations that the rank's streams are running, or nil if there is no answer
// within a second.
func (r *remote) Running() []string {
	id, c, err := r.ask(request{Verb: verbRunning})
	if err != nil {
		return nil
	}
	defer r.forget(id)
	select {
	case m := <-c:
		return m.List
	case <-time.After(time.Second):
		return nil
	}
}

func (r *remote) snapshot() state {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}

// Touched, TouchedClasses, CommStats, DiskTraffic and Usage return the values after the last
// completed request.
func (r *remote) Touched(s graph.Space) int64 {
	if s >= graph.NumSpaces {
		return 0
	}
	return r.snapshot().Touched[s]
}
func (r *remote) TouchedClasses() exec.Classes { return r.snapshot().Classes }
func (r *remote) CommStats() comm.Stats        { return r.snapshot().Comm }
func (r *remote) DiskTraffic() device.Traffic  { return r.snapshot().Disk }
func (r *remote) Usage() exec.Usage            { return r.snapshot().Usage }

// Close ends the rank; for the last rank of a process it ends that process's part of the job.
func (r *remote) Close() error {
	done, told := make(chan error, 1), r.isTold()
	go func() {
		defer crash.Guard()
		_, err := r.call(request{Verb: verbClose})
		if told {
			err = nil
		}
		done <- err
	}()
	for wait := comm.NewWait(2 * stopGrace); wait.Counted < 2*stopGrace; wait.Look() {
		select {
		case err := <-done:
			return errors.Join(err, r.closed())
		case <-time.After(wait.Every):
		}
	}
	return errors.Join(fmt.Errorf("%w: the process of rank %d does not end", comm.ErrTimeout, r.rank), r.closed())
}

// stopGrace is the time that ranks have to stop after the job was aborted. A rank whose kernel
// never returns does not stop and is abandoned.
const stopGrace = 5 * time.Second
