package meet

import (
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/world"
	"github.com/spillway-ml/spillway/device"
)

// Binder is the part of a member that a transport implements.
type Binder interface {
	// Bind creates the kernel of an operation. Its operands have been checked, except for
	// their memory and, for a sum, the dtype.
	Bind(o *Op) (device.Kernel, error)
}

// Op is one bound operation of one rank. A transport's kernel embeds it.
type Op struct {
	comm.Call

	member   *Member
	kernel   device.Kernel
	place    *place
	position int
}

// Begin counts a run of a collective and returns its number among the rank's collectives
// in the group.
func (o *Op) Begin() uint64 {
	o.member.calls++
	return o.member.calls
}

// Met returns the kernel that member i runs at the meeting; call it between Meet and Leave.
// i is the index in the group; for a Send and Recv the sender is 0 and the receiver 1.
func (o *Op) Met(i int) device.Kernel { return o.place.ops[i].kernel }

// Count adds the bytes of one run to the rank's Stats.
func (o *Op) Count(sent, read, written int64) { o.member.Add(sent, read, written) }

// Member is one rank's comm.Group.
type Member struct {
	world.Member
	group *group
	own   Binder
	wake  chan struct{} // holds one token, which tells a waiting member to check again
	timer *time.Timer

	calls uint64 // number of collectives begun
}

var _ comm.Group = (*Member)(nil)

// Calls returns the number of collectives that the rank has begun in the group.
func (m *Member) Calls() uint64 { return m.calls }

// Timeout is how long the rank waits for another one to arrive.
func (m *Member) Timeout() time.Duration { return m.group.world.timeout }

// Own returns the transport's part (Binder) of the member with index i.
func (m *Member) Own(i int) Binder { return m.group.members[i].own }

func (m *Member) rouse() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// begin starts the member's timer.
func (m *Member) begin() comm.Wait {
	w := comm.NewWait(m.group.world.timeout)
	m.timer.Reset(w.Every)
	return w
}

// sleep returns when the member is roused, or when it should check its timeout.
func (m *Member) sleep(w *comm.Wait) {
	select {
	case <-m.wake:
	case <-m.timer.C:
		m.timer.Reset(w.Every)
	}
	w.Look()
}

// bind makes the kernel of an operation whose operands have been checked.
func (m *Member) bind(c comm.Call) (device.Kernel, error) {
	o := &Op{Call: c, member: m, place: m.group.all, position: m.Index}
	if o.Sig.Op == comm.SendRecv {
		from, to := o.Peer, m.Index
		o.position = 1
		if o.Sends() {
			from, to = to, from
			o.position = 0
		}
		o.place = m.group.pairs[from*m.Size()+to]
	}
	k, err := m.own.Bind(o)
	if err != nil {
		return nil, err
	}
	o.kernel = k
	return k, nil
}
