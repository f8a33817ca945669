package nccl

import (
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

// Control is how the ranks reach each other beside NCCL, over a transport of the
// processes. It watches for those that die or fall silent.
type Control interface {
	// Gather gives every rank what each has said, by rank, as many bytes of all. All ranks
	// call it, the same number of times.
	Gather(rank int, own []byte) ([][]byte, error)
	// Show tells the watchdog where a rank is in its group of a slot: 0 is all ranks, the
	// mesh axes follow.
	Show(rank, slot int, p watch.Progress)
	// Abort ends the job with err, in every process; Err is the error that has, nil while
	// the job is sound, and OnError has f called with it once.
	Abort(err error)
	Err() error
	OnError(f func(error))
}

// Sum adds buffers of the ranks in the order of comm.Adder, or from left to right:
// kernels/cuda has it.
type Sum interface {
	// Enqueue adds the sum of n elements at srcs to a stream. It goes to every one of
	// dsts, or is added to what is there. A dst may be one of the srcs.
	Enqueue(api driver.API, s driver.Stream, dsts, srcs []driver.Address, n int64, accumulate bool) error
}

// MostSources is how many buffers a Sum adds at once.
const MostSources = 64

// Options of a World.
type Options struct {
	API     API
	Control Control
	// Sum makes a sum of elements, for one rank and its GPU.
	Sum func(rank int, dtype graph.DType, order graph.SumOrder) (Sum, error)
	// World is the communicator of all ranks, made already and this World's from here on; 0:
	// it makes one.
	World Comm
	// Failed is given the last operations of a rank of this process where an error ends the
	// job, some lines of text. nil: nobody is.
	Failed func(flight string)
	// Timeout is how long a rank may keep others waiting. Default 60 s.
	Timeout time.Duration
}

// World is this process's ranks in a job, with their groups.
//
// An error in one group ends all, in every process.
type World struct {
	o      Options
	size   int
	groups []watch.Group
	chunk  int64 // bytes that come from each rank at a time where they are to be added

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

// New makes the world of a mesh's ranks. Each process gives its own Groups.
func New(mesh []graph.Axis, o Options) (*World, error) {
	if o.API == nil || o.Control == nil || o.Sum == nil {
		return nil, errors.New("nccl: want a library, a control and sums")
	}
	if o.Timeout <= 0 {
		o.Timeout = 60 * time.Second
	}
	w := &World{o: o}
	var err error
	if w.size, w.groups, err = world.Groups("nccl", mesh); err != nil {
		return nil, err
	}
	w.chunk = chunkOf(w.size)
	o.Control.OnError(w.abort)
	return w, nil
}

// mostChunk is what comes from each rank at a time: links are busy from about a MiB on.
// Tests shorten it.
var mostChunk int64 = 4 << 20

// Of many ranks less comes at a time, so that what waits to be added stays bounded.
const (
	leastChunk  = 64 << 10
	allChunks   = 32 << 20
	chunkAlign  = 256
	barrierSize = 256
)

func chunkOf(ranks int) int64 {
	return min(mostChunk, max(leastChunk, allChunks/int64(max(ranks, 1))/chunkAlign*chunkAlign))
}

// ScratchBytes is what one of so many ranks takes of its GPU for parts that wait to be
// added.
func ScratchBytes(ranks int) int64 { return chunkOf(ranks)*int64(ranks) + barrierSize*int64(ranks+1) }

// LibraryBytes estimates what NCCL takes of a GPU among so many: the library's own, and
// buffers for each peer that it has a link of its own to. To be replaced by a measurement.
func LibraryBytes(ranks int) int64 {
	const own, peer, peers = 160 << 20, 32 << 20, 7
	return own + peer*int64(min(max(ranks-1, 0), peers))
}

// hello is what a rank says of itself first.
type hello struct {
	Version int
	GPU     string // its UUID
	Name    string
	Host    string
	ID      []byte `json:",omitempty"` // rank 0's
	Err     string `json:",omitempty"`
}

const helloBytes = 1 << 10

// Groups makes a rank's communicators with those of the other processes, and returns its
// memberships by mesh axis, −1 for all ranks. ctx is the rank's context, on whose goroutine
// this and the groups' methods are called. What they take is given back as ctx closes.
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

// join meets the other ranks and makes the communicator of all.
func (r *rank) join() error {
	all, err := r.greet()
	if err != nil || r.w.size == 1 {
		return err
	}
	var id ID
	if n := copy(id[:], all[0].ID); n != IDBytes && r.w.o.World == 0 {
		return fmt.Errorf("rank 0 has sent %d bytes to meet by, want %d", n, IDBytes)
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

// greet says who the rank is and hears who the others are. What keeps them from one job is
// refused, on every rank.
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
		if err := json.Unmarshal(trimZeros(b), &all[i]); err != nil {
			return nil, fmt.Errorf("what rank %d says of itself: %w", i, err)
		}
	}
	if len(all) != r.w.size {
		return nil, fmt.Errorf("%d ranks said who they are, want %d", len(all), r.w.size)
	}
	return all, compatible(all)
}

func trimZeros(b []byte) []byte {
	if i := slices.Index(b, 0); i >= 0 {
		return b[:i]
	}
	return b
}

// compatible refuses ranks that can't have one communicator.
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

// newComm is a handle that is given back with the rank's.
func (r *rank) newComm() *communicator {
	c := &communicator{}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.comms = append(r.comms, c)
	return c
}

// call makes calls of communicators, unless the job has ended.
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

// How a rank waits for a call that is under way: a communicator's first meeting takes
// seconds, that of a group of calls microseconds.
const (
	firstPause = 5 * time.Microsecond
	longPause  = 2 * time.Millisecond
)

// settle returns when a communicator has nothing under way.
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

// abort gives back the communicators of all ranks here, and ends what they run. A stream
// passes what is ended as if it were done: its rank has the error before.
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
	go func() { // whoever reads may be slow, and an abort may never come back
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

// flightCalls is how many calls of each group a rank tells of.
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

// close gives back what the rank has, in good order where the job is sound. It runs as the
// rank's context closes, once its streams run nothing.
func (r *rank) close() error {
	var errs []error
	r.leave.Do(func() { close(r.left) })
	<-r.watched
	r.mu.Lock()
	r.members = nil // their words go with the context
	r.mu.Unlock()
	if r.w.o.Control.Err() != nil {
		r.abort()
	}
	for _, c := range slices.Backward(r.comms) {
		if err := r.end(c); err != nil && r.w.o.Control.Err() == nil {
			errs = append(errs, err)
		}
	}
	r.abort() // what did not end
	if r.scratch != 0 {
		errs = append(errs, r.ctx.Driver().Free(r.scratch))
		r.scratch = 0
	}
	return errors.Join(errs...)
}

// end brings a communicator to its end in good order.
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

// Took is what NCCL has taken of the GPU of a rank of this process, in bytes: measured as
// its communicators were made and every kind of call was run once.
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
