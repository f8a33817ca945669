package mpi

import (
	"fmt"
	"time"

	"github.com/spillway-ml/spillway/internal/dl"

	"github.com/spillway-ml/spillway/comm"
)

// Peer runs MPI's own collectives. Spillway does not train with them: they are a baseline
// for benchmarks, equivalent to a C loop over the same library.
type Peer struct {
	p          *Process
	float, sum uintptr
	fn         map[comm.Op]uintptr
}

var peerNames = map[comm.Op]string{comm.AllReduce: "MPI_Allreduce", comm.ReduceScatter: "MPI_Reduce_scatter_block", comm.AllGather: "MPI_Allgather",
	comm.Broadcast: "MPI_Bcast", comm.AllToAll: "MPI_Alltoall"}

// Peer returns MPI's own collectives, for benchmarks.
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

// Run runs a collective of float32 times times and returns the time taken on this rank.
// Every rank of the job must call it. send and recv have the full buffer's length and do not
// overlap. An all-gather sends the first part of send; a reduce-scatter receives into the
// first part of recv.
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
