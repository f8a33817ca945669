// Package onegpu is communication between ranks of one process that share a GPU:
// copies, and sums in the tree's order, straight from the peers' arenas. No byte
// leaves the device.
package onegpu

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// DefaultTimeout is how long an operation waits for its peers.
const DefaultTimeout = 60 * time.Second

// Sum adds buffers of the ranks in the order of comm.Adder: kernels/cuda has it.
type Sum interface {
	// Enqueue adds the sum of n elements at srcs, one for each rank, to a stream. It
	// goes to every one of dsts, or is added to what is there. A dst may be one of
	// the srcs. It does not allocate.
	Enqueue(api driver.API, s driver.Stream, dsts, srcs []driver.Address, n int64, accumulate bool) error
}

// Options of a World.
type Options struct {
	// Timeout is how long a rank waits in an operation for another one to
	// arrive. Default 60 s.
	Timeout time.Duration
	// Sum makes a sum of elements, for one rank.
	Sum func(dtype graph.DType) (Sum, error)
}

// World is the ranks of a job on one GPU, with their groups: the world (axis −1)
// and, for each mesh axis, the ranks that differ in it alone.
//
// An error in one group ends all: a rank that fails anywhere is missing
// everywhere.
type World struct {
	mesh    []graph.Axis
	size    int
	opts    Options
	groups  []*group
	members [][]*member // by axis + 1, rank

	failed atomic.Bool // set after err
	mu     sync.Mutex
	err    error
	hooks  []func(error)
}

// New returns the world of the mesh's ranks; an empty mesh has one.
func New(mesh []graph.Axis, o Options) (*World, error) {
	w := &World{mesh: slices.Clone(mesh), size: 1, opts: o}
	if o.Sum == nil {
		return nil, errors.New("onegpu: want sums")
	}
	if w.opts.Timeout <= 0 {
		w.opts.Timeout = DefaultTimeout
	}
	for i, a := range mesh {
		if a.Size < 1 {
			return nil, fmt.Errorf("onegpu: mesh axis %d (%s) has size %d, want at least 1", i, a.Name, a.Size)
		}
		w.size *= a.Size
	}
	all := make([]int, w.size)
	for r := range all {
		all[r] = r
	}
	w.members = make([][]*member, len(mesh)+1)
	for i := range w.members {
		w.members[i] = make([]*member, w.size)
	}
	w.add(0, "world", all)
	for i, a := range mesh {
		for first := range w.size {
			if comm.Coord(mesh, first)[i] != 0 {
				continue
			}
			stride := 1
			for _, inner := range mesh[i+1:] {
				stride *= inner.Size
			}
			ranks := make([]int, a.Size)
			for j := range ranks {
				ranks[j] = first + j*stride
			}
			w.add(i+1, "axis "+a.Name, ranks)
		}
	}
	return w, nil
}

func (w *World) add(slot int, name string, ranks []int) {
	g := &group{world: w, name: name, ranks: ranks, posted: make([]*kernel, len(ranks)), pairs: make([]pair, len(ranks)*len(ranks))}
	g.cond = sync.NewCond(&g.mu)
	for i, r := range ranks {
		m := &member{group: g, index: i}
		m.timer = time.AfterFunc(time.Hour, func() {
			g.mu.Lock()
			m.late = true
			g.cond.Broadcast()
			g.mu.Unlock()
		})
		m.timer.Stop()
		g.members = append(g.members, m)
		w.members[slot][r] = m
	}
	w.groups = append(w.groups, g)
}

// Size returns the number of ranks.
func (w *World) Size() int { return w.size }

// Groups returns all of a rank's memberships by mesh axis, −1 for all ranks. ctx
// is the rank's context, on whose goroutine this and the groups' methods are
// called.
func (w *World) Groups(ctx *cuda.Context) (map[int]comm.Group, error) {
	rank := ctx.Rank()
	if rank < 0 || rank >= w.size {
		return nil, fmt.Errorf("onegpu: rank %d of %d ranks", rank, w.size)
	}
	groups := make(map[int]comm.Group, len(w.members))
	for i, list := range w.members {
		m := list[rank]
		if m.ctx != nil {
			return nil, fmt.Errorf("onegpu: rank %d has its groups already", rank)
		}
		m.ctx = ctx
		for _, e := range []*driver.Event{&m.ready, &m.done} {
			var err error
			if *e, err = ctx.DriverEvent(); err != nil {
				return nil, fmt.Errorf("onegpu: %w", err)
			}
		}
		if err := m.watch(); err != nil {
			return nil, fmt.Errorf("onegpu: %w", err)
		}
		groups[i-1] = m
	}
	return groups, nil
}

// Abort ends every group with err; the first call counts.
func (w *World) Abort(err error) { w.fail(fmt.Errorf("%w: %w", comm.ErrAborted, err)) }

// fail makes err the world's error, unless it has one, wakes who waits and
// returns the world's error. The caller holds no group's lock.
func (w *World) fail(err error) error {
	w.mu.Lock()
	if w.err != nil {
		defer w.mu.Unlock()
		return w.err
	}
	w.err = err
	w.failed.Store(true)
	hooks := w.hooks
	w.mu.Unlock()
	for _, g := range w.groups {
		g.mu.Lock()
		g.cond.Broadcast()
		g.mu.Unlock()
	}
	for _, f := range hooks {
		f(err)
	}
	return err
}

// OnError registers f for the error that ends the world. If it has ended, f is
// called at once.
func (w *World) OnError(f func(error)) {
	w.mu.Lock()
	err := w.err
	if err == nil {
		w.hooks = append(w.hooks, f)
	}
	w.mu.Unlock()
	if err != nil {
		f(err)
	}
}

// Err returns the error that ended the world, nil while it is sound.
func (w *World) Err() error {
	if !w.failed.Load() {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// names lists ranks: "rank 3", "ranks 1, 2".
func names(ranks []int) string {
	s := make([]string, len(ranks))
	for i, r := range ranks {
		s[i] = fmt.Sprint(r)
	}
	if len(s) == 1 {
		return "rank " + s[0]
	}
	return "ranks " + strings.Join(s, ", ")
}
