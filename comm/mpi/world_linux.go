package mpi

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/comm/world"
)

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

// awaitGroups waits until the groups have their communicators. It returns the job's error
// if the job ends first.
func (w *World) awaitGroups() error {
	select {
	case <-w.grouped:
		return nil
	case <-w.over:
		return w.Err()
	}
}

// Show reports to the watchdog the progress of a rank of this process in its group of a slot,
// for operations that another transport runs. Call numbers continue from those of the group
// itself, which must run no operations after that.
func (w *World) Show(rank, slot int, p watch.Progress) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.own.Reports[rank-w.first].In[slot] = p
}

// Close ends the process's part of the job and tells the other processes.
func (w *World) Close() error {
	close(w.stop)
	<-w.stopped
	return nil
}
