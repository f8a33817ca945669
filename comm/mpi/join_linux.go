package mpi

import (
	"cmp"
	"fmt"
	"os"
	"time"

	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/comm/world"
	"github.com/spillway-ml/spillway/graph"
)

// Options of a World.
type Options struct {
	// Timeout is how long a rank may keep others waiting. Default 60 s.
	Timeout time.Duration
	// Warn is called with each warning, one line a call; nil drops them.
	Warn func(string)
	// Messages makes collectives use messages between pairs of ranks even if each process has
	// one rank, for which MPI's non-blocking collectives would be used otherwise.
	Messages bool
}

// maxEach is the largest number of ranks of a process: every pair of ranks of two processes
// has its own tags, and MPI guarantees only 32768 tags.
const maxEach = 32

// Join makes this process's ranks members of the mesh's groups. Every process has each
// consecutive ranks. Join starts the heartbeat.
func (p *Process) Join(mesh []graph.Axis, each int, o Options) (*World, error) {
	if each < 1 || each > maxEach {
		return nil, fmt.Errorf("mpi: %d ranks in a process, want 1 to %d: start more processes", each, maxEach)
	}
	w := &World{process: p, engine: p.engine, each: each, first: p.engine.rank * each, size: p.engine.world * each,
		timeout: cmp.Or(max(o.Timeout, 0), defaultTimeout), warn: o.Warn,
		flights: make([]flight, each), over: make(chan struct{}),
		stop: make(chan struct{}), stopped: make(chan struct{}),
		grouped: make(chan struct{}), peers: make([]beat, p.engine.world)}
	if w.warn == nil {
		w.warn = func(string) {}
	}
	size, groups, err := world.Groups("mpi", mesh)
	if err != nil {
		return nil, err
	}
	w.Open(w.fail)
	w.groups = groups
	if size != w.size {
		return nil, fmt.Errorf("mpi: a mesh of %d ranks, want the job's %d", size, w.size)
	}
	if err := w.addMembers(len(mesh) + 1); err != nil {
		return nil, err
	}
	host, _ := os.Hostname()
	w.own = beat{Host: host, PID: os.Getpid(), Reports: w.reports(watch.Alive)}
	for i := range w.peers {
		w.peers[i].Reports = w.reports(watch.Absent)
	}
	go w.monitor()
	if each > 1 || o.Messages || w.size == 1 {
		close(w.grouped)
		return w, nil
	}
	go w.makeCommunicators()
	return w, nil
}

// reports returns initial reports of a process's ranks, in state s.
func (w *World) reports(s watch.State) []watch.Report {
	list := make([]watch.Report, w.each)
	for i := range list {
		list[i] = watch.Report{State: s, In: make([]watch.Progress, len(w.members))}
	}
	return list
}

// addMembers creates the group memberships of this process's ranks.
func (w *World) addMembers(slots int) (err error) {
	w.members = make([][]*member, slots)
	for slot := range w.members {
		w.members[slot] = make([]*member, w.each)
	}
	for _, g := range w.groups {
		for i, r := range g.Ranks {
			if r < w.first || r >= w.first+w.each {
				continue
			}
			m := &member{world: w}
			m.Join(&w.End, g, i, m.bind)
			if m.headers, err = offHeap((len(g.Ranks) + 2) * headerBytes); err != nil {
				return err
			}
			if m.scratch, err = offHeap(2 * len(g.Ranks) * chunkBytes); err != nil {
				return err
			}
			w.members[g.Slot][r-w.first] = m
		}
	}
	return nil
}
