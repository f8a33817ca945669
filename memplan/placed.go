package memplan

import (
	"cmp"
	"slices"
)

// placedGroup is what has been placed of a group (see timeline.groups), by offset;
// at one offset what came later comes first.
type placedGroup struct {
	all []placed
	// live are those of all that a buffer still to be placed may overlap in time. Of
	// a deep model placed by first steps that is what is alive, not all that came
	// before. It is thinned out as it doubles.
	live []int32
	span []span // of live: apart, so that who is asked for is found in few cache lines
	thin int    // the length of live at which that happens
	head int    // of find: into live
}

// placed is a buffer's offset and its position in the order of placing.
type placed struct {
	lo int64
	at int32
}

// span is the bytes that a buffer takes.
type span struct{ lo, hi int64 }

func (g *placedGroup) clear() {
	g.all, g.live, g.span, g.thin = g.all[:0], g.live[:0], g.span[:0], 64
}

// add puts in buffer i at s, the one at position k of the order of placing; last is
// by buffer the position after which nobody asks where it lies.
func (g *placedGroup) add(i int32, s span, last []int32, k int32) {
	n, _ := slices.BinarySearchFunc(g.all, s.lo, func(p placed, lo int64) int { return cmp.Compare(p.lo, lo) })
	g.all = slices.Insert(g.all, n, placed{s.lo, k})
	if last[i] <= k {
		return
	}
	n, _ = slices.BinarySearchFunc(g.span, s.lo, func(t span, lo int64) int { return cmp.Compare(t.lo, lo) })
	g.live, g.span = slices.Insert(g.live, n, i), slices.Insert(g.span, n, s)
	if len(g.live) < g.thin {
		return
	}
	kept := 0
	for at, j := range g.live {
		if last[j] > k {
			g.live[kept], g.span[kept] = j, g.span[at]
			kept++
		}
	}
	g.live, g.span = g.live[:kept], g.span[:kept]
	g.thin = max(64, 2*kept)
}

// seek moves head to the first buffer in live, from the one at from, that is in row.
func (g *placedGroup) seek(row []uint64, from int) {
	for k, i := range g.live[from:] {
		if row[i>>6]>>(i&63)&1 == 1 {
			g.head = from + k
			return
		}
	}
	g.head = len(g.live)
}

// passed counts the buffers of all up to the one at head.
func (g *placedGroup) passed(order []int32) int64 {
	if g.head == len(g.live) {
		return int64(len(g.all))
	}
	n, _ := slices.BinarySearchFunc(g.all, placed{g.span[g.head].lo, order[g.live[g.head]]}, func(p, want placed) int {
		return cmp.Or(cmp.Compare(p.lo, want.lo), cmp.Compare(want.at, p.at))
	})
	return int64(n) + 1
}
