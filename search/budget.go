package search

import "sync"

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
