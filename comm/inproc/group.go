package inproc

import (
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/direct"
	"github.com/spillway-ml/spillway/comm/meet"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
)

// member is one rank in a group. An operation has two rendezvous, and takes no
// allocation:
//
//	meet    every rank has posted its kernel; the last one to come compares
//	        the signatures
//	move    every rank reads its peers' memory through the posted kernels; of a
//	        pair, the receiver does
//	leave   wait until all have moved: nobody reads my inputs any more
//
// An error (Abort, a timeout, a mismatch) releases the ranks that wait to meet: the
// meeting can no longer take place, so no rank reads their memory. It does not release ranks
// that wait for the others to leave, because peers may still be copying from their memory;
// that copying always ends.
type member struct{ *meet.Member }

var _ cpu.PeerKernel = (*kernel)(nil)

// kernel is one bound operation of one rank.
type kernel struct {
	*meet.Op
	m   *member
	own device.Ptr // any range of the rank's memory: tells the checker which rank runs the kernel

	memory direct.Operands
	mover  *direct.Mover
}

func (k *kernel) ReachesPeers() {}

// met returns the kernel that member i runs at the meeting: see meet.Op.Met.
func (k *kernel) met(i int) *kernel { return k.Op.Met(i).(*kernel) }

// Run runs the operation. It returns when no peer reads the rank's inputs any more.
func (k *kernel) Run() error {
	m := k.m
	if err := m.Enter(k.Call); err != nil {
		return err
	}
	defer m.Leave()
	if k.Sig.Op == comm.SendRecv {
		return k.point()
	}
	k.Begin()
	if err := k.Meet(true); err != nil {
		return err
	}
	k.work()
	k.AllLeft()
	return nil
}

// work does this rank's part of the operation. If it panics, the panic becomes the rank's
// error, and the rank still leaves the meeting, so that no peer hangs.
func (k *kernel) work() {
	moved := false
	defer func() {
		k.Leave()
		if !moved {
			k.AllLeft()
		}
	}()
	for i := range k.mover.Peers {
		k.mover.Peers[i] = k.met(i).memory
	}
	cpu.Enter(k.own)
	defer cpu.Leave(k.own)
	read, written := k.mover.Move()
	k.Count(k.Sent, read, written)
	moved = true
}

// point runs a Send, which waits for the receiver to have copied, or a Recv.
func (k *kernel) point() error {
	if err := k.Meet(true); err != nil {
		return err
	}
	if k.Sends() {
		k.Leave()
		k.AllLeft()
		k.Count(k.Sent, 0, 0)
		return nil
	}
	k.work()
	return nil
}

// Bind checks the operands' memory and chooses how to move their bytes.
func (m *member) Bind(o *meet.Op) (device.Kernel, error) {
	size := m.Size()
	if o.Sig.Op == comm.SendRecv {
		size = 2
	}
	mover, memory, err := direct.New(o.Call, m.Rank(), size)
	if err != nil {
		return nil, err
	}
	k := &kernel{Op: o, m: m, mover: mover, memory: memory}
	for _, p := range o.Touches() {
		k.own = p
	}
	return k, nil
}
