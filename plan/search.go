package plan

import (
	"cmp"
	"runtime"
	"slices"
	"sync"
)

// Ladder is a list of configurations, each of which needs less memory than the
// one before it and costs more.
type Ladder[C any] struct {
	Rungs []C
	Texts []string // by rung: what a person types for it
	Order int      // what it costs beside time: lower is better, whatever the time
}

// Found is the first rung of a ladder that fits.
type Found[R any] struct {
	Ladder  int // index
	Rung    int
	Text    string
	Order   int
	Result  R
	Seconds float64 // predicted, for a fixed amount of work
}

// Climb finds each ladder's first rung that fits and returns them by Order, then
// by predicted seconds, then by place in the list. Memory only falls along a
// ladder, so its last rung is tried first: where that does not fit, none does;
// otherwise the first is found by bisection. try returns a rung's result, its
// predicted seconds for a fixed amount of work and whether it fits; a rung with
// an error does not. Ladders are climbed at the same time, and the outcome
// depends neither on that nor on the machine's speed.
func Climb[C, R any](ladders []Ladder[C], try func(C) (result R, seconds float64, fits bool, err error)) []Found[R] {
	found := make([]*Found[R], len(ladders))
	Parallel(len(ladders), func(i int) {
		l := &ladders[i]
		test := func(k int) bool {
			r, s, ok, err := try(l.Rungs[k])
			if err != nil || !ok {
				return false
			}
			found[i] = &Found[R]{i, k, l.Texts[k], l.Order, r, s}
			return true
		}
		n := len(l.Rungs)
		if n == 0 || !test(n-1) {
			return
		}
		// Rung hi fits, and is the last that was found to.
		for lo, hi := 0, n-1; lo < hi; {
			mid := (lo + hi) / 2
			if test(mid) {
				hi = mid
			} else {
				lo = mid + 1
			}
		}
	})
	var out []Found[R]
	for _, f := range found {
		if f != nil {
			out = append(out, *f)
		}
	}
	slices.SortStableFunc(out, func(a, b Found[R]) int {
		return cmp.Or(cmp.Compare(a.Order, b.Order), cmp.Compare(a.Seconds, b.Seconds))
	})
	return out
}

// Parallel calls f(0) … f(n−1) on all processors.
func Parallel(n int, f func(int)) {
	next := make(chan int)
	var wg sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) {
		wg.Go(func() {
			for i := range next {
				f(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
}
