package mpi

import (
	"fmt"
	"time"

	"github.com/spillway-ml/spillway/internal/dl"

	"github.com/spillway-ml/spillway/comm"
)

// Peer is the library's own collectives, which Spillway does not train with: they are
// there to be measured against, as a loop in C over the same library would be.
type Peer struct {
	p          *Process
	float, sum uintptr
	fn         map[comm.Op]uintptr
}

var peerNames = map[comm.Op]string{comm.AllReduce: "MPI_Allreduce", comm.ReduceScatter: "MPI_Reduce_scatter_block", comm.AllGather: "MPI_Allgather",
	comm.Broadcast: "MPI_Bcast", comm.AllToAll: "MPI_Alltoall"}

// Peer finds the library's collectives.
func (p *Process) Peer() (*Peer, error) {
	l := p.engine.lib
	peer := &Peer{p: p, fn: map[comm.Op]uintptr{}}
	var err error
	switch {
	case l.symbols:
		if peer.float, err = dl.Symbol(l.handle, "ompi_mpi_float"); err == nil {
			peer.sum, err = dl.Symbol(l.handle, "ompi_mpi_op_sum")
		}
	case l.name == families[MPICH].name:
		peer.float, peer.sum = 0x4c00040a, 0x58000003
	default:
		err = fmt.Errorf("mpi: the collectives of %s are not measured", l.name)
	}
	for op, name := range peerNames {
		if err == nil {
			peer.fn[op], err = dl.Symbol(l.handle, name)
		}
	}
	return peer, err
}

// Run runs a collective of float32 so many times, on every rank of the job, and
// returns how long that took here: send and recv lie apart, each of the whole buffer's
// length; an all-gather sends, and a reduce-scatter receives, its first part.
func (p *Peer) Run(op comm.Op, send, recv []byte, times int) (took time.Duration, err error) {
	l := p.p.engine.lib
	n := uintptr(len(recv) / 4)
	part := n / uintptr(p.p.engine.world)
	var args []uintptr
	switch op {
	case comm.AllReduce:
		args = []uintptr{address(send), address(recv), n, p.float, p.sum, l.world}
	case comm.ReduceScatter:
		args = []uintptr{address(send), address(recv), part, p.float, p.sum, l.world}
	case comm.AllGather, comm.AllToAll:
		args = []uintptr{address(send), part, p.float, address(recv), part, p.float, l.world}
	case comm.Broadcast:
		args = []uintptr{address(recv), n, p.float, 0, l.world}
	default:
		return 0, fmt.Errorf("mpi: no %s to measure", op)
	}
	err = p.p.engine.call(func() error {
		began := time.Now()
		for range times {
			if err := l.check(peerNames[op], dl.Call(p.fn[op], args...)); err != nil {
				return err
			}
		}
		took = time.Since(began)
		return nil
	})
	return took, err
}

// call has the engine's thread run f, which blocks it, and with it heartbeats.
func (e *engine) call(f func() error) error {
	x := &exchange{run: f, done: make(chan error, 1)}
	e.give(x)
	return e.wait(x)
}
