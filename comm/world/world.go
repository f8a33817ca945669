// Package world is the common part of all transports: the groups of a mesh, the error that
// ends a job, and one rank's membership in a group. A transport adds how ranks synchronize and
// how bytes move.
package world

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// DefaultTimeout is how long a rank may keep others waiting.
const DefaultTimeout = 60 * time.Second

// Groups lists the groups of a mesh: all ranks in slot 0, then for each axis the ranks that
// differ in it alone. An empty mesh has one rank. transport is the name that errors begin
// with.
func Groups(transport string, mesh []graph.Axis) (size int, list []watch.Group, err error) {
	size = 1
	for i, a := range mesh {
		if a.Size < 1 {
			return 0, nil, fmt.Errorf("%s: mesh axis %d (%s) has size %d, want at least 1", transport, i, a.Name, a.Size)
		}
		size *= a.Size
	}
	add := func(slot int, name string, first, stride, n int) {
		g := watch.Group{Name: name, Slot: slot}
		for i := range n {
			g.Ranks = append(g.Ranks, first+i*stride)
		}
		list = append(list, g)
	}
	add(0, "world", 0, 1, size)
	stride := size
	for i, a := range mesh {
		stride /= a.Size
		for first := range size {
			if first/stride%a.Size == 0 {
				add(i+1, "axis "+a.Name, first, stride, a.Size)
			}
		}
	}
	return size, list, nil
}

// End holds the error that ends a world. The first error counts; later ones are dropped.
type End struct {
	fail func(error) error

	failed atomic.Bool // set after err
	mu     sync.Mutex
	err    error
	hooks  []func(error)
}

// Open sets the function with which a transport ends the world. fail must call Settle with
// its error and return the world's error.
func (e *End) Open(fail func(error) error) { e.fail = fail }

// Fail makes err the world's error unless the world already has one. It returns the world's
// error.
func (e *End) Fail(err error) error { return e.fail(err) }

// Abort ends every group with err.
func (e *End) Abort(err error) { _ = e.fail(fmt.Errorf("%w: %w", comm.ErrAborted, err)) }

// Settle makes err the world's error and calls first, then the functions of OnError. If
// the world has an error, it does nothing. It returns the world's error.
func (e *End) Settle(err error, first func()) error {
	e.mu.Lock()
	if e.err != nil {
		defer e.mu.Unlock()
		return e.err
	}
	e.err = err
	e.failed.Store(true)
	hooks := e.hooks
	e.mu.Unlock()
	first()
	for _, f := range hooks {
		f(err)
	}
	return err
}

// OnError registers f to be called with the error that ends the world. If the world has
// already ended, f is called at once.
func (e *End) OnError(f func(error)) {
	e.mu.Lock()
	err := e.err
	if err == nil {
		e.hooks = append(e.hooks, f)
	}
	e.mu.Unlock()
	if err != nil {
		f(err)
	}
}

// Failed is true once the world has an error. It takes no lock.
func (e *End) Failed() *atomic.Bool { return &e.failed }

// Err returns the error that ended the world, nil if none has.
func (e *End) Err() error {
	if !e.failed.Load() {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.err
}

// kinds lists the kinds of errors; processes send each other the index.
var kinds = [...]error{comm.ErrAborted, comm.ErrTimeout, comm.ErrMismatch, comm.ErrLost}

// Kind returns the index of an error's kind in kinds.
func Kind(err error) (kind int) {
	for i, k := range kinds {
		if errors.Is(err, k) {
			kind = i
		}
	}
	return kind
}

// told is an error that another process reported.
type told struct {
	kind error
	text string
}

func (e *told) Error() string { return e.text }
func (e *told) Unwrap() error { return e.kind }

// Told returns the error that another process reported, from its kind and text.
func Told(kind int, text string) error {
	return &told{kinds[min(max(kind, 0), len(kinds)-1)], text}
}

// ops lists the operations; processes send each other the index.
var ops = [...]comm.Op{"", comm.AllGather, comm.ReduceScatter, comm.AllReduce, comm.Broadcast, comm.AllToAll, comm.SendRecv, comm.Barrier}

// OpNumber returns the index of an operation in ops, 0 if unknown.
func OpNumber(op comm.Op) uint64 { return uint64(max(slices.Index(ops[:], op), 0)) }

// OpOf returns the operation with the given index; it accepts any number.
func OpOf(number uint64) comm.Op { return ops[number%uint64(len(ops))] }

// Member is one rank in a group of a world.
type Member struct {
	comm.Caller
	*End
	comm.Counter
	Name   string
	Slot   int
	Global []int // global rank by index in the group

	busy atomic.Bool
}

// Join initializes the member as rank index i of group g. bind makes the kernel of an
// operation whose operands have been checked.
func (m *Member) Join(e *End, g watch.Group, i int, bind func(comm.Call) (device.Kernel, error)) {
	m.End, m.Name, m.Slot, m.Global = e, g.Name, g.Slot, g.Ranks
	m.Caller = comm.Caller{Index: i, Ranks: len(g.Ranks), World: g.Ranks[i], Bind: bind}
}

// Enter begins an operation, which Leave ends. Running two operations at the same time is an
// error that ends the world.
func (m *Member) Enter(c comm.Call) error {
	if !m.busy.CompareAndSwap(false, true) {
		return m.Fail(fmt.Errorf("%w: rank %d runs two operations of its %s group at once, the second is %s %q: they belong on one stream",
			comm.ErrAborted, m.World, m.Name, c.Sig.Op, c.Name))
	}
	return nil
}

// Leave ends an operation.
func (m *Member) Leave() { m.busy.Store(false) }
