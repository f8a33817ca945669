// Package fault wraps a device and makes chosen operations fail, to test the effect of failures on
// a job.
package fault

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// ErrInjected is wrapped by every error that this package makes.
var ErrInjected = errors.New("injected fault")

// Mode is how an operation fails.
type Mode uint8

// Modes of failure.
const (
	// AtLaunch: Launch returns the error, as for a launch that the driver refuses.
	AtLaunch Mode = iota
	// WhenRun: the operation is enqueued and fails when its turn comes. The
	// kernel's type must be one that runs on the CPU (a Run method).
	WhenRun
	// Panic is WhenRun with a panic in place of an error.
	Panic
	// Hang: the operation is enqueued and runs until the context is aborted, as
	// a stuck rank does. As WhenRun, CPU kernels only.
	Hang
)

// Plan says which operations fail. The zero value fails none.
type Plan struct {
	// Launch fails the n-th launch (from 1), over all streams, whose label matches Label; 0 fails
	// none.
	Launch int64
	// Label is a substring of the labels that Launch counts; empty counts all.
	Label string
	Mode  Mode
	// Alloc makes allocations in Space fail.
	Alloc bool
	Space graph.Space
	// Copy makes binding a copy fail if its label contains this text; empty fails none.
	Copy string
}

// Context wraps a context. It implements device.Context, and device.Poisoner if the wrapped context
// does.
type Context struct {
	device.Context
	plan    Plan
	count   atomic.Int64
	fired   atomic.Bool
	release chan struct{}
	once    sync.Once
}

var (
	_ device.Context  = (*Context)(nil)
	_ device.Poisoner = (*Context)(nil)
	_ device.DiskUser = (*Context)(nil)
	_ device.Timed    = (*stream)(nil)
)

// Wrap returns ctx with the faults of plan.
func Wrap(ctx device.Context, plan Plan) *Context {
	return &Context{Context: ctx, plan: plan, release: make(chan struct{})}
}

// Fired reports whether the planned launch was reached.
func (c *Context) Fired() bool { return c.fired.Load() }

// Alloc fails in the plan's space.
func (c *Context) Alloc(space graph.Space, bytes int64) (device.Arena, error) {
	if c.plan.Alloc && space == c.plan.Space {
		return nil, fmt.Errorf("rank %d: allocate %d bytes of %s memory: %w", c.Rank(), bytes, space, ErrInjected)
	}
	return c.Context.Alloc(space, bytes)
}

// Copy fails for the plan's label.
func (c *Context) Copy(label string, dst, src device.Ptr) (device.Kernel, error) {
	if c.plan.Copy != "" && strings.Contains(label, c.plan.Copy) {
		return nil, fmt.Errorf("rank %d: copy %q: %w", c.Rank(), label, ErrInjected)
	}
	return c.Context.Copy(label, dst, src)
}

// Poison calls the wrapped context.
func (c *Context) Poison(label string, p device.Ptr) (device.Kernel, error) {
	poisoner, ok := c.Context.(device.Poisoner)
	if !ok {
		return nil, fmt.Errorf("rank %d: poison %q: the wrapped device can't (%T)", c.Rank(), label, c.Context)
	}
	return poisoner.Poison(label, p)
}

// Running calls the wrapped context.
func (c *Context) Running() []string {
	if o, ok := c.Context.(device.Observer); ok {
		return o.Running()
	}
	return nil
}

// DiskTraffic calls the wrapped context.
func (c *Context) DiskTraffic() device.Traffic {
	if u, ok := c.Context.(device.DiskUser); ok {
		return u.DiskTraffic()
	}
	return device.Traffic{}
}

// Abort releases hanging operations and aborts the wrapped context.
func (c *Context) Abort(err error) {
	c.Context.Abort(err)
	c.once.Do(func() { close(c.release) })
}

// Close releases hanging operations and closes the wrapped context.
func (c *Context) Close() error {
	c.once.Do(func() { close(c.release) })
	return c.Context.Close()
}

// NewStream returns a stream of the wrapped context with the planned faults.
func (c *Context) NewStream(id graph.StreamID) (device.Stream, error) {
	s, err := c.Context.NewStream(id)
	if err != nil {
		return nil, err
	}
	return &stream{Stream: s, ctx: c, id: id}, nil
}

type stream struct {
	device.Stream
	ctx *Context
	id  graph.StreamID
}

func (s *stream) Launch(k device.Kernel) error {
	plan := s.ctx.plan
	if plan.Launch == 0 || !strings.Contains(k.Label(), plan.Label) || s.ctx.count.Add(1) != plan.Launch {
		return s.Stream.Launch(k)
	}
	s.ctx.fired.Store(true)
	if plan.Mode == AtLaunch {
		err := &device.OpError{Rank: s.ctx.Rank(), Stream: s.id, Kernel: k, Err: ErrInjected}
		s.ctx.Abort(err) // sticky, like a driver's error
		return err
	}
	return s.Stream.Launch(&failing{Kernel: k, ctx: s.ctx})
}

func (s *stream) Time(t device.Timer) error {
	timed, ok := s.Stream.(device.Timed)
	if !ok {
		return fmt.Errorf("the wrapped device can't time its kernels (%T)", s.Stream)
	}
	return timed.Time(t)
}

// failing replaces a kernel. It has the Run method of CPU kernels.
type failing struct {
	device.Kernel
	ctx *Context
}

func (f *failing) Run() error {
	switch f.ctx.plan.Mode {
	case Panic:
		panic(ErrInjected.Error())
	case Hang:
		<-f.ctx.release
	}
	return ErrInjected
}

// Unwrap returns the kernel that f replaces.
func (f *failing) Unwrap() device.Kernel { return f.Kernel }
