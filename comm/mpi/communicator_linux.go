package mpi

import (
	"fmt"
	"unsafe"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/internal/dl"
)

// makeCommunicators gives every group that this process's rank is in a communicator.
// Making one blocks the engine, and with it heartbeats and streams: so the processes
// meet before it by messages, which the job's end interrupts, and it is short.
func (w *World) makeCommunicators() {
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
	if err := w.exchangeQuietly(list); err != nil {
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

// split makes the communicator of a rank's group, on the engine's thread: every
// process calls it for the groups of one axis at once.
func (w *World) split(m *member) error {
	l := w.engine.lib
	var made uint64 // a handle of 32 bits fills the lower half
	err := l.check("MPI_Comm_split", dl.Call(l.fn.split, l.world, uintptr(m.Global[0]), uintptr(m.Index), uintptr(unsafe.Pointer(&made))))
	m.group = uintptr(made)
	return err
}

// exchangeQuietly is exchange for what nobody waits for yet.
func (w *World) exchangeQuietly(list []transfer) error { return w.wait(w.engine.begin(list, true)) }

// awaitGroups returns when the groups have their communicators, or the job's error.
func (w *World) awaitGroups() error {
	select {
	case <-w.grouped:
		return nil
	case <-w.over:
		return w.Err()
	}
}
