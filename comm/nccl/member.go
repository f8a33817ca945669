package nccl

import (
	"fmt"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// member is one rank in a group. Each rank enqueues a collective independently: no host
// thread waits for a peer.
//
//	arrived = n   the rank's stream has come to its n-th call
//	move          NCCL's copies, and of a sum the adding, a chunk after the other
//	passed = n    no peer reads its inputs any more: NCCL's operations end on a rank's
//	              stream once what it sends has been taken
//
// The watchdog reads the two words arrived and passed: see watch.go.
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

// Stats returns what the rank has moved in the group.
func (m *member) Stats() comm.Stats { return m.counter.Stats() }

// addMember makes the rank, with index i, a member of a group. A group of all ranks uses the
// existing communicator: one stream runs the collectives of all groups.
func (r *rank) addMember(g watch.Group, i int) error {
	m := &member{r: r, name: g.Name, slot: g.Slot, comm: r.world}
	m.Caller = comm.Caller{Index: i, Ranks: len(g.Ranks), World: r.index, Bind: m.bind}
	if n := len(g.Ranks); n > 1 && n < r.w.size {
		m.comm = r.newComm()
		err := r.call(func() error {
			return r.w.o.API.Split(r.world.handle, &m.comm.handle, g.Ranks[0], r.index, Config{})
		})
		for _, c := range []*communicator{r.world, m.comm} {
			if err == nil {
				err = r.settle(c, "make the communicator of "+g.Name)
			}
		}
		if err == nil && m.comm.handle == 0 {
			err = fmt.Errorf("NCCL has made no communicator of %s", g.Name)
		}
		if err != nil {
			return err
		}
	}
	if err := m.progress.words(r.ctx); err != nil {
		return err
	}
	r.mu.Lock()
	r.members = append(r.members, m)
	r.mu.Unlock()
	return nil
}

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

// bind checks that the operands are in GPU memory and chooses the kernel's move.
func (m *member) bind(c comm.Call) (device.Kernel, error) {
	k := &kernel{Call: c, m: m, text: fmt.Sprintf("%s %q", c.Sig.Op, c.Name), srcs: make([]driver.Address, m.Ranks)}
	k.sig = c.Sig.Hash()
	if c.Squares.Acc.Arena != nil {
		return nil, comm.ErrNoSquares
	}
	if c.Round != nil {
		return nil, fmt.Errorf("rounds of an algorithm (%s): NCCL's collectives go their own way", c.Sig.Round)
	}
	var err error
	if k.in, k.reads, err = cuda.Operand(c.In); err != nil {
		return nil, err
	}
	if k.out, k.writes, err = cuda.Operand(c.Out); err != nil {
		return nil, err
	}
	return k, k.plan()
}

// plan sets the kernel's move and the operands that it reads and writes.
func (k *kernel) plan() error {
	in, out := k.In.Len, k.Out.Len
	switch k.Sig.Op {
	case comm.AllGather:
		k.move, k.read, k.written = gather, in, out
		if k.InPlace {
			k.written -= in
			k.writes = []device.Ptr{{Arena: k.Out.Arena, Off: k.Out.Off, Len: k.In.Off - k.Out.Off},
				{Arena: k.Out.Arena, Off: k.In.Off + k.In.Len, Len: k.Out.Off + k.Out.Len - k.In.Off - k.In.Len}}
		}
	case comm.ReduceScatter:
		k.move, k.read, k.written = scatter, in, out
		return k.adds()
	case comm.AllReduce:
		k.move, k.read, k.written = reduce, out, out
		return k.adds()
	case comm.Broadcast:
		k.move, k.written = spread, out
		if k.m.Index == k.Sig.Root {
			k.reads, k.writes = k.writes, nil
			k.read, k.written = out, 0
		}
	case comm.AllToAll:
		k.move, k.read, k.written = exchange, in, out
	case comm.SendRecv:
		k.move, k.read, k.written = point, in, out
		if !k.Sends() {
			k.Sent = 0
		}
	case comm.Barrier:
		k.move = barrier
	}
	return nil
}

// adds sets the GPU sum of a reduction.
func (k *kernel) adds() (err error) {
	if err := comm.CheckSum(k.Sig.DType); err != nil {
		return err
	}
	if k.m.Ranks > MostSources && k.Sig.Order == graph.SumTree && k.Sig.DType.Size() < graph.F32.Size() {
		return fmt.Errorf("a sum of %s over %d ranks: it is rounded once, and one kernel adds at most %d; "+
			"shard within groups of at most that many (Config.ShardSize)", k.Sig.DType, k.m.Ranks, MostSources)
	}
	k.sum, err = k.m.r.sum(k.Sig.DType, k.Sig.Order)
	return err
}

func (r *rank) sum(dtype graph.DType, order graph.SumOrder) (Sum, error) {
	key := sumKey{dtype, order}
	if s := r.sums[key]; s != nil {
		return s, nil
	}
	s, err := r.w.o.Sum(r.index, dtype, order)
	if err != nil {
		return nil, err
	}
	r.sums[key] = s
	return s, nil
}

// Enqueue adds the operation to the rank's stream.
func (k *kernel) Enqueue(api driver.API, s driver.Stream) error {
	m := k.m
	if err := m.Err(); err != nil {
		return err
	}
	point := k.Sig.Op == comm.SendRecv
	if !point {
		m.calls++
		if err := m.progress.enter(api, s, k, m.calls); err != nil {
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
