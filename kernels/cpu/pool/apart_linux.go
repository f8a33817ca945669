package pool

import (
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Where another process has a core busy, even at the lowest priority, Linux
// leaves two threads of a Run on one core for milliseconds: longer than most
// Runs take. So a worker that starts to compute on a core where the pool already
// computes moves to one where it does not. It stays free to be moved again.

// places counts the goroutines that compute on each core. Counts are hints: a
// thread that the kernel moves meanwhile stays counted where it began.
type places struct {
	apart bool         // there are cores enough
	moved atomic.Int64 // when a worker last moved
	on    [1024]atomic.Int32
}

// seldom is how far apart moves are: what costs some 20 µs must not be done for
// every Run where other processes keep all cores busy.
const seldom = 5 * time.Millisecond

const nowhere = -1

func (p *places) init(threads int) { p.apart = threads > 1 && threads <= runtime.NumCPU() }

// enter counts the caller's core in and returns it.
func (p *places) enter(worker bool) int {
	if !p.apart {
		return nowhere
	}
	var c uint32
	if _, _, errno := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&c)), 0, 0); errno != 0 || int(c) >= len(p.on) {
		return nowhere
	}
	cpu := int(c)
	if p.on[cpu].Add(1) > 1 && worker {
		if to := p.move(); to != nowhere {
			p.on[cpu].Add(-1)
			p.on[to].Add(1)
			return to
		}
	}
	return cpu
}

func (p *places) leave(cpu int) {
	if cpu != nowhere {
		p.on[cpu].Add(-1)
	}
}

// move takes the calling thread to an allowed core where the pool does not
// compute and returns that core, or nowhere if there is none.
func (p *places) move() int {
	now, last := time.Now().UnixNano(), p.moved.Load()
	if now-last < int64(seldom) || !p.moved.CompareAndSwap(last, now) {
		return nowhere
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var allowed, one unix.CPUSet
	if unix.SchedGetaffinity(0, &allowed) != nil {
		return nowhere
	}
	for cpu := range p.on {
		if !allowed.IsSet(cpu) || p.on[cpu].Load() > 0 {
			continue
		}
		one.Set(cpu)
		if unix.SchedSetaffinity(0, &one) != nil {
			return nowhere
		}
		_ = unix.SchedSetaffinity(0, &allowed) // it was allowed a moment ago
		return cpu
	}
	return nowhere
}
