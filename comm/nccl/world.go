package nccl

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/comm/world"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
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

// communicator is one rank's handle of a communicator, at an address that stays.
type communicator struct{ handle Comm }

// New returns the world of a mesh's ranks. Each process calls Groups for its own ranks.
func New(mesh []graph.Axis, o Options) (*World, error) {
	if o.API == nil || o.Control == nil || o.Sum == nil {
		return nil, errors.New("nccl: want a library, a control and sums")
	}
	o.Timeout = cmp.Or(max(o.Timeout, 0), world.DefaultTimeout)
	w := &World{o: o}
	var err error
	if w.size, w.groups, err = world.Groups("nccl", mesh); err != nil {
		return nil, err
	}
	w.chunk = chunkOf(w.size)
	o.Control.OnError(w.abort)
	return w, nil
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

// ScratchBytes returns the GPU memory in bytes that one of so many ranks uses to receive
// addends.
func ScratchBytes(ranks int) int64 { return chunkOf(ranks)*int64(ranks) + barrierSize*int64(ranks+1) }

// LibraryBytes estimates the GPU memory that NCCL uses on one of so many ranks: its own state,
// and buffers for each peer with a direct connection. To be replaced by a measurement.
func LibraryBytes(ranks int) int64 {
	const own, peer, peers = 160 << 20, 32 << 20, 7
	return own + peer*int64(min(max(ranks-1, 0), peers))
}

// hello is the information that ranks exchange first.
type hello struct {
	Version int
	GPU     string // its UUID
	Name    string
	Host    string
	ID      []byte `json:",omitempty"` // rank 0's
	Err     string `json:",omitempty"`
}

const helloBytes = 1 << 10

// Groups creates a rank's communicators, together with the other processes, and returns its
// memberships by mesh axis, −1 for all ranks. ctx is the rank's context; call Groups and the
// groups' methods on its goroutine. Closing ctx frees the communicators.
func (w *World) Groups(ctx *cuda.Context) (map[int]comm.Group, error) {
	r := &rank{w: w, index: ctx.Rank(), ctx: ctx, sums: map[sumKey]Sum{}, left: make(chan struct{}), watched: make(chan struct{})}
	if r.index < 0 || r.index >= w.size {
		return nil, fmt.Errorf("nccl: rank %d of %d ranks", r.index, w.size)
	}
	fail := func(err error) (map[int]comm.Group, error) {
		close(r.watched)
		if r.w.o.Control.Err() == nil { // the others wait for it
			r.w.o.Control.Abort(fmt.Errorf("rank %d: %w", r.index, err))
		}
		return nil, fmt.Errorf("nccl: rank %d: %w", r.index, errors.Join(err, r.close()))
	}
	w.mu.Lock()
	w.ranks = append(w.ranks, r)
	w.mu.Unlock()
	if err := r.join(); err != nil {
		return fail(err)
	}
	for _, g := range w.groups {
		if i := slices.Index(g.Ranks, r.index); i >= 0 {
			if err := r.addMember(g, i); err != nil {
				return fail(err)
			}
		}
	}
	if err := r.rehearse(); err != nil {
		return fail(err)
	}
	ctx.AtClose(r.close)
	go r.watch()
	groups := map[int]comm.Group{}
	for slot, m := range r.members {
		groups[slot-1] = m
	}
	return groups, nil
}

// join exchanges information with the other ranks and creates the communicator of all ranks.
func (r *rank) join() error {
	all, err := r.greet()
	if err != nil || r.w.size == 1 {
		return err
	}
	var id ID
	if n := copy(id[:], all[0].ID); n != IDBytes && r.w.o.World == 0 {
		return fmt.Errorf("rank 0 has sent an NCCL identifier of %d bytes, want %d", n, IDBytes)
	}
	api := r.ctx.Driver()
	before, _, err := api.MemInfo()
	if err != nil {
		return err
	}
	r.world = r.newComm()
	if r.world.handle = r.w.o.World; r.world.handle != 0 {
		err = nil // it is there
	} else if err := r.call(func() error { return r.w.o.API.Init(&r.world.handle, r.w.size, id, r.index, Config{Share: true}) }); err != nil {
		return err
	}
	if err := r.settle(r.world, "join the communicator of all ranks"); err != nil {
		return err
	}
	if r.scratch, err = api.Alloc(ScratchBytes(r.w.size)); err != nil {
		return fmt.Errorf("%d bytes of scratch memory: %w", ScratchBytes(r.w.size), err)
	}
	r.took = before
	return nil
}

// greet exchanges hello with the other ranks. If the ranks cannot form one job, every rank
// returns an error.
func (r *rank) greet() ([]hello, error) {
	gpu := r.ctx.GPU()
	own := hello{GPU: fmt.Sprintf("%x", gpu.UUID), Name: gpu.Name}
	own.Host, _ = os.Hostname()
	var err error
	if own.Version, err = r.w.o.API.Version(); err == nil && r.index == 0 && r.w.size > 1 && r.w.o.World == 0 {
		var id ID
		id, err = r.w.o.API.UniqueID()
		own.ID = id[:]
	}
	if err != nil {
		own.Err = err.Error()
		own.Err = own.Err[:min(len(own.Err), helloBytes/4)]
	}
	text, err := json.Marshal(own)
	if err != nil || len(text) > helloBytes {
		return nil, fmt.Errorf("it can't say who it is in %d bytes: %w", helloBytes, err)
	}
	said, err := r.w.o.Control.Gather(r.index, append(text, make([]byte, helloBytes-len(text))...))
	if err != nil {
		return nil, err
	}
	all := make([]hello, len(said))
	for i, b := range said {
		text, _, _ := bytes.Cut(b, []byte{0}) // zeros fill the block
		if err := json.Unmarshal(text, &all[i]); err != nil {
			return nil, fmt.Errorf("what rank %d says of itself: %w", i, err)
		}
	}
	if len(all) != r.w.size {
		return nil, fmt.Errorf("%d ranks said who they are, want %d", len(all), r.w.size)
	}
	return all, compatible(all)
}

// compatible returns an error if the ranks cannot share one communicator.
func compatible(all []hello) error {
	on := map[string]int{}
	for i, h := range all {
		switch first := all[0]; {
		case h.Err != "":
			return fmt.Errorf("rank %d (host %s): %s", i, h.Host, h.Err)
		case h.Version != first.Version:
			return fmt.Errorf("rank 0 (host %s) has NCCL %s, rank %d (host %s) has %s: install one version everywhere",
				first.Host, VersionText(first.Version), i, h.Host, VersionText(h.Version))
		}
		at := h.Host + " " + h.GPU
		if other, taken := on[at]; taken {
			return fmt.Errorf("ranks %d and %d both have the GPU %s with UUID %s of host %s: NCCL wants a GPU for each rank; start no more processes on a host than it has GPUs, "+
				"or run the ranks of a GPU in one process", other, i, h.Name, h.GPU, h.Host)
		}
		on[at] = i
	}
	return nil
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

// ending is the job's error.
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

// abort frees the communicators of all ranks of this process and stops their operations. A
// stream continues after a stopped operation as if it were complete, so the rank's error must be
// set first.
func (w *World) abort(err error) {
	w.mu.Lock()
	ranks := slices.Clone(w.ranks)
	w.mu.Unlock()
	flights := make([]string, len(ranks))
	for i, r := range ranks {
		flights[i] = r.flight(flightCalls)
	}
	for _, r := range ranks {
		r.ctx.Abort(err)
	}
	told := make(chan struct{})
	go func() { // the reader of the text may be slow, and an abort may never return
		defer crash.Guard()
		defer close(told)
		for _, flight := range flights {
			if flight != "" && w.o.Failed != nil {
				w.o.Failed(flight)
			}
		}
	}()
	for _, r := range ranks {
		r.abort()
	}
	<-told
}

// flightCalls is the number of recent calls of each group that a rank lists after a failure.
const flightCalls = 3

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
