package plan

import (
	"runtime"
	"sync"
)

// Parallel calls f(0) … f(n−1) on all processors, and returns when all calls have returned.
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
