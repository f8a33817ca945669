package search

import "github.com/spillway-ml/spillway/graph"

// A search evaluates at most mostEffort plans unless the caller sets a limit. Planning time grows
// with the number of operations: effortOps of them take about 5 s on one processor, including
// wholePlans plans of all layers.
const (
	leastEffort, mostEffort = 60, 1000
	effortOps, wholePlans   = 360_000, 12
)

// size returns the default number of plans that a search may evaluate. It is smaller for larger
// programs, and for offloaded classes, whose copies are many operations.
func (s *searcher) size() (int, error) {
	c := s.spec
	if len(s.spaces) > 0 {
		c.Offload = resting([]graph.Class{graph.Optimizer}, graph.Host)
	}
	whole := wholePlans * c.Accum / c.micros()
	var m *measured
	if s.folded {
		m = s.at(c, foldedLayers[0])
	} else { // the search may reuse this plan
		m = s.memo.measured(keyOf(&c), func() *measured { return s.at(c, 0) })
	}
	if m.err != nil {
		return 0, m.err
	}
	n := m.planned
	if s.folded {
		both := foldedLayers[0] + foldedLayers[1]
		n, whole = n*both/foldedLayers[0], whole*s.layers/both
	}
	return min(mostEffort, max(leastEffort, effortOps/max(n, 1)-whole)), nil
}

// allow sets the budget of a search: that of the hardware, or else its own.
func (s *searcher) allow(hw *Hardware) error {
	s.budget, s.effort = hw.Budget, hw.Effort
	if s.budget == nil {
		s.budget = &Budget{total: hw.Effort}
	}
	if s.budget.total == 0 {
		n, err := s.size()
		if err != nil {
			return err
		}
		s.budget.total = n
		s.budget.take(0) // of the size
	}
	if left := s.budget.left(); s.effort == 0 || s.effort > left {
		s.effort = left
	}
	return nil
}
