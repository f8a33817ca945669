package search

import (
	"sync"

	"github.com/spillway-ml/spillway/graph"
)

// Budget is how many plans searches may evaluate together: the first ones, the rest is refused.
// The outcome of a search depends on it, and on no clock. Searches that share one run one after
// the other. The zero value takes its number from the first job.
type Budget struct {
	mu          sync.Mutex
	total, used int
	refused     bool // a plan was
	kept        int  // of what is left, for a search that follows
}

// NewBudget allows so many plans; 0: as many as take about 5 s of a processor, by the size of the first job.
func NewBudget(plans int) *Budget { return &Budget{total: plans} }

// Total is how many plans may be evaluated; 0: no search was started yet.
func (b *Budget) Total() int { return b.total }

// Used is how many plans were evaluated.
func (b *Budget) Used() int { return b.used }

func (b *Budget) left() int { return b.total - b.used - b.kept }

// take takes one plan and leaves so many; false: it is refused.
func (b *Budget) take(leave int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if leave >= b.left() {
		b.refused = true
		return false
	}
	b.used++
	return true
}

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
	} else { // the search may look at it too
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

// ops are the operations of a step's program, or those of one of its micro-batches; −1: of all.
func (f *Forecast) ops(micro int) (n int) {
	if sec := f.Plan.Program.SectionOf(graph.SectionStep, graph.FormWhole); sec != nil {
		for _, ph := range sec.Phases {
			for i := range ph.Ops {
				if micro < 0 || ph.Ops[i].Micro == micro {
					n++
				}
			}
		}
	}
	return n
}

// allow gives a search a budget, of its own where the hardware has none.
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
