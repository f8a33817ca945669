package meet

import (
	"fmt"
	"sync"

	"github.com/spillway-ml/spillway/comm"
)

// group is the state that the members of one group share.
type group struct {
	world   *World
	name    string
	ranks   []int // global rank by index
	members []*Member
	all     *place
	pairs   []*place // by from·W + to; nil for a rank and itself
}

// place is a reusable barrier, for all members of a group or for the sender and the receiver
// of a pair.
type place struct {
	group   *group
	members []*Member // for a pair: the sender, then the receiver

	mu      sync.Mutex
	arrived int
	round   uint64   // number of meetings to which all members have come
	left    uint64   // how many times a member has left, summed over all meetings
	came    []uint64 // by position: the last meeting to which the member came
	ops     []*Op    // by position: the operation that the member runs
}

func newPlace(g *group, members []*Member) *place {
	return &place{group: g, members: members, came: make([]uint64, len(members)), ops: make([]*Op, len(members))}
}

// rouse wakes the other waiting members, so that they check the place again.
func (p *place) rouse(self *Member) {
	for _, m := range p.members {
		if m != self {
			m.rouse()
		}
	}
}

// Meet returns when every rank of the operation has reached the same meeting, or with the world's
// error. If first is set, it is the operation's first meeting: it shows the operation to the peers,
// and the last rank to arrive compares the signatures. A collective must call Begin before it. Meet
// allocates nothing.
func (o *Op) Meet(first bool) error {
	m, p := o.member, o.place
	p.mu.Lock()
	if first {
		if err := m.Err(); err != nil {
			p.mu.Unlock()
			return err
		}
		p.ops[o.position] = o
	}
	number := p.round + 1
	p.came[o.position] = number
	p.arrived++
	if p.arrived == len(p.members) {
		var err error
		if first {
			err = o.compare()
		}
		if err == nil {
			p.arrived, p.round = 0, number
			p.rouse(m)
		}
		p.mu.Unlock()
		if err != nil {
			return m.Fail(err)
		}
		return nil
	}
	defer m.timer.Stop()
	for w := m.begin(); ; {
		if p.round >= number {
			p.mu.Unlock()
			return nil
		}
		if err := m.Err(); err != nil {
			p.mu.Unlock()
			return err
		}
		if w.Counted >= p.group.world.timeout {
			err := o.missing(number)
			p.mu.Unlock()
			return m.Fail(err)
		}
		p.mu.Unlock()
		m.sleep(&w)
		p.mu.Lock()
	}
}

// Leave says that the rank no longer accesses the peers' memory. Call it after Meet. The
// work between them must not be able to hang, because AllLeft waits without a timeout.
func (o *Op) Leave() {
	p := o.place
	p.mu.Lock()
	p.left++
	if p.left == p.round*uint64(len(p.members)) {
		p.rouse(o.member)
	}
	p.mu.Unlock()
}

// AllLeft returns when every rank has left the meeting, so that no rank reads this rank's
// inputs any more. An error or the timeout does not end the wait, because peers may still be
// moving bytes.
func (o *Op) AllLeft() {
	m, p := o.member, o.place
	p.mu.Lock()
	for p.left < p.round*uint64(len(p.members)) {
		p.mu.Unlock()
		<-m.wake
		p.mu.Lock()
	}
	p.mu.Unlock()
}

// compare returns an error unless all ranks have come with the same operation.
func (o *Op) compare() error {
	p, g := o.place, o.member.group
	a, m := p.ops[0], p.members[0]
	for i, b := range p.ops[1:] {
		n := p.members[i+1]
		if o.Sig.Op == comm.SendRecv {
			if a.Sig != b.Sig {
				return fmt.Errorf("%w in the %s group: rank %d sends %s (%q), rank %d receives %s (%q)", comm.ErrMismatch, g.name,
					m.GlobalRank(), a.Sig, a.Name, n.GlobalRank(), b.Sig, b.Name)
			}
		} else if b.Sig != a.Sig || n.calls != m.calls {
			return fmt.Errorf("%w in the %s group: rank %d runs %s (%q, call %d), rank %d runs %s (%q, call %d)", comm.ErrMismatch, g.name,
				m.GlobalRank(), a.Sig, a.Name, m.calls, n.GlobalRank(), b.Sig, b.Name, n.calls)
		}
	}
	return nil
}

// missing returns the timeout error of a meeting, which names the ranks that did not come.
func (o *Op) missing(number uint64) error {
	g := o.member.group
	if o.Sig.Op != comm.SendRecv {
		return o.Late(o.member.calls, func(i int) bool { return o.place.came[i] < number })
	}
	verb := "receive"
	if o.Sends() {
		verb = "send"
	}
	return fmt.Errorf("%w: %s %q (%s group): %s did not come within %v; %s waited", comm.ErrTimeout, verb, o.Name, g.name,
		g.world.Names(g.ranks[o.Peer:o.Peer+1]), g.world.timeout, g.world.Names([]int{o.member.GlobalRank()}))
}

// Late returns the timeout error of the rank's call-th collective, which names the ranks
// for whose index isLost is true. It returns nil if there are none.
func (o *Op) Late(call uint64, isLost func(i int) bool) error {
	g := o.member.group
	var lost, here []int
	for i, r := range g.ranks {
		if isLost(i) {
			lost = append(lost, r)
		} else {
			here = append(here, r)
		}
	}
	if len(lost) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s %q (call %d of the %s group): %s did not arrive within %v; %s waited",
		comm.ErrTimeout, o.Sig.Op, o.Name, call, g.name, g.world.Names(lost), g.world.timeout, g.world.Names(here))
}
