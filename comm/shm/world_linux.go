package shm

import (
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
)

// Options of a World.
type Options struct {
	// Timeout is how long a rank may keep others waiting. Default 60 s.
	Timeout time.Duration
	// Warn is told what a person should know, one line a call; nil drops it.
	Warn func(string)
}

const (
	beatEvery   = 100 * time.Millisecond
	silentAfter = time.Second
)

// World is a process's part of a job: the ranks that it runs, with their groups.
//
// An error in one group ends all, in every process.
type World struct {
	job     *Job
	mesh    []graph.Axis
	local   []int // the ranks of this process
	groups  []watch.Group
	members [][]*member // by axis + 1, local rank
	timeout time.Duration
	warn    func(string)
	spins   bool // a waiter looks for a while before it goes to sleep

	mu      sync.Mutex
	err     error
	failed  atomic.Bool // set after err
	hooks   []func(error)
	regions [][]atomic.Pointer[mapped] // by rank, region
	own     []ownRegion
	free    int64 // of the process's file: where the next arena begins

	stop    chan struct{}
	stopped chan struct{}
}

// ownRegion is an arena of a rank of this process.
type ownRegion struct {
	rank, index int
	data        []byte
}

// Join makes this process the one that runs the given ranks of a mesh; an empty
// mesh has one. The process's heartbeat begins.
func (j *Job) Join(mesh []graph.Axis, ranks []int, o Options) (*World, error) {
	w := &World{job: j, mesh: slices.Clone(mesh), local: slices.Clone(ranks), timeout: o.Timeout, warn: o.Warn,
		stop: make(chan struct{}), stopped: make(chan struct{})}
	if w.timeout <= 0 {
		w.timeout = 60 * time.Second
	}
	if w.warn == nil {
		w.warn = func(string) {}
	}
	size := 1
	for i, a := range mesh {
		if a.Size < 1 {
			return nil, fmt.Errorf("shm: mesh axis %d (%s) has size %d, want at least 1", i, a.Name, a.Size)
		}
		size *= a.Size
	}
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
	// A waiter may spin where every rank has a core of its own to spin on.
	w.spins = int(j.header().Cores) >= j.world
	w.addGroups()
	w.regions = make([][]atomic.Pointer[mapped], j.world)
	for r := range w.regions {
		w.regions[r] = make([]atomic.Pointer[mapped], maxRegions)
	}
	go func() {
		defer crash.Guard()
		w.monitor()
	}()
	return w, nil
}

// addGroups makes the groups of all ranks, and the members of this process's.
func (w *World) addGroups() {
	w.members = make([][]*member, len(w.mesh)+1)
	add := func(slot int, name string, ranks []int) {
		w.groups = append(w.groups, watch.Group{Name: name, Slot: slot, Ranks: ranks})
		for i, r := range ranks {
			if !slices.Contains(w.local, r) {
				continue
			}
			m := &member{world: w, name: name, slot: slot, ranks: ranks}
			m.Caller = comm.Caller{Index: i, Ranks: len(ranks), World: r, Bind: m.bind}
			w.members[slot][r] = m
		}
	}
	all := make([]int, w.job.world)
	for i := range all {
		all[i] = i
	}
	for i := range w.members {
		w.members[i] = make([]*member, w.job.world)
	}
	add(0, "world", all)
	stride := w.job.world
	for i, a := range w.mesh {
		stride /= a.Size
		for first := range w.job.world {
			if first/stride%a.Size != 0 {
				continue
			}
			ranks := make([]int, a.Size)
			for j := range ranks {
				ranks[j] = first + j*stride
			}
			add(i+1, "axis "+a.Name, ranks)
		}
	}
}

// Group returns the membership of a rank of this process along a mesh axis, −1
// for all ranks.
func (w *World) Group(rank, axis int) (comm.Group, error) {
	if axis < -1 || axis >= len(w.mesh) {
		return nil, fmt.Errorf("shm: mesh axis %d of %d axes", axis, len(w.mesh))
	}
	if !slices.Contains(w.local, rank) {
		return nil, fmt.Errorf("shm: rank %d is not one of this process's %v", rank, w.local)
	}
	return w.members[axis+1][rank], nil
}

// Groups returns all memberships of a rank of this process by mesh axis, −1 for
// all ranks.
func (w *World) Groups(rank int) (map[int]comm.Group, error) {
	all := map[int]comm.Group{}
	for axis := -1; axis < len(w.mesh); axis++ {
		g, err := w.Group(rank, axis)
		if err != nil {
			return nil, err
		}
		all[axis] = g
	}
	return all, nil
}

// Abort ends the job with err, in every process; the first error of all counts.
func (w *World) Abort(err error) { _ = w.fail(fmt.Errorf("%w: %w", comm.ErrAborted, err)) }

// OnError registers f for the error that ends the job. If it has ended, f is
// called at once.
func (w *World) OnError(f func(error)) {
	w.mu.Lock()
	err := w.err
	if err == nil {
		w.hooks = append(w.hooks, f)
	}
	w.mu.Unlock()
	if err != nil {
		f(err)
	}
}

// Err returns the error that ended the job, nil while it is sound.
func (w *World) Err() error {
	if !w.failed.Load() {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// kinds of errors, by their number in the control segment.
var kinds = [...]error{comm.ErrAborted, comm.ErrTimeout, comm.ErrMismatch, comm.ErrLost}

// sharedError is an error that another process has found.
type sharedError struct {
	kind error
	text string
}

func (e *sharedError) Error() string { return e.text }
func (e *sharedError) Unwrap() error { return e.kind }

// fail makes err the job's error, unless it has one, and returns the job's.
func (w *World) fail(err error) error {
	h := w.job.header()
	if h.ended.CompareAndSwap(0, 1) {
		h.kind = 0
		for i, k := range kinds {
			if errors.Is(err, k) {
				h.kind = uint32(i)
			}
		}
		h.rank = uint32(w.local[0])
		h.textLen = uint32(copy(h.text[:], err.Error()))
		h.ended.Store(2)
		w.ringAll()
		return w.settle(err)
	}
	return w.adopt()
}

// adopt makes the job's error this process's, and returns it; nil while the job
// is sound.
func (w *World) adopt() error {
	if err := w.Err(); err != nil {
		return err
	}
	h := w.job.header()
	for begin := time.Now(); h.ended.Load() == 1 && time.Since(begin) < time.Second; {
		runtime.Gosched() // its writer is at it, or died over it
	}
	switch h.ended.Load() {
	case 0:
		return nil
	case 1:
		return w.settle(&sharedError{comm.ErrLost, "rank lost: a process died while it ended the job"})
	}
	text := string(h.text[:min(int(h.textLen), len(h.text))])
	return w.settle(&sharedError{kinds[min(int(h.kind), len(kinds)-1)], text})
}

// settle makes err this process's error, unless it has one.
func (w *World) settle(err error) error {
	w.mu.Lock()
	if w.err != nil {
		defer w.mu.Unlock()
		return w.err
	}
	w.err = err
	w.failed.Store(true)
	hooks := w.hooks
	w.mu.Unlock()
	for _, f := range hooks {
		f(err)
	}
	return err
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
	// Who sleeps in a Send or Recv looks again by itself: see nap.
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

// Show tells the watchdog where a rank of this process is in its group of a slot, in an
// operation that another transport runs. Calls go on from those of the group itself, of
// which there are none afterwards.
func (w *World) Show(rank, slot int, p watch.Progress) {
	own := w.job.post(slot, rank)
	if own.came.Load() != p.Call {
		own.text.set(p.Op)
	}
	own.came.Store(p.Call)
	own.phase.Store(uint32(p.Phase))
}

// Map makes the memory of a rank's arenas, for cpu.Options.
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

// find returns where b lies in a rank's regions.
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

// hash of a signature, equal where operations agree.
func hash(s comm.Signature) uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s %d %d %d %d %v %s", s.Op, s.Bytes, s.DType, s.Root, s.Order, s.Accumulate, s.Round)
	return h.Sum64()
}
