package peers

import (
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/meet"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// member is one rank in a group. A collective is enqueued by all ranks together;
// it allocates nothing:
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
// A stream waits only for events that were recorded before the wait was enqueued, so that
// streams cannot deadlock, even if the GPU has fewer queues than there are streams.
//
// A rank whose GPU work is stuck has still enqueued the operation: only its peers' streams
// show that it does not arrive (see watch.go).
//
// An error (Abort, a timeout, a mismatch) releases the ranks that wait on the host.
type member struct {
	*meet.Member
	world       *World
	ctx         *cuda.Context
	port        *port  // nil: the rank's sums read nothing from other GPUs
	far         []bool // by index: the member is on another GPU
	beyond      int    // number of members on other GPUs
	ready, done driver.Event
	progress    progress
}

// find sets far and beyond.
func (m *member) find() {
	m.far = make([]bool, m.Size())
	for i := range m.far {
		if m.far[i] = m.world.far(m.GlobalRank(), m.peer(i).GlobalRank()); m.far[i] {
			m.beyond++
		}
	}
	if m.beyond > 0 {
		m.port = m.world.ports[m.GlobalRank()]
	}
}

// fetch copies n bytes from the memory of the member of index i to the rank's own.
func (m *member) fetch(api driver.API, s driver.Stream, dst driver.Address, i int, src driver.Address, n int64) error {
	if m.far[i] {
		return api.CopyPeer(dst, m.ctx.Handle(), src, m.peer(i).ctx.Handle(), n, s)
	}
	return api.CopyOnDevice(dst, src, n, s)
}

// peer returns the member of index i of the group.
func (m *member) peer(i int) *member { return m.Own(i).(*member) }

// kernel is one bound operation of one rank.
type kernel struct {
	*meet.Op
	m             *member
	reads, writes []device.Ptr

	in, out driver.Address // addresses of the operands
	bytes   int64          // size of a shard, or of the whole buffer if there are no shards
	move    func(k *kernel, api driver.API, s driver.Stream) (read, written int64, err error)

	sum        Sum
	srcs, dsts []driver.Address // addresses for the whole sum, by member
	pieceSrcs  []driver.Address // addresses for one piece; sources on other GPUs lie in the port
	pieceDsts  []driver.Address
	peerReads  []driver.Range // for an observer
	peerWrites []driver.Range
}

var (
	_ cuda.Kernel   = (*kernel)(nil)
	_ cuda.Accessor = (*kernel)(nil)
)

func (k *kernel) Reads() []device.Ptr  { return k.reads }
func (k *kernel) Writes() []device.Ptr { return k.writes }

// met returns the kernel that member i runs at the meeting: see meet.Op.Met.
func (k *kernel) met(i int) *kernel { return k.Op.Met(i).(*kernel) }

// Enqueue adds the operation to the rank's stream. It returns when every rank
// has done so.
func (k *kernel) Enqueue(api driver.API, s driver.Stream) error {
	err := k.enqueue(api, s)
	if err != nil { // enqueued copies may still read a peer's memory: see leave
		k.m.port.settle(api, s)
		_ = api.Record(k.m.done, s) // err is reported; a second error is dropped
	}
	return err
}

func (k *kernel) enqueue(api driver.API, s driver.Stream) error {
	m := k.m
	if err := m.Err(); err != nil {
		return err
	}
	if err := api.Record(m.ready, s); err != nil {
		return err
	}
	if k.Sig.Op == comm.SendRecv {
		return k.point(api, s)
	}
	call := k.Begin()
	if err := m.progress.enter(api, s, k, call); err != nil {
		return err
	}
	if err := k.Meet(true); err != nil {
		return err
	}
	if err := k.waitPeers(api, s, func(p *member) driver.Event { return p.ready }); err != nil {
		return err
	}
	if err := m.progress.pass(api, s, call); err != nil {
		return err
	}
	read, written, err := k.move(k, api, s)
	if err != nil {
		return err
	}
	if err := api.Record(m.done, s); err != nil {
		return err
	}
	if err := k.Meet(false); err != nil {
		return err
	}
	if err := k.waitPeers(api, s, func(p *member) driver.Event { return p.done }); err != nil {
		return err
	}
	k.Count(k.Sent, read, written)
	return nil
}

func (k *kernel) waitPeers(api driver.API, s driver.Stream, event func(*member) driver.Event) error {
	for i := range k.m.Size() {
		if i == k.m.Rank() {
			continue
		}
		if err := api.Wait(s, event(k.m.peer(i))); err != nil {
			return err
		}
	}
	return nil
}

// point enqueues a Send or a Recv. The two ranks meet three times: for the operands, for the
// copy, and for the sender's wait, before which the receiver must not record done again.
func (k *kernel) point(api driver.API, s driver.Stream) error {
	other := k.m.peer(k.Peer)
	if err := k.Meet(true); err != nil {
		return err
	}
	if !k.Sends() {
		if err := api.Wait(s, other.ready); err != nil {
			return err
		}
		if err := k.m.fetch(api, s, k.out, k.Peer, k.met(0).in, k.bytes); err != nil {
			return err
		}
		if err := api.Record(k.m.done, s); err != nil {
			return err
		}
	}
	if err := k.Meet(false); err != nil {
		return err
	}
	if k.Sends() {
		if err := api.Wait(s, other.done); err != nil {
			return err
		}
	}
	if err := k.Meet(false); err != nil {
		return err
	}
	if k.Sends() {
		k.Count(k.Sent, 0, 0)
	} else {
		k.Count(0, k.bytes, k.bytes)
	}
	return nil
}

// Bind checks that the operands are in GPU memory and chooses the kernel's move.
func (m *member) Bind(o *meet.Op) (device.Kernel, error) {
	if o.Squares.Acc.Arena != nil {
		return nil, comm.ErrNoSquares
	}
	k := &kernel{Op: o, m: m, bytes: o.Sig.Bytes}
	var err error
	if k.in, k.reads, err = cuda.Operand(o.In); err != nil {
		return nil, err
	}
	if k.out, k.writes, err = cuda.Operand(o.Out); err != nil {
		return nil, err
	}
	return k, k.plan()
}

// plan sets the kernel's move, and the parts of the rank's operands that it reads and
// writes.
func (k *kernel) plan() error {
	switch shard, full := k.In, k.Out; k.Sig.Op {
	case comm.AllGather:
		k.bytes, k.move = shard.Len, gather
		if k.InPlace {
			k.writes = []device.Ptr{{Arena: full.Arena, Off: full.Off, Len: shard.Off - full.Off},
				{Arena: full.Arena, Off: shard.Off + shard.Len, Len: full.Off + full.Len - shard.Off - shard.Len}}
		}
	case comm.ReduceScatter:
		k.bytes, k.move = k.Out.Len, scatter
		if k.InPlace { // peers read the other parts
			k.reads = nil
		}
		return k.add()
	case comm.AllReduce:
		k.move = reduce
		return k.add()
	case comm.Broadcast:
		k.move = spread
		if k.m.Rank() == k.Sig.Root {
			k.reads, k.writes = k.writes, nil
		}
	case comm.AllToAll:
		k.bytes, k.move = k.Out.Len/int64(k.m.Size()), exchange
	case comm.Barrier:
		k.move = func(*kernel, driver.API, driver.Stream) (read, written int64, err error) { return 0, 0, nil }
	}
	return nil
}
