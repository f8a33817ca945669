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
