package inproc

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
)

// group is what the members of one group share. A collective has two
// rendezvous, and takes no allocation:
//
//	arrive  post the kernel; the last rank to come compares the signatures
//	        and opens the round
//	move    every rank reads its peers' memory through the posted kernels
//	finish  wait until all have moved: nobody reads my inputs any more
//
// An error (Abort, a timeout, a mismatch) releases who waits in arrive: the
// round can't open any more, so nobody reads their memory. It releases nobody
// from finish, since peers are moving; moving is copying, and ends.
type group struct {
	world   *World
	name    string
	ranks   []int // global rank by index
	members []*member

	mu      sync.Mutex
	arrived int
	round   uint64 // rounds opened
	moving  int    // ranks that have not moved yet in this round
	done    uint64 // rounds finished
	posted  []*kernel
	pairs   []pair // by from·W + to
}

// pair is the rendezvous of a Send with its Recv, under group.mu.
type pair struct {
	send, recv    *kernel
	matched, done uint64
}

// member is one rank's comm.Group.
type member struct {
	group *group
	index int
	wake  chan struct{} // holds one token: look again
	timer *time.Timer

	busy    atomic.Bool
	calls   uint64 // collectives begun
	counter comm.Counter
	adders  [3]any // by dtype, shared by the rank's kernels: only one runs at a time
}

var (
	_ comm.Group     = (*member)(nil)
	_ cpu.PeerKernel = (*kernel)(nil)
)

func (m *member) Rank() int             { return m.index }
func (m *member) Size() int             { return len(m.group.ranks) }
func (m *member) Abort(err error)       { m.group.world.Abort(err) }
func (m *member) OnError(f func(error)) { m.group.world.OnError(f) }
func (m *member) Err() error            { return m.group.world.Err() }
func (m *member) Stats() comm.Stats     { return m.counter.Stats() }

func (g *group) wakeAll() {
	for _, m := range g.members {
		m.rouse()
	}
}

func (m *member) rouse() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// kernel is one bound operation of one rank.
type kernel struct {
	m       *member
	label   string
	sig     comm.Signature
	touches []device.Ptr
	own     device.Ptr // any range of the rank, for the checker
	sent    int64

	in, out []byte // out is nil for a Send, in for a Recv
	inPlace bool
	peer    int // of a Send or Recv
	mover   mover
}

// mover does a collective's work for one rank once all have arrived, and
// returns the bytes that it loaded and stored.
type mover interface {
	move(k *kernel) (read, written int64)
}

func (k *kernel) Label() string         { return k.label }
func (k *kernel) Touches() []device.Ptr { return k.touches }
func (k *kernel) ReachesPeers()         {}

// Run executes the operation. It returns when no peer reads its inputs any more.
func (k *kernel) Run() error {
	m := k.m
	if !m.busy.CompareAndSwap(false, true) {
		return m.group.world.fail(fmt.Errorf("%w: rank %d runs two operations of its %s group at once, the second is %s %q: they belong on one stream",
			comm.ErrAborted, m.group.ranks[m.index], m.group.name, k.sig.Op, k.label))
	}
	defer m.busy.Store(false)
	if k.sig.Op == comm.SendRecv {
		if k.out == nil {
			return k.send()
		}
		return k.receive()
	}
	if err := k.arrive(); err != nil {
		return err
	}
	k.work()
	k.finish()
	return nil
}

func (k *kernel) arrive() error {
	m, g := k.m, k.m.group
	g.mu.Lock()
	if err := g.world.Err(); err != nil {
		g.mu.Unlock()
		return err
	}
	m.calls++
	g.posted[m.index] = k
	g.arrived++
	if g.arrived == len(g.ranks) {
		err := g.compare()
		if err == nil {
			g.arrived, g.moving = 0, len(g.ranks)
			g.round++
			g.wakeAll()
		}
		g.mu.Unlock()
		if err != nil {
			return g.world.fail(err)
		}
		return nil
	}
	m.timer.Reset(g.world.timeout)
	defer m.timer.Stop()
	for late := false; ; {
		if g.round >= m.calls {
			g.mu.Unlock()
			return nil
		}
		if err := g.world.Err(); err != nil {
			g.mu.Unlock()
			return err
		}
		if late {
			err := g.missing(k)
			g.mu.Unlock()
			return g.world.fail(err)
		}
		g.mu.Unlock()
		late = m.sleep()
		g.mu.Lock()
	}
}

// sleep returns when the member is roused, or late when its timer has run out.
func (m *member) sleep() (late bool) {
	select {
	case <-m.wake:
		return false
	case <-m.timer.C:
		return true
	}
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

// missing is the error of a timeout in arrive.
func (g *group) missing(k *kernel) error {
	var lost, here []int
	for i, m := range g.members {
		if m.calls < k.m.calls {
			lost = append(lost, g.ranks[i])
		} else {
			here = append(here, g.ranks[i])
		}
	}
	return fmt.Errorf("%w: %s %q (call %d of the %s group): %s did not arrive within %v; %s waited",
		comm.ErrTimeout, k.sig.Op, k.label, k.m.calls, g.name, names(lost), g.world.timeout, names(here))
}

// work moves this rank's part. The round goes on if it panics, so that no peer
// hangs; the panic itself becomes the rank's error.
func (k *kernel) work() {
	g := k.m.group
	moved := false
	defer func() {
		g.mu.Lock()
		g.moving--
		if g.moving == 0 {
			g.done++
			g.wakeAll()
		}
		g.mu.Unlock()
		if !moved {
			k.finish()
		}
	}()
	cpu.Enter(k.own)
	defer cpu.Leave(k.own)
	read, written := k.mover.move(k)
	k.m.counter.Add(k.sent, read, written)
	moved = true
}

func (k *kernel) finish() {
	m, g := k.m, k.m.group
	g.mu.Lock()
	for g.done < m.calls {
		g.mu.Unlock()
		<-m.wake
		g.mu.Lock()
	}
	g.mu.Unlock()
}

// post puts k into its pair and returns the pair and k's number in it.
func (k *kernel) post(p *pair, side **kernel) (number uint64, err error) {
	g := k.m.group
	*side = k
	if p.send != nil && p.recv != nil {
		if p.send.sig != p.recv.sig {
			from, to := p.send.m.index, p.recv.m.index
			return 0, fmt.Errorf("%w in the %s group: rank %d sends %s (%q), rank %d receives %s (%q)", comm.ErrMismatch, g.name,
				g.ranks[from], p.send.sig, p.send.label, g.ranks[to], p.recv.sig, p.recv.label)
		}
		p.matched++
		g.members[k.peer].rouse()
		return p.matched, nil
	}
	return p.matched + 1, nil
}

// meet waits until the pair has matched k's number.
func (k *kernel) meet(p *pair, side **kernel, verb string) (number uint64, err error) {
	m, g := k.m, k.m.group
	g.mu.Lock()
	if err := g.world.Err(); err != nil {
		g.mu.Unlock()
		return 0, err
	}
	number, err = k.post(p, side)
	if err != nil {
		g.mu.Unlock()
		return 0, g.world.fail(err)
	}
	m.timer.Reset(g.world.timeout)
	defer m.timer.Stop()
	for late := false; ; {
		if p.matched >= number {
			g.mu.Unlock()
			return number, nil
		}
		if err := g.world.Err(); err != nil {
			g.mu.Unlock()
			return 0, err
		}
		if late {
			g.mu.Unlock()
			return 0, g.world.fail(fmt.Errorf("%w: %s %q (%s group): rank %d did not come within %v; rank %d waited",
				comm.ErrTimeout, verb, k.label, g.name, g.ranks[k.peer], g.world.timeout, g.ranks[m.index]))
		}
		g.mu.Unlock()
		late = m.sleep()
		g.mu.Lock()
	}
}

func (k *kernel) send() error {
	m, g := k.m, k.m.group
	p := &g.pairs[m.index*len(g.ranks)+k.peer]
	number, err := k.meet(p, &p.send, "send")
	if err != nil {
		return err
	}
	g.mu.Lock()
	for p.done < number {
		g.mu.Unlock()
		<-m.wake
		g.mu.Lock()
	}
	g.mu.Unlock()
	m.counter.Add(k.sent, 0, 0)
	return nil
}

func (k *kernel) receive() error {
	m, g := k.m, k.m.group
	p := &g.pairs[k.peer*len(g.ranks)+m.index]
	if _, err := k.meet(p, &p.recv, "receive"); err != nil {
		return err
	}
	cpu.Enter(k.own)
	copy(k.out, p.send.in)
	cpu.Leave(k.own)
	m.counter.Add(0, int64(len(k.out)), int64(len(k.out)))
	g.mu.Lock()
	p.send, p.recv = nil, nil
	p.done++
	g.members[k.peer].rouse()
	g.mu.Unlock()
	return nil
}

// bind fills in what every kernel needs and checks that its memory is the CPU
// device's. in and out may be the zero Ptr.
func (m *member) bind(label string, sig comm.Signature, in, out device.Ptr) (*kernel, error) {
	k := &kernel{m: m, label: label, sig: sig, sent: comm.RingBytes(sig, m.index, m.Size())}
	for _, o := range []struct {
		p   device.Ptr
		mem *[]byte
	}{{in, &k.in}, {out, &k.out}} {
		if o.p.Arena == nil {
			continue
		}
		b, err := cpu.Bytes(o.p)
		if err != nil {
			return nil, m.refuse(sig.Op, label, err)
		}
		*o.mem, k.own = b, o.p
		k.touches = append(k.touches, o.p)
	}
	return k, nil
}

func (m *member) refuse(op comm.Op, label string, err error) error {
	return fmt.Errorf("rank %d: %s %q: %w", m.group.ranks[m.index], op, label, err)
}

func (m *member) AllGather(label string, shard, full device.Ptr, dtype graph.DType) (device.Kernel, error) {
	if err := comm.CheckShards(full, shard, dtype, m.index, m.Size(), false); err != nil {
		return nil, m.refuse(comm.AllGather, label, err)
	}
	k, err := m.bind(label, comm.Signature{Op: comm.AllGather, Bytes: full.Len, DType: dtype}, shard, full)
	if err != nil {
		return nil, err
	}
	k.inPlace = shard.Overlaps(full)
	k.mover = gather{}
	return k, nil
}

func (m *member) ReduceScatter(label string, full, shard device.Ptr, dtype graph.DType, accumulate bool) (device.Kernel, error) {
	if err := comm.CheckShards(full, shard, dtype, m.index, m.Size(), accumulate); err != nil {
		return nil, m.refuse(comm.ReduceScatter, label, err)
	}
	k, err := m.bind(label, comm.Signature{Op: comm.ReduceScatter, Bytes: full.Len, DType: dtype, Accumulate: accumulate}, full, shard)
	if err != nil {
		return nil, err
	}
	k.inPlace = shard.Overlaps(full)
	k.mover, err = newReducer(m, dtype, full, shard)
	if err != nil {
		return nil, m.refuse(comm.ReduceScatter, label, err)
	}
	return k, nil
}

func (m *member) AllReduce(label string, buf device.Ptr, dtype graph.DType) (device.Kernel, error) {
	if err := comm.CheckBuffer(buf, dtype); err != nil {
		return nil, m.refuse(comm.AllReduce, label, err)
	}
	k, err := m.bind(label, comm.Signature{Op: comm.AllReduce, Bytes: buf.Len, DType: dtype}, device.Ptr{}, buf)
	if err != nil {
		return nil, err
	}
	k.mover, err = newReducer(m, dtype, buf, device.Ptr{})
	if err != nil {
		return nil, m.refuse(comm.AllReduce, label, err)
	}
	return k, nil
}

func (m *member) Broadcast(label string, buf device.Ptr, dtype graph.DType, root int) (device.Kernel, error) {
	if err := comm.CheckBuffer(buf, dtype); err != nil {
		return nil, m.refuse(comm.Broadcast, label, err)
	}
	if root < 0 || root >= m.Size() {
		return nil, m.refuse(comm.Broadcast, label, fmt.Errorf("root %d of %d ranks", root, m.Size()))
	}
	k, err := m.bind(label, comm.Signature{Op: comm.Broadcast, Bytes: buf.Len, DType: dtype, Root: root}, device.Ptr{}, buf)
	if err != nil {
		return nil, err
	}
	k.mover = spread{}
	return k, nil
}

func (m *member) AllToAll(label string, send, recv device.Ptr, dtype graph.DType) (device.Kernel, error) {
	part := device.Ptr{Arena: recv.Arena, Off: recv.Off, Len: recv.Len / int64(m.Size())}
	if err := comm.CheckShards(send, part, dtype, m.index, m.Size(), true); err != nil {
		return nil, m.refuse(comm.AllToAll, label, err)
	}
	if recv.Len != send.Len || recv.Overlaps(send) {
		return nil, m.refuse(comm.AllToAll, label, errors.New("want buffers of one length that lie apart"))
	}
	k, err := m.bind(label, comm.Signature{Op: comm.AllToAll, Bytes: send.Len, DType: dtype}, send, recv)
	if err != nil {
		return nil, err
	}
	k.mover = exchange{}
	return k, nil
}

func (m *member) Send(label string, buf device.Ptr, dtype graph.DType, to int) (device.Kernel, error) {
	return m.point(label, buf, device.Ptr{}, dtype, to)
}

func (m *member) Recv(label string, buf device.Ptr, dtype graph.DType, from int) (device.Kernel, error) {
	return m.point(label, device.Ptr{}, buf, dtype, from)
}

// point binds a Send of in or a Recv of out.
func (m *member) point(label string, in, out device.Ptr, dtype graph.DType, peer int) (device.Kernel, error) {
	buf := in
	if buf.Arena == nil {
		buf = out
	}
	if err := comm.CheckBuffer(buf, dtype); err != nil {
		return nil, m.refuse(comm.SendRecv, label, err)
	}
	if peer < 0 || peer >= m.Size() || peer == m.index {
		return nil, m.refuse(comm.SendRecv, label, fmt.Errorf("the peer of rank %d is %d, want another of %d ranks", m.index, peer, m.Size()))
	}
	k, err := m.bind(label, comm.Signature{Op: comm.SendRecv, Bytes: buf.Len, DType: dtype}, in, out)
	if err != nil {
		return nil, err
	}
	k.peer = peer
	if in.Arena != nil {
		k.sent = buf.Len
	}
	return k, nil
}

func (m *member) Barrier(label string) (device.Kernel, error) {
	k, err := m.bind(label, comm.Signature{Op: comm.Barrier}, device.Ptr{}, device.Ptr{})
	if err != nil {
		return nil, err
	}
	k.mover = nothing{}
	return k, nil
}
