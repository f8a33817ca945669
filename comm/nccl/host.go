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

// Host joins processes that have nothing but NCCL to meet by: one rank and one GPU each.
// A communicator of its own carries what other jobs send over shared memory or MPI: the
// leader's streams, who the ranks are, heartbeats and errors.
//
// Rank 0 goes round the others, again and again: with each it swaps one block of bytes, on
// a stream of its own, so that it knows by name who does not answer. Where nothing is to be
// said there is a pause between rounds. A block is a short kernel of one thread block.
//
// A Host that shrinks can go on with fewer ranks, once others are lost and those that are
// left have agreed on who they are:
//
//	root ──┬─ control: the rounds        a rank is lost: both are aborted
//	       └─ data: the World's
//	  │ Shrink: a root of those that are left, split as before
//
// Nothing runs on the root, so that a loss leaves it without an error and without a kernel
// that waits: NCCL refuses to shrink a communicator that has found one.
type Host struct {
	api     API
	gpu     driver.API
	device  driver.Device
	block   int64 // bytes
	shrinks bool
	root    communicator // of a host that shrinks
	control communicator
	data    communicator // of the same ranks, for a World; 0 once that has it
	orders  chan order

	rank, world int // the host's thread writes them, with mu held; no round and no World is there then

	stream driver.Stream
	event  driver.Event
	near   driver.Address // on the GPU: what is sent, and behind it what comes
	pinned []byte         // the same on the host

	wake    chan struct{}
	ended   chan struct{} // closed when no more rounds are made
	leaving chan struct{}
	leave   sync.Once

	mu       sync.Mutex
	gen      int  // of ranks: those that are left are another
	suspect  int  // rank 0: who was silent for the timeout, or whose swap failed first; −1: nobody
	started  bool // a world has joined: there is somebody to tell of errors
	err      error
	hooks    []func(error)
	warn     func(string)
	timeout  time.Duration
	slots    int            // groups that a rank is in
	observer *HostWorld     // of rank 0
	looked   time.Time      // when it has last
	over     bool           // no more rounds are made
	has      []uint64       // rank 0: the latest whole gather that each has
	reports  []watch.Report // rank 0: of all; another: at index 0 its own
	where    []string       // rank 0: host and process of each
	heard    []time.Time    // by peer: when the last block of it came
	named    bool           // it was said that a peer is silent
	gone     []bool         // who has left, or is told so
	streams  map[int]*hostStream
	seq      uint64   // of gathers that this rank has come to
	said     [][]byte // rank 0: of each, in gather seq
	come     []uint64 // rank 0: which gather that is of
	all      [][]byte // what the latest whole gather has
	whole    uint64   // its number
	cond     *sync.Cond
}

// order is what Shrink asks of the host's thread.
type order struct {
	without []int
	done    chan error // room for one
}

// letter is what a block holds, as JSON behind its length.
type letter struct {
	Err    string        `json:",omitempty"` // what ended the job
	Kind   int           `json:",omitempty"`
	Left   bool          `json:",omitempty"` // the sender makes no more rounds
	Seq    uint64        `json:",omitempty"` // the gather that Said, or of rank 0 All, is of
	Has    uint64        `json:",omitempty"` // the latest whole gather that the sender has
	Said   []byte        `json:",omitempty"`
	All    [][]byte      `json:",omitempty"`
	Report *watch.Report `json:",omitempty"`
	Where  string        `json:",omitempty"`
	Bytes  []byte        `json:",omitempty"` // of the stream between the two
	End    bool          `json:",omitempty"` // of it
	More   bool          `json:",omitempty"` // the next round begins at once
}

const (
	roundPause   = time.Millisecond
	hostSilent   = 1200 * time.Millisecond
	hostTimeout  = 60 * time.Second
	leaveGrace   = 3 * time.Second
	failedGrace  = 300 * time.Millisecond
	leastBlock   = 32 << 10
	helloInBlock = 2 << 10 // of a gather, for each rank
	blockReserve = 6 << 10 // of a block, for what is not a stream's
)

// StartHost makes this process the one of a rank. The ranks find each other by what
// UniqueID gives on each of them: the address in NCCL_COMM_ID. Of all of them the same is
// asked: whether the host shrinks.
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
		runtime.LockOSThread() // never given back: its context is the GPU's
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

// of makes the host that of a rank of so many, with nothing said yet. mu is held where
// others know of the host.
func (h *Host) of(rank, world int) {
	h.rank, h.world, h.suspect = rank, world, -1
	h.started, h.slots, h.observer, h.hooks, h.err, h.over, h.named = false, 0, nil, nil, nil, false, false
	h.reports, h.where, h.gone = make([]watch.Report, world), make([]string, world), make([]bool, world)
	h.streams, h.said, h.come, h.has = map[int]*hostStream{}, make([][]byte, world), make([]uint64, world), make([]uint64, world)
	h.seq, h.whole, h.all = 0, 0, nil
	h.heard = make([]time.Time, world)
	now := time.Now()
	for i := range h.heard {
		h.heard[i] = now
	}
}

// open makes the communicators and memory, on the host's thread.
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

// met says that all ranks have just been heard of.
func (h *Host) met() {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	for i := range h.heard {
		h.heard[i] = now
	}
}

// divide makes the communicators that are used of the one that all ranks have, before
// anything runs on that: a split wants it idle.
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

// settle waits until a communicator has nothing under way.
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

// failIn is fail of who speaks of certain ranks, and is heard while the host has those.
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

// quiet ends what goes over the host's rounds: there are no more of these ranks. It tells
// whether that is in good order.
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

// close gives back what the host has, on its thread.
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
			_ = h.api.Abort(c.handle) // the process ends
		}
		c.handle = 0
	}
	if h.stream != 0 {
		_ = h.gpu.Synchronize(h.stream) // an abort has ended what it ran
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

// Close ends the process's part, once every other process ends its own, or after a moment.
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
