// Package inproc is communication between the ranks of one process: each rank
// reads its peers' arenas directly, so that every byte of a collective is read
// once and written once.
package inproc

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/graph"
)

// DefaultTimeout is how long an operation waits for its peers.
const DefaultTimeout = 60 * time.Second

// Options of a World.
type Options struct {
	// Timeout is how long a rank waits in an operation for another one to
	// arrive. Default 60 s.
	Timeout time.Duration
}

// World is the ranks of a job in this process, with their groups: the world
// (axis −1) and, for each mesh axis, the ranks that differ in it alone.
//
// An error in one group ends all: a rank that fails anywhere is missing
// everywhere.
type World struct {
	mesh    []graph.Axis
	size    int
	timeout time.Duration
	groups  []*group
	members [][]*member // by axis + 1, rank

	failed atomic.Bool // set after err
	mu     sync.Mutex
	err    error
	hooks  []func(error)
}

// New returns the world of the mesh's ranks; an empty mesh has one.
func New(mesh []graph.Axis, o Options) (*World, error) {
	w := &World{mesh: slices.Clone(mesh), size: 1, timeout: o.Timeout}
	if w.timeout <= 0 {
		w.timeout = DefaultTimeout
	}
	for i, a := range mesh {
		if a.Size < 1 {
			return nil, fmt.Errorf("inproc: mesh axis %d (%s) has size %d, want at least 1", i, a.Name, a.Size)
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
	stride := w.size
	for i, a := range mesh {
		stride /= a.Size
		for first := range w.size {
			if first/stride%a.Size != 0 {
				continue
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
	for i, r := range ranks {
		m := &member{group: g, index: i, wake: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
		m.timer.Stop()
		g.members = append(g.members, m)
		w.members[slot][r] = m
	}
	w.groups = append(w.groups, g)
}

// Size returns the number of ranks.
func (w *World) Size() int { return w.size }

// Group returns rank's membership along a mesh axis, −1 for all ranks.
func (w *World) Group(rank, axis int) (comm.Group, error) {
	if rank < 0 || rank >= w.size {
		return nil, fmt.Errorf("inproc: rank %d of %d ranks", rank, w.size)
	}
	if axis < -1 || axis >= len(w.mesh) {
		return nil, fmt.Errorf("inproc: mesh axis %d of %d axes", axis, len(w.mesh))
	}
	return w.members[axis+1][rank], nil
}

// Groups returns all of rank's memberships by mesh axis, −1 for all ranks.
func (w *World) Groups(rank int) (map[int]comm.Group, error) {
	groups := make(map[int]comm.Group, len(w.members))
	for axis := -1; axis < len(w.mesh); axis++ {
		g, err := w.Group(rank, axis)
		if err != nil {
			return nil, err
		}
		groups[axis] = g
	}
	return groups, nil
}

// Abort ends every group with err; the first call counts.
func (w *World) Abort(err error) { w.fail(fmt.Errorf("%w: %w", comm.ErrAborted, err)) }

// fail makes err the world's error, unless it has one, wakes who waits and
// returns the world's error.
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
		g.wakeAll()
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
