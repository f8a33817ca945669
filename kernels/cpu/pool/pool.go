// Package pool is the worker pool of the CPU device. One pool serves every
// rank of the process: it starts its goroutines once, runs a Task's indices on
// them without allocating, and never lets more than its number of threads
// compute at the same time, however many ranks call it at once.
//
// A pool decides who computes an index, never what is computed: kernels split
// their work by shape alone, so results do not depend on the number of threads.
package pool

import (
	"sync"
	"sync/atomic"
)

// Task is work split into independent indices. RunIndex must be safe to call
// from several goroutines at once with different indices.
type Task interface{ RunIndex(i int) }

// Pool runs Tasks. The zero value is not usable; call New.
type Pool struct {
	threads int
	slots   chan struct{} // a token a running goroutine, worker or caller
	jobs    chan *job
	free    sync.Pool
	close   sync.Once
}

type job struct {
	task    Task
	n       int64
	next    atomic.Int64
	pending sync.WaitGroup // workers that hold a reference to the job
}

// New returns a pool that computes on at most threads goroutines at a time
// (at least one).
func New(threads int) *Pool {
	threads = max(threads, 1)
	p := &Pool{threads: threads, slots: make(chan struct{}, threads), jobs: make(chan *job)}
	p.free.New = func() any { return new(job) }
	for range threads {
		p.slots <- struct{}{}
	}
	for range threads - 1 {
		go p.work()
	}
	return p
}

// Threads returns the largest number of goroutines that compute at a time.
func (p *Pool) Threads() int { return p.threads }

// Close ends the pool's goroutines. No Run may be in progress or follow.
func (p *Pool) Close() { p.close.Do(func() { close(p.jobs) }) }

// Run calls t.RunIndex(i) for every i in [0, n) and returns when all have
// returned. The calling goroutine takes part. Concurrent calls share the
// pool's threads.
func (p *Pool) Run(n int, t Task) {
	if n <= 0 {
		return
	}
	<-p.slots
	defer func() { p.slots <- struct{}{} }()
	if n == 1 || p.threads == 1 {
		for i := range n {
			t.RunIndex(i)
		}
		return
	}
	j := p.free.Get().(*job)
	j.task, j.n = t, int64(n)
	j.next.Store(0)
	for range min(n, p.threads) - 1 {
		j.pending.Add(1)
		select {
		case p.jobs <- j:
			continue
		default:
		}
		j.pending.Done() // every worker is busy with another rank's task
		break
	}
	j.drain()
	j.pending.Wait()
	j.task = nil
	p.free.Put(j)
}

func (j *job) drain() {
	for i := j.next.Add(1) - 1; i < j.n; i = j.next.Add(1) - 1 {
		j.task.RunIndex(int(i))
	}
}

func (p *Pool) work() {
	for j := range p.jobs {
		select {
		case <-p.slots:
			j.drain()
			p.slots <- struct{}{}
		default: // the callers already use every thread
		}
		j.pending.Done()
	}
}
