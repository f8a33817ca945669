package search

import (
	"math"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// allLayers says that all layers of many are planned: a plan takes tenths of a second.
func (s *searcher) allLayers() bool { return s.layers > foldedFrom && !s.folded }

// needsMore says whether a base needs more of the device than there is with all that may leave it on
// the host, whatever room that has. On disk it would need as much of the device.
func (s *searcher) needsMore(b base, set *moveSet) bool {
	f := &filler{searcher: s, base: b, set: set, items: set.items()}
	r := f.lean()[0]
	_, all := f.steps(r)
	m := s.measure(&point{base: b, set: set, x: f.spread(r, all, math.Inf(1)), how: r})
	by, _ := s.over(m, margins{})
	return m.err == nil && by[graph.Device] > 0
}

// firstOf is the number of the first of an alternative's specs that does, of their length: none. Where
// programs are large the last is asked first, since it does where any does.
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
