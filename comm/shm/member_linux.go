package shm

import (
	"fmt"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/direct"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/comm/world"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
)

// member is one rank in a group. An operation allocates nothing:
//
//	come    post the operation and the place of its operands, and wait until every
//	        rank has done so; each compares the signatures
//	move    read and write the peers' memory, as mapped in this process; of a pair, only
//	        the receiver does
//	leave   wait until all have moved: no rank reads this rank's inputs any more
//
// A rank writes its post between leaving one operation and coming to the next. No other rank
// reads it then, because a rank returns from an operation only when all ranks have left.
type member struct {
	world.Member
	world *World
}

var _ comm.Group = (*member)(nil)

// kernel is one bound operation of one rank.
type kernel struct {
	comm.Call
	m     *member
	mover *direct.Mover
	own   device.Ptr // any range of the rank's memory: tells the checker which rank runs the kernel

	in, out operand
	sig     uint64
	text    string  // "all_gather "label"", for messages
	posts   []*post // posts of the ranks that meet
	ranks   []int   // their global ranks
	at      int     // index of this rank among them
}

var _ cpu.PeerKernel = (*kernel)(nil)

func (k *kernel) ReachesPeers() {}

func (m *member) bind(c comm.Call) (device.Kernel, error) {
	k := &kernel{Call: c, m: m, sig: c.Sig.Hash(), text: fmt.Sprintf("%s %q", c.Sig.Op, c.Name), at: m.Index, ranks: m.Global}
	if c.Sig.Op == comm.SendRecv {
		from, to := c.Peer, m.Index
		if k.at = 1; c.Sends() {
			from, to, k.at = to, from, 0
		}
		k.ranks = []int{m.Global[from], m.Global[to]}
		for side := range 2 {
			k.posts = append(k.posts, m.world.job.pair(m.Slot, k.ranks[0], k.ranks[1], side))
		}
	} else {
		for _, r := range m.Global {
			k.posts = append(k.posts, m.world.job.post(m.Slot, r))
		}
	}
	var own direct.Operands
	var err error
	if k.mover, own, err = direct.New(c, m.Index, len(k.posts)); err != nil {
		return nil, err
	}
	for _, x := range []struct {
		p    device.Ptr
		mem  []byte
		dest *operand
	}{{c.In, own.In, &k.in}, {c.Out, own.Out, &k.out}} {
		*x.dest = operand{region: -1}
		if x.p.Arena == nil {
			continue
		}
		k.own = x.p
		if *x.dest, err = m.world.find(m.World, x.mem); err != nil {
			return nil, err
		}
	}
	return k, nil
}

// Run runs the operation. It returns when no peer reads the rank's inputs any more.
func (k *kernel) Run() error {
	m := k.m
	if err := m.Enter(k.Call); err != nil {
		return err
	}
	defer m.Leave()
	call := k.posts[k.at].came.Load() + 1
	rec := m.world.job.rank(m.World).begin(k, call)
	err := k.meet(call)
	if err == nil {
		rec.end.Store(now())
	}
	return err
}

func (k *kernel) meet(call uint64) error {
	w, own := k.m.world, k.posts[k.at]
	k.point(watch.Waiting, call)
	if w.job.header().ended.Load() != 0 {
		return w.adopt()
	}
	k.write(own)
	own.phase.Store(uint32(watch.Waiting))
	own.came.Store(call)
	k.ring()
	if err := k.await(call, came); err != nil {
		return err
	}
	if err := k.compare(call); err != nil {
		return err
	}
	own.phase.Store(uint32(watch.Moving))
	k.point(watch.Moving, call)
	read, written, err := k.move()
	if err != nil {
		return w.fail(err)
	}
	own.phase.Store(uint32(watch.Leaving))
	own.left.Store(call)
	k.ring()
	k.point(watch.Leaving, call)
	if err := k.await(call, left); err != nil {
		return err
	}
	own.phase.Store(uint32(watch.Idle))
	k.point(watch.Idle, call)
	sent := k.Sent
	if k.Sig.Op == comm.SendRecv && !k.Sends() {
		sent = 0
	}
	k.m.Add(sent, read, written)
	return nil
}

// point shows where a Send or Recv is.
func (k *kernel) point(p watch.Phase, call uint64) {
	if k.Sig.Op != comm.SendRecv {
		return
	}
	a := k.m.world.job.rank(k.m.World)
	if p == watch.Waiting {
		a.pointText.set(k.text)
		a.pointPeer.Store(uint32(k.ranks[1-k.at]))
	}
	a.pointCall.Store(call)
	a.point.Store(uint32(p))
}

// write posts the operation.
func (k *kernel) write(p *post) {
	p.kind, p.dtype, p.flags = uint32(world.OpNumber(k.Sig.Op)), uint32(k.Sig.DType), 0
	if k.Sig.Accumulate {
		p.flags = 1
	}
	p.flags |= uint32(k.Sig.Order) << 1
	p.bytes, p.root = k.Sig.Bytes, int64(k.Sig.Root)
	p.in, p.out = k.in, k.out
	p.text.set(k.text)
	p.sig.Store(k.sig)
}

// signature returns the signature of the operation that a rank has posted.
func (p *post) signature() comm.Signature {
	return comm.Signature{Op: world.OpOf(uint64(p.kind)), Bytes: p.bytes, DType: graph.DType(p.dtype), Root: int(p.root), Order: graph.SumOrder(p.flags >> 1), Accumulate: p.flags&1 != 0}
}

// ring wakes the other ranks of the operation that sleep.
func (k *kernel) ring() {
	for i, p := range k.posts {
		if i != k.at && p.asleep.Load() != 0 {
			p.bell.Add(1)
			wake(&p.bell)
		}
	}
}

func came(p *post) uint64 { return p.came.Load() }
func left(p *post) uint64 { return p.left.Load() }

// spinFor is how long a waiter polls before it sleeps: about the cost of waking a sleeper, 10
// to 40 µs, more in a virtual machine. looks is the number of polls between two readings of the
// clock.
const (
	spinFor = 20 * time.Microsecond
	looks   = 50
)

// nap is the longest sleep of a waiter before it checks for an error of the job.
const nap = 100 * time.Millisecond

// await returns when every rank has reached the call, or with the job's error.
func (k *kernel) await(call uint64, reached func(*post) uint64) error {
	w, own, next := k.m.world, k.posts[k.at], 0
	all := func() bool {
		for ; next < len(k.posts); next++ {
			if reached(k.posts[next]) < call {
				return false
			}
		}
		return true
	}
	for until := now() + int64(spinFor); ; {
		for range looks {
			if all() {
				return nil
			}
		}
		if !w.spins || now() >= until {
			break
		}
	}
	for {
		own.asleep.Store(1)
		bell := own.bell.Load()
		ended := w.job.header().ended.Load() != 0
		if ready := all(); ready || ended {
			own.asleep.Store(0)
			if ready {
				return nil
			}
			return w.adopt()
		}
		sleep(&own.bell, bell, nap)
		own.asleep.Store(0)
	}
}

// compare fails the job unless all ranks have come with the same operation.
func (k *kernel) compare(call uint64) error {
	a := k.posts[0]
	for i, b := range k.posts {
		if b.sig.Load() == a.sig.Load() {
			continue
		}
		verbs, number := [2]string{"runs", "runs"}, fmt.Sprintf(" at call %d", call)
		if k.Sig.Op == comm.SendRecv {
			verbs, number = [2]string{"sends", "receives"}, ""
		}
		return k.m.world.fail(fmt.Errorf("%w in the %s group%s: rank %d %s %s (%s), rank %d %s %s (%s)", comm.ErrMismatch, k.m.Name, number,
			k.ranks[0], verbs[0], a.signature(), quoted(a), k.ranks[i], verbs[1], b.signature(), quoted(b)))
	}
	return nil
}

// quoted returns a post's label.
func quoted(p *post) string {
	_, label, _ := strings.Cut(p.text.String(), " ")
	return label
}

// move does this rank's part. A panic becomes the error of the job.
func (k *kernel) move() (read, written int64, err error) {
	for i, p := range k.posts {
		peer := &k.mover.Peers[i]
		if peer.In, err = k.m.world.view(k.ranks[i], p.in); err != nil {
			return 0, 0, err
		}
		if peer.Out, err = k.m.world.view(k.ranks[i], p.out); err != nil {
			return 0, 0, err
		}
	}
	cpu.Enter(k.own)
	defer cpu.Leave(k.own)
	read, written = k.mover.Move()
	return read, written, nil
}
