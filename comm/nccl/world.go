package nccl

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// Control is the ranks' connection in addition to NCCL, over another transport between the
// processes. It watches for ranks that die or fall silent.
type Control interface {
	// Gather exchanges bytes between all ranks: it returns every rank's own, by rank. All
	// ranks must call it the same number of times, with the same length.
	Gather(rank int, own []byte) ([][]byte, error)
	// Show reports a rank's progress in its group of a slot to the watchdog. Slot 0 is the
	// group of all ranks; the mesh axes follow.
	Show(rank, slot int, p watch.Progress)
	// Abort ends the job with err in every process. Err returns the error that ended the job,
	// nil if there has been none. OnError registers f to be called once with that error.
	Abort(err error)
	Err() error
	OnError(f func(error))
}

// helloBytes is the length of a rank's description of itself, and the largest input of
// Control.Gather.
const helloBytes = 1 << 10

// Sum adds buffers of the ranks in the order of comm.Adder, or from left to right. Package
// kernels/cuda implements it.
type Sum interface {
	// Enqueue adds a kernel to a stream that sums n elements of each of srcs. It writes the
	// sum to each of dsts, or adds it to them if accumulate is set. A dst may be one of srcs.
	Enqueue(api driver.API, s driver.Stream, dsts, srcs []driver.Address, n int64, accumulate bool) error
}

// MostSources is the largest number of buffers that a Sum adds in one launch.
const MostSources = 64

// Options of a World.
type Options struct {
	API     API
	Control Control
	// Sum creates the Sum of one rank, on its GPU.
	Sum func(rank int, dtype graph.DType, order graph.SumOrder) (Sum, error)
	// World is an existing communicator of all ranks, which the new World takes over. 0: it
	// creates one.
	World Comm
	// Failed, if not nil, is called when an error ends the job, with some lines of text that
	// list the last operations of a rank of this process.
	Failed func(flight string)
	// Timeout is how long a rank may keep others waiting. Default 60 s.
	Timeout time.Duration
}

// World is this process's ranks in a job, with their groups.
//
// An error in one group ends all groups, in every process.
type World struct {
	o      Options
	size   int
	groups []watch.Group
	chunk  int64 // bytes that a sum receives from each rank at a time

	mu    sync.Mutex
	ranks []*rank
}

// rank is one rank of this process. All its collectives run on one stream.
type rank struct {
	w     *World
	index int
	ctx   *cuda.Context

	mu      sync.Mutex // held while a communicator is called, so that none is given back meanwhile
	aborted bool
	comms   []*communicator
	world   *communicator
	members []*member // by slot; none once the rank leaves

	scratch driver.Address // where parts that are to be added land: a chunk from each rank
	sums    map[sumKey]Sum
	took    int64 // bytes of the GPU that NCCL has taken

	leave         sync.Once
	left, watched chan struct{} // closed as it leaves, and when nobody watches it any more
}

type sumKey struct {
	dtype graph.DType
	order graph.SumOrder
}

// mostChunk is the largest chunk in bytes that a sum receives from each rank at a time; about
// 1 MiB saturates a link. Tests reduce it.
var mostChunk int64 = 4 << 20

// With many ranks chunks are smaller, to bound the scratch memory.
const (
	leastChunk  = 64 << 10
	allChunks   = 32 << 20
	chunkAlign  = 256
	barrierSize = 256
)

func chunkOf(ranks int) int64 {
	return min(mostChunk, max(leastChunk, allChunks/int64(max(ranks, 1))/chunkAlign*chunkAlign))
}

// ScratchBytes returns the GPU memory in bytes that one of the given number of ranks uses to
// receive addends.
func ScratchBytes(ranks int) int64 { return chunkOf(ranks)*int64(ranks) + barrierSize*int64(ranks+1) }

// LibraryBytes estimates the GPU memory that NCCL uses on one of the given number of ranks: its own
// state, and buffers for each peer with a direct connection. It is not measured yet.
func LibraryBytes(ranks int) int64 {
	const own, peer, peers = 160 << 20, 32 << 20, 7
	return own + peer*int64(min(max(ranks-1, 0), peers))
}

// newComm returns a new handle, which close frees with the rank's others.
func (r *rank) newComm() *communicator {
	c := &communicator{}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.comms = append(r.comms, c)
	return c
}

// call runs f, which calls NCCL with the rank's communicators, unless the job has ended.
func (r *rank) call(f func() error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.aborted {
		return r.ending()
	}
	return f()
}

// ending returns the job's error.
func (r *rank) ending() error {
	if err := r.w.o.Control.Err(); err != nil {
		return err
	}
	return comm.ErrAborted
}

// Poll intervals for an NCCL call in progress: the creation of a communicator takes seconds, a
// group of calls microseconds.
const (
	firstPause = 5 * time.Microsecond
	longPause  = 2 * time.Millisecond
)

// settle waits until a communicator has no call in progress.
func (r *rank) settle(c *communicator, what string) error {
	began, pause := time.Now(), firstPause
	for looks := 0; ; looks++ {
		busy := false
		err := r.call(func() (err error) {
			if c.handle != 0 {
				busy, err = r.w.o.API.State(c.handle)
			}
			return err
		})
		if err != nil || !busy {
			return err
		}
		if time.Since(began) > r.w.o.Timeout {
			return fmt.Errorf("%w: %s: NCCL is not done after %v", comm.ErrTimeout, what, r.w.o.Timeout)
		}
		if looks > 16 {
			time.Sleep(pause)
			pause = min(2*pause, longPause)
		}
	}
}

func (r *rank) abort() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.aborted {
		return
	}
	r.aborted = true
	for _, c := range slices.Backward(r.comms) {
		if c.handle != 0 {
			_ = r.w.o.API.Abort(c.handle) // the job has an error already
			c.handle = 0
		}
	}
}

// close frees the rank's communicators and memory. If the job has no error it finalizes the
// communicators first. It runs while the rank's context closes, after the streams' work has
// ended.
func (r *rank) close() error {
	var errs []error
	r.leave.Do(func() { close(r.left) })
	<-r.watched
	r.mu.Lock()
	r.members = nil // closing the context frees their words
	r.mu.Unlock()
	if r.w.o.Control.Err() != nil {
		r.abort()
	}
	for _, c := range slices.Backward(r.comms) {
		if err := r.end(c); err != nil && r.w.o.Control.Err() == nil {
			errs = append(errs, err)
		}
	}
	r.abort() // communicators that were not finalized
	if r.scratch != 0 {
		errs = append(errs, r.ctx.Driver().Free(r.scratch))
		r.scratch = 0
	}
	return errors.Join(errs...)
}

// end finalizes and destroys a communicator.
func (r *rank) end(c *communicator) error {
	api, is := r.w.o.API, false
	err := r.call(func() error {
		if is = c.handle != 0; !is {
			return nil
		}
		return api.Finalize(c.handle)
	})
	if err == nil {
		err = r.settle(c, "end a communicator")
	}
	if err != nil || !is {
		return err
	}
	return r.call(func() error {
		defer func() { c.handle = 0 }()
		return api.Destroy(c.handle)
	})
}

// Took returns the GPU memory in bytes that NCCL has allocated for a rank of this process. It
// was measured while the communicators were created and every kind of call ran once.
func (w *World) Took(index int) int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.ranks {
		if r.index == index {
			return r.took
		}
	}
	return 0
}

// drain returns when a stream has run everything, or with the job's error.
func (r *rank) drain(api driver.API, s driver.Stream) error {
	e, err := api.NewEvent(false)
	if err != nil {
		return err
	}
	err = api.Record(e, s)
	for began, pause := time.Now(), firstPause; err == nil; pause = min(2*pause, longPause) {
		var done bool
		if done, err = api.Done(e); err != nil {
			break
		}
		if err = r.w.o.Control.Err(); done || err != nil { // an abort lets a stream pass
			break
		}
		if time.Since(began) > r.w.o.Timeout {
			err = fmt.Errorf("%w: NCCL's first calls are not done after %v", comm.ErrTimeout, r.w.o.Timeout)
		}
		time.Sleep(pause)
	}
	return errors.Join(err, api.DestroyEvent(e))
}
