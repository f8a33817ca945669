// Package peers is the transport between the ranks of one process on its GPUs: copies, and
// sums in the order of comm.Adder. Sums of ranks that share a GPU read the peers' arenas
// directly. Between GPUs, copy engines move the bytes into the rank's own memory piece by
// piece, where they are added (pieces.go); kernels need no peer access to other GPUs.
package peers

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/meet"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// Sum adds buffers of the ranks in the order of comm.Adder, or from left to right. Package
// kernels/cuda implements it.
type Sum interface {
	// Enqueue adds a kernel to a stream that sums n elements of every rank's buffer, srcs.
	// It writes the sum to each of dsts, or adds it to them if accumulate is set. A dst may
	// be one of srcs. Enqueue does not allocate, and keeps neither list.
	Enqueue(api driver.API, s driver.Stream, dsts, srcs []driver.Address, n int64, accumulate bool) error
}

// Options of a World.
type Options struct {
	// Timeout is how long a rank waits in an operation for another one to
	// arrive. Default 60 s.
	Timeout time.Duration
	// Sum creates the Sum of a rank on its GPU. In the order SumSequential the result is f32.
	Sum func(rank int, dtype graph.DType, order graph.SumOrder) (Sum, error)
	// GPU is the ordinal of each rank's GPU; nil: all ranks share one GPU.
	GPU []int
	// Scratch is the device memory in bytes that each rank allocates to receive addends from
	// other GPUs: use ScratchBytes. Pieces of a sum are as large as it allows.
	Scratch int64
}

// World is the ranks of a job on the GPUs of a process.
type World struct {
	*meet.World
	o     Options
	ports []*port // by rank; nil: not created yet, or not needed
	ends  []end   // by rank
}

// end says whether a rank's streams have finished. Once done is set the rank destroys its
// events, so other ranks must not query them; they query events only under mu.
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

// leave runs after a rank's streams have ended and before its memory is freed. It waits until
// the peers' streams no longer read that memory. They may still do so after a collective that
// failed; a complete collective leaves no reads behind.
func (w *World) leave(all []*meet.Member, rank int, ctx *cuda.Context, deadline time.Time) error {
	own := &w.ends[rank]
	own.mu.Lock()
	own.done = true
	own.mu.Unlock()
	if soon := time.Now().Add(leaveGrace); soon.Before(deadline) {
		deadline = soon
	}
	for _, of := range all {
		for i := range of.Size() {
			p := of.Own(i).(*member)
			if r := p.GlobalRank(); p.done != 0 && !w.passed(r, p.done, ctx.Driver(), deadline) {
				return fmt.Errorf("%s still reads its memory", w.Names([]int{r}))
			}
		}
	}
	return nil
}

// passed waits until a rank's streams have ended or have passed their last Record of the
// event done. A caller whose own GPU is lost cannot query events and waits for the end.
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

// leaveGrace is how long an ending rank waits for the other ranks' streams.
const leaveGrace = 8 * time.Second

// far tells whether two ranks of the world are on different GPUs.
func (w *World) far(a, b int) bool { return w.o.GPU != nil && w.o.GPU[a] != w.o.GPU[b] }

// Groups returns all of a rank's memberships by mesh axis, −1 for all ranks. ctx
// is the rank's context, on whose goroutine this and the groups' methods are
// called.
func (w *World) Groups(ctx *cuda.Context) (map[int]comm.Group, error) {
	rank := ctx.Rank()
	all, err := w.Members(rank)
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
	for slot, of := range all {
		m := of.Own(of.Rank()).(*member)
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
		groups[slot-1] = m.Member
	}
	return groups, nil
}
