package nccl

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// member is one rank in a group. Each rank enqueues a collective independently: no host
// thread waits for a peer.
//
//	arrived = n   the rank's stream has reached its n-th call
//	move          NCCL's copies, and for a sum the additions, one chunk at a time
//	passed = n    no peer reads its inputs any more: NCCL's operations end on a rank's
//	              stream once its data has been received
//
// The watchdog reads the two words arrived and passed: see progress.go.
type member struct {
	comm.Caller
	r    *rank
	name string
	slot int
	comm *communicator

	calls    uint64
	counter  comm.Counter
	progress progress
}

var _ comm.Group = (*member)(nil)

// Abort ends every group of the job with err.
func (m *member) Abort(err error) { m.r.w.o.Control.Abort(err) }

// OnError registers f for the error that ends the job.
func (m *member) OnError(f func(error)) { m.r.w.o.Control.OnError(f) }

// Err returns the error that ended the job, nil while it is sound.
func (m *member) Err() error { return m.r.w.o.Control.Err() }

// Stats returns the rank's traffic in the group.
func (m *member) Stats() comm.Stats { return m.counter.Stats() }

// kernel is one bound operation of one rank.
type kernel struct {
	comm.Call
	m             *member
	text          string
	sig           uint64 // hash of the signature
	reads, writes []device.Ptr
	in, out       driver.Address
	move          func(k *kernel, api driver.API, s driver.Stream) error

	read, written int64 // bytes of the rank's own memory that one run reads and writes
	sum           Sum
	srcs          []driver.Address // scratch, reused by each sum
	dst           [1]driver.Address
}

var (
	_ cuda.Kernel   = (*kernel)(nil)
	_ cuda.Accessor = (*kernel)(nil)
)

// Reads and Writes return the operands that the rank's own stream reads and writes. Peers
// do not access the rank's memory: its stream sends to them.
func (k *kernel) Reads() []device.Ptr  { return k.reads }
func (k *kernel) Writes() []device.Ptr { return k.writes }

// Enqueue adds the operation to the rank's stream.
func (k *kernel) Enqueue(api driver.API, s driver.Stream) error {
	m := k.m
	if err := m.Err(); err != nil {
		return err
	}
	point := k.Sig.Op == comm.SendRecv
	if !point {
		m.calls++
		if err := m.progress.enter(api, s, called{call: m.calls, sig: k.sig, text: k.text, bytes: k.Sig.Bytes}); err != nil {
			return err
		}
	}
	if err := k.move(k, api, s); err != nil {
		return m.r.failed(m, k.text, m.calls, err)
	}
	if !point {
		if err := m.progress.pass(api, s, m.calls); err != nil {
			return err
		}
	}
	m.counter.Add(k.Sent, k.read, k.written)
	return nil
}

// together runs NCCL calls of the group's communicator between GroupStart and GroupEnd. It
// returns when NCCL has enqueued them, so that later work on the stream follows them. Single
// calls need this too: outside a group, a call may return before it is enqueued.
func (k *kernel) together(calls func(api API, c Comm) error) error {
	r, c := k.m.r, k.m.comm
	err := r.call(func() error {
		api := r.w.o.API
		if err := api.GroupStart(); err != nil {
			return err
		}
		return errors.Join(calls(api, c.handle), api.GroupEnd())
	})
	if err != nil {
		return err
	}
	return r.settle(c, k.text)
}

// peers calls f for every other rank of the group. Each rank starts at a different peer, to
// spread the load.
func (k *kernel) peers(f func(i int) error) error {
	for j := 1; j < k.m.Ranks; j++ {
		if err := f((k.m.Index + j) % k.m.Ranks); err != nil {
			return err
		}
	}
	return nil
}

// failed returns the job's error, or NCCL's error for a call in a group.
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
