package nccl

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/device/cuda/driver"
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

	mu      sync.Mutex
	gen     int  // generation of the set of ranks; Shrink increases it
	suspect int  // rank 0: the rank that timed out, or whose swap failed first; −1: none
	started bool // a world has joined, so errors have a receiver
	err     error
	hooks   []func(error)
	warn    func(string)
	timeout time.Duration
	slots   int            // number of groups that a rank is in
	machine *watch.Machine // rank 0: the watchdog, nil before a world has joined
	began   time.Time      // time at which that world joined
	looked  time.Time      // time of the watchdog's last observation
	over    bool           // the rounds have stopped
	has     []uint64       // rank 0: the latest complete gather that each rank has
	reports []watch.Report // rank 0: of all ranks; other ranks: their own, at index 0
	where   []string       // rank 0: host and process of each rank
	heard   []time.Time    // by peer: when its last block came
	named   bool           // a warning about a silent peer has been given
	gone    []bool         // by rank: it has left, or was told that the job has ended
	streams map[int]*hostStream
	seq     uint64   // number of gathers that this rank has begun
	said    [][]byte // rank 0: by rank, its contribution to its latest gather
	come    []uint64 // rank 0: by rank, the number of that gather
	all     [][]byte // result of the latest complete gather
	whole   uint64   // number of the latest complete gather
	cond    *sync.Cond
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

// of initializes the host's state for a rank of a world of the given size. If other goroutines
// already use the host, the caller must hold mu.
func (h *Host) of(rank, world int) {
	h.rank, h.world, h.suspect = rank, world, -1
	h.started, h.slots, h.machine, h.hooks, h.err, h.over, h.named = false, 0, nil, nil, nil, false, false
	h.reports, h.where, h.gone = make([]watch.Report, world), make([]string, world), make([]bool, world)
	h.streams, h.said, h.come, h.has = map[int]*hostStream{}, make([][]byte, world), make([]uint64, world), make([]uint64, world)
	h.seq, h.whole, h.all = 0, 0, nil
	h.heard = make([]time.Time, world) // met sets it
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

// given tells whether the time limit of something that began at began has passed.
func (h *Host) given(began time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	most := h.timeout
	if h.err != nil {
		most = failedGrace
	}
	return time.Since(began) > most
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
