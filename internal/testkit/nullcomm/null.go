// Package nullcomm is a communication group for the null device: it checks operands and transfers
// nothing.
package nullcomm

import (
	"fmt"
	"sync"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/nulldevice"
)

// Group is rank's membership in a group whose other ranks need not exist.
type Group struct {
	rank, size int
	mu         sync.Mutex
	err        error
	hooks      []func(error)
}

var _ comm.Group = (*Group)(nil)

// New returns the membership of index rank of size.
func New(rank, size int) *Group { return &Group{rank: rank, size: size} }

// Rank returns the index in the group.
func (g *Group) Rank() int { return g.rank }

// Size returns the number of ranks.
func (g *Group) Size() int { return g.size }

// Stats returns zeros, because nothing is transferred.
func (g *Group) Stats() comm.Stats { return comm.Stats{} }

// Abort keeps the first error, for Err and OnError.
func (g *Group) Abort(err error) {
	g.mu.Lock()
	if g.err != nil {
		g.mu.Unlock()
		return
	}
	err = fmt.Errorf("%w: %w", comm.ErrAborted, err)
	g.err = err
	hooks := g.hooks
	g.mu.Unlock()
	for _, f := range hooks {
		f(err)
	}
}

// OnError registers f for the first Abort.
func (g *Group) OnError(f func(error)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.hooks = append(g.hooks, f)
}

// Err returns the error of the first Abort.
func (g *Group) Err() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.err
}

func (g *Group) kernel(op comm.Op, label string, err error, ranges ...device.Ptr) (device.Kernel, error) {
	if err != nil {
		return nil, fmt.Errorf("rank %d: %s %q: %w", g.rank, op, label, err)
	}
	return nulldevice.NewKernel(label, ranges...), nil
}

func (g *Group) peer(i int) error {
	if i < 0 || i >= g.size {
		return fmt.Errorf("rank %d of %d ranks", i, g.size)
	}
	return nil
}

func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// AllGather binds a gather of shards.
func (g *Group) AllGather(label string, shard, full device.Ptr, dtype graph.DType) (device.Kernel, error) {
	return g.kernel(comm.AllGather, label, comm.CheckShards(full, shard, dtype, g.rank, g.size, false), shard, full)
}

// ReduceScatter binds a sum of full buffers.
func (g *Group) ReduceScatter(label string, full, shard device.Ptr, dtype graph.DType, order graph.SumOrder, accumulate bool, from ...int) (device.Kernel, error) {
	return g.kernel(comm.ReduceScatter, label, first(comm.CheckScatter(full, shard, dtype, g.rank, g.size, order, accumulate), comm.CheckSum(dtype)), full, shard)
}

// ReduceLeaves binds a sum of full buffers.
func (g *Group) ReduceLeaves(label string, full, shard device.Ptr, dtype graph.DType, accumulate bool, squares comm.Squares, from ...int) (device.Kernel, error) {
	return g.kernel(comm.ReduceScatter, label, comm.CheckScatter(full, shard, dtype, g.rank, g.size, graph.SumSequential, accumulate), full, shard, squares.Acc)
}

// AllReduce binds a sum in place.
func (g *Group) AllReduce(label string, buf device.Ptr, dtype graph.DType, order graph.SumOrder) (device.Kernel, error) {
	return g.kernel(comm.AllReduce, label, first(comm.CheckOrder(order), comm.CheckBuffer(buf, dtype), comm.CheckSum(dtype)), buf)
}

// Broadcast binds a broadcast.
func (g *Group) Broadcast(label string, buf device.Ptr, dtype graph.DType, root int) (device.Kernel, error) {
	return g.kernel(comm.Broadcast, label, first(comm.CheckBuffer(buf, dtype), g.peer(root)), buf)
}

// AllToAll binds an exchange.
func (g *Group) AllToAll(label string, send, recv device.Ptr, dtype graph.DType) (device.Kernel, error) {
	return g.kernel(comm.AllToAll, label, first(comm.CheckBuffer(send, dtype), comm.CheckBuffer(recv, dtype)), send, recv)
}

// Send binds a send.
func (g *Group) Send(label string, buf device.Ptr, dtype graph.DType, to int) (device.Kernel, error) {
	return g.kernel(comm.SendRecv, label, first(comm.CheckBuffer(buf, dtype), g.peer(to)), buf)
}

// Recv binds a receive.
func (g *Group) Recv(label string, buf device.Ptr, dtype graph.DType, from int) (device.Kernel, error) {
	return g.kernel(comm.SendRecv, label, first(comm.CheckBuffer(buf, dtype), g.peer(from)), buf)
}

// Barrier binds a barrier.
func (g *Group) Barrier(label string) (device.Kernel, error) {
	return g.kernel(comm.Barrier, label, nil)
}
