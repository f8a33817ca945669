package peers

import (
	"sync/atomic"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// progress tells how far a rank's stream has come in the collectives of a group,
// so that a rank whose GPU work is stuck is missed as one that does not call: the
// stream stores the number of the call at which it has arrived, and of the one in
// which all peers have. Numbers are compared as differences of int32.
//
// While a rank waits for its streams it reads its own words, shows them to its
// peers, and looks how long it has been held up.
type progress struct {
	ok              bool // the device can store to memory in stream order
	arrived, passed *atomic.Uint32
	arrivedAt       driver.Address
	passedAt        driver.Address
	shown           atomic.Uint32 // arrived, for the peers

	recent [1024]*kernel // by call
	held   uint32        // the call in which the rank was last seen waiting
	wait   comm.Wait
}

// watch gives a member its words.
func (m *member) watch() (err error) {
	p := &m.progress
	if p.arrived, p.arrivedAt, p.ok, err = m.ctx.Word(); err != nil || !p.ok {
		return err
	}
	if p.passed, p.passedAt, p.ok, err = m.ctx.Word(); err != nil {
		return err
	}
	m.ctx.WhileWaiting(m.look)
	return nil
}

// enter and pass mark a call on the stream: that the rank is there, and that all
// are.
func (p *progress) enter(api driver.API, s driver.Stream, k *kernel, call uint64) error {
	if !p.ok {
		return nil
	}
	p.recent[call%uint64(len(p.recent))] = k
	return api.WriteValue(s, p.arrivedAt, uint32(call))
}

func (p *progress) pass(api driver.API, s driver.Stream, call uint64) error {
	if !p.ok {
		return nil
	}
	return api.WriteValue(s, p.passedAt, uint32(call))
}

// look ends the world where the rank has been held up in one call for longer than
// the timeout by peers that have not arrived.
func (m *member) look() {
	p := &m.progress
	passed, arrived := p.passed.Load(), p.arrived.Load() // in this order: passed is never ahead
	p.shown.Store(arrived)
	if arrived == passed || m.Err() != nil {
		p.held = passed
		return
	}
	if p.held != arrived {
		p.held, p.wait = arrived, comm.NewWait(m.Timeout())
		return
	}
	if p.wait.Look(); p.wait.Counted < m.Timeout() {
		return
	}
	call := m.Calls() - uint64(uint32(m.Calls())-arrived)
	k := p.recent[call%uint64(len(p.recent))]
	err := k.Late(call, func(i int) bool { return i != m.Rank() && int32(m.peer(i).progress.shown.Load()-arrived) < 0 })
	if err != nil {
		_ = m.Fail(err)
	}
}
