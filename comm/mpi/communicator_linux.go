package mpi

import (
	"fmt"
	"unsafe"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/internal/dl"
)

// makeCommunicators creates an MPI communicator for each group of this process's rank.
// Creating one blocks the engine, and with it heartbeats and streams. To keep that short, the
// processes first synchronize by messages, which the end of the job can interrupt.
func (w *World) makeCommunicators() {
	defer crash.Guard()
	fail := func(err error) {
		_ = w.fail(fmt.Errorf("%w: rank %d: groups of the mesh: %w", comm.ErrLost, w.first, err))
	}
	mem, err := offHeap(w.engine.world)
	if err != nil {
		fail(err)
		return
	}
	var list []transfer
	for p := range w.engine.world {
		if p != w.engine.rank {
			list = append(list, transfer{peer: p, tag: tagJoin, mem: mem[p : p+1]}, transfer{send: true, peer: p, tag: tagJoin, mem: mem[w.engine.rank:][:1]})
		}
	}
	if err := w.wait(w.engine.begin(list, true)); err != nil { // no operation waits for them yet
		if w.Err() == nil {
			fail(err)
		}
		return
	}
	err = w.engine.call(func() error {
		for _, ranks := range w.members {
			if err := w.split(ranks[0]); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		fail(err)
		return
	}
	close(w.grouped)
}

// split creates the communicator of a rank's group, on the engine's thread. All processes
// call it at the same time for the groups of one axis.
func (w *World) split(m *member) error {
	l := w.engine.lib
	var made uint64 // a handle of 32 bits fills the lower half
	err := l.check("MPI_Comm_split", dl.Call(l.fn.split, l.world, uintptr(m.Global[0]), uintptr(m.Index), uintptr(unsafe.Pointer(&made))))
	m.group = uintptr(made)
	return err
}
