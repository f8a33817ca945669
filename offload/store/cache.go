package store

import (
	"sync"
	"sync/atomic"
)

// cache pins blocks in memory of its own, outside the Go heap: those that came
// first stay. A training step goes round the file in a circle, where all blocks
// are worth the same and the one read last is the last to come again: whatever a
// policy lets go is asked for before what it takes in, so a cache of a quarter of
// the file serves a quarter of the reads when nothing is replaced, and less with
// any replacement (18 % with frequencies, 8 % with recency).
//
// A slot holds one range of one block; ranges that adjoin it extend it, as small
// buffers that lie side by side are moved one after the other. Each block has a
// version that every write of the block changes before it writes, and a slot
// serves only if its version is the block's. A write brings the slot that was up
// to date before it to its own version.
type cache struct {
	block    int64 // bytes
	memory   []byte
	slots    []slot
	slotOf   []atomic.Int32  // by block, from 1; 0: none
	versions []atomic.Uint32 // by block

	mu   sync.Mutex // guards used
	used int

	hits, misses atomic.Int64
}

type slot struct {
	mu       sync.Mutex
	mem      []byte // of the whole block
	version  uint32
	from, to int64 // bytes of the file that it holds
}

// newCache returns nil where the bytes are too few for it.
func newCache(bytes, block, physical int64) (*cache, error) {
	blocks := (physical + block - 1) / block
	n := min(bytes/block, blocks)
	if n == 0 {
		return nil, nil
	}
	memory, err := mapPages(int(n * block))
	if err != nil {
		return nil, err
	}
	c := &cache{block: block, memory: memory, slots: make([]slot, n), slotOf: make([]atomic.Int32, blocks), versions: make([]atomic.Uint32, blocks)}
	for i := range c.slots {
		c.slots[i].mem = memory[int64(i)*block:][:block:block]
	}
	return c, nil
}

func (c *cache) close() error {
	if c == nil {
		return nil
	}
	return unmapPages(c.memory)
}

// of returns a block's slot; nil: it has none.
func (c *cache) of(block int64) *slot {
	if i := c.slotOf[block].Load(); i > 0 {
		return &c.slots[i-1]
	}
	return nil
}

// version returns the version of a block as it is before a read.
func (c *cache) version(block int64) uint32 { return c.versions[block].Load() }

// bump gives a block its next version, before a write.
func (c *cache) bump(block int64) uint32 { return c.versions[block].Add(1) }

// get fills mem, which starts at off, from a slot that holds all of r as it
// stands at the version. What fails verify is left to the file to judge.
func (c *cache) get(block int64, version uint32, r span, mem []byte, off int64, verify func([]byte, int64) error) bool {
	s, ok := c.of(block), false
	if s != nil {
		s.mu.Lock()
		ok = s.version == version && s.from <= r.lo && r.hi <= s.to && verify(s.mem[r.lo-block*c.block:r.hi-block*c.block], r.lo) == nil
		if ok {
			copy(mem, s.mem[off-block*c.block:])
		}
		s.mu.Unlock()
	}
	if ok {
		c.hits.Add(1)
	} else {
		c.misses.Add(1)
	}
	return ok
}

// put offers the contents of r, as read at the version.
func (c *cache) put(block int64, version uint32, r span, buf []byte) {
	c.keep(block, version, version, r, buf)
}

// update tells of a write that gave the block this version: what it did not
// touch is as it was.
func (c *cache) update(block int64, version uint32, r span, buf []byte) {
	c.keep(block, version-1, version, r, buf)
}

// keep puts contents into the block's slot, or into a free one, beside what is
// there if that adjoins and is of the version before.
func (c *cache) keep(block int64, before, version uint32, r span, buf []byte) {
	s := c.of(block)
	if s == nil {
		if s = c.take(block); s == nil {
			return // all are pinned
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.version == before && s.from <= r.hi && r.lo <= s.to {
		s.from, s.to = min(s.from, r.lo), max(s.to, r.hi)
	} else {
		s.from, s.to = r.lo, r.hi
	}
	s.version = version
	copy(s.mem[r.lo-block*c.block:], buf)
}

// take gives a block a slot that is free; nil: there is none. The slot is empty:
// it holds no byte until it is locked and filled.
func (c *cache) take(block int64) *slot {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.of(block); s != nil { // another took one meanwhile
		return s
	}
	if c.used == len(c.slots) {
		return nil
	}
	s := &c.slots[c.used]
	s.mu.Lock()
	s.from, s.to = -1, -1
	s.mu.Unlock()
	c.used++
	c.slotOf[block].Store(int32(c.used))
	return s
}
