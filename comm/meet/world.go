// Package meet is what transports between ranks of one process share: the world
// of a mesh's ranks and its groups, the meetings of ranks on the host, and the
// checks of operands. A transport adds how the bytes move.
package meet

import (
	"fmt"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/comm/world"
	"github.com/spillway-ml/spillway/graph"
)

// World is the ranks of a job in this process, with their groups: the world
// (axis −1) and, for each mesh axis, the ranks that differ in it alone.
//
// An error in one group ends all: a rank that fails anywhere is missing
// everywhere.
type World struct {
	world.End
	transport string // for errors
	size      int
	timeout   time.Duration
	members   [][]*Member // by axis + 1, rank
	where     func(rank int) string
}

// New returns the world of the mesh's ranks; an empty mesh has one. transport
// is the name that errors begin with, timeout how long a rank waits for another
// one to arrive (DefaultTimeout if not positive). join gives each member what
// the transport adds to it.
func New(transport string, mesh []graph.Axis, timeout time.Duration, join func(*Member) Binder) (*World, error) {
	w := &World{transport: transport, timeout: timeout}
	if w.timeout <= 0 {
		w.timeout = world.DefaultTimeout
	}
	size, groups, err := world.Groups(transport, mesh)
	if err != nil {
		return nil, err
	}
	w.Open(w.fail)
	w.size = size
	w.members = make([][]*Member, len(mesh)+1)
	for i := range w.members {
		w.members[i] = make([]*Member, size)
	}
	for _, g := range groups {
		w.add(g, join)
	}
	return w, nil
}

func (w *World) add(of watch.Group, join func(*Member) Binder) {
	g := &group{world: w, name: of.Name, ranks: of.Ranks}
	for i, r := range g.ranks {
		m := &Member{group: g, wake: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
		m.Join(&w.End, of, i, m.bind)
		m.timer.Stop()
		m.own = join(m)
		g.members = append(g.members, m)
		w.members[of.Slot][r] = m
	}
	g.all = newPlace(g, g.members)
	g.pairs = make([]*place, len(g.ranks)*len(g.ranks))
	for from, a := range g.members {
		for to, b := range g.members {
			if from != to {
				g.pairs[from*len(g.ranks)+to] = newPlace(g, []*Member{a, b})
			}
		}
	}
}

// At returns a rank's membership along a mesh axis, −1 for all ranks.
func At(w *World, rank, axis int) (*Member, error) {
	if rank < 0 || rank >= w.size {
		return nil, fmt.Errorf("%s: rank %d of %d ranks", w.transport, rank, w.size)
	}
	if axis < -1 || axis >= len(w.members)-1 {
		return nil, fmt.Errorf("%s: mesh axis %d of %d axes", w.transport, axis, len(w.members)-1)
	}
	return w.members[axis+1][rank], nil
}

// AllAt returns all of a rank's memberships by mesh axis, −1 for all ranks.
func AllAt(w *World, rank int) (map[int]*Member, error) {
	all := make(map[int]*Member, len(w.members))
	for axis := -1; axis < len(w.members)-1; axis++ {
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

// fail makes err the world's error and wakes who waits.
func (w *World) fail(err error) error {
	return w.Settle(err, func() {
		for _, list := range w.members {
			for _, m := range list {
				m.rouse()
			}
		}
	})
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
