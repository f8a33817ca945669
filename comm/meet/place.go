package meet

import (
	"fmt"
	"sync"

	"github.com/spillway-ml/spillway/comm"
)

// group is what the members of one group share.
type group struct {
	world   *World
	name    string
	ranks   []int // global rank by index
	members []*Member
	all     *place
	pairs   []*place // by from·W + to, nil from a rank to itself
}

// place is where members meet time after time: all of a group, or the sender
// and the receiver of a pair.
type place struct {
	group   *group
	members []*Member // of a pair the sender, then the receiver

	mu      sync.Mutex
	arrived int
	round   uint64   // meetings that all have come to
	left    uint64   // members that have left a meeting, over all of them
	came    []uint64 // by position: the last meeting that the member came to
	ops     []*Op    // by position: what the member runs
}

func newPlace(g *group, members []*Member) *place {
	return &place{group: g, members: members, came: make([]uint64, len(members)), ops: make([]*Op, len(members))}
}

// rouse makes the others look again.
func (p *place) rouse(self *Member) {
	for _, m := range p.members {
		if m != self {
			m.rouse()
		}
	}
}

// Meet returns when every rank of the operation has come to the same meeting, or
// with the world's error. The first meeting of an operation shows it to the
// peers; the last rank to come to it compares the signatures. Before it, a
// collective has called Begin. Meet allocates nothing.
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

// Leave says that the rank is done with the peers' memory. It comes after Meet,
// for an operation whose work can't hang: see AllLeft.
func (o *Op) Leave() {
	p := o.place
	p.mu.Lock()
	p.left++
	if p.left == p.round*uint64(len(p.members)) {
		p.rouse(o.member)
	}
	p.mu.Unlock()
}

// AllLeft returns when every rank has left the meeting: nobody reads the rank's
// inputs any more. Neither an error nor the timeout ends it, since peers are
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

// missing is the error of a timeout in a meeting.
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

// Late is the error of a collective, run as the rank's call-th, in which some
// ranks miss others, by their index; nil where none is lost.
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
