package mpi

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

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
	silentAfter = 1200 * time.Millisecond
	beatBytes   = 4 << 10 // of a heartbeat's message
)

// World is this process's rank in a job, with its groups.
//
// An error in one group ends all, in every process.
type World struct {
	process *Process
	engine  *engine
	mesh    []graph.Axis
	rank    int
	groups  []watch.Group
	members []*member // by axis + 1
	timeout time.Duration
	warn    func(string)
	flight  flight

	mu     sync.Mutex
	err    error
	broken atomic.Bool   // set after err
	over   chan struct{} // closed with err
	hooks  []func(error)
	own    beat
	peers  []beat // by rank, as last heard

	stop    chan struct{}
	stopped chan struct{}
}

// beat is what a rank says of itself to all others, again and again.
type beat struct {
	watch.Report
	Host string
	PID  int
	Err  string `json:",omitempty"` // what ended the job, where it found it
	Kind int
}

// kinds of errors, by their number in a beat.
var kinds = [...]error{comm.ErrAborted, comm.ErrTimeout, comm.ErrMismatch, comm.ErrLost}

// Join makes this process's rank a member of the mesh's groups. Its heartbeat
// begins.
func (p *Process) Join(mesh []graph.Axis, o Options) (*World, error) {
	w := &World{process: p, engine: p.engine, mesh: slices.Clone(mesh), rank: p.engine.rank, timeout: o.Timeout, warn: o.Warn,
		over: make(chan struct{}), stop: make(chan struct{}), stopped: make(chan struct{}), peers: make([]beat, p.engine.world)}
	if w.timeout <= 0 {
		w.timeout = 60 * time.Second
	}
	if w.warn == nil {
		w.warn = func(string) {}
	}
	size := 1
	for i, a := range mesh {
		if a.Size < 1 {
			return nil, fmt.Errorf("mpi: mesh axis %d (%s) has size %d, want at least 1", i, a.Name, a.Size)
		}
		size *= a.Size
	}
	if size != p.engine.world {
		return nil, fmt.Errorf("mpi: a mesh of %d ranks, want the job's %d", size, p.engine.world)
	}
	if err := w.addGroups(); err != nil {
		return nil, err
	}
	host, _ := os.Hostname()
	w.own = beat{Host: host, PID: os.Getpid()}
	w.own.State, w.own.In = watch.Alive, make([]watch.Progress, len(mesh)+1)
	for r := range w.peers {
		w.peers[r].In = make([]watch.Progress, len(mesh)+1)
	}
	go func() {
		defer crash.Guard()
		w.monitor()
	}()
	return w, nil
}

// offHeap is memory that MPI may use while the process goes on.
func offHeap(n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	return b, os.NewSyscallError("mmap", err)
}

// addGroups makes all groups, for the watchdog, and this rank's memberships.
func (w *World) addGroups() error {
	w.members = make([]*member, len(w.mesh)+1)
	add := func(slot int, name string, ranks []int) error {
		w.groups = append(w.groups, watch.Group{Name: name, Slot: slot, Ranks: ranks})
		i := slices.Index(ranks, w.rank)
		if i < 0 {
			return nil
		}
		m := &member{world: w, name: name, slot: slot, ranks: ranks}
		m.Caller = comm.Caller{Index: i, Ranks: len(ranks), World: w.rank, Bind: m.bind}
		var err error
		if m.headers, err = offHeap((len(ranks) + 2) * headerBytes); err != nil {
			return err
		}
		m.scratch, err = offHeap(2 * len(ranks) * chunkBytes)
		w.members[slot] = m
		return err
	}
	all := make([]int, w.engine.world)
	for i := range all {
		all[i] = i
	}
	if err := add(0, "world", all); err != nil {
		return err
	}
	stride := len(all)
	for i, a := range w.mesh {
		stride /= a.Size
		for first := range all {
			if first/stride%a.Size != 0 {
				continue
			}
			ranks := make([]int, a.Size)
			for j := range ranks {
				ranks[j] = first + j*stride
			}
			if err := add(i+1, "axis "+a.Name, ranks); err != nil {
				return err
			}
		}
	}
	return nil
}

// Groups returns all memberships of this process's rank by mesh axis, −1 for all
// ranks.
func (w *World) Groups(rank int) (map[int]comm.Group, error) {
	if rank != w.rank {
		return nil, fmt.Errorf("mpi: rank %d is not this process's %d", rank, w.rank)
	}
	all := map[int]comm.Group{}
	for slot, m := range w.members {
		all[slot-1] = m
	}
	return all, nil
}

// Abort ends the job with err, in every process.
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
	if !w.broken.Load() {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// fail makes err the job's error, unless it has one, and returns the job's. The
// next heartbeat tells the others.
func (w *World) fail(err error) error {
	w.mu.Lock()
	if w.err != nil {
		defer w.mu.Unlock()
		return w.err
	}
	w.err = err
	w.broken.Store(true)
	for i, k := range kinds {
		if errors.Is(err, k) {
			w.own.Kind = i
		}
	}
	w.own.Err = err.Error()
	w.own.Err = w.own.Err[:min(len(w.own.Err), beatBytes/3)]
	hooks := w.hooks
	w.mu.Unlock()
	close(w.over)
	for _, f := range hooks {
		f(err)
	}
	return err
}

// failed makes the error of an operation's messages the job's.
func (w *World) failed(k *kernel, err error) error {
	if job := w.Err(); job != nil {
		return job
	}
	return w.fail(fmt.Errorf("%w: rank %d: %s: %w", comm.ErrLost, w.rank, k.text, err))
}

// exchange runs messages, or ends with the job's error.
func (w *World) exchange(list []transfer) error {
	if len(list) == 0 {
		return nil
	}
	return w.wait(w.engine.begin(slices.Clone(list), false))
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

// show puts into the heartbeat where the rank is in an operation.
func (w *World) show(k *kernel, phase watch.Phase) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := watch.Progress{Call: k.m.calls, Phase: phase, Op: k.text}
	if k.Sig.Op == comm.SendRecv {
		w.own.Point, w.own.Peer = p, k.ranks[0]
		return
	}
	w.own.In[k.m.slot] = p
}

// encode writes the heartbeat as a message.
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

// hear takes a heartbeat.
func (w *World) hear(rank int, message []byte) (done bool) {
	n := binary.LittleEndian.Uint32(message)
	var b beat
	if int(n) > len(message)-4 || json.Unmarshal(message[4:4+n], &b) != nil || len(b.In) != len(w.mesh)+1 {
		return false // not a sign of life
	}
	w.mu.Lock()
	w.peers[rank] = b
	w.mu.Unlock()
	if b.Err != "" && w.Err() == nil {
		_ = w.fail(&peerError{kinds[min(max(b.Kind, 0), len(kinds)-1)], b.Err})
	}
	return b.State == watch.Done
}

// peerError is an error that another process has found.
type peerError struct {
	kind error
	text string
}

func (e *peerError) Error() string { return e.text }
func (e *peerError) Unwrap() error { return e.kind }

// Close ends the rank's part: the others learn that it has.
func (w *World) Close() error {
	close(w.stop)
	<-w.stopped
	return nil
}
