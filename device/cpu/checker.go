package cpu

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"slices"
	"sync"

	"github.com/spillway-ml/spillway/device"
)

// PeerKernel is a communication kernel (package comm): it also accesses other ranks' arenas and
// may wait for their kernels. A Checker does not watch it. The kernel must call Enter and Leave
// around its accesses to memory, and must not wait between them.
type PeerKernel interface {
	Kernel
	ReachesPeers()
}

// Checker verifies, in tests, that kernels write only to the ranges that they declare. It lets
// only one kernel run at a time and compares the bytes of all ranks' arenas outside the kernel's
// Touches before and after.
//
// The contexts of all ranks of a process share one Checker. It ignores ranges that HostBytes
// has returned, because the host may write to them.
type Checker struct {
	run1   sync.RWMutex // held for writing by a watched kernel, for reading by a PeerKernel
	mu     sync.Mutex
	seed   maphash.Seed
	arenas []*watched
}

type watched struct {
	arena  *Arena
	exempt []device.Ptr
	skip   []span // scratch
	spans  []span // the ranges that are compared for the current kernel
	sum    uint64
}

type span struct{ from, to int64 }

// NewChecker returns a checker that watches nothing yet.
func NewChecker() *Checker { return &Checker{seed: maphash.MakeSeed()} }

func (c *Checker) watch(a *Arena) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.arenas = append(c.arenas, &watched{arena: a})
}

func (c *Checker) unwatch(a *Arena) {
	c.run1.Lock() // no watched kernel is reading the arena
	defer c.run1.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.arenas = slices.DeleteFunc(c.arenas, func(w *watched) bool { return w.arena == a })
}

func (c *Checker) exempt(p device.Ptr) {
	c.run1.Lock()
	defer c.run1.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.arenas {
		if w.arena == p.Arena && !slices.Contains(w.exempt, p) {
			w.exempt = append(w.exempt, p)
		}
	}
}

func (c *Checker) run(k Kernel) error {
	if _, ok := k.(PeerKernel); ok {
		return k.Run()
	}
	c.run1.Lock()
	defer c.run1.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.arenas {
		w.plan(k.Touches())
		w.sum = w.hash(c.seed)
	}
	err := k.Run()
	for _, w := range c.arenas {
		if w.hash(c.seed) != w.sum {
			return fmt.Errorf("broken invariant: it wrote to rank %d's %s arena outside the ranges that it declares (its error: %v)",
				w.arena.ctx.rank, w.arena.space, err)
		}
	}
	return err
}

// plan sets spans to the arena minus touches and exempt ranges.
func (w *watched) plan(touches []device.Ptr) {
	w.skip = w.skip[:0]
	for _, list := range [2][]device.Ptr{touches, w.exempt} {
		for _, p := range list {
			if p.Arena == w.arena {
				w.skip = append(w.skip, span{p.Off, p.Off + p.Len})
			}
		}
	}
	slices.SortFunc(w.skip, func(a, b span) int { return cmp.Compare(a.from, b.from) })
	w.spans = w.spans[:0]
	var at int64
	for _, s := range w.skip {
		if s.from > at {
			w.spans = append(w.spans, span{at, s.from})
		}
		at = max(at, s.to)
	}
	if size := w.arena.Size(); at < size {
		w.spans = append(w.spans, span{at, size})
	}
}

func (w *watched) hash(seed maphash.Seed) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	for _, s := range w.spans {
		h.Write(w.arena.mem[s.from:s.to])
	}
	return h.Sum64()
}

// Enter begins a PeerKernel's accesses to memory; p is any range of its own rank.
func Enter(p device.Ptr) {
	if a, ok := p.Arena.(*Arena); ok && a.ctx.opts.Checker != nil {
		a.ctx.opts.Checker.run1.RLock()
	}
}

// Leave ends what Enter began.
func Leave(p device.Ptr) {
	if a, ok := p.Arena.(*Arena); ok && a.ctx.opts.Checker != nil {
		a.ctx.opts.Checker.run1.RUnlock()
	}
}
