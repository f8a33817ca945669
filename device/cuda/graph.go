package cuda

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// Fixed is a Kernel that a CUDA graph can replace: each Enqueue makes the same calls with the
// same arguments, and only launches, copies and fills. It reads values that change from step to
// step from memory.
type Fixed interface {
	Kernel
	Fixed()
}

var (
	_ device.Capturer = (*Stream)(nil)
	_ Fixed           = (*copyKernel)(nil)
	_ Fixed           = (*poisonKernel)(nil)
)

func (k *copyKernel) Fixed()   {}
func (k *poisonKernel) Fixed() {}

// graphKernel is a sequence of kernels of one stream as a CUDA graph.
type graphKernel struct {
	label                  string
	exec                   driver.GraphExec
	touches, reads, writes []device.Ptr
}

func (g *graphKernel) Label() string         { return g.label }
func (g *graphKernel) Touches() []device.Ptr { return g.touches }
func (g *graphKernel) Reads() []device.Ptr   { return g.reads }
func (g *graphKernel) Writes() []device.Ptr  { return g.writes }

// Enqueue launches the graph.
func (g *graphKernel) Enqueue(api driver.API, s driver.Stream) error {
	return api.LaunchGraph(g.exec, s)
}

// Captures tells whether a kernel can be part of a graph.
func (s *Stream) Captures(k device.Kernel) bool {
	_, ok := k.(Fixed)
	return ok
}

// Capture creates a CUDA graph of kernels. Each must have run on the stream at least once, so
// that its code is loaded. The result runs them all in order in one launch, any number of times.
// No work may run during Capture. After an error the stream is unchanged and the kernels can
// still be launched one by one.
func (s *Stream) Capture(label string, list []device.Kernel) (device.Kernel, error) {
	fail := func(err error) (device.Kernel, error) {
		return nil, fmt.Errorf("rank %d, stream %s: capture %q as a CUDA graph: %w", s.ctx.rank, s.id, label, err)
	}
	if err := s.usable(); err != nil {
		return fail(err)
	}
	if s.timing != nil {
		return fail(errors.New("the stream's kernels are timed one by one"))
	}
	g := &graphKernel{label: label}
	for _, k := range list {
		if _, ok := k.(Fixed); !ok {
			return fail(fmt.Errorf("operation %q (%T) is not the same work each time", k.Label(), k))
		}
		for _, p := range k.Touches() {
			if _, err := s.ctx.own(p); err != nil {
				return fail(fmt.Errorf("operation %q: operand: %w", k.Label(), err))
			}
		}
		g.add(s.ctx, k)
		if c, ok := k.(Checked); ok {
			s.checked[c] = struct{}{}
		}
	}
	api := s.ctx.api
	captured, err := s.gather(list)
	if err != nil {
		return fail(err)
	}
	g.exec, err = api.Instantiate(captured)
	if err = errors.Join(err, api.DestroyGraph(captured)); err != nil {
		if g.exec != 0 {
			err = errors.Join(err, api.DestroyGraphExec(g.exec))
		}
		return fail(err)
	}
	s.ctx.graphs = append(s.ctx.graphs, g.exec)
	return g, nil
}

// gather enqueues kernels while the stream captures.
func (s *Stream) gather(list []device.Kernel) (driver.Graph, error) {
	api := s.ctx.api
	if err := api.BeginCapture(s.handle); err != nil {
		return 0, err
	}
	var err error
	for _, k := range list {
		if err = s.call(k.(Kernel)); err != nil {
			err = fmt.Errorf("operation %q: %w", k.Label(), err)
			break
		}
	}
	captured, end := api.EndCapture(s.handle)
	if err == nil {
		return captured, end
	}
	if end == nil {
		end = api.DestroyGraph(captured)
	}
	return 0, errors.Join(err, end)
}

// add adds a kernel's operands to the graph's. touches keeps only the highest range of each
// arena, because it is read at every launch.
func (g *graphKernel) add(c *Context, k device.Kernel) {
	for _, p := range k.Touches() {
		known := false
		for i := range g.touches {
			if t := &g.touches[i]; t.Arena == p.Arena {
				known = true
				if p.Off+p.Len > t.Off+t.Len {
					*t = p
				}
			}
		}
		if !known {
			g.touches = append(g.touches, p)
		}
	}
	if c.observer == nil {
		return
	}
	if a, ok := k.(Accessor); ok {
		g.reads, g.writes = append(g.reads, a.Reads()...), append(g.writes, a.Writes()...)
		return
	}
	g.writes = append(g.writes, k.Touches()...)
}
