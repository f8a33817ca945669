package nccl

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/crash"
)

// Host connects processes that can communicate only over NCCL, with one rank and one GPU
// each. A separate communicator carries the data that other jobs send over shared memory or
// MPI: the leader's streams, rank information, heartbeats and errors.
//
// Rank 0 repeatedly visits the other ranks in turn and exchanges one block of bytes with
// each, on a separate CUDA stream, so that it knows which rank does not answer. If there is
// nothing to send, it pauses between rounds. Sending a block is a short kernel of one thread
// block.
//
// A Host that shrinks can continue with fewer ranks after others are lost, once the
// remaining ranks have agreed on who they are:
//
//	root ──┬─ control: the rounds        a rank is lost: both are aborted
//	       └─ data: the World's
//	  │ Shrink: a root of those that are left, split as before
//
// Nothing runs on the root communicator, so that the loss of a rank leaves it without an
// error and without a waiting kernel: NCCL refuses to shrink a communicator with an error.
type Host struct {
	api     API
	gpu     driver.API
	device  driver.Device
	block   int64 // bytes
	shrinks bool
	root    communicator // used only by a host that shrinks
	control communicator
	data    communicator // of the same ranks, for a World; 0 once the World has taken it
	orders  chan order

	rank, world int // the host's thread writes them, with mu held; no round and no World is there then

	stream driver.Stream
	event  driver.Event
	near   driver.Address // GPU memory: the block to send, followed by the received block
	pinned []byte         // page-locked host copy of near

	wake    chan struct{}
	ended   chan struct{} // closed when the rounds have stopped
	leaving chan struct{}
	leave   sync.Once

	mu       sync.Mutex
	gen      int  // generation of the set of ranks; Shrink increases it
	suspect  int  // rank 0: the rank that timed out, or whose swap failed first; −1: none
	started  bool // a world has joined, so errors have a receiver
	err      error
	hooks    []func(error)
	warn     func(string)
	timeout  time.Duration
	slots    int            // number of groups that a rank is in
	observer *HostWorld     // rank 0's world, which runs the watchdog
	looked   time.Time      // time of the watchdog's last observation
	over     bool           // the rounds have stopped
	has      []uint64       // rank 0: the latest complete gather that each rank has
	reports  []watch.Report // rank 0: of all ranks; other ranks: their own, at index 0
	where    []string       // rank 0: host and process of each rank
	heard    []time.Time    // by peer: when its last block came
	named    bool           // a warning about a silent peer has been given
	gone     []bool         // by rank: it has left, or was told that the job has ended
	streams  map[int]*hostStream
	seq      uint64   // number of gathers that this rank has begun
	said     [][]byte // rank 0: by rank, its contribution to its latest gather
	come     []uint64 // rank 0: by rank, the number of that gather
	all      [][]byte // result of the latest complete gather
	whole    uint64   // number of the latest complete gather
	cond     *sync.Cond
}

// order is a request of Shrink to the host's thread.
type order struct {
	without []int
	done    chan error // the result; buffered
}

// letter is the content of a block, encoded as JSON after its length.
type letter struct {
	Err    string        `json:",omitempty"` // the error that ended the job
	Kind   int           `json:",omitempty"`
	Left   bool          `json:",omitempty"` // the sender takes part in no more rounds
	Seq    uint64        `json:",omitempty"` // number of the gather of Said (rank 0: of All)
	Has    uint64        `json:",omitempty"` // the latest complete gather that the sender has
	Said   []byte        `json:",omitempty"`
	All    [][]byte      `json:",omitempty"`
	Report *watch.Report `json:",omitempty"`
	Where  string        `json:",omitempty"`
	Bytes  []byte        `json:",omitempty"` // data of the stream between the two ranks
	End    bool          `json:",omitempty"` // the stream's sender has closed it
	More   bool          `json:",omitempty"` // the next round begins without a pause
}

const (
	roundPause   = time.Millisecond
	hostSilent   = 1200 * time.Millisecond
	hostTimeout  = 60 * time.Second
	leaveGrace   = 3 * time.Second
	failedGrace  = 300 * time.Millisecond
	leastBlock   = 32 << 10
	helloInBlock = 2 << 10 // bytes of a block for a gather, for each rank
	blockReserve = 6 << 10 // bytes of a block for everything but stream data
)

// StartHost makes this process run the given rank. The ranks find each other by the address
// in NCCL_COMM_ID, which UniqueID returns on each of them. shrinks must be the same on all
// ranks.
func StartHost(api API, gpu driver.API, device driver.Device, rank, world int, shrinks bool) (*Host, error) {
	if shrinks {
		if err := api.Shrinks(); err != nil {
			return nil, fmt.Errorf("nccl: to go on with fewer ranks: %w", err)
		}
	}
	h := &Host{api: api, gpu: gpu, device: device, shrinks: shrinks, block: max(leastBlock, helloInBlock*int64(world)+blockReserve), orders: make(chan order),
		wake: make(chan struct{}, 1), ended: make(chan struct{}), leaving: make(chan struct{}), warn: func(string) {}, timeout: hostTimeout}
	h.cond = sync.NewCond(&h.mu)
	h.of(rank, world)
	began := make(chan error)
	go func() {
		defer crash.Guard()
		runtime.LockOSThread() // never unlocked: the GPU's context is current on this thread
		defer close(h.ended)
		err := h.open()
		began <- err
		if err == nil {
			for h.rounds(); h.goOn(); h.rounds() {
			}
			h.close()
		}
	}()
	return h, <-began
}

// of initializes the host's state for a rank of so many ranks. If other goroutines
// already use the host, the caller must hold mu.
func (h *Host) of(rank, world int) {
	h.rank, h.world, h.suspect = rank, world, -1
	h.started, h.slots, h.observer, h.hooks, h.err, h.over, h.named = false, 0, nil, nil, nil, false, false
	h.reports, h.where, h.gone = make([]watch.Report, world), make([]string, world), make([]bool, world)
	h.streams, h.said, h.come, h.has = map[int]*hostStream{}, make([][]byte, world), make([]uint64, world), make([]uint64, world)
	h.seq, h.whole, h.all = 0, 0, nil
	h.heard = make([]time.Time, world) // met sets it
}

// open creates the communicators and allocates memory, on the host's thread.
func (h *Host) open() error {
	handle, err := h.gpu.Retain(h.device.Ordinal)
	if err == nil {
		err = h.gpu.SetCurrent(handle)
	}
	if err != nil {
		return fmt.Errorf("nccl: GPU %d: %w", h.device.Ordinal, err)
	}
	first := &h.control
	if h.shrinks {
		first = &h.root
	}
	id, err := h.api.UniqueID()
	if err == nil {
		err = h.api.Init(&first.handle, h.world, id, h.rank, Config{CTAs: 1})
	}
	if err == nil {
		err = h.settle(first, "meet the other processes")
	}
	if err == nil {
		err = h.divide()
	}
	if err == nil {
		err = h.memory()
	}
	if err != nil {
		h.close()
		return fmt.Errorf("nccl: rank %d of %d: %w", h.rank, h.world, err)
	}
	h.met()
	return nil
}

// met records that all ranks have just been heard from.
func (h *Host) met() {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	for i := range h.heard {
		h.heard[i] = now
	}
}

// divide splits the control and data communicators from the root, before anything runs on
// the root: a split requires an idle communicator.
func (h *Host) divide() error {
	split := func(from, into *communicator, o Config) error {
		err := h.api.Split(from.handle, &into.handle, 0, h.rank, o)
		for _, c := range []*communicator{from, into} {
			if err == nil {
				err = h.settle(c, "make the ranks' communicator")
			}
		}
		return err
	}
	if !h.shrinks {
		return split(&h.control, &h.data, Config{Share: true})
	}
	if err := split(&h.root, &h.control, Config{CTAs: 1}); err != nil {
		return err
	}
	return split(&h.root, &h.data, Config{Share: true})
}

func (h *Host) memory() (err error) {
	if h.stream, err = h.gpu.NewStream(); err != nil {
		return err
	}
	if h.event, err = h.gpu.NewEvent(false); err != nil {
		return err
	}
	if h.near, err = h.gpu.Alloc(2 * h.block); err != nil {
		return err
	}
	p, _, err := h.gpu.HostAlloc(2 * h.block)
	if err == nil {
		h.pinned = unsafe.Slice((*byte)(p), 2*h.block)
	}
	return err
}

// settle waits until a communicator has no call in progress.
func (h *Host) settle(c *communicator, what string) error {
	for began, pause := time.Now(), firstPause; ; pause = min(2*pause, longPause) {
		busy, err := h.api.State(c.handle)
		if err != nil || !busy {
			return err
		}
		if h.given(began) {
			return fmt.Errorf("%w: %s: NCCL is not done after %v", comm.ErrTimeout, what, time.Since(began).Round(time.Millisecond))
		}
		time.Sleep(pause)
	}
}

// fail makes err the job's error, unless it has one.
func (h *Host) fail(err error) {
	h.mu.Lock()
	gen := h.gen
	h.mu.Unlock()
	h.failIn(gen, err)
}

// failIn is fail for a caller that belongs to generation gen of the ranks. It does nothing
// if the host has moved on to another generation.
func (h *Host) failIn(gen int, err error) {
	h.mu.Lock()
	if h.err != nil || gen != h.gen {
		h.mu.Unlock()
		return
	}
	h.err = err
	hooks := h.hooks
	h.cond.Broadcast()
	h.mu.Unlock()
	h.rouse()
	for _, f := range hooks {
		f(err)
	}
}

func (h *Host) rouse() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// quiet ends the streams and gathers that the host's rounds carry, because these ranks make
// no more rounds. It tells whether the job ended without an error.
func (h *Host) quiet() (sound bool) {
	h.mu.Lock()
	sound = h.err == nil
	h.over = true
	if h.err == nil {
		h.err = io.ErrClosedPipe
	}
	streams := slices.Collect(maps.Values(h.streams))
	for _, s := range streams {
		s.room.Broadcast()
	}
	h.cond.Broadcast()
	h.mu.Unlock()
	for _, s := range streams {
		s.end()
	}
	return sound
}

// close frees the host's communicators and memory, on the host's thread.
func (h *Host) close() {
	sound := h.quiet()
	for _, c := range []*communicator{&h.data, &h.control, &h.root} {
		if c.handle == 0 {
			continue
		}
		err := errors.New("the job has ended")
		if sound {
			if err = h.api.Finalize(c.handle); err == nil {
				err = h.settle(c, "end a communicator")
			}
			if err == nil {
				err = h.api.Destroy(c.handle)
			}
		}
		if err != nil {
			_ = h.api.Abort(c.handle) // an error changes nothing: the process ends
		}
		c.handle = 0
	}
	if h.stream != 0 {
		_ = h.gpu.Synchronize(h.stream) // Abort has stopped the stream's NCCL kernels
		_ = h.gpu.DestroyStream(h.stream)
	}
	if h.event != 0 {
		_ = h.gpu.DestroyEvent(h.event)
	}
	if h.near != 0 {
		_ = h.gpu.Free(h.near)
	}
	if h.pinned != nil {
		_ = h.gpu.HostFree(unsafe.Pointer(&h.pinned[0]))
	}
	_ = h.gpu.Release(h.device.Ordinal)
}

// Close ends this process's part of the job. It waits a limited time for the other
// processes to end theirs.
func (h *Host) Close() error {
	h.leave.Do(func() { close(h.leaving) })
	h.rouse()
	select {
	case <-h.ended:
		return nil
	case <-time.After(leaveGrace):
	}
	h.fail(fmt.Errorf("%w: a process does not leave", comm.ErrTimeout))
	select {
	case <-h.ended:
	case <-time.After(leaveGrace):
	}
	return nil
}
