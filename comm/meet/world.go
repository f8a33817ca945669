// Package meet is the common part of transports between ranks of one process: the world of
// a mesh's ranks and its groups, the barriers (meetings) of ranks on the host, and the checks
// of operands. A transport adds how the bytes move.
package meet

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/comm/world"
	"github.com/spillway-ml/spillway/graph"
)

// World holds the ranks of a job in this process and their groups: all ranks (axis −1) and,
// for each mesh axis, the ranks that differ only in that coordinate.
//
// An error in one group ends all groups, because a rank that has failed in one group will
// not arrive in the others.
type World struct {
	world.End
	transport string // the transport's name, for errors
	size      int
	timeout   time.Duration
	members   [][]*Member // by axis + 1 and rank
	where     func(rank int) string
}

// New returns the world of the mesh's ranks; an empty mesh has one rank. Errors begin with
// transport. timeout is how long a rank waits for another to arrive (DefaultTimeout if not
// positive). join returns the transport's part of each member.
func New(transport string, mesh []graph.Axis, timeout time.Duration, join func(*Member) Binder) (*World, error) {
	w := &World{transport: transport, timeout: cmp.Or(max(timeout, 0), world.DefaultTimeout)}
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

// Members returns a rank's memberships: of all ranks, then along each mesh axis.
func (w *World) Members(rank int) ([]*Member, error) {
	if rank < 0 || rank >= w.size {
		return nil, fmt.Errorf("%s: rank %d of %d ranks", w.transport, rank, w.size)
	}
	list := make([]*Member, len(w.members))
	for slot := range list {
		list[slot] = w.members[slot][rank]
	}
	return list, nil
}

// Where sets a function that returns where a rank runs ("GPU 3"); errors that name a rank
// include it. Call Where before the ranks run anything.
func (w *World) Where(f func(rank int) string) { w.where = f }

// Size returns the number of ranks.
func (w *World) Size() int { return w.size }

// fail makes err the world's error and wakes all waiting ranks.
func (w *World) fail(err error) error {
	return w.Settle(err, func() {
		for _, list := range w.members {
			for _, m := range list {
				m.rouse()
			}
		}
	})
}

// Names formats a list of ranks: "rank 3", "ranks 1, 2" or "ranks 1 (GPU 0), 2 (GPU 1)".
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
