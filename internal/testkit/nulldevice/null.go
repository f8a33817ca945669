// Package nulldevice is a device that executes nothing: a launch only records what the kernel would
// touch. A complete program can be launched, so the executor's work and the memory it touches can
// be checked at any size without the memory.
package nulldevice

import (
	"fmt"
	"sync"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// Context is one rank's use of the null device.
type Context struct {
	rank     int
	launches [graph.NumStreams]int64

	mu    sync.Mutex
	err   error
	hooks []func(error)
	host  map[hostRange][]byte
}

type hostRange struct {
	arena    *Arena
	off, len int64
}

var (
	_ device.Context  = (*Context)(nil)
	_ device.Poisoner = (*Context)(nil)
	_ device.Timed    = (*stream)(nil)
)

// New returns rank's context.
func New(rank int) *Context { return &Context{rank: rank, host: map[hostRange][]byte{}} }

// Rank returns the rank that the context belongs to.
func (c *Context) Rank() int { return c.rank }

// Launches returns the number of kernels launched on a stream.
func (c *Context) Launches(id graph.StreamID) int64 { return c.launches[id] }

// Arena is a size without memory.
type Arena struct {
	ctx     *Context
	space   graph.Space
	size    int64
	touched int64
}

// Space returns the arena's memory space.
func (a *Arena) Space() graph.Space { return a.space }

// Size returns the arena's length in bytes.
func (a *Arena) Size() int64 { return a.size }

// Touched returns the highest offset + length of a launched kernel's ranges.
func (a *Arena) Touched() int64 { return a.touched }

// Alloc returns an arena of any space and size.
func (c *Context) Alloc(space graph.Space, bytes int64) (device.Arena, error) {
	if bytes <= 0 {
		return nil, fmt.Errorf("rank %d: allocate %d bytes of %s memory: want a positive size", c.rank, bytes, space)
	}
	return &Arena{ctx: c, space: space, size: bytes}, nil
}

type event struct{ ctx *Context }

// NewEvent returns an event that has always occurred.
func (c *Context) NewEvent() (device.Event, error) { return &event{c}, nil }

func (c *Context) check(p device.Ptr) error {
	a, ok := p.Arena.(*Arena)
	if !ok {
		return fmt.Errorf("not memory of the null device (%T)", p.Arena)
	}
	if a.ctx != c {
		return fmt.Errorf("memory of rank %d, want rank %d's own", a.ctx.rank, c.rank)
	}
	return p.Check()
}

// Kernel does nothing.
type Kernel struct {
	label   string
	touches []device.Ptr
}

// NewKernel returns a kernel that touches those ranges that have an arena.
func NewKernel(label string, ranges ...device.Ptr) *Kernel {
	k := &Kernel{label: label}
	for _, p := range ranges {
		if p.Arena != nil {
			k.touches = append(k.touches, p)
		}
	}
	return k
}

// Label names the operation.
func (k *Kernel) Label() string { return k.label }

// Touches returns the ranges that the kernel was made with.
func (k *Kernel) Touches() []device.Ptr { return k.touches }

// Copy binds a copy that does nothing.
func (c *Context) Copy(label string, dst, src device.Ptr) (device.Kernel, error) {
	for _, p := range []device.Ptr{dst, src} {
		if err := c.check(p); err != nil {
			return nil, fmt.Errorf("rank %d: copy %q: %w", c.rank, label, err)
		}
	}
	if dst.Len != src.Len {
		return nil, fmt.Errorf("rank %d: copy %q: destination has %d bytes, source %d", c.rank, label, dst.Len, src.Len)
	}
	return NewKernel(label, dst, src), nil
}

// Poison binds a fill that does nothing.
func (c *Context) Poison(label string, p device.Ptr) (device.Kernel, error) {
	if err := c.check(p); err != nil {
		return nil, fmt.Errorf("rank %d: poison %q: %w", c.rank, label, err)
	}
	return NewKernel(label, p), nil
}

// HostBytes returns zeroed bytes that the host may write, the same ones for the same range.
// Overlapping ranges do not share memory.
func (c *Context) HostBytes(p device.Ptr) ([]byte, error) {
	if err := c.check(p); err != nil {
		return nil, fmt.Errorf("rank %d: host view: %w", c.rank, err)
	}
	a := p.Arena.(*Arena)
	if a.space != graph.Host {
		return nil, fmt.Errorf("rank %d: host view: the range is in %s memory, want host memory", c.rank, a.space)
	}
	r := hostRange{a, p.Off, p.Len}
	b, ok := c.host[r]
	if !ok {
		b = make([]byte, p.Len)
		c.host[r] = b
	}
	return b, nil
}

// OnError registers f for the first error.
func (c *Context) OnError(f func(error)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hooks = append(c.hooks, f)
}

// Abort makes err the sticky error.
func (c *Context) Abort(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	if err == nil {
		err = fmt.Errorf("aborted")
	}
	c.err = err
	hooks := c.hooks
	c.mu.Unlock()
	for _, f := range hooks {
		f(err)
	}
}

func (c *Context) sticky() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close does nothing.
func (c *Context) Close() error { return nil }

type stream struct {
	ctx   *Context
	id    graph.StreamID
	timer device.Timer
}

// NewStream returns a stream.
func (c *Context) NewStream(id graph.StreamID) (device.Stream, error) {
	if id >= graph.NumStreams {
		return nil, fmt.Errorf("rank %d: no stream %s", c.rank, id)
	}
	return &stream{ctx: c, id: id}, nil
}

func (s *stream) Launch(k device.Kernel) error {
	if err := s.ctx.sticky(); err != nil {
		return err
	}
	if _, ok := k.(*Kernel); !ok {
		return fmt.Errorf("rank %d, stream %s, operation %q: not a kernel of the null device (%T)", s.ctx.rank, s.id, k.Label(), k)
	}
	for _, p := range k.Touches() {
		if err := s.ctx.check(p); err != nil {
			return &device.OpError{Rank: s.ctx.rank, Stream: s.id, Kernel: k, Err: fmt.Errorf("operand: %w", err)}
		}
		a := p.Arena.(*Arena)
		a.touched = max(a.touched, p.Off+p.Len)
	}
	s.ctx.launches[s.id]++
	if s.timer != nil {
		now := device.Now()
		s.timer.Ran(now, now)
	}
	return nil
}

func (s *stream) event(e device.Event) error {
	if ev, ok := e.(*event); !ok || ev.ctx != s.ctx {
		return fmt.Errorf("rank %d, stream %s: not an event of this context (%T)", s.ctx.rank, s.id, e)
	}
	return s.ctx.sticky()
}

func (s *stream) Record(e device.Event) error { return s.event(e) }
func (s *stream) Wait(e device.Event) error   { return s.event(e) }
func (s *stream) Sync() error                 { return s.ctx.sticky() }
func (s *stream) Time(t device.Timer) error   { s.timer = t; return nil }
