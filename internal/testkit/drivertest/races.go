//go:build linux

package drivertest

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// clock is a vector clock: by agent, the number of its operations that happen
// before a point. Agents are streams and threads of the host.
type clock []uint64

func (c *clock) join(o clock) {
	for len(*c) < len(o) {
		*c = append(*c, 0)
	}
	for i, v := range o {
		(*c)[i] = max((*c)[i], v)
	}
}

func (c clock) has(agent int, time uint64) bool { return agent < len(c) && c[agent] >= time }

// agent runs operations one after another: a stream or a host thread.
type agent struct {
	id    int
	name  string
	clock clock
}

func (a *agent) tick() uint64 {
	for len(a.clock) <= a.id {
		a.clock = append(a.clock, 0)
	}
	a.clock[a.id]++
	return a.clock[a.id]
}

type races struct {
	agents    int
	threads   map[int]*agent     // of the host, by thread
	workers   map[uintptr]*agent // that the caller named
	words     map[driver.Address]clock
	abandoned bool
}

func newRaces() *races {
	return &races{threads: map[int]*agent{}, workers: map[uintptr]*agent{}, words: map[driver.Address]clock{}}
}

func (r *races) agent(name string) *agent {
	r.agents++
	return &agent{id: r.agents - 1, name: name}
}

func (r *races) thread(tid int) *agent {
	a := r.threads[tid]
	if a == nil {
		a = r.agent("the host")
		r.threads[tid] = a
	}
	return a
}

func (r *races) worker(id uintptr) *agent {
	a := r.workers[id]
	if a == nil {
		a = r.agent("a host kernel's thread")
		r.workers[id] = a
	}
	return a
}

// access is an agent's latest access of one kind.
type access struct {
	agent *agent
	time  uint64
	label string
}

// segment is bytes [from, to) of an allocation that have one history.
type segment struct {
	from, to int64
	write    access
	reads    []access // since the write, one an agent
}

// segments are sorted and disjoint; bytes between them were never accessed.
type segments []segment

// cut splits the segment that contains at, if any.
func (s *segments) cut(at int64) int {
	i, _ := slices.BinarySearchFunc(*s, at, func(g segment, at int64) int {
		if g.to <= at {
			return -1
		}
		return 1
	})
	if i < len(*s) && (*s)[i].from < at {
		left, right := (*s)[i], (*s)[i]
		left.to, right.from = at, at
		right.reads = slices.Clone(right.reads)
		*s = slices.Insert((*s), i+1, right)
		(*s)[i] = left
		i++
	}
	return i
}

// touch records an access to [from, to). It returns the first earlier access that conflicts with it
// and that clock c does not order before it.
func (s *segments) touch(from, to int64, write bool, now access, c clock) (conflict access, wrote bool) {
	if from >= to {
		return access{}, false
	}
	first := s.cut(from)
	end := s.cut(to)
	note := func(a access, w bool) {
		if conflict.agent == nil && a.agent != nil && a.agent != now.agent && !c.has(a.agent.id, a.time) {
			conflict, wrote = a, w
		}
	}
	var gaps []segment
	at := from
	for i := first; i < end; i++ {
		g := &(*s)[i]
		if g.from > at {
			gaps = append(gaps, segment{from: at, to: g.from})
		}
		at = g.to
		note(g.write, true)
		if write {
			for _, r := range g.reads {
				note(r, false)
			}
			g.write, g.reads = now, g.reads[:0]
			continue
		}
		k := slices.IndexFunc(g.reads, func(r access) bool { return r.agent == now.agent })
		if k < 0 {
			g.reads = append(g.reads, now)
		} else {
			g.reads[k] = now
		}
	}
	if at < to {
		gaps = append(gaps, segment{from: at, to: to})
	}
	for _, g := range gaps {
		if write {
			g.write = now
		} else {
			g.reads = []access{now}
		}
		i := s.cut(g.from)
		*s = slices.Insert(*s, i, g)
	}
	// Adjacent segments written by one operation have the same history.
	if write {
		s.merge(from, to, now)
	}
	return conflict, wrote
}

// merge joins the segments of [from, to), which now has written.
func (s *segments) merge(from, to int64, now access) {
	i := s.cut(from)
	j := i
	for j < len(*s) && (*s)[j].to <= to {
		j++
	}
	if j-i > 1 {
		(*s)[i] = segment{from: from, to: to, write: now}
		*s = slices.Delete(*s, i+1, j)
	}
}

// accesses checks and records an agent's reads and writes. It returns an error for a range outside
// live allocations, or in memory that the device cannot access. The caller holds mu.
func (d *Driver) accesses(a *agent, gpu int, label string, reads, writes []driver.Range) error {
	now := access{a, a.tick(), label}
	for k, list := range [2][]driver.Range{reads, writes} {
		verb := [2]string{"reads", "writes"}[k]
		for _, r := range list {
			if r.Len == 0 {
				continue
			}
			m, err := d.reach(r)
			if err != nil {
				d.fault("%s on %s %s out of bounds: %v", quote(label), a.name, verb, err)
				return err
			}
			if !d.canReach(gpu, m) {
				err := fmt.Errorf("%s, which device %d has no access to", m, gpu)
				d.fault("%s on %s %s %v", quote(label), a.name, verb, err)
				return &crash{err.Error()}
			}
			if d.races.abandoned {
				continue
			}
			from := int64(r.At - m.at)
			before, wrote := m.history.touch(from, from+r.Len, k == 1, now, a.clock)
			if before.agent != nil {
				did := "read"
				if wrote {
					did = "written"
				}
				d.fault("%s on %s %s bytes [%d, %d) of %s, %s by %s on %s, and nothing orders the two", quote(label), a.name, verb,
					from, from+r.Len, m, did, quote(before.label), before.agent.name)
			}
		}
	}
	return nil
}

// HostAccess implements driver.Observer.
func (d *Driver) HostAccess(id uintptr, label string, reads, writes []driver.Range) {
	d.mu.Lock()
	defer d.mu.Unlock()
	_ = d.accesses(d.races.worker(id), anywhere, label, reads, writes) // a fault is recorded
}

// HostSaw implements driver.Observer.
func (d *Driver) HostSaw(id uintptr, word driver.Address) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.races.worker(id).clock.join(d.races.words[word])
}

// HostSet implements driver.Observer.
func (d *Driver) HostSet(id uintptr, word driver.Address) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.races.words[word]
	c.join(d.races.worker(id).clock)
	d.races.words[word] = c
}

// Abandon implements driver.Observer: order is no longer checked.
func (d *Driver) Abandon() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.races.abandoned = true
}
