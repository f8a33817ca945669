package mpi

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

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
	// Messages makes collectives use messages between pairs of ranks even if each process has
	// one rank, for which MPI's non-blocking collectives would be used otherwise.
	Messages bool
}

const (
	defaultTimeout = world.DefaultTimeout

	beatEvery   = 100 * time.Millisecond
	silentAfter = 1200 * time.Millisecond
)

// maxEach is the largest number of ranks of a process: every pair of ranks of two processes
// has its own tags, and MPI guarantees only 32768 tags.
const maxEach = 32

// World is this process's ranks in a job, with their groups.
//
// An error in one group ends all groups, in every process.
type World struct {
	world.End
	process *Process
	engine  *engine
	each    int // number of ranks of every process
	first   int // this process's first rank
	size    int // number of ranks of the job
	groups  []watch.Group
	members [][]*member // by axis + 1 and the rank's index in the process
	timeout time.Duration
	warn    func(string)
	flights []flight // by the rank's index in the process

	over chan struct{} // closed once the job has an error

	mu    sync.Mutex
	own   beat
	peers []beat // by process: its last heartbeat

	stop    chan struct{}
	stopped chan struct{}
	grouped chan struct{} // closed when the groups have their communicators, if they get any
}

// beat is the heartbeat that a process sends repeatedly to all others.
type beat struct {
	Reports []watch.Report // reports of its ranks
	Host    string
	PID     int
	Err     string `json:",omitempty"` // the error that ended the job, if this process found it
	Kind    int
}

// Join makes this process's ranks members of the mesh's groups. Every process has each
// consecutive ranks. Join starts the heartbeat.
func (p *Process) Join(mesh []graph.Axis, each int, o Options) (*World, error) {
	if each < 1 || each > maxEach {
		return nil, fmt.Errorf("mpi: %d ranks in a process, want 1 to %d: start more processes", each, maxEach)
	}
	w := &World{process: p, engine: p.engine, each: each, first: p.engine.rank * each, size: p.engine.world * each,
		timeout: cmp.Or(max(o.Timeout, 0), defaultTimeout), warn: o.Warn, flights: make([]flight, each), over: make(chan struct{}), stop: make(chan struct{}), stopped: make(chan struct{}),
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

// offHeap allocates n bytes outside the Go heap: MPI may access them between its calls,
// when Go may move or free heap memory.
func offHeap(n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	return b, os.NewSyscallError("mmap", err)
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

// Groups returns all memberships of one of this process's ranks by mesh axis, −1 for
// all ranks.
func (w *World) Groups(rank int) (map[int]comm.Group, error) {
	if rank < w.first || rank >= w.first+w.each {
		return nil, fmt.Errorf("mpi: rank %d is not of this process's %d from %d", rank, w.each, w.first)
	}
	all := map[int]comm.Group{}
	for slot, list := range w.members {
		all[slot-1] = list[rank-w.first]
	}
	return all, nil
}

// fail makes err the job's error, unless the job already has one. It returns the job's error.
// The next heartbeat sends it to the other processes.
func (w *World) fail(err error) error {
	return w.Settle(err, func() {
		w.process.failed.Store(true)
		text := err.Error()
		w.mu.Lock()
		w.own.Kind, w.own.Err = world.Kind(err), text[:min(len(text), beatBytes/3)]
		w.mu.Unlock()
		close(w.over)
	})
}

// failed makes an error of an operation's messages the job's error.
func (w *World) failed(k *kernel, err error) error {
	if job := w.Err(); job != nil {
		return job
	}
	return w.fail(fmt.Errorf("%w: rank %d: %s: %w", comm.ErrLost, k.m.World, k.text, err))
}

// exchange runs messages between ranks that have met. It returns the job's error if the job
// ends first.
func (w *World) exchange(list []transfer) error {
	if len(list) == 0 {
		return nil
	}
	return w.run(&exchange{list: slices.Clone(list), met: true})
}

// run runs an exchange. It returns the job's error if the job ends first.
func (w *World) run(x *exchange) error {
	if done, err := w.engine.attend(x, w.Failed()); done {
		return err
	}
	return w.wait(w.engine.start(x))
}

func (w *World) wait(x *exchange) error {
	select {
	case err := <-x.done:
		return err
	case <-w.over:
		return w.Err()
	case <-w.engine.closed:
		return errEnded
	}
}

// show puts the rank's progress in an operation into the heartbeat.
func (w *World) show(k *kernel, phase watch.Phase) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := watch.Progress{Call: k.m.calls, Phase: phase, Op: k.text}
	own := &w.own.Reports[k.m.World-w.first]
	if k.Sig.Op == comm.SendRecv {
		own.Point, own.Peer = p, k.ranks[0]
		return
	}
	own.In[k.m.Slot] = p
}

// Show reports to the watchdog the progress of a rank of this process in its group of a slot,
// for operations that another transport runs. Call numbers continue from those of the group
// itself, which must run no operations after that.
func (w *World) Show(rank, slot int, p watch.Progress) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.own.Reports[rank-w.first].In[slot] = p
}

// encode encodes the heartbeat as a message.
func (w *World) encode(to []byte) {
	w.mu.Lock()
	text, err := json.Marshal(w.own)
	w.mu.Unlock()
	if err != nil || len(text) > len(to)-4 {
		text = []byte("{}")
	}
	binary.LittleEndian.PutUint32(to, uint32(len(text)))
	copy(to[4:], text)
}

// hear processes a heartbeat. done says that it is the process's last one.
func (w *World) hear(process int, message []byte) (done bool) {
	n := binary.LittleEndian.Uint32(message)
	var b beat
	if int(n) > len(message)-4 || json.Unmarshal(message[4:4+n], &b) != nil || len(b.Reports) != w.each {
		return false // damaged: does not count as a sign of life
	}
	for _, r := range b.Reports {
		if len(r.In) != len(w.members) {
			return false
		}
	}
	w.mu.Lock()
	w.peers[process] = b
	w.mu.Unlock()
	if b.Err != "" && w.Err() == nil {
		_ = w.fail(world.Told(b.Kind, b.Err))
	}
	return b.Reports[0].State == watch.Done
}

// Close ends the process's part of the job and tells the other processes.
func (w *World) Close() error {
	close(w.stop)
	<-w.stopped
	return nil
}
