//go:build linux

package nccltest

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// group holds the calls of a thread between GroupStart and GroupEnd.
type group struct {
	depth int
	calls []*call
}

// call is a rank's part of an operation.
type call struct {
	m          *member
	name       string // "ncclSend"
	send, recv driver.Address
	bytes      int64
	peer       int // of a send or recv; the root of a broadcast
	number     int // of a collective
	stream     driver.Stream

	of    *batch
	with  map[int]*call // the peers' calls that it meets, by rank, once they have arrived
	taken int           // number of ranks that have read the sent data
}

func (c *call) collective() bool { return c.name != "ncclSend" && c.name != "ncclRecv" }

// same reports whether two ranks' calls belong to the same operation.
func (c *call) same(o *call) bool {
	return c.name == o.name && c.bytes == o.bytes && (c.name != "ncclBroadcast" || c.peer == o.peer)
}

func (c *call) String() string { return fmt.Sprintf("%s of %d bytes", c.name, c.bytes) }

// pair holds the messages from one rank to another, in order.
type pair struct{ sends, recvs []*call }

// batch holds the calls of a group on one communicator, which the library runs as one kernel:
//
//	arrive │ until every call has met its peers │ copy what is received │ until what is sent is taken
type batch struct {
	m      *member
	calls  []*call
	unmet  int // calls that have not met their peers
	undone int // calls whose data is not yet received or taken
	came   atomic.Bool
	left   atomic.Bool
	dead   atomic.Bool
}

func (b *batch) String() string { return b.calls[0].String() }

func (l *library) add(c *call, comm nccl.Comm) error {
	device := l.d.Current()
	l.mu.Lock()
	m, err := l.ready(c.name, comm, device)
	if err == nil {
		c.m = m
		err = l.fits(c)
	}
	g := l.open[unix.Gettid()]
	if err != nil || g != nil {
		if err == nil {
			g.calls = append(g.calls, c)
		}
		l.mu.Unlock()
		return err
	}
	l.mu.Unlock()
	return l.begin([]*call{c})
}

// fits refuses invalid arguments of a rank's call.
func (l *library) fits(c *call) error {
	m := c.m
	switch {
	case c.bytes <= 0:
		return l.wrong(c.name, "rank %d: %d bytes", m.rank, c.bytes)
	case c.peer < 0 || c.peer >= m.of.size || !c.collective() && c.peer == m.rank:
		return l.wrong(c.name, "rank %d of %d names rank %d", m.rank, m.of.size, c.peer)
	case m.stream != 0 && m.stream != uintptr(c.stream) && slices.ContainsFunc(m.work, func(b *batch) bool { return !b.left.Load() }):
		return l.wrong(c.name, "rank %d calls on stream %d while stream %d still runs its %s", m.rank, c.stream, m.stream, m.work[len(m.work)-1])
	}
	m.stream = uintptr(c.stream)
	return nil
}

// GroupEnd starts the calls of the outermost group.
func (l *library) GroupEnd() error {
	l.mu.Lock()
	err := l.enter("ncclGroupEnd")
	tid := unix.Gettid()
	g := l.open[tid]
	if g == nil {
		err = l.wrong("ncclGroupEnd", "without a start")
	}
	if g != nil {
		if g.depth--; g.depth > 0 {
			l.mu.Unlock()
			return err
		}
		delete(l.open, tid)
	}
	l.mu.Unlock()
	if err != nil || len(g.calls) == 0 {
		return err
	}
	return l.begin(g.calls)
}

// begin enqueues calls on their streams, one batch per communicator.
func (l *library) begin(calls []*call) error {
	var order []*member
	of := map[*member]*batch{}
	for _, c := range calls {
		b := of[c.m]
		if b == nil {
			b = &batch{m: c.m}
			of[c.m], order = b, append(order, c.m)
		}
		c.of = b
		b.calls = append(b.calls, c)
	}
	for _, m := range order {
		if err := l.enqueue(of[m]); err != nil {
			return err
		}
	}
	return nil
}

// enqueue enqueues a batch on its stream.
func (l *library) enqueue(b *batch) error {
	l.mu.Lock()
	m := b.m
	m.looks = l.o.Looks
	held := l.holds(m.rank)
	for i, c := range b.calls {
		if c.stream != b.calls[0].stream {
			l.fault("rank %d: a group on streams %d and %d", m.rank, b.calls[0].stream, c.stream)
		}
		if c.collective() {
			if i > 0 {
				l.fault("rank %d: %s behind %s in a group", m.rank, c, b.calls[0])
			}
			m.count++
			c.number = m.count
		}
	}
	m.work = append(slices.DeleteFunc(m.work, func(o *batch) bool { return o.left.Load() }), b)
	l.mu.Unlock()
	var reads, writes []driver.Range
	for _, c := range b.calls {
		r, w := c.touches()
		reads, writes = append(reads, r...), append(writes, w...)
	}
	s, label := b.calls[0].stream, b.String()
	l.d.Access(label, s, reads, writes)
	return errors.Join(
		l.d.Until(s, label, func() bool { return !held.Load() || b.dead.Load() }),
		l.d.Run(s, label, func() error { l.arrive(b); return nil }),
		l.d.Until(s, label, b.came.Load),
		l.d.Run(s, label, func() error { return l.move(b) }),
		l.d.Until(s, label, b.left.Load))
}

// touches returns the ranges of its own rank's memory that a call reads and writes.
func (c *call) touches() (reads, writes []driver.Range) {
	n, w := c.bytes, int64(c.m.of.size)
	own := driver.Address(int64(c.m.rank) * n)
	switch c.name {
	case "ncclSend":
		return []driver.Range{{At: c.send, Len: n}}, nil
	case "ncclRecv":
		return nil, []driver.Range{{At: c.recv, Len: n}}
	case "ncclBroadcast":
		if c.m.rank == c.peer {
			return []driver.Range{{At: c.send, Len: n}}, nil
		}
		return nil, []driver.Range{{At: c.recv, Len: n}}
	}
	reads = []driver.Range{{At: c.send, Len: n}}
	if c.send == c.recv+own { // in place
		return reads, []driver.Range{{At: c.recv, Len: int64(own)}, {At: c.send + driver.Address(n), Len: (w-1)*n - int64(own)}}
	}
	return reads, []driver.Range{{At: c.recv, Len: w * n}}
}

// arrive is called when a rank's stream reaches a batch: its calls meet those of its peers.
func (l *library) arrive(b *batch) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b.unmet, b.undone = len(b.calls), len(b.calls)
	for _, c := range b.calls {
		c.with = map[int]*call{}
		if c.collective() {
			l.meetAll(c)
		} else {
			l.meetPair(c)
		}
	}
}

// meetAll starts a collective once all ranks have reached it.
func (l *library) meetAll(c *call) {
	all := c.m.of.together[c.number]
	if all == nil {
		all = map[int]*call{}
		c.m.of.together[c.number] = all
	}
	all[c.m.rank] = c
	if len(all) < c.m.of.size {
		return
	}
	delete(c.m.of.together, c.number)
	for _, o := range all {
		if !o.same(c) {
			l.disagree(c, o)
			return
		}
	}
	for _, o := range all {
		o.with = all
		o.of.met()
	}
}

// meetPair starts a send and its recv once both have been reached.
func (l *library) meetPair(c *call) {
	key := [2]int{c.m.rank, c.peer}
	if c.name == "ncclRecv" {
		key = [2]int{c.peer, c.m.rank}
	}
	p := c.m.of.pairs[key]
	if p == nil {
		p = &pair{}
		c.m.of.pairs[key] = p
	}
	if c.name == "ncclSend" {
		p.sends = append(p.sends, c)
	} else {
		p.recvs = append(p.recvs, c)
	}
	for len(p.sends) > 0 && len(p.recvs) > 0 {
		s, r := p.sends[0], p.recvs[0]
		p.sends, p.recvs = p.sends[1:], p.recvs[1:]
		if s.bytes != r.bytes {
			l.disagree(s, r)
			continue
		}
		s.with[r.m.rank], r.with[s.m.rank] = r, s
		s.of.met()
		r.of.met()
	}
}

// disagree records a fault that the real library does not detect: it would hang, or copy whatever
// is there.
func (l *library) disagree(a, b *call) {
	l.fault("rank %d calls %s, and rank %d %s", a.m.rank, a, b.m.rank, b)
}

// met records that a call has met its peers.
func (b *batch) met() {
	if b.unmet--; b.unmet == 0 {
		b.came.Store(true)
	}
}

// move copies the data that a batch receives.
func (l *library) move(b *batch) error {
	if b.dead.Load() {
		return nil
	}
	type copying struct {
		to, from driver.Address
		bytes    int64
	}
	var list []copying
	l.mu.Lock()
	for _, c := range b.calls {
		switch c.name {
		case "ncclRecv":
			list = append(list, copying{c.recv, c.with[c.peer].send, c.bytes})
		case "ncclBroadcast":
			if c.m.rank != c.peer {
				list = append(list, copying{c.recv, c.with[c.peer].send, c.bytes})
			}
		case "ncclAllGather":
			for rank, o := range c.with {
				if rank == c.m.rank && c.send == c.recv+driver.Address(int64(rank)*c.bytes) {
					continue // in place
				}
				list = append(list, copying{c.recv + driver.Address(int64(rank)*c.bytes), o.send, c.bytes})
			}
		}
	}
	l.mu.Unlock()
	for _, x := range list {
		to, err := l.d.Bytes(x.to, x.bytes)
		if err != nil {
			return err
		}
		from, err := l.d.Bytes(x.from, x.bytes)
		if err != nil {
			return err
		}
		copy(to, from)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range b.calls {
		switch {
		case c.collective():
			for _, o := range c.with {
				if o.taken++; o.taken == o.m.of.size {
					o.of.done()
				}
			}
		case c.name == "ncclRecv":
			c.with[c.peer].of.done()
			b.done()
		}
	}
	return nil
}

// done records that one of the calls is complete.
func (b *batch) done() {
	if b.undone--; b.undone == 0 {
		b.left.Store(true)
	}
}

func (l *library) AllGather(send, recv driver.Address, bytes int64, c nccl.Comm, s driver.Stream) error {
	return l.add(&call{name: "ncclAllGather", send: send, recv: recv, bytes: bytes, stream: s}, c)
}

func (l *library) Broadcast(buf driver.Address, bytes int64, root int, c nccl.Comm, s driver.Stream) error {
	return l.add(&call{name: "ncclBroadcast", send: buf, recv: buf, bytes: bytes, peer: root, stream: s}, c)
}

func (l *library) Send(buf driver.Address, bytes int64, to int, c nccl.Comm, s driver.Stream) error {
	return l.add(&call{name: "ncclSend", send: buf, bytes: bytes, peer: to, stream: s}, c)
}

func (l *library) Recv(buf driver.Address, bytes int64, from int, c nccl.Comm, s driver.Stream) error {
	return l.add(&call{name: "ncclRecv", recv: buf, bytes: bytes, peer: from, stream: s}, c)
}
