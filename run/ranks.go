// Package run drives the ranks of a job from one process: executors and states. It knows all ranks
// of the world and which are local. Only States knows which rank holds a range of a state, here or
// in another process.
package run

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/internal/thread"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform"
)

// Ranks are the ranks that this process drives. On the leader they include those of other
// processes. The methods must be called from one goroutine.
type Ranks struct {
	platform.World
	plan    *plan.Plan
	timeout time.Duration
	list    []*Rank

	sharing  sync.Once // computes shares
	shares   [][]piece // by rank: its pieces of a checkpoint
	unshared error     // error of computing shares

	hashing func() (*hashing, error) // assignment of blocks to ranks for hashing; computed by the first call

	trace *exec.Trace // nil: none

	folders filesys.Opener                    // opens the checkpoint folder; nil: the system's
	folder  string                            // path of the checkpoint folder here; "": the leader's path
	refused error                             // a *NotJoined, written by the ranks' goroutine
	joined  atomic.Pointer[checkpoint.Joined] // the leader's checkpoint folder
}

// Rank is one rank, with its executor and the goroutine that drives it.
type Rank struct {
	on *thread.Thread
	// Index is the rank in the world, Slot its index among the ranks that the process drives.
	Index, Slot int
	Exec        Executor

	role  *plan.Role
	image checkpoint.Image // copy of the states that is saved while training continues
}

// RankOptions are the arguments of Open.
type RankOptions struct {
	World    platform.World
	Plan     *plan.Plan
	Platform platform.Platform // started
	Trace    *exec.Trace
	Meter    bool          // measure collectives, for Ranks.Usage
	Poison   bool          // fill released memory, to detect wrong reads
	Timeout  time.Duration // how long a rank may be busy after the first rank has finished
	// Graphs launches a step's operations as CUDA graphs if possible. Warn is called if that
	// fails, with one line a call, from any goroutine.
	Graphs bool
	Warn   func(string)
	// Links are the streams to other processes, by rank of World; ranks of one process share
	// one. These processes have already opened their ranks, unless Opened is set.
	Links map[int]*Link
	// Opened waits until the other processes have opened their ranks. It is set if ranks must
	// open at the same time to connect to each other (platform.Meeter); nil: they have.
	Opened func() error
	// Wrap, for tests of failures, wraps a rank's device context.
	Wrap func(rank int, ctx device.Context) device.Context
	// Folders opens the leader's checkpoint folder in another process; nil: filesys.System.
	Folders filesys.Opener
	// Checkpoint is the path of the leader's checkpoint folder on this host; "": the same
	// path as the leader's.
	Checkpoint string
}

// Open makes the executors of the world's local ranks. The caller must close the result, even after
// an error.
func Open(o RankOptions) (*Ranks, error) {
	rs := &Ranks{World: o.World, plan: o.Plan, timeout: o.Timeout, trace: o.Trace, folders: o.Folders, folder: o.Checkpoint}
	rs.hashing = sync.OnceValues(rs.newHashing)
	if err := o.World.Check(); err != nil {
		return rs, err
	}
	if err := rs.openLocal(&o); err != nil {
		return rs, err
	}
	channels := map[*Link]*channel{}
	for _, r := range rs.list {
		link := o.Links[r.Index]
		if link == nil {
			continue
		}
		if channels[link] == nil {
			channels[link] = newChannel(link)
		}
		r.role = o.Plan.Of(r.Index)
		r.Exec = channels[link].remote(r.Index, r.role)
	}
	return rs, nil
}

// openLocal makes the ranks, and the executors of this process's ranks.
func (rs *Ranks) openLocal(o *RankOptions) (err error) {
	for slot, i := range o.World.Local {
		rs.list = append(rs.list, &Rank{on: thread.New(o.Platform.GPU() != nil), Index: i, Slot: slot})
	}
	if m, ok := o.Platform.(platform.Meeter); ok && m.Meets() {
		err = rs.openMeeting(o, m)
	} else {
		for _, r := range rs.list {
			if o.Links[r.Index] == nil && err == nil {
				err = r.on.Do(func() error { return r.open(o) })
			}
		}
	}
	if o.Opened == nil || err != nil && !errors.Is(err, comm.ErrAborted) {
		return err
	}
	if other := o.Opened(); other != nil { // the error that ended the job
		return other
	}
	return err
}

// openMeeting opens all ranks at once, because they connect to each other and to those of other
// processes while they open. If one fails, the others of its process stop waiting.
func (rs *Ranks) openMeeting(o *RankOptions, m platform.Meeter) (err error) {
	var mu sync.Mutex
	var opening sync.WaitGroup
	for _, r := range rs.list {
		if o.Links[r.Index] != nil {
			continue
		}
		opening.Go(func() {
			defer crash.Guard()
			e := r.on.Do(func() error { return r.open(o) })
			if e == nil {
				return
			}
			mu.Lock()
			if err == nil || errors.Is(err, comm.ErrAborted) && !errors.Is(e, comm.ErrAborted) {
				err = e
			}
			mu.Unlock()
			if len(o.World.Local)-len(o.Links) > 1 {
				m.Abort(e)
			}
		})
	}
	opening.Wait()
	return err
}

// open makes a rank's context and executor, on the rank's goroutine.
func (r *Rank) open(o *RankOptions) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("rank %d: %w", r.Index, err)
		}
	}()
	ctx, groups, err := o.Platform.Rank(r.Index)
	if err != nil {
		return err
	}
	coord := make([]int, len(o.Plan.Program.Mesh))
	for axis := range coord {
		coord[axis] = groups[axis].Rank()
	}
	if o.Wrap != nil {
		ctx = o.Wrap(r.Index, ctx)
	}
	r.role = o.Plan.Of(r.Index)
	e, err := exec.New(exec.Config{Program: r.role.Program, Layout: r.role.Layout, Context: ctx, Library: o.Platform.Library(r.Index), Groups: groups,
		Coord: coord, Trace: o.Trace, Meter: o.Meter, Poison: o.Poison, Graphs: o.Graphs, Warn: o.Warn})
	if err != nil {
		return err
	}
	r.Exec = ofRole{e, r.role}
	return nil
}

// Has says whether the rank has a buffer, given by its root: in a pipeline each stage has only the
// buffers that it uses.
func (r *Rank) Has(root graph.BufID) bool {
	own := r.role.Own(root)
	return own != graph.NoBuf && r.role.Layout.Offset[own] >= 0
}

// Write copies data to a buffer of the rank, at byte offset off.
func (r *Rank) Write(buf graph.BufID, off int64, data []byte) error {
	return r.on.Do(func() error { return r.Exec.Write(buf, off, data) })
}

// Read copies bytes of a buffer of the rank, from byte offset off, to data.
func (r *Rank) Read(buf graph.BufID, off int64, data []byte) error {
	return r.on.Do(func() error { return r.Exec.Read(buf, off, data) })
}

// close frees the rank's resources, unless the rank does not stop.
func (r *Rank) close() error {
	done := make(chan error, 1)
	end := func() { done <- r.Exec.Close() }
	if r.Exec == nil {
		end = func() { done <- nil }
	}
	defer close(r.on.Work)
	for wait := comm.NewWait(2 * stopGrace); wait.Counted < 2*stopGrace; wait.Look() {
		select {
		case r.on.Work <- end:
			return <-done
		case <-time.After(wait.Every):
		}
	}
	return fmt.Errorf("rank %d is still busy; its memory is not given back", r.Index)
}

// Close ends the ranks.
func (rs *Ranks) Close() error {
	// Close all at once, because a rank may wait for the others to end.
	errs := make([]error, len(rs.list))
	var closing sync.WaitGroup
	for i, r := range rs.list {
		closing.Go(func() {
			defer crash.Guard()
			errs[i] = errors.Join(r.close(), r.image.Close())
		})
	}
	closing.Wait()
	rs.list = nil
	if j := rs.joined.Swap(nil); j != nil {
		errs = append(errs, j.Close())
	}
	return errors.Join(errs...)
}

// Traces returns the trace events of the ranks in other processes.
func (rs *Ranks) Traces() (list []exec.Events) {
	for _, r := range rs.list {
		if far, ok := r.Exec.(*remote); ok {
			list = append(list, far.trace)
		}
	}
	return list
}

// First returns the first of this process's ranks.
func (rs *Ranks) First() *Rank { return rs.list[0] }

// Each runs f for all ranks at once and joins their errors: first the causes, then those that
// another rank's abort caused. what names f in errors. A rank that fails ends the others. A rank
// that is still busy Timeout after the first one has finished also ends them: the collectives'
// timeouts do not notice a rank that hangs after its last collective.
func (rs *Ranks) Each(what string, f func(r *Rank) error) error {
	type end struct {
		slot int
		err  error
	}
	ends := make(chan end, len(rs.list))
	for i, r := range rs.list {
		r.on.Work <- func() { ends <- end{i, f(r)} }
	}
	var first error
	busy := map[int]bool{}
	for i := range rs.list {
		busy[i] = true
	}
	var wait comm.Wait
	var limit time.Duration
	var look <-chan time.Time
	within := func(d time.Duration) {
		wait, limit = comm.NewWait(d), d
		look = time.After(wait.Every)
	}
	for len(busy) > 0 {
		select {
		case e := <-ends:
			delete(busy, e.slot)
			switch {
			case e.err == nil && look == nil:
				within(rs.timeout)
			case e.err == nil:
			case first == nil:
				first = e.err
				rs.abort(fmt.Errorf("rank %d failed: %w", rs.list[e.slot].Index, e.err))
				within(stopGrace)
			case errors.Is(first, comm.ErrAborted) && !errors.Is(e.err, comm.ErrAborted):
				first = e.err
			}
		case <-look:
			if wait.Look(); wait.Counted < limit {
				look = time.After(wait.Every)
				continue
			}
			if first != nil {
				return fmt.Errorf("%w; %s did not stop within %s", first, rs.whereabouts(busy), stopGrace)
			}
			first = fmt.Errorf("%w: %s did not end %s within %s of the first rank that did", comm.ErrTimeout, rs.whereabouts(busy), what, rs.timeout)
			rs.abort(first)
			within(stopGrace)
		}
	}
	return first
}

func (rs *Ranks) abort(why error) {
	for _, r := range rs.list {
		r.Exec.Abort(why)
	}
}

// whereabouts names the busy ranks, by slot, and the operations that they run.
func (rs *Ranks) whereabouts(busy map[int]bool) string {
	var list []string
	for i, r := range rs.list {
		if busy[i] {
			at := fmt.Sprintf("rank %d", r.Index)
			if ops := r.Exec.Running(); len(ops) > 0 {
				at += " (in " + strings.Join(ops, " and ") + ")"
			}
			list = append(list, at)
		}
	}
	return strings.Join(list, ", ")
}

// CommSent returns the ring-equivalent bytes that these ranks have sent.
func (rs *Ranks) CommSent() (n int64) {
	for _, r := range rs.list {
		n += r.Exec.CommStats().Sent
	}
	return n
}

// Usage returns the cost of these ranks' collectives, summed.
func (rs *Ranks) Usage() (sum exec.Usage) {
	for _, r := range rs.list {
		sum = sum.Add(r.Exec.Usage())
	}
	return sum
}

// DiskTraffic returns the bytes that these ranks have moved to and from the disk tier.
func (rs *Ranks) DiskTraffic() (sum device.Traffic) {
	for _, r := range rs.list {
		d := r.Exec.DiskTraffic()
		sum.Read += d.Read
		sum.Written += d.Written
	}
	return sum
}

// Memory returns, by space and rank, the end of the highest byte that an operation has touched so
// far, and the planned size of the arena.
func (rs *Ranks) Memory() (touched, planned [graph.NumSpaces][]int64) {
	for sp := range graph.NumSpaces {
		for _, r := range rs.list {
			touched[sp] = append(touched[sp], r.Exec.Touched(sp))
			planned[sp] = append(planned[sp], rs.plan.Of(r.Index).Layout.Spaces[sp].Peak)
		}
	}
	return touched, planned
}

// Classes returns, for each rank, the bytes of the plan's peaks that have been touched so far, by
// space and class.
func (rs *Ranks) Classes() []exec.Classes {
	list := make([]exec.Classes, len(rs.list))
	for i, r := range rs.list {
		list[i] = r.Exec.TouchedClasses()
	}
	return list
}

// Len returns the number of ranks that this process drives.
func (rs *Ranks) Len() int { return len(rs.list) }
