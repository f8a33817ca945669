package search

import "github.com/spillway-ml/spillway/graph"

// A search evaluates at most mostEffort plans where nothing is said. A plan takes time for each of its
// operations, and effortOps of them about 5 s of a processor, those of wholePlans made whole among
// them.
const (
	leastEffort, mostEffort = 60, 1000
	effortOps, wholePlans   = 360_000, 12
)

// size is how many plans a search may evaluate by default: fewer of larger ones, whose classes' copies
// are many operations.
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
