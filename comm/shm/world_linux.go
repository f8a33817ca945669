package shm

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/comm"
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
}

const (
	beatEvery   = 100 * time.Millisecond
	silentAfter = time.Second
)

// World is this process's part of a job: the ranks that it runs and their groups.
//
// An error in one group ends all groups, in every process.
type World struct {
	world.End
	job     *Job
	local   []int // the ranks of this process
	groups  []watch.Group
	members [][]*member // by axis + 1, local rank
	timeout time.Duration
	warn    func(string)
	spins   bool // waiters poll for a while before they sleep

	mu      sync.Mutex
	regions [][]atomic.Pointer[mapped] // by rank, region
	own     []ownRegion
	free    int64 // offset of the next arena in the process's file

	stop    chan struct{}
	stopped chan struct{}
}

// ownRegion is an arena of a rank of this process.
type ownRegion struct {
	rank, index int
	data        []byte
}

// Join makes this process run the given ranks of a mesh; an empty mesh has one rank. It starts
// the process's heartbeat.
func (j *Job) Join(mesh []graph.Axis, ranks []int, o Options) (*World, error) {
	w := &World{job: j, local: slices.Clone(ranks), timeout: cmp.Or(max(o.Timeout, 0), world.DefaultTimeout), warn: o.Warn,
		stop: make(chan struct{}), stopped: make(chan struct{})}
	if w.warn == nil {
		w.warn = func(string) {}
	}
	size, groups, err := world.Groups("shm", mesh)
	if err != nil {
		return nil, err
	}
	w.Open(w.fail)
	w.groups = groups
	if err := j.each(len(ranks)); err != nil {
		return nil, err
	}
	if size != j.world || len(mesh)+1 > maxSlots {
		return nil, fmt.Errorf("shm: a mesh of %d ranks and %d axes, want the job's %d ranks and at most %d axes", size, len(mesh), j.world, maxSlots-1)
	}
	for i, r := range ranks {
		if r < 0 || r >= size || r != ranks[0]+i || ranks[0]%len(ranks) != 0 {
			return nil, fmt.Errorf("shm: ranks %v of %d ranks in one of %d processes: they are neighbours, as many in each", ranks, size, j.processes)
		}
		if !j.rank(r).state.CompareAndSwap(uint32(watch.Absent), uint32(watch.Alive)) {
			return nil, fmt.Errorf("shm: rank %d has joined the job already", r)
		}
		j.rank(r).pid.Store(uint32(os.Getpid()))
	}
	// A waiter may spin if every rank has its own core.
	w.spins = int(j.header().Cores) >= j.world
	w.members = make([][]*member, len(mesh)+1)
	for slot := range w.members {
		w.members[slot] = make([]*member, j.world)
	}
	for _, g := range groups {
		for i, r := range g.Ranks {
			if slices.Contains(ranks, r) {
				m := &member{world: w}
				m.Join(&w.End, g, i, m.bind)
				w.members[g.Slot][r] = m
			}
		}
	}
	w.regions = make([][]atomic.Pointer[mapped], j.world)
	for r := range w.regions {
		w.regions[r] = make([]atomic.Pointer[mapped], maxRegions)
	}
	go w.monitor()
	return w, nil
}

// Groups returns all memberships of a rank of this process by mesh axis, −1 for all ranks.
func (w *World) Groups(rank int) (map[int]comm.Group, error) {
	if !slices.Contains(w.local, rank) {
		return nil, fmt.Errorf("shm: rank %d is not one of this process's %v", rank, w.local)
	}
	all := map[int]comm.Group{}
	for slot, list := range w.members {
		all[slot-1] = list[rank]
	}
	return all, nil
}

// fail makes err the job's error, unless it already has one. It returns the job's error.
func (w *World) fail(err error) error {
	if w.job.Fail(w.local[0], err) {
		w.ringAll()
		return w.Settle(err, func() {})
	}
	return w.adopt()
}

// adopt makes the job's error this process's error and returns it; nil if there is none.
func (w *World) adopt() error {
	if err := w.Err(); err != nil {
		return err
	}
	h := w.job.header()
	for begin := time.Now(); h.ended.Load() == 1 && time.Since(begin) < time.Second; {
		runtime.Gosched() // another process is writing the error, or died while writing it
	}
	switch h.ended.Load() {
	case 0:
		return nil
	case 1:
		return w.Settle(world.Told(world.Kind(comm.ErrLost), "rank lost: a process died while it ended the job"), func() {})
	}
	text := string(h.text[:min(int(h.textLen), len(h.text))])
	return w.Settle(world.Told(int(h.kind), text), func() {})
}

// ringAll wakes every rank of the job that sleeps.
func (w *World) ringAll() {
	ring := func(p *post) {
		p.bell.Add(1)
		wake(&p.bell)
	}
	for _, g := range w.groups {
		for _, r := range g.Ranks {
			ring(w.job.post(g.Slot, r))
		}
	}
	// A rank that sleeps in a Send or Recv wakes up without a signal: see nap.
}

// Close ends the process's part: its heartbeat stops, and others that still wait
// for its ranks learn that they have ended. Nothing of the world may run.
func (w *World) Close() error {
	for _, r := range w.local {
		w.job.rank(r).state.Store(uint32(watch.Done))
	}
	close(w.stop)
	<-w.stopped
	var errs []error
	for r := range w.regions {
		for i := range w.regions[r] {
			if m := w.regions[r][i].Swap(nil); m != nil && !slices.Contains(w.local, r) {
				errs = append(errs, m.unmap())
			}
		}
	}
	return errors.Join(errs...)
}

// Show reports to the watchdog the progress of a rank of this process in its group of a slot,
// for operations that another transport runs. Call numbers continue from those of the group
// itself, which must run no operations after that.
func (w *World) Show(rank, slot int, p watch.Progress) {
	own := w.job.post(slot, rank)
	if own.came.Load() != p.Call {
		own.text.set(p.Op)
	}
	own.came.Store(p.Call)
	own.phase.Store(uint32(p.Phase))
}

// Map returns the function that allocates a rank's arenas, for cpu.Options.Map.
func (w *World) Map(rank int) func(graph.Space, int64) ([]byte, func() error, error) {
	return func(_ graph.Space, bytes int64) ([]byte, func() error, error) {
		if !slices.Contains(w.local, rank) {
			return nil, nil, fmt.Errorf("shm: rank %d is not one of this process's %v", rank, w.local)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		area, file := w.job.rank(rank), w.job.file(rank)
		index := int(area.count.Load())
		if index == maxRegions {
			return nil, nil, fmt.Errorf("a rank has at most %d arenas in shared memory", maxRegions)
		}
		off := w.free
		if err := file.Truncate(off + bytes); err != nil {
			return nil, nil, fmt.Errorf("grow the process's shared memory: %w", err)
		}
		m, err := mapFile(file, off, bytes)
		if err != nil {
			return nil, nil, err
		}
		_ = huge(m.data)
		w.free = (off + bytes + hugeSize - 1) / hugeSize * hugeSize
		area.regions[index].off.Store(off)
		area.regions[index].size.Store(bytes)
		area.count.Store(uint32(index + 1))
		w.regions[rank][index].Store(m)
		w.own = append(w.own, ownRegion{rank, index, m.data})
		return m.data, m.unmap, nil
	}
}

// find returns the position of b in a rank's regions.
func (w *World) find(rank int, b []byte) (operand, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range w.own {
		if off := address(b) - address(o.data); o.rank == rank && off >= 0 && off+int64(len(b)) <= int64(len(o.data)) {
			return operand{int64(o.index), off, int64(len(b))}, nil
		}
	}
	return operand{}, errors.New("the operand is not in the rank's shared memory")
}

// view returns a peer's operand as this process has it mapped.
func (w *World) view(rank int, o operand) ([]byte, error) {
	if o.region < 0 {
		return nil, nil
	}
	if o.region >= maxRegions {
		return nil, fmt.Errorf("shm: rank %d posted region %d", rank, o.region)
	}
	p := w.regions[rank][o.region].Load()
	if p == nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		if p = w.regions[rank][o.region].Load(); p == nil {
			r := &w.job.rank(rank).regions[o.region]
			var err error
			if p, err = mapFile(w.job.file(rank), r.off.Load(), r.size.Load()); err != nil {
				return nil, fmt.Errorf("shm: map the memory of rank %d: %w", rank, err)
			}
			w.regions[rank][o.region].Store(p)
		}
	}
	if o.off < 0 || o.n < 0 || o.off+o.n > int64(len(p.data)) {
		return nil, fmt.Errorf("shm: rank %d posted bytes [%d, %d) of an arena of %d", rank, o.off, o.off+o.n, len(p.data))
	}
	return p.data[o.off : o.off+o.n : o.off+o.n], nil
}
