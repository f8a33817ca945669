package pool

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
)

// counter counts how often each index runs and how many run concurrently.
type counter struct {
	seen       []atomic.Int32
	busy, most *atomic.Int32
	nap        time.Duration
}

func (c *counter) RunIndex(i int) {
	n := c.busy.Add(1)
	for m := c.most.Load(); n > m && !c.most.CompareAndSwap(m, n); m = c.most.Load() {
	}
	if c.nap > 0 && i%7 == 0 {
		time.Sleep(c.nap)
	}
	c.seen[i].Add(1)
	c.busy.Add(-1)
}

func TestEveryIndexOnceAndNeverMoreThreads(t *testing.T) {
	for _, threads := range []int{1, 2, 3, 8} {
		for _, callers := range []int{1, 2, 5} {
			for _, nap := range []time.Duration{0, 300 * time.Microsecond} {
				p := New(threads)
				var busy, most atomic.Int32
				var wg sync.WaitGroup
				for range callers {
					wg.Add(1)
					go func() {
						defer wg.Done()
						for n := range 60 {
							c := &counter{seen: make([]atomic.Int32, n), busy: &busy, most: &most, nap: nap}
							p.Run(n, c)
							for i := range c.seen {
								if got := c.seen[i].Load(); got != 1 {
									t.Errorf("threads %d: index %d of %d ran %d times", threads, i, n, got)
								}
							}
						}
					}()
				}
				wg.Wait()
				p.Close()
				require.LessOrEqual(t, int(most.Load()), threads)
			}
		}
	}
}

// meet is a loop body that waits until two indices run at the same time, so it needs a second worker.
type meet struct{ arrived atomic.Int32 }

func (m *meet) RunIndex(int) {
	m.arrived.Add(1)
	for end := time.Now().Add(5 * time.Second); m.arrived.Load() < 2; {
		if time.Now().After(end) {
			return
		}
	}
}

func TestWorkersTakePart(t *testing.T) {
	p := New(2)
	defer p.Close()
	for i := range 200 {
		if i%50 == 49 {
			time.Sleep(20 * time.Millisecond) // the worker sleeps
		}
		m := new(meet)
		start := time.Now()
		p.Run(2, m)
		require.Less(t, time.Since(start), 5*time.Second, "no worker joined run %d", i)
	}
}

type nothing struct{}

func (nothing) RunIndex(int) {}

func TestRunAllocatesNothing(t *testing.T) {
	p := New(3)
	defer p.Close()
	var task Task = new(nothing)
	require.Zero(t, alloctest.PerRun(200, func() { p.Run(9, task) }))
}

// uneven makes one of two threads wait for the other: three indices of 20 µs each.
type uneven struct{}

func (uneven) RunIndex(int) {
	for start := time.Now(); time.Since(start) < 20*time.Microsecond; {
	}
}

func BenchmarkWait(b *testing.B) {
	for _, locked := range []bool{false, true} {
		b.Run(map[bool]string{false: "caller", true: "locked caller"}[locked], func(b *testing.B) {
			if locked {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
			}
			p := New(2)
			defer p.Close()
			var task Task = new(uneven)
			b.ReportAllocs()
			for b.Loop() {
				p.Run(3, task)
			}
		})
	}
}

func BenchmarkRun(b *testing.B) {
	for _, threads := range []int{1, 2} {
		b.Run(map[int]string{1: "1 thread", 2: "2 threads"}[threads], func(b *testing.B) {
			p := New(threads)
			defer p.Close()
			var task Task = new(nothing)
			b.ReportAllocs()
			for b.Loop() {
				p.Run(16, task)
			}
		})
	}
}
