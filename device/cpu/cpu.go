// Package cpu implements the CPU as a device: each rank has memory mappings as arenas and
// in-order streams with one goroutine each. It behaves like an asynchronous accelerator: only
// stream order and events order operations, and only kernels and copies access an arena.
package cpu

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// Kernel is a kernel that this device can launch. Run computes on memory obtained from Bytes
// or Slice when the kernel was bound. It runs on the stream's goroutine and must not allocate.
// Its error, or its panic, becomes the context's sticky error.
type Kernel interface {
	device.Kernel
	Run() error
}

// Options of a Context.
type Options struct {
	// Capacity is the limit of each space in bytes; Alloc fails beyond it. 0: no limit.
	Capacity [graph.NumSpaces]int64
	// Queue is how many operations a stream holds before Launch, Record and Wait
	// block. Default 4096.
	Queue int
	// Pin locks host arenas into memory (mlock), at their size rounded up to a page, so that
	// they are not swapped out. If the system refuses, they stay unlocked and Warn is called,
	// once in a process.
	Pin bool
	// RequirePinned makes Alloc fail if memory cannot be locked. It implies Pin.
	RequirePinned bool
	// Warn is called with each warning, one line a call; nil drops them.
	Warn func(string)
	// Disk creates the storage of a rank's arena in graph.Disk. Bytes that were never written
	// read as initial. nil: the rank has no disk memory.
	Disk func(rank int, bytes int64, initial byte) (device.Disk, error)
	// Map allocates the memory of device and host arenas: zero-filled, page-aligned, with the
	// arena's length. unmap frees it. If Map is nil, arenas are private mappings.
	Map func(space graph.Space, bytes int64) (data []byte, unmap func() error, err error)
	// Poison fills new arenas with 0xFF bytes (NaN in every float type). It touches every
	// page, so it is for tests.
	Poison bool
	// Checker, shared by the ranks of a process, watches every kernel for writes
	// outside the ranges that it declares. It runs one kernel at a time: for tests.
	Checker *Checker
}

// closeGrace is how long Close waits for a kernel that still runs.
const closeGrace = 10 * time.Second

var (
	errClosed = errors.New("the context is closed")
	errNoWork = errors.New("aborted")
)

// Context is one rank's use of the CPU device. It implements device.Context and
// device.Poisoner.
type Context struct {
	rank    int
	opts    Options
	used    [graph.NumSpaces]int64
	arenas  []*Arena
	streams []*Stream // grows on the driving goroutine, under mu
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
	_ device.Timed    = (*Stream)(nil)
)

// New returns rank's context.
func New(rank int, o Options) *Context {
	if o.Queue <= 0 {
		o.Queue = 4096
	}
	return &Context{rank: rank, opts: o}
}

// Rank returns the rank that the context belongs to.
func (c *Context) Rank() int { return c.rank }

// Alloc allocates an arena. In device and host memory it is a mapping: its pages are zero and
// become resident when first touched, or at once if host memory is pinned. On disk it is
// storage from Options.Disk. Alloc fails if the space's capacity would be exceeded.
func (c *Context) Alloc(space graph.Space, bytes int64) (device.Arena, error) {
	fail := func(format string, args ...any) (device.Arena, error) {
		return nil, fmt.Errorf("rank %d: allocate %d bytes of %s memory: %s", c.rank, bytes, space, fmt.Sprintf(format, args...))
	}
	switch {
	case c.closed:
		return fail("%v", errClosed)
	case bytes <= 0:
		return fail("want a positive size")
	case space >= graph.NumSpaces:
		return fail("the CPU device has device, host and disk memory")
	case space == graph.Disk && c.opts.Disk == nil:
		return fail("the rank was given no folder for it (Config.Disk DIR)")
	}
	if limit := c.opts.Capacity[space]; limit > 0 && bytes > limit-c.used[space] {
		return fail("the capacity is %d bytes, of which %d are in use", limit, c.used[space])
	}
	a := &Arena{ctx: c, space: space, size: bytes}
	if space == graph.Disk {
		initial := byte(0)
		if c.opts.Poison {
			initial = poisonByte
		}
		disk, err := c.opts.Disk(c.rank, bytes, initial)
		if err != nil {
			return nil, fmt.Errorf("rank %d: allocate %d bytes of %s memory: %w", c.rank, bytes, space, err)
		}
		a.disk = disk
		c.mu.Lock()
		c.disks = append(c.disks, disk)
		c.mu.Unlock()
	} else {
		m, unmap, err := c.mapArena(space, bytes)
		if err != nil {
			return fail("%v", err)
		}
		if space == graph.Host && (c.opts.Pin || c.opts.RequirePinned) {
			if err := c.pin(m); err != nil {
				_ = unmap()
				return nil, fmt.Errorf("rank %d: allocate %d bytes of %s memory: %w", c.rank, bytes, space, err)
			}
		}
		a.unmap, a.mem = unmap, m.data
		if k := c.opts.Checker; k != nil {
			k.watch(a)
		}
	}
	c.used[space] += bytes
	c.arenas = append(c.arenas, a)
	return a, nil
}

// mapArena allocates the memory of an arena and returns the function that frees it.
func (c *Context) mapArena(space graph.Space, bytes int64) (m mapping, unmap func() error, err error) {
	pinned := space == graph.Host && (c.opts.Pin || c.opts.RequirePinned)
	switch {
	case c.opts.Map != nil:
		m.size = bytes
		m.data, unmap, err = c.opts.Map(space, bytes)
		if err == nil && int64(len(m.data)) != bytes {
			err = fmt.Errorf("the mapping has %d bytes", len(m.data))
		}
	case c.opts.Poison && !pinned && bytes <= mostReused:
		return reuse(bytes)
	default:
		m, err = mapMemory(bytes)
		unmap = m.unmap
	}
	if err == nil && c.opts.Poison {
		poison(m.data)
	}
	return m, unmap, err
}

// NewEvent returns an event that was never recorded.
func (c *Context) NewEvent() (device.Event, error) {
	if c.closed {
		return nil, errClosed
	}
	return &event{ctx: c}, nil
}

// HostBytes returns the memory of a range of a host arena of this rank.
func (c *Context) HostBytes(p device.Ptr) ([]byte, error) {
	a, err := c.own(p)
	if err != nil {
		return nil, fmt.Errorf("rank %d: host view: %w", c.rank, err)
	}
	if a.space != graph.Host {
		return nil, fmt.Errorf("rank %d: host view: the range is in %s memory, want host memory", c.rank, a.space)
	}
	if k := c.opts.Checker; k != nil {
		k.exempt(p)
	}
	return a.mem[p.Off : p.Off+p.Len : p.Off+p.Len], nil
}

// Reach returns the memory of a range of an arena of this rank. It returns false if the arena
// is on disk or a Checker watches it.
func (c *Context) Reach(p device.Ptr) ([]byte, bool) {
	a, err := c.own(p)
	if err != nil || a.mem == nil || c.opts.Checker != nil {
		return nil, false
	}
	return a.mem[p.Off : p.Off+p.Len : p.Off+p.Len], true
}

// own returns p's arena if p lies in an arena of this context.
func (c *Context) own(p device.Ptr) (*Arena, error) {
	a, ok := p.Arena.(*Arena)
	if !ok {
		return nil, fmt.Errorf("not memory of the CPU device (%T)", p.Arena)
	}
	if a.ctx != c {
		return nil, fmt.Errorf("memory of rank %d, want rank %d's own", a.ctx.rank, c.rank)
	}
	if err := p.Check(); err != nil {
		return nil, err
	}
	return a, nil
}

// OnError registers f for the first sticky error.
func (c *Context) OnError(f func(error)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hooks = append(c.hooks, f)
}

// Abort makes err sticky and releases the streams' waits.
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
	for _, s := range streams {
		s.mu.Lock() // a waiter is either before its check of failed or asleep
		s.cond.Broadcast()
		s.mu.Unlock()
	}
	for _, f := range hooks {
		f(err)
	}
}

// Close ends the streams and unmaps the arenas. If a kernel does not end within ten seconds,
// the memory stays mapped and the error names the kernel.
func (c *Context) Close() error {
	if c.closed {
		return nil
	}
	c.closed = true // from here on nothing is enqueued
	if !c.failed.Load() {
		for _, s := range c.streams {
			_ = s.drain() // Sync has already returned this error to the caller
		}
	}
	for _, s := range c.streams {
		close(s.queue)
	}
	deadline := time.NewTimer(closeGrace)
	defer deadline.Stop()
	for _, s := range c.streams {
		select {
		case <-s.ended:
		case <-deadline.C:
			return fmt.Errorf("rank %d: close: operation %q on stream %s is still running after %v; its memory is left mapped",
				c.rank, s.current(), s.id, closeGrace)
		}
	}
	var first error
	for _, a := range c.arenas {
		if k := c.opts.Checker; k != nil {
			k.unwatch(a)
		}
		var err error
		if a.disk != nil {
			err = a.disk.Close()
		} else {
			err = a.unmap()
		}
		a.mem = nil
		if first == nil && err != nil {
			first = fmt.Errorf("rank %d: close: give the %s arena back: %w", c.rank, a.space, err)
		}
	}
	return first
}

// Arena is a separate memory mapping outside the Go heap. It never moves, its pages become
// resident when touched, and unreadable guard pages lie on both sides. In graph.Disk it is
// storage that only copies access.
type Arena struct {
	ctx     *Context
	space   graph.Space
	size    int64
	unmap   func() error
	mem     []byte
	disk    device.Disk
	touched atomic.Int64
}

// Space returns the arena's memory space.
func (a *Arena) Space() graph.Space { return a.space }

// Size returns the arena's length in bytes.
func (a *Arena) Size() int64 { return a.size }

// Touched returns the highest offset + length that a kernel has touched.
func (a *Arena) Touched() int64 { return a.touched.Load() }

// Rank returns the rank that the arena belongs to.
func (a *Arena) Rank() int { return a.ctx.rank }

func (a *Arena) touch(end int64) {
	for {
		old := a.touched.Load()
		if end <= old || a.touched.CompareAndSwap(old, end) {
			return
		}
	}
}

// HostMemory is an arena of another device whose memory the host can access, such as
// page-locked memory of the CUDA device. CPU kernels can compute on it.
type HostMemory interface {
	device.Arena
	// HostMemory returns the whole arena, valid until its device is closed, or an error if
	// the host cannot access it.
	HostMemory() ([]byte, error)
}

// Bytes returns the memory of p. Kernels may keep it when they are bound. Ranges outside p's
// arena and memory that the host cannot access are errors.
func Bytes(p device.Ptr) ([]byte, error) {
	a, ok := p.Arena.(*Arena)
	if !ok {
		if p.Arena == nil {
			return nil, errors.New("the operand is absent")
		}
		if h, ok := p.Arena.(HostMemory); ok {
			if err := p.Check(); err != nil {
				return nil, err
			}
			mem, err := h.HostMemory()
			if err != nil {
				return nil, err
			}
			return mem[p.Off : p.Off+p.Len : p.Off+p.Len], nil
		}
		return nil, fmt.Errorf("not memory of the CPU device (%T)", p.Arena)
	}
	if err := p.Check(); err != nil {
		return nil, err
	}
	if a.space == graph.Disk {
		return nil, fmt.Errorf("the range is in %s memory, which only copies reach", a.space)
	}
	if a.mem == nil {
		return nil, errClosed
	}
	return a.mem[p.Off : p.Off+p.Len : p.Off+p.Len], nil
}

// Element is the Go type of a buffer's elements; uint16 represents 16-bit floats.
type Element interface {
	~float32 | ~float64 | ~int64 | ~int32 | ~int8 | ~uint8 | ~uint16
}

// Slice returns the memory of p as elements of type T. It fails if Bytes does, if the offset
// is not a multiple of T's alignment, or if the length is not a multiple of T's size.
func Slice[T Element](p device.Ptr) ([]T, error) {
	b, err := Bytes(p)
	if err != nil {
		return nil, err
	}
	var zero T
	size := int64(unsafe.Sizeof(zero))
	if p.Off%size != 0 || p.Len%size != 0 {
		return nil, fmt.Errorf("bytes [%d, %d) don't divide into elements of %d bytes (%T)", p.Off, p.Off+p.Len, size, zero)
	}
	if len(b) == 0 {
		return []T{}, nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), p.Len/size), nil
}

func address(b []byte) int64 { return int64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
