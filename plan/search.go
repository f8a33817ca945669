package plan

import (
	"cmp"
	"runtime"
	"slices"
	"sync"
)

// Candidate is a configuration that a search may choose.
type Candidate[C any] struct {
	Config C
	Text   string // the change that makes it, as a person types it
	Order  int    // what it costs beside time: lower is taken first, whatever the time
	// Supersets of a change that fits are not looked at: Changes names the single
	// changes that this candidate makes.
	Changes []string
	// TooLarge says that it cannot fit, without a plan (its states alone are over
	// a cap).
	TooLarge bool
}

// Found is a candidate that fits.
type Found[C, R any] struct {
	Candidate Candidate[C]
	Result    R
	Seconds   float64 // predicted, per unit of work
}

// Search plans candidates and returns those that fit, by Order, then by
// predicted seconds, then by place in the list. try returns a candidate's
// result, its predicted seconds for a fixed amount of work, and whether it fits;
// an error rules the candidate out. At most limit candidates are planned (0: all),
// in the order of the list. The outcome does not depend on the machine's speed or
// number of processors.
func Search[C, R any](list []Candidate[C], limit int, try func(C) (result R, seconds float64, fits bool, err error)) []Found[C, R] {
	type outcome struct {
		result  R
		seconds float64
		fits    bool
	}
	done := make([]outcome, len(list))
	var fitting []int
	covered := func(i int) bool {
		for _, j := range fitting {
			small, big := list[j].Changes, list[i].Changes
			if len(small) < len(big) && !slices.ContainsFunc(small, func(s string) bool { return !slices.Contains(big, s) }) {
				return true
			}
		}
		return false
	}
	// Candidates of one number of changes at a time: whether a larger set is worth
	// planning depends on the smaller ones alone, not on which finished first.
	most := 0
	for i := range list {
		most = max(most, len(list[i].Changes))
	}
	for size := 0; size <= most; size++ {
		var wave []int
		for i := range list {
			if len(list[i].Changes) == size && !list[i].TooLarge && !covered(i) && (limit == 0 || len(wave) < limit) {
				wave = append(wave, i)
			}
		}
		if limit > 0 {
			limit = max(limit-len(wave), 1)
		}
		next := make(chan int)
		var wg sync.WaitGroup
		for range min(len(wave), runtime.GOMAXPROCS(0)) {
			wg.Go(func() {
				for i := range next {
					if r, s, ok, err := try(list[i].Config); err == nil {
						done[i] = outcome{r, s, ok}
					}
				}
			})
		}
		for _, i := range wave {
			next <- i
		}
		close(next)
		wg.Wait()
		for _, i := range wave {
			if done[i].fits {
				fitting = append(fitting, i)
			}
		}
	}
	slices.SortStableFunc(fitting, func(a, b int) int {
		return cmp.Or(cmp.Compare(list[a].Order, list[b].Order), cmp.Compare(done[a].seconds, done[b].seconds), cmp.Compare(a, b))
	})
	var out []Found[C, R]
	for _, i := range fitting {
		out = append(out, Found[C, R]{list[i], done[i].result, done[i].seconds})
	}
	return out
}
