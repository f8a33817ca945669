package onegpu

import (
	"fmt"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// group is what the members of one group share. A collective is enqueued by all
// ranks together; it allocates nothing:
//
//	record ready   on the rank's stream: its operands are as the operation finds them
//	meet           on the host: every rank has posted its kernel and recorded;
//	               the last one to come compares the signatures
//	wait           the stream, for the peers' ready
//	move           copies and sums from the peers' memory
//	record done
//	meet           every rank has recorded
//	wait           the stream, for the peers' done: nobody reads my inputs any more
//
// Waits stand for records that were made before them, so no stream waits for
// what is enqueued later: streams can't wait for each other in a circle, also
// where the GPU has fewer queues than there are streams.
//
// A rank whose GPU work is stuck has enqueued the operation all the same: that it
// does not arrive shows on its peers' streams only (see watch.go).
//
// An error (Abort, a timeout, a mismatch) releases who waits on the host.
type group struct {
	world   *World
	name    string
	ranks   []int // global rank by index
	members []*member

	mu      sync.Mutex
	cond    *sync.Cond
	arrived int
	round   uint64 // meetings over
	posted  []*kernel
	pairs   []pair // by from·W + to
}

// pair is the rendezvous of a Send with its Recv, under group.mu.
type pair struct {
	send, recv *kernel
	copied     bool // the receiver has enqueued the copy and recorded done
}

// member is one rank's comm.Group.
type member struct {
	group       *group
	index       int
	ctx         *cuda.Context
	ready, done driver.Event
	timer       *time.Timer
	late        bool // the timer has run out; under group.mu

	calls    uint64 // collectives begun
	meetings uint64 // of the group, that the rank has come to
	counter  comm.Counter
	progress progress
}

var _ comm.Group = (*member)(nil)

func (m *member) Rank() int             { return m.index }
func (m *member) Size() int             { return len(m.group.ranks) }
func (m *member) Abort(err error)       { m.group.world.Abort(err) }
func (m *member) OnError(f func(error)) { m.group.world.OnError(f) }
func (m *member) Err() error            { return m.group.world.Err() }
func (m *member) Stats() comm.Stats     { return m.counter.Stats() }

// kernel is one bound operation of one rank.
type kernel struct {
	m             *member
	label         string
	sig           comm.Signature
	reads, writes []device.Ptr
	touches       []device.Ptr
	sent          int64

	in, out driver.Address // of the operands
	bytes   int64          // of a shard, or of the whole buffer where there are none
	inPlace bool
	peer    int // of a Send or Recv
	move    func(k *kernel, api driver.API, s driver.Stream) (read, written int64, err error)

	sum        Sum
	srcs, dsts []driver.Address // scratch
	peerReads  []driver.Range   // scratch, for an observer
	peerWrites []driver.Range
}

var (
	_ cuda.Kernel   = (*kernel)(nil)
	_ cuda.Accessor = (*kernel)(nil)
)

func (k *kernel) Label() string         { return k.label }
func (k *kernel) Touches() []device.Ptr { return k.touches }
func (k *kernel) Reads() []device.Ptr   { return k.reads }
func (k *kernel) Writes() []device.Ptr  { return k.writes }

// Enqueue adds the operation to the rank's stream. It returns when every rank
// has done so.
func (k *kernel) Enqueue(api driver.API, s driver.Stream) error {
	m, g := k.m, k.m.group
	if err := g.world.Err(); err != nil {
		return err
	}
	if err := api.Record(m.ready, s); err != nil {
		return err
	}
	if k.sig.Op == comm.SendRecv {
		return k.point(api, s)
	}
	m.calls++
	if err := m.progress.enter(api, s, k); err != nil {
		return err
	}
	if err := k.meet(true); err != nil {
		return err
	}
	if err := k.waitPeers(api, s, func(p *member) driver.Event { return p.ready }); err != nil {
		return err
	}
	if err := m.progress.pass(api, s, m.calls); err != nil {
		return err
	}
	read, written, err := k.move(k, api, s)
	if err != nil {
		return err
	}
	if err := api.Record(m.done, s); err != nil {
		return err
	}
	if err := k.meet(false); err != nil {
		return err
	}
	if err := k.waitPeers(api, s, func(p *member) driver.Event { return p.done }); err != nil {
		return err
	}
	m.counter.Add(k.sent, read, written)
	return nil
}

func (k *kernel) waitPeers(api driver.API, s driver.Stream, event func(*member) driver.Event) error {
	for i, p := range k.m.group.members {
		if i == k.m.index {
			continue
		}
		if err := api.Wait(s, event(p)); err != nil {
			return err
		}
	}
	return nil
}

// await holds the rank until ok, or the world's error or the timeout, for which
// late gives the error. The caller holds the group's lock, which await gives
// back.
func (k *kernel) await(ok func() bool, late func() error) error {
	m, g := k.m, k.m.group
	m.late = false
	m.timer.Reset(g.world.opts.Timeout)
	defer m.timer.Stop()
	for {
		if ok() {
			g.mu.Unlock()
			return nil
		}
		if g.world.failed.Load() {
			g.mu.Unlock()
			return g.world.Err()
		}
		if m.late {
			err := late()
			g.mu.Unlock()
			return g.world.fail(err)
		}
		g.cond.Wait()
	}
}

// meet returns when every rank has come to the same meeting. The first of an
// operation posts it.
func (k *kernel) meet(post bool) error {
	m, g := k.m, k.m.group
	g.mu.Lock()
	if post {
		g.posted[m.index] = k
	}
	m.meetings++
	g.arrived++
	if g.arrived == len(g.ranks) {
		var err error
		if post {
			err = g.compare()
		}
		if err == nil {
			g.arrived = 0
			g.round++
			g.cond.Broadcast()
		}
		g.mu.Unlock()
		if err != nil {
			return g.world.fail(err)
		}
		return nil
	}
	number := m.meetings
	return k.await(func() bool { return g.round >= number }, func() error { return g.missing(k) })
}

// compare returns an error unless every rank has posted the same operation.
func (g *group) compare() error {
	a, m := g.posted[0], g.members[0]
	for i, b := range g.posted[1:] {
		n := g.members[i+1]
		if b.sig != a.sig || n.calls != m.calls {
			return fmt.Errorf("%w in the %s group: rank %d runs %s (%q, call %d), rank %d runs %s (%q, call %d)", comm.ErrMismatch, g.name,
				g.ranks[0], a.sig, a.label, m.calls, g.ranks[i+1], b.sig, b.label, n.calls)
		}
	}
	return nil
}

// missing is the error of a timeout in a meeting.
func (g *group) missing(k *kernel) error {
	return g.late(k, k.m.calls, func(m *member) bool { return m.meetings < k.m.meetings })
}

// late is the error of an operation in which some ranks miss others; nil where
// none is lost.
func (g *group) late(k *kernel, call uint64, isLost func(m *member) bool) error {
	var lost, here []int
	for i, m := range g.members {
		if isLost(m) {
			lost = append(lost, g.ranks[i])
		} else {
			here = append(here, g.ranks[i])
		}
	}
	if len(lost) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s %q (call %d of the %s group): %s did not arrive within %v; %s waited",
		comm.ErrTimeout, k.sig.Op, k.label, call, g.name, names(lost), g.world.opts.Timeout, names(here))
}

// point is Enqueue of a Send or a Recv. Both return when the other has enqueued
// its part.
func (k *kernel) point(api driver.API, s driver.Stream) error {
	m, g := k.m, k.m.group
	sends := k.out == 0
	from, to := k.peer, m.index
	if sends {
		from, to = to, from
	}
	p := &g.pairs[from*len(g.ranks)+to]
	late := func() error {
		verb := "receive"
		if sends {
			verb = "send"
		}
		return fmt.Errorf("%w: %s %q (%s group): rank %d did not come within %v; rank %d waited",
			comm.ErrTimeout, verb, k.label, g.name, g.ranks[k.peer], g.world.opts.Timeout, g.ranks[m.index])
	}
	other := g.members[k.peer]
	g.mu.Lock()
	if sends {
		p.send = k
		g.cond.Broadcast()
		if err := k.await(func() bool { return p.copied }, late); err != nil {
			return err
		}
		if err := api.Wait(s, other.done); err != nil {
			return err
		}
		g.mu.Lock()
		*p = pair{} // the receiver may record done again
		g.cond.Broadcast()
		g.mu.Unlock()
		m.counter.Add(k.sent, 0, 0)
		return nil
	}
	p.recv = k
	if err := k.await(func() bool { return p.send != nil }, late); err != nil {
		return err
	}
	if sig := p.send.sig; sig != k.sig {
		return g.world.fail(fmt.Errorf("%w in the %s group: rank %d sends %s (%q), rank %d receives %s (%q)", comm.ErrMismatch, g.name,
			g.ranks[from], sig, p.send.label, g.ranks[to], k.sig, k.label))
	}
	if err := api.Wait(s, other.ready); err != nil {
		return err
	}
	if err := api.CopyOnDevice(k.out, p.send.in, k.bytes, s); err != nil {
		return err
	}
	if err := api.Record(m.done, s); err != nil {
		return err
	}
	g.mu.Lock()
	p.copied = true
	g.cond.Broadcast()
	if err := k.await(func() bool { return p.recv != k }, late); err != nil {
		return err
	}
	m.counter.Add(0, k.bytes, k.bytes)
	return nil
}

// bind fills in what every kernel needs. in and out may be the zero Ptr.
func (m *member) bind(label string, sig comm.Signature, in, out device.Ptr) (*kernel, error) {
	k := &kernel{m: m, label: label, sig: sig, sent: comm.RingBytes(sig, m.index, m.Size())}
	for _, o := range []struct {
		p    device.Ptr
		at   *driver.Address
		list *[]device.Ptr
	}{{in, &k.in, &k.reads}, {out, &k.out, &k.writes}} {
		if o.p.Arena == nil {
			continue
		}
		var err error
		if *o.at, err = cuda.Address(o.p); err == nil && o.p.Arena.Space() != graph.Device {
			err = fmt.Errorf("the range is in %s memory, want the GPU's", o.p.Arena.Space())
		}
		if err != nil {
			return nil, m.refuse(sig.Op, label, err)
		}
		*o.list = append(*o.list, o.p)
		k.touches = append(k.touches, o.p)
	}
	return k, nil
}

func (m *member) refuse(op comm.Op, label string, err error) error {
	return fmt.Errorf("rank %d: %s %q: %w", m.group.ranks[m.index], op, label, err)
}
