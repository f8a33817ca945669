package peers

import (
	"sync/atomic"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// progress tracks how far a rank's stream has come in the collectives of a group, so that a
// rank with stuck GPU work is detected like a rank that does not call. The stream stores the
// number of the call at which it has arrived, and of the call at which all peers have (passed).
// Numbers are compared by their int32 difference, so they may wrap.
//
// While a rank waits for its streams it reads its own words, publishes them to its peers,
// and checks how long it has been waiting.
type progress struct {
	ok              bool // the device can store to memory in stream order
	arrived, passed *atomic.Uint32
	arrivedAt       driver.Address
	passedAt        driver.Address
	shown           atomic.Uint32 // copy of arrived for the peers

	recent [1024]*kernel // the latest calls, by number modulo 1024
	held   uint32        // the call in which the rank was waiting at the last look
	wait   comm.Wait
}

// watch allocates a member's words.
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

// enter and pass make the stream store a call's number: enter when the rank has arrived,
// pass when all ranks have.
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

// look ends the world if the rank has waited in one call for longer than the timeout for
// peers that have not arrived.
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
