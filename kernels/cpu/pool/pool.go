// Package pool is the worker pool of the CPU device. One pool serves every
// rank of the process: it starts its goroutines once, runs a Task's indices on
// them without allocating, and never lets more than its number of threads
// compute at the same time, however many ranks call it at once.
//
// A pool decides who computes an index, never what is computed: kernels split
// their work by shape alone, so results do not depend on the number of threads.
//
// A kernel is a few Runs of some microseconds each, one behind the other, so a
// worker that runs out of work looks for more for a while before it sleeps:
// waking it takes longer than many Runs do.
package pool

import (
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/spillway-ml/spillway/internal/crash"
)

// Task is work split into independent indices. RunIndex must be safe to call
// from several goroutines at once with different indices, and must not call
// Run.
type Task interface{ RunIndex(i int) }

// An idle worker looks glances times for work, yields to other goroutines, and
// so on spins times, some 400 µs, before it sleeps. A caller whose last indices
// are on other threads looks patience times, some 50 µs, then yields between as
// a worker does, some 100 µs. It doesn't begin with that because where it is
// locked to its thread, as it must be for some libraries, to yield takes two
// switches of threads, and they may land on the core of the worker that it waits
// for.
const (
	glances     = 50
	spins       = 1600
	patience    = 100_000
	callerSpins = 400
)

// Pool runs Tasks. The zero value is not usable; call New.
type Pool struct {
	threads int
	slots   chan struct{} // a token a running goroutine, worker or caller
	open    atomic.Int32  // len(jobs)
	asleep  atomic.Int32  // workers that wait for wake
	wake    chan struct{}
	closed  atomic.Bool
	close   sync.Once

	mu   sync.Mutex
	jobs []*job // whose indices are not all taken
	free []*job
	turn int // the job that the next worker joins

	places places
}

type job struct {
	task  Task
	n     int64
	next  atomic.Int64
	state atomic.Int64  // workers that hold a reference to the job; + waiting
	done  chan struct{} // from the last of them, where the caller is waiting
}

const waiting = 1 << 32

// New returns a pool that computes on at most threads goroutines at a time
// (at least one).
func New(threads int) *Pool {
	threads = max(threads, 1)
	p := &Pool{threads: threads, slots: make(chan struct{}, threads), wake: make(chan struct{}, threads)}
	for range threads {
		p.slots <- struct{}{}
		p.free = append(p.free, &job{done: make(chan struct{}, 1)})
	}
	p.places.init(threads)
	// A job lives while its caller holds a token, so there are never more.
	p.jobs = make([]*job, 0, threads)
	for range threads - 1 {
		go p.work()
	}
	return p
}

// Threads returns the largest number of goroutines that compute at a time.
func (p *Pool) Threads() int { return p.threads }

// Close ends the pool's goroutines. No Run may be in progress or follow.
func (p *Pool) Close() {
	p.close.Do(func() {
		p.closed.Store(true)
		close(p.wake)
	})
}

// Run calls t.RunIndex(i) for every i in [0, n) and returns when all have
// returned. The calling goroutine takes part. Concurrent calls share the
// pool's threads.
func (p *Pool) Run(n int, t Task) {
	if n <= 0 {
		return
	}
	<-p.slots
	defer p.release()
	if n == 1 || p.threads == 1 {
		for i := range n {
			t.RunIndex(i)
		}
		return
	}
	cpu := p.places.enter(false)
	j := p.publish(n, t)
	p.drain(j)
	j.wait()
	p.places.leave(cpu)
	j.task = nil
	p.mu.Lock()
	p.free = append(p.free, j)
	p.mu.Unlock()
}

// publish offers the task to the workers.
func (p *Pool) publish(n int, t Task) *job {
	p.mu.Lock()
	j := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	j.task, j.n = t, int64(n)
	j.next.Store(0)
	p.jobs = append(p.jobs, j)
	p.open.Store(int32(len(p.jobs)))
	p.mu.Unlock()
	for range min(n, p.threads) - 1 {
		if !p.wakeOne() {
			break
		}
	}
	return j
}

// drain computes indices until all are taken, and then withdraws the job from the workers.
func (p *Pool) drain(j *job) {
	for i := j.next.Add(1) - 1; i < j.n; i = j.next.Add(1) - 1 {
		j.task.RunIndex(int(i))
	}
	p.mu.Lock()
	for i := range p.jobs {
		if p.jobs[i] == j {
			last := len(p.jobs) - 1
			p.jobs[i], p.jobs[last] = p.jobs[last], nil
			p.jobs = p.jobs[:last]
			p.open.Store(int32(last))
			break
		}
	}
	p.mu.Unlock()
}

// wait returns when no worker holds a reference to the job.
func (j *job) wait() {
	for range patience {
		if j.state.Load() == 0 {
			return
		}
	}
	for range callerSpins {
		for range glances {
			if j.state.Load() == 0 {
				return
			}
		}
		runtime.Gosched()
	}
	if j.state.Add(waiting) != waiting {
		<-j.done
	}
	j.state.Store(0)
}

// leave drops a worker's reference to the job. The worker must not use the job afterwards,
// because the caller may reuse it.
func (j *job) leave() {
	if j.state.Add(-1) == waiting {
		j.done <- struct{}{}
	}
}

// release returns a caller's token. If a job is open, it wakes a sleeping worker to use the
// token.
func (p *Pool) release() {
	p.slots <- struct{}{}
	if p.open.Load() > 0 {
		p.wakeOne()
	}
}

// wakeOne wakes a sleeping worker and reports whether there was one.
func (p *Pool) wakeOne() bool {
	for {
		n := p.asleep.Load()
		if n == 0 {
			return false
		}
		if p.asleep.CompareAndSwap(n, n-1) {
			p.wake <- struct{}{}
			return true
		}
	}
}

// join returns a job that has indices left, or nil.
func (p *Pool) join() *job {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.jobs) == 0 {
		return nil
	}
	p.turn++
	j := p.jobs[p.turn%len(p.jobs)]
	j.state.Add(1)
	return j
}

// help joins a job if there is one and a token is free, and reports whether it
// did.
func (p *Pool) help() bool {
	select {
	case <-p.slots:
	default: // the callers already use every thread
		return false
	}
	j := p.join()
	if j != nil {
		cpu := p.places.enter(true)
		p.drain(j)
		p.places.leave(cpu)
		j.leave()
	}
	p.slots <- struct{}{} // no wake: this worker itself looks for an open job
	return j != nil
}

func (p *Pool) work() {
	defer crash.Guard()
	for idle := 0; !p.closed.Load(); {
		for range glances {
			if p.open.Load() > 0 {
				if p.help() {
					idle = -1
				}
				break
			}
		}
		if idle++; idle < spins {
			if idle > 0 {
				runtime.Gosched()
			}
			continue
		}
		idle = 0
		p.asleep.Add(1)
		// What opened before that is seen here; what opens after wakes.
		if p.open.Load() > 0 && len(p.slots) > 0 && p.stayAwake() {
			continue
		}
		<-p.wake
	}
}

// stayAwake takes back the announcement of sleep, unless a wake is already on
// its way for it.
func (p *Pool) stayAwake() bool {
	for {
		n := p.asleep.Load()
		if n == 0 {
			return false
		}
		if p.asleep.CompareAndSwap(n, n-1) {
			return true
		}
	}
}
