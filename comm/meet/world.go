// Package meet is what transports between ranks of one process share: the world
// of a mesh's ranks and its groups, the meetings of ranks on the host, and the
// checks of operands. A transport adds how the bytes move.
package meet

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

// World is the ranks of a job in this process, with their groups: the world
// (axis −1) and, for each mesh axis, the ranks that differ in it alone.
//
// An error in one group ends all: a rank that fails anywhere is missing
// everywhere.
type World struct {
	transport string // for errors
	mesh      []graph.Axis
	size      int
	timeout   time.Duration
	members   [][]*Member // by axis + 1, rank
	where     func(rank int) string

	failed atomic.Bool // set after err
	mu     sync.Mutex
	err    error
	hooks  []func(error)
}

// New returns the world of the mesh's ranks; an empty mesh has one. transport
// is the name that errors begin with, timeout how long a rank waits for another
// one to arrive (DefaultTimeout if not positive). join gives each member what
// the transport adds to it.
func New(transport string, mesh []graph.Axis, timeout time.Duration, join func(*Member) Binder) (*World, error) {
	w := &World{transport: transport, mesh: slices.Clone(mesh), size: 1, timeout: timeout}
	if w.timeout <= 0 {
		w.timeout = DefaultTimeout
	}
	for i, a := range mesh {
		if a.Size < 1 {
			return nil, fmt.Errorf("%s: mesh axis %d (%s) has size %d, want at least 1", transport, i, a.Name, a.Size)
		}
		w.size *= a.Size
	}
	all := make([]int, w.size)
	for r := range all {
		all[r] = r
	}
	w.members = make([][]*Member, len(mesh)+1)
	for i := range w.members {
		w.members[i] = make([]*Member, w.size)
	}
	w.add(0, "world", all, join)
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
			w.add(i+1, "axis "+a.Name, ranks, join)
		}
	}
	return w, nil
}

func (w *World) add(slot int, name string, ranks []int, join func(*Member) Binder) {
	g := &group{world: w, name: name, ranks: ranks}
	for i, r := range ranks {
		m := &Member{group: g, wake: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
		m.Caller = comm.Caller{Index: i, Ranks: len(ranks), World: r, Bind: m.bind}
		m.timer.Stop()
		m.own = join(m)
		g.members = append(g.members, m)
		w.members[slot][r] = m
	}
	g.all = newPlace(g, g.members)
	g.pairs = make([]*place, len(ranks)*len(ranks))
	for from, a := range g.members {
		for to, b := range g.members {
			if from != to {
				g.pairs[from*len(ranks)+to] = newPlace(g, []*Member{a, b})
			}
		}
	}
}

// At returns a rank's membership along a mesh axis, −1 for all ranks.
func At(w *World, rank, axis int) (*Member, error) {
	if rank < 0 || rank >= w.size {
		return nil, fmt.Errorf("%s: rank %d of %d ranks", w.transport, rank, w.size)
	}
	if axis < -1 || axis >= len(w.mesh) {
		return nil, fmt.Errorf("%s: mesh axis %d of %d axes", w.transport, axis, len(w.mesh))
	}
	return w.members[axis+1][rank], nil
}

// AllAt returns all of a rank's memberships by mesh axis, −1 for all ranks.
func AllAt(w *World, rank int) (map[int]*Member, error) {
	all := make(map[int]*Member, len(w.members))
	for axis := -1; axis < len(w.mesh); axis++ {
		m, err := At(w, rank, axis)
		if err != nil {
			return nil, err
		}
		all[axis] = m
	}
	return all, nil
}

// Where has errors say of each rank that they name where it runs ("GPU 3"). It is called
// before the ranks run anything.
func (w *World) Where(f func(rank int) string) { w.where = f }

// Size returns the number of ranks.
func (w *World) Size() int { return w.size }

// Abort ends every group with err; the first call counts.
func (w *World) Abort(err error) { _ = w.fail(fmt.Errorf("%w: %w", comm.ErrAborted, err)) }

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
	for _, list := range w.members {
		for _, m := range list {
			m.rouse()
		}
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

// Names lists ranks: "rank 3", "ranks 1, 2"; "ranks 1 (GPU 0), 2 (GPU 1)".
func (w *World) Names(ranks []int) string {
	s := make([]string, len(ranks))
	for i, r := range ranks {
		s[i] = fmt.Sprint(r)
		if w.where != nil {
			s[i] += " (" + w.where(r) + ")"
		}
	}
	if len(s) == 1 {
		return "rank " + s[0]
	}
	return "ranks " + strings.Join(s, ", ")
}
