package cuda

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// Options of a Context.
type Options struct {
	// Driver is the API that the context calls.
	Driver driver.API
	// Ordinal is the GPU's device ordinal.
	Ordinal int
	// Where names the GPU in errors if the job has several; "" if it has one.
	Where string
	// Capacity is the limit of each space in bytes; Alloc fails beyond it. 0: no limit.
	Capacity [graph.NumSpaces]int64
	// Queue is how many host kernels can be queued on a stream before Launch blocks. Default
	// 4096.
	Queue int
	// Marks is the number of launches between two progress marks of a stream. Errors and
	// Running use the marks to name the current operation. Default 8.
	Marks int
	// Disk creates the storage of a rank's arena in graph.Disk. Bytes that were never written
	// read as initial. nil: the rank has no disk memory.
	Disk func(rank int, bytes int64, initial byte) (device.Disk, error)
	// Poison fills new arenas with 0xFF bytes (NaN in every float type), for tests.
	Poison bool
}

// poisonByte, repeated, is NaN in every float type.
const poisonByte = 0xFF

// closeGrace is how long Close waits for running work.
var closeGrace = 10 * time.Second

var (
	errClosed = errors.New("the context is closed")
	errNoWork = errors.New("aborted")
)

// Context is one rank's use of a GPU. All ranks of a process share the primary
// context of their device.
//
// Its methods, and those of its streams, must be called from one goroutine that is locked to
// its thread; New makes the CUDA context current on that thread. Any goroutine may call Abort,
// Err, Running and DiskTraffic.
type Context struct {
	rank     int
	opts     Options
	api      driver.API
	observer driver.Observer // nil: none
	memOps   bool            // the device has WriteValue and WaitValue
	gpu      driver.Device
	handle   driver.Context

	used    [graph.NumSpaces]int64
	arenas  []*Arena
	events  []*event
	streams []*Stream // grows on the driving goroutine, under mu
	sides   []side
	scratch []driver.Address
	graphs  []driver.GraphExec
	words   wordBlock
	waiting []func()                         // see WhileWaiting
	leaving []func() error                   // see AtClose
	others  []func(deadline time.Time) error // see BeforeFree
	closed  bool

	failed atomic.Bool // set after err
	mu     sync.Mutex  // guards err, hooks, streams, disks
	err    error
	hooks  []func(error)
	disks  []device.Disk
}

var (
	_ device.Context  = (*Context)(nil)
	_ device.Poisoner = (*Context)(nil)
	_ device.DiskUser = (*Context)(nil)
	_ device.Observer = (*Context)(nil)
	_ device.Timed    = (*Stream)(nil)
)

// New returns rank's context on a GPU and makes it current on the calling
// thread, which the caller has locked.
func New(rank int, o Options) (*Context, error) {
	fail := func(err error) (*Context, error) {
		return nil, fmt.Errorf("rank %d: CUDA device %d: %w", rank, o.Ordinal, err)
	}
	if o.Queue <= 0 {
		o.Queue = 4096
	}
	if o.Marks <= 0 {
		o.Marks = 8
	}
	if o.Driver == nil {
		return fail(errors.New("want a driver"))
	}
	list, err := o.Driver.Devices()
	if err != nil {
		return fail(err)
	}
	if o.Ordinal < 0 || o.Ordinal >= len(list) {
		return fail(fmt.Errorf("there are %d", len(list)))
	}
	c := &Context{rank: rank, opts: o, api: o.Driver, gpu: list[o.Ordinal], memOps: list[o.Ordinal].StreamMemOps}
	c.observer, _ = o.Driver.(driver.Observer)
	handle, err := c.api.Retain(o.Ordinal)
	if err != nil {
		return fail(err)
	}
	c.handle = handle
	if err := c.api.SetCurrent(handle); err != nil {
		return fail(errors.Join(err, c.api.Release(o.Ordinal)))
	}
	if err := c.words.alloc(c.api); err != nil {
		return fail(errors.Join(err, c.api.Release(o.Ordinal)))
	}
	return c, nil
}

// Rank returns the rank that the context belongs to.
func (c *Context) Rank() int { return c.rank }

// Driver returns the API that the context calls.
func (c *Context) Driver() driver.API { return c.api }

// GPU describes the device.
func (c *Context) GPU() driver.Device { return c.gpu }

// wordBlock is page-locked memory with the words through which streams and their host kernels
// signal each other, one word in each cache line.
type wordBlock struct {
	mem unsafe.Pointer
	at  driver.Address
	n   int
}

const (
	wordStride  = 64
	wordsBytes  = 4096
	wordsStream = 3 // words of a stream: reached, finished, mark
)

func (b *wordBlock) alloc(api driver.API) (err error) {
	b.mem, b.at, err = api.HostAlloc(wordsBytes)
	if err != nil {
		return fmt.Errorf("words for signals: %w", err)
	}
	clear(unsafe.Slice((*byte)(b.mem), wordsBytes))
	return nil
}

// word is a uint32 that both the host and a stream can access.
type word struct {
	host *atomic.Uint32
	at   driver.Address
}

func (b *wordBlock) next() (word, error) {
	if (b.n+1)*wordStride > wordsBytes {
		return word{}, fmt.Errorf("a context has %d words for signals: %d for a stream, 2 for a group", wordsBytes/wordStride, wordsStream)
	}
	w := word{(*atomic.Uint32)(unsafe.Add(b.mem, b.n*wordStride)), b.at + driver.Address(b.n*wordStride)}
	b.n++
	return w, nil
}

// NewEvent returns an event that was never recorded.
func (c *Context) NewEvent() (device.Event, error) {
	if c.closed {
		return nil, errClosed
	}
	e, err := c.api.NewEvent(false)
	if err != nil {
		return nil, fmt.Errorf("rank %d: event: %w", c.rank, err)
	}
	ev := &event{ctx: c, handle: e}
	c.events = append(c.events, ev)
	return ev, nil
}

// DriverEvent creates a driver event for kernels that order streams of several ranks. Close
// destroys it.
func (c *Context) DriverEvent() (driver.Event, error) {
	e, err := c.NewEvent()
	if err != nil {
		return 0, err
	}
	return e.(*event).handle, nil
}

// Word returns a word of page-locked memory, initially 0, for WriteValue on the rank's streams.
// ok is false if the device has no stream memory operations. The word is invalid after Close.
func (c *Context) Word() (host *atomic.Uint32, at driver.Address, ok bool, err error) {
	if !c.memOps {
		return nil, 0, false, nil
	}
	w, err := c.words.next()
	return w.host, w.at, err == nil, err
}

// WhileWaiting registers f to be called periodically on the rank's goroutine while it waits
// for a stream, so that f can check why the stream does not progress.
func (c *Context) WhileWaiting(f func()) { c.waiting = append(c.waiting, f) }

// AtClose registers f to be called on the rank's goroutine while the context closes, after all
// its streams' work has ended and before the streams are destroyed. If some work does not end, f
// is not called.
func (c *Context) AtClose(f func() error) { c.leaving = append(c.leaving, f) }

// BeforeFree registers f for Close to call after the rank's streams have ended and before its
// memory is freed. f returns when no other rank accesses that memory. If it returns an error, at
// the deadline, the memory is not freed.
func (c *Context) BeforeFree(f func(deadline time.Time) error) { c.others = append(c.others, f) }

// OnError registers f for the first sticky error.
func (c *Context) OnError(f func(error)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hooks = append(c.hooks, f)
}

// Abort makes err sticky and releases the streams' waits. Device work enqueued after those
// waits still runs, on undefined data.
func (c *Context) Abort(err error) {
	if err == nil {
		err = errNoWork
	}
	c.fail(err)
}

// Err returns the sticky error, nil if there is none.
func (c *Context) Err() error {
	if !c.failed.Load() {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *Context) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = err
	c.failed.Store(true)
	hooks, streams := c.hooks, c.streams
	c.mu.Unlock()
	if c.observer != nil {
		c.observer.Abandon()
	}
	for _, s := range streams {
		s.host.release()
	}
	for _, f := range hooks {
		f(err)
	}
}

// DiskTraffic returns the bytes that the rank's copies have moved from and to disk so far.
func (c *Context) DiskTraffic() (sum device.Traffic) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, d := range c.disks {
		t := d.Traffic()
		sum.Read += t.Read
		sum.Written += t.Written
	}
	return sum
}

// Running lists the operations that the streams are running, as far as is known: a host
// kernel, or the first operation after the last progress mark of the stream.
func (c *Context) Running() (list []string) {
	c.mu.Lock()
	streams := c.streams
	c.mu.Unlock()
	for _, s := range streams {
		if k := s.atHand(); k != nil {
			at := fmt.Sprintf("operation %s on stream %s", k.Label(), s.id)
			if c.opts.Where != "" {
				at += " of " + c.opts.Where
			}
			list = append(list, at)
		}
	}
	return list
}

// Close ends the streams and frees the memory. If some work does not end within ten seconds,
// the memory is not freed and the error names the work.
func (c *Context) Close() error {
	if c.closed {
		return nil
	}
	known := c.Err()
	var errs, late []error
	for _, s := range c.streams { // let enqueued work finish
		if err := s.Sync(); err != nil && known == nil { // the caller already has a known error
			known = err
			late = append(late, err)
		}
	}
	c.closed = true
	deadline := time.Now().Add(closeGrace)
	for _, s := range c.streams {
		if err := s.end(deadline); err != nil {
			errs = append(errs, err)
		}
	}
	for _, s := range c.sides {
		if err := c.end(s, deadline); err != nil {
			errs = append(errs, err)
		}
	}
	for _, f := range c.others {
		if err := f(deadline); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("rank %d: close: %w; its memory is not given back", c.rank, errors.Join(errs...))
	}
	note := func(err error) {
		// If the context is lost, every call returns that error: report it only once.
		var now, then *driver.Error
		if err == nil || errors.As(err, &now) && errors.As(known, &then) && now.Code == then.Code {
			return
		}
		errs = append(errs, err)
	}
	for _, f := range c.leaving {
		note(f())
	}
	for _, s := range c.streams {
		for _, err := range s.destroy() {
			note(err)
		}
	}
	for _, s := range c.sides {
		for _, err := range s.destroy(c.api) {
			note(err)
		}
	}
	for _, g := range c.graphs {
		note(c.api.DestroyGraphExec(g))
	}
	for _, e := range c.events {
		note(c.api.DestroyEvent(e.handle))
	}
	for _, a := range c.arenas {
		note(a.free())
	}
	for _, at := range c.scratch {
		note(c.api.Free(at))
	}
	note(c.api.HostFree(c.words.mem))
	note(c.api.Release(c.opts.Ordinal))
	if errs = append(late, errs...); len(errs) > 0 {
		return fmt.Errorf("rank %d: close: %w", c.rank, errors.Join(errs...))
	}
	return nil
}
