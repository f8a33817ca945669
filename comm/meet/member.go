package meet

import (
	"errors"
	"fmt"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// Binder is what a transport adds to a member.
type Binder interface {
	// Bind makes the kernel of an operation whose operands have been checked,
	// but for where they lie and, of a sum, the dtype.
	Bind(o *Op) (device.Kernel, error)
}

// Op is one bound operation of one rank. A transport's kernel embeds it.
type Op struct {
	Sig comm.Signature
	// In and Out are the operands; the zero Ptr stands for none. An operation in
	// place, on one buffer, has Out alone; so has a Recv, and a Send In.
	In, Out device.Ptr
	InPlace bool  // the shard is the rank's part of the full buffer
	Peer    int   // of a Send or Recv
	Sent    int64 // what a run of it counts as: see comm.Stats

	member   *Member
	label    string
	touches  []device.Ptr
	kernel   device.Kernel
	place    *place
	position int
}

// Label returns the name for errors and traces.
func (o *Op) Label() string { return o.label }

// Touches returns the operands.
func (o *Op) Touches() []device.Ptr { return o.touches }

// Sends tells whether it is a Send.
func (o *Op) Sends() bool { return o.Sig.Op == comm.SendRecv && o.Out.Arena == nil }

// Begin counts a run of a collective, and returns its number among the rank's.
func (o *Op) Begin() uint64 {
	o.member.calls++
	return o.member.calls
}

// Met returns the kernel of a member at the meeting, between Meet and Leave: by
// its index in the group; of a Send and Recv, the sender's is 0, the receiver's 1.
func (o *Op) Met(i int) device.Kernel { return o.place.ops[i].kernel }

// Count adds what a run has moved to the rank's Stats.
func (o *Op) Count(sent, read, written int64) { o.member.counter.Add(sent, read, written) }

// Member is one rank's comm.Group.
type Member struct {
	group *group
	index int
	own   Binder
	wake  chan struct{} // holds one token: look again
	timer *time.Timer

	calls   uint64 // collectives begun
	counter comm.Counter
}

var _ comm.Group = (*Member)(nil)

// Rank returns the rank's index in the group.
func (m *Member) Rank() int { return m.index }

// Size returns the group's size.
func (m *Member) Size() int { return len(m.group.ranks) }

// Abort ends every group of the world with err.
func (m *Member) Abort(err error) { m.group.world.Abort(err) }

// OnError registers f for the error that ends the world.
func (m *Member) OnError(f func(error)) { m.group.world.OnError(f) }

// Err returns the error that ended the world, nil while it is sound.
func (m *Member) Err() error { return m.group.world.Err() }

// Stats returns what the rank has moved in the group.
func (m *Member) Stats() comm.Stats { return m.counter.Stats() }

// Fail makes err the world's error, unless it has one, and returns the world's.
func (m *Member) Fail(err error) error { return m.group.world.fail(err) }

// Calls is how many collectives the rank has begun.
func (m *Member) Calls() uint64 { return m.calls }

// Name returns the group's: "world" or "axis data".
func (m *Member) Name() string { return m.group.name }

// GlobalRank returns the rank in the world.
func (m *Member) GlobalRank() int { return m.group.ranks[m.index] }

// Timeout is how long the rank waits for another one to arrive.
func (m *Member) Timeout() time.Duration { return m.group.world.timeout }

// Own returns what the transport has added to the member of index i.
func (m *Member) Own(i int) Binder { return m.group.members[i].own }

func (m *Member) rouse() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// sleep returns when the member is roused, or late when its timer has run out.
func (m *Member) sleep() (late bool) {
	select {
	case <-m.wake:
		return false
	case <-m.timer.C:
		return true
	}
}

// bind makes the kernel of o, unless its operands are wrong.
func (m *Member) bind(label string, wrong error, o *Op) (device.Kernel, error) {
	if wrong != nil {
		return nil, m.refuse(o, label, wrong)
	}
	o.member, o.label, o.place, o.position = m, label, m.group.all, m.index
	o.Sent = comm.RingBytes(o.Sig, m.index, m.Size())
	o.InPlace = o.In.Overlaps(o.Out)
	for _, p := range []device.Ptr{o.In, o.Out} {
		if p.Arena != nil {
			o.touches = append(o.touches, p)
		}
	}
	if o.Sig.Op == comm.SendRecv {
		from, to := o.Peer, m.index
		o.position = 1
		if o.Sends() {
			from, to = to, from
			o.position, o.Sent = 0, o.Sig.Bytes
		}
		o.place = m.group.pairs[from*m.Size()+to]
	}
	k, err := m.own.Bind(o)
	if err != nil {
		return nil, m.refuse(o, label, err)
	}
	o.kernel = k
	return k, nil
}

func (m *Member) refuse(o *Op, label string, err error) error {
	return fmt.Errorf("rank %d: %s %q: %w", m.GlobalRank(), o.Sig.Op, label, err)
}

// AllGather binds a gather of shards.
func (m *Member) AllGather(label string, shard, full device.Ptr, dtype graph.DType) (device.Kernel, error) {
	return m.bind(label, comm.CheckShards(full, shard, dtype, m.index, m.Size(), false),
		&Op{Sig: comm.Signature{Op: comm.AllGather, Bytes: full.Len, DType: dtype}, In: shard, Out: full})
}

// ReduceScatter binds a sum of the rank's part over the ranks.
func (m *Member) ReduceScatter(label string, full, shard device.Ptr, dtype graph.DType, accumulate bool) (device.Kernel, error) {
	return m.bind(label, comm.CheckShards(full, shard, dtype, m.index, m.Size(), accumulate),
		&Op{Sig: comm.Signature{Op: comm.ReduceScatter, Bytes: full.Len, DType: dtype, Accumulate: accumulate}, In: full, Out: shard})
}

// AllReduce binds a sum in place.
func (m *Member) AllReduce(label string, buf device.Ptr, dtype graph.DType) (device.Kernel, error) {
	return m.bind(label, comm.CheckBuffer(buf, dtype),
		&Op{Sig: comm.Signature{Op: comm.AllReduce, Bytes: buf.Len, DType: dtype}, Out: buf})
}

// Broadcast binds a copy of the root's buffer.
func (m *Member) Broadcast(label string, buf device.Ptr, dtype graph.DType, root int) (device.Kernel, error) {
	err := comm.CheckBuffer(buf, dtype)
	if err == nil && (root < 0 || root >= m.Size()) {
		err = fmt.Errorf("root %d of %d ranks", root, m.Size())
	}
	return m.bind(label, err, &Op{Sig: comm.Signature{Op: comm.Broadcast, Bytes: buf.Len, DType: dtype, Root: root}, Out: buf})
}

// AllToAll binds an exchange of parts.
func (m *Member) AllToAll(label string, send, recv device.Ptr, dtype graph.DType) (device.Kernel, error) {
	part := device.Ptr{Arena: recv.Arena, Off: recv.Off, Len: recv.Len / int64(m.Size())}
	err := comm.CheckShards(send, part, dtype, m.index, m.Size(), true)
	if err == nil && (recv.Len != send.Len || recv.Overlaps(send)) {
		err = errors.New("want buffers of one length that lie apart")
	}
	return m.bind(label, err, &Op{Sig: comm.Signature{Op: comm.AllToAll, Bytes: send.Len, DType: dtype}, In: send, Out: recv})
}

// Send binds the giving of buf to a peer's Recv.
func (m *Member) Send(label string, buf device.Ptr, dtype graph.DType, to int) (device.Kernel, error) {
	return m.point(label, &Op{In: buf, Peer: to}, buf, dtype)
}

// Recv binds the copy of the buffer of a peer's Send.
func (m *Member) Recv(label string, buf device.Ptr, dtype graph.DType, from int) (device.Kernel, error) {
	return m.point(label, &Op{Out: buf, Peer: from}, buf, dtype)
}

func (m *Member) point(label string, o *Op, buf device.Ptr, dtype graph.DType) (device.Kernel, error) {
	o.Sig = comm.Signature{Op: comm.SendRecv, Bytes: buf.Len, DType: dtype}
	err := comm.CheckBuffer(buf, dtype)
	if err == nil && (o.Peer < 0 || o.Peer >= m.Size() || o.Peer == m.index) {
		err = fmt.Errorf("the peer of rank %d is %d, want another of %d ranks", m.index, o.Peer, m.Size())
	}
	return m.bind(label, err, o)
}

// Barrier binds a meeting of all ranks.
func (m *Member) Barrier(label string) (device.Kernel, error) {
	return m.bind(label, nil, &Op{Sig: comm.Signature{Op: comm.Barrier}})
}

// Share returns the elements that rank i of w adds in an all-reduce of n: equal
// parts that start at multiples of 16 elements, a cache line of f32, so that
// ranks don't write to one line at once.
func Share(n, i, w int64) (from, to int64) {
	const line = 16
	at := func(i int64) int64 {
		if i == w {
			return n
		}
		return n * i / w / line * line
	}
	return at(i), at(i + 1)
}
