package search

import (
	"math"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// allLayers reports whether plans of a deep model have all its layers: each then takes tenths of a
// second.
func (s *searcher) allLayers() bool { return s.layers > foldedFrom && !s.folded }

// needsMore reports whether a base exceeds device memory even if everything that may leave the device
// is on the host, however large the host is. With the disk in place of the host it needs as much of
// the device: that was measured, not proven.
func (s *searcher) needsMore(b base, set *moveSet) bool {
	f := &filler{searcher: s, base: b, set: set, items: set.items()}
	r := f.lean()[0]
	_, all := f.steps(r)
	m := s.measure(&point{base: b, set: set, x: f.spread(r, all, math.Inf(1)), how: r})
	by, _ := s.over(m, margins{})
	return m.err == nil && by[graph.Device] > 0
}

// firstOf returns the index of the first of an alternative's specs for which does is true, or their
// number if there is none. The last spec has the most room. Where plans are slow it is tried first,
// and if it fails, the others are not tried.
func (w *wayFinder) firstOf(a *alternative, does func(Spec, *cost.Machine) bool) int {
	n := len(a.specs)
	if w.main.allLayers() && n > 1 && !does(a.specs[n-1], a.machine(n-1)) {
		return n
	}
	for i := range a.specs {
		if does(a.specs[i], a.machine(i)) {
			return i
		}
	}
	return n
}

// lateSingles are single changes that have not been planned whole, the fastest by lower bounds first. Their
// plans take seconds (isLarge), and the combined search may find a way that is faster by more than slowWay.
type lateSingles struct {
	*searcher
	points []*point
	done   map[Field]bool // see wayFinder.single
}

// addLate plans the late single changes that are not slow beside the ways so far, and reports whether one was slow.
// A combination must be faster than a single change by worthMore, as in wayFinder.combined.
func (w *wayFinder) addLate() (slow bool) {
	late := &w.late
	for _, p := range late.points {
		if w.isSlow(late.searcher, p) {
			return true
		}
		if len(w.ways) >= mostWays || !w.single(late.searcher, p, late.done) {
			continue
		}
		last := w.ways[len(w.ways)-1]
		w.ways = slices.DeleteFunc(w.ways, func(o Way) bool {
			return o.order == sameJob && len(o.Changes) > 1 && o.Slowdown > worthMore*last.Slowdown
		})
	}
	return false
}
