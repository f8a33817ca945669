package nccl

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spillway-ml/spillway/comm/world"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/graph"
)

// HostWorld is the Control of a World over a Host: it does for one rank in a mesh what NCCL
// does not. Rank 0's HostWorld also watches for ranks that others wait for.
type HostWorld struct {
	h   *Host
	gen int // generation of ranks to which this world belongs; see past
}

var _ Control = (*HostWorld)(nil)

// Join makes the process's rank a rank of a mesh. timeout is how long a rank may keep others
// waiting. warn is called with each warning; nil drops them.
func (h *Host) Join(mesh []graph.Axis, timeout time.Duration, warn func(string)) (*HostWorld, error) {
	size, groups, err := world.Groups("nccl", mesh)
	if err != nil {
		return nil, err
	}
	if size != h.world {
		return nil, fmt.Errorf("nccl: a mesh of %d ranks, want the job's %d", size, h.world)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if timeout > 0 {
		h.timeout = timeout
	}
	if warn != nil {
		h.warn = warn
	}
	h.started, h.slots = true, len(mesh)+1
	for i := range h.reports {
		h.reports[i] = watch.Report{State: watch.Alive, In: make([]watch.Progress, h.slots)}
	}
	if h.rank == 0 {
		h.began = time.Now()
		h.machine = watch.New(watch.Config{World: size, Groups: groups, Interval: lookEvery, Silent: h.timeout, Timeout: h.timeout,
			Where: func(r int) string { return h.where[r] }}) // called with mu held
	}
	return &HostWorld{h: h, gen: h.gen}, nil
}

// Communicator gives the communicator of all ranks to a World, once: see Options.World.
func (w *HostWorld) Communicator() (Comm, error) {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	if w.past() || w.h.data.handle == 0 {
		return 0, errors.New("nccl: the communicator of the ranks is taken, or the host has ended")
	}
	c := w.h.data.handle
	w.h.data.handle = 0
	return c, nil
}

// Gather exchanges bytes between all ranks: it returns the contribution own of every rank.
func (w *HostWorld) Gather(rank int, own []byte) ([][]byte, error) {
	h := w.h
	h.mu.Lock()
	defer h.mu.Unlock()
	if rank != h.rank || len(own) > helloBytes {
		return nil, fmt.Errorf("nccl: %d bytes of rank %d, want at most %d of rank %d", len(own), rank, helloBytes, h.rank)
	}
	if w.past() {
		return nil, comm.ErrAborted
	}
	h.seq++
	h.said[0] = own
	if h.rank == 0 {
		h.gathered()
	}
	h.rouse()
	for want := h.seq; !w.past() && h.whole < want && h.err == nil; {
		h.cond.Wait()
	}
	if w.past() {
		return nil, comm.ErrAborted
	}
	return slices.Clone(h.all), h.err
}

// Show reports the rank's progress in its group of a slot to the watchdog.
func (w *HostWorld) Show(_, slot int, p watch.Progress) {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	if !w.past() {
		w.h.reports[0].In[slot] = p
	}
}

// Abort ends the job with err, in every process.
func (w *HostWorld) Abort(err error) {
	w.h.failIn(w.gen, fmt.Errorf("%w: %w", comm.ErrAborted, err))
}

// past tells whether the host has moved on to another generation of ranks; the caller
// holds the host's mu.
func (w *HostWorld) past() bool { return w.gen != w.h.gen }

// Err returns the error that ended the job, nil if there has been none.
func (w *HostWorld) Err() error {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	if w.past() {
		return comm.ErrAborted
	}
	return w.h.err
}

// OnError registers f to be called with the error that ends the job. If the job has already
// ended, f is called at once.
func (w *HostWorld) OnError(f func(error)) {
	w.h.mu.Lock()
	err := w.h.err
	if w.past() {
		err = comm.ErrAborted
	}
	if err == nil {
		w.h.hooks = append(w.h.hooks, f)
	}
	w.h.mu.Unlock()
	if err != nil {
		f(err)
	}
}

// Groups returns an error: a Host supports no CPU ranks.
func (w *HostWorld) Groups(int) (map[int]comm.Group, error) {
	return nil, errors.New("CPU ranks have nothing to meet by here: start them with mpirun (in a Kubernetes cluster: an MPIJob), or with spillway launch on one host")
}

// Map returns nil: a Host supports no CPU ranks, which would need shared memory.
func (w *HostWorld) Map(int) func(graph.Space, int64) ([]byte, func() error, error) { return nil }

// Close ends the rank's part in the world. The Host continues until its own Close.
func (w *HostWorld) Close() error {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	if !w.past() {
		w.h.reports[0].State = watch.Done
		w.h.hooks = nil
	}
	return nil
}
