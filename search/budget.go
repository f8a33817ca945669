package search

import "sync"

// Budget limits the number of plans that searches evaluate together: further ones are refused. The
// outcome of a search depends on it, not on a clock. Searches that share a Budget run one after the
// other. The zero value sets its number by the first job.
type Budget struct {
	mu          sync.Mutex
	total, used int
	refused     bool // a plan was refused
	kept        int  // number of remaining plans kept for a later search
}

// NewBudget allows the given number of plans; 0: the number that takes about 5 s of a processor, by
// the size of the first job.
func NewBudget(plans int) *Budget { return &Budget{total: plans} }

// Total returns the number of plans that may be evaluated; 0: no search has started yet.
func (b *Budget) Total() int { return b.total }

// Used returns the number of plans evaluated.
func (b *Budget) Used() int { return b.used }

func (b *Budget) left() int { return b.total - b.used - b.kept }

// take counts one plan. It returns false, and refuses the plan, if leave or fewer plans are left.
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
