// Package peers is communication between the ranks of one process on its GPUs: copies,
// and sums in the tree's order. Of ranks that share a GPU no byte leaves the device: sums
// read the peers' arenas. Between GPUs the copy engines move the bytes, so that it does
// not matter whether kernels reach the other card, and what is to be added is added from
// the rank's own memory, piece by piece: see pieces.go.
package peers

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/meet"
	"github.com/spillway-ml/spillway/comm/world"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// DefaultTimeout is how long an operation waits for its peers.
const DefaultTimeout = world.DefaultTimeout

// Sum adds buffers of the ranks in the order of comm.Adder, or from left to right:
// kernels/cuda has it.
type Sum interface {
	// Enqueue adds the sum of n elements at srcs, one for each rank, to a stream. It
	// goes to every one of dsts, or is added to what is there. A dst may be one of
	// the srcs. It does not allocate, and keeps neither list.
	Enqueue(api driver.API, s driver.Stream, dsts, srcs []driver.Address, n int64, accumulate bool) error
}

// Options of a World.
type Options struct {
	// Timeout is how long a rank waits in an operation for another one to
	// arrive. Default 60 s.
	Timeout time.Duration
	// Sum makes a sum of elements, for one rank, on its GPU. From left to right it is of f32.
	Sum func(rank int, dtype graph.DType, order graph.SumOrder) (Sum, error)
	// GPU is the ordinal of each rank's; nil: all share one.
	GPU []int
	// Scratch is the bytes of device memory that a rank takes for what it adds of other
	// GPUs' ranks: ScratchBytes. Sums come in as large pieces as it holds.
	Scratch int64
}

// World is the ranks of a job on the GPUs of a process.
type World struct {
	*meet.World
	o     Options
	ports []*port // by rank; nil: not yet, or it adds nothing of other GPUs
	ends  []end   // by rank
}

// end is whether a rank's streams run nothing any more. Nobody asks about its events once
// done is set, for it destroys them; they are asked about under mu.
type end struct {
	mu   sync.Mutex
	done bool
}

// New returns the world of the mesh's ranks; an empty mesh has one.
func New(mesh []graph.Axis, o Options) (*World, error) {
	if o.Sum == nil {
		return nil, errors.New("peers: want sums")
	}
	w := &World{o: o}
	var err error
	w.World, err = meet.New("peers", mesh, o.Timeout, func(m *meet.Member) meet.Binder { return &member{Member: m, world: w} })
	if err != nil {
		return nil, err
	}
	w.ends = make([]end, w.Size())
	if o.GPU == nil {
		return w, nil
	}
	if len(o.GPU) != w.Size() {
		return nil, fmt.Errorf("peers: GPUs of %d rank(s), want of %d", len(o.GPU), w.Size())
	}
	w.ports = make([]*port, w.Size())
	w.Where(func(rank int) string { return fmt.Sprintf("GPU %d", o.GPU[rank]) })
	return w, nil
}

// leave is what a rank whose streams have ended does before its memory is given back: it
// waits until its peers' streams have run what they read of it. After a collective that
// all have run to its end nobody does; one that failed may have left copies behind.
func (w *World) leave(all map[int]*meet.Member, rank int, ctx *cuda.Context, deadline time.Time) error {
	own := &w.ends[rank]
	own.mu.Lock()
	own.done = true
	own.mu.Unlock()
	if soon := time.Now().Add(leaveGrace); soon.Before(deadline) {
		deadline = soon
	}
	for axis := -1; axis < len(all)-1; axis++ {
		for i := range all[axis].Size() {
			p := all[axis].Own(i).(*member)
			if r := p.GlobalRank(); p.done != 0 && !w.passed(r, p.done, ctx.Driver(), deadline) {
				return fmt.Errorf("%s still reads its memory", w.Names([]int{r}))
			}
		}
	}
	return nil
}

// passed waits until a rank's streams have ended, or run to its last record of an event. A
// rank whose own GPU is lost can't ask for that: it waits for the end.
func (w *World) passed(rank int, done driver.Event, api driver.API, deadline time.Time) bool {
	ran := func() bool {
		of := &w.ends[rank]
		of.mu.Lock()
		defer of.mu.Unlock()
		if of.done {
			return true
		}
		ok, err := api.Done(done)
		return ok && err == nil
	}
	for !ran() {
		if time.Now().After(deadline) {
			return false
		}
		time.Sleep(100 * time.Microsecond)
	}
	return true
}

// leaveGrace is how long a rank that ends waits for the others' streams.
const leaveGrace = 8 * time.Second

// far tells whether two ranks of the world are on different GPUs.
func (w *World) far(a, b int) bool { return w.o.GPU != nil && w.o.GPU[a] != w.o.GPU[b] }

// Groups returns all of a rank's memberships by mesh axis, −1 for all ranks. ctx
// is the rank's context, on whose goroutine this and the groups' methods are
// called.
func (w *World) Groups(ctx *cuda.Context) (map[int]comm.Group, error) {
	rank := ctx.Rank()
	all, err := meet.AllAt(w.World, rank)
	if err != nil {
		return nil, err
	}
	if w.ports != nil && w.o.Scratch > 0 && w.ports[rank] == nil {
		if w.ports[rank], err = newPort(ctx, w.o.Scratch); err != nil {
			return nil, fmt.Errorf("peers: %w", err)
		}
	}
	ctx.BeforeFree(func(deadline time.Time) error { return w.leave(all, rank, ctx, deadline) })
	groups := make(map[int]comm.Group, len(all))
	for axis := -1; axis < len(all)-1; axis++ {
		m := all[axis].Own(all[axis].Rank()).(*member)
		if m.ctx != nil {
			return nil, fmt.Errorf("peers: rank %d has its groups already", rank)
		}
		m.ctx = ctx
		m.find()
		for _, e := range []*driver.Event{&m.ready, &m.done} {
			if *e, err = ctx.DriverEvent(); err != nil {
				return nil, fmt.Errorf("peers: %w", err)
			}
		}
		if err := m.watch(); err != nil {
			return nil, fmt.Errorf("peers: %w", err)
		}
		groups[axis] = m.Member
	}
	return groups, nil
}
