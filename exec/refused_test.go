package exec_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/inproc"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/fault"
)

func TestCapacityAndAllocationFaults(t *testing.T) {
	z := newZero3(1, 1000)
	peak := z.layout.Spaces[graph.Device].Peak
	open := func(c device.Context) (*exec.Executor, error) {
		w, err := inproc.New(z.p.Mesh, inproc.Options{})
		require.NoError(t, err)
		groups, err := w.Groups(0)
		require.NoError(t, err)
		return exec.New(exec.Config{Program: z.p, Layout: z.layout, Context: c, Library: library{}, Groups: groups, Coord: []int{0}})
	}
	var o cpu.Options
	o.Capacity[graph.Device] = peak
	e, err := open(cpu.New(0, o))
	require.NoError(t, err)
	require.NoError(t, e.Close())
	o.Capacity[graph.Device]--
	_, err = open(cpu.New(0, o))
	require.EqualError(t, err, fmt.Sprintf("exec: rank 0: allocate %d bytes of device memory: the capacity is %d bytes, of which 0 are in use", peak, peak-1))
	_, err = open(fault.Wrap(cpu.New(0, cpu.Options{}), fault.Plan{Alloc: true, Space: graph.Host}))
	require.ErrorIs(t, err, fault.ErrInjected)
	require.ErrorContains(t, err, "of host memory")
	two, err := inproc.New([]graph.Axis{{Name: "data", Size: 2}}, inproc.Options{})
	require.NoError(t, err)
	groups, err := two.Groups(1)
	require.NoError(t, err)
	_, err = exec.New(exec.Config{Program: z.p, Layout: z.layout, Context: cpu.New(1, o), Library: library{}, Groups: groups, Coord: []int{0}})
	require.Error(t, err)
	require.ErrorIs(t, two.Err(), comm.ErrAborted)
	require.ErrorContains(t, two.Err(), "aborted: exec: rank 1: allocate", "rank 0 would wait for rank 1 in vain")
	_, err = open(fault.Wrap(cpu.New(0, cpu.Options{}), fault.Plan{Copy: "hyper/in"}))
	require.ErrorIs(t, err, fault.ErrInjected)
	require.ErrorContains(t, err, "exec: rank 0, section step, phase micro, operation hyper/in: ")
}

func TestBadProgramsAreRefused(t *testing.T) {
	cases := []struct {
		name   string
		change func(z *zero3, c *exec.Config, ops []graph.Op) // ops of the micro phase
		want   string
	}{
		{"event", func(z *zero3, _ *exec.Config, ops []graph.Op) { ops[0].Wait = []graph.EventID{99} }, "operation hyper/in: wait: event 99 of 9"},
		{"record", func(z *zero3, _ *exec.Config, ops []graph.Op) { ops[0].Record = -1 }, "record: event -1 of 9"},
		{"buffer", func(z *zero3, _ *exec.Config, ops []graph.Op) { ops[2].In[0] = 77 }, "operation g: input 0: buffer 77 of"},
		{"no place", func(z *zero3, _ *exec.Config, ops []graph.Op) { z.layout.Offset[z.g] = -1 }, `output 0: buffer "g" has no place in the layout`},
		{"outside", func(z *zero3, _ *exec.Config, ops []graph.Op) { z.layout.Offset[z.g] = 1 << 20 }, `buffer "g": bytes [`},
		{"view", func(z *zero3, _ *exec.Config, ops []graph.Op) {
			ops[2].In[0] = z.view("v", graph.F32, z.n, graph.View{Base: z.full, Offset: 4})
		}, `buffer "v": bytes [4, `},
		{"kind", func(z *zero3, _ *exec.Config, ops []graph.Op) { ops[2].Kind = "fft" }, "no kernel for fft"},
		{"group", func(z *zero3, _ *exec.Config, ops []graph.Op) { ops[1].Attr = graph.GroupAttr{Axis: 4} }, "all_gather: no group for mesh axis 4"},
		{"attribute", func(z *zero3, _ *exec.Config, ops []graph.Op) { ops[1].Attr = nil }, "all_gather: attribute <nil>, want graph.GroupAttr"},
		{"mode", func(z *zero3, _ *exec.Config, ops []graph.Op) { ops[1].Out[0].Mode = graph.Accum }, "all_gather with output mode accum"},
		{"copy mode", func(z *zero3, _ *exec.Config, ops []graph.Op) { ops[0].Out[0].Mode = graph.Accum }, "copy with output mode accum, want write"},
		{"operands", func(z *zero3, _ *exec.Config, ops []graph.Op) { ops[0].In = nil }, "copy has 0 inputs and 1 outputs, want 1 and 1"},
		{"absent", func(z *zero3, _ *exec.Config, ops []graph.Op) { ops[0].In[0] = graph.NoBuf }, "copy: an operand is absent"},
		{"predicate", func(z *zero3, _ *exec.Config, ops []graph.Op) { ops[1].Skip = z.p.Loss }, "all_gather with a predicate"},
		{"dtypes", func(z *zero3, _ *exec.Config, ops []graph.Op) { z.p.Buf(z.full).DType = graph.I32 }, "all_gather from f32 to i32"},
		{"stream", func(z *zero3, _ *exec.Config, ops []graph.Op) { ops[0].Stream = 9 }, "no stream stream(9)"},
		{"coord", func(_ *zero3, c *exec.Config, _ []graph.Op) { c.Coord = []int{1} }, "coordinate 1 along mesh axis data of size 1"},
		{"coords", func(_ *zero3, c *exec.Config, _ []graph.Op) { c.Coord = nil }, "0 coordinates for a mesh of 1 axes"},
		{"layout", func(z *zero3, c *exec.Config, _ []graph.Op) { z.layout.Offset = z.layout.Offset[1:] }, "offsets, the program"},
		{"library", func(_ *zero3, c *exec.Config, _ []graph.Op) { c.Library = nil }, "want a program, a layout and a kernel library"},
		{"untimed", func(_ *zero3, c *exec.Config, _ []graph.Op) {
			c.Trace, c.Context = exec.NewTrace(1), plain{c.Context}
		}, "the device can't time its kernels for a trace or a meter"},
		{"unpoisoned", func(_ *zero3, c *exec.Config, _ []graph.Op) {
			c.Poison, c.Context = true, plain{c.Context}
		}, "the device can't fill released memory"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			z := newZero3(1, 40)
			w, err := inproc.New(z.p.Mesh, inproc.Options{})
			require.NoError(t, err)
			groups, err := w.Groups(0)
			require.NoError(t, err)
			cfg := exec.Config{Program: z.p, Layout: z.layout, Context: cpu.New(0, cpu.Options{}), Library: library{}, Groups: groups, Coord: []int{0}}
			c.change(z, &cfg, z.p.Sections[0].Phases[1].Ops)
			_, err = exec.New(cfg)
			require.ErrorContains(t, err, c.want)
		})
	}
	_, err := exec.New(exec.Config{})
	require.ErrorContains(t, err, "no device context")
}

// plain is a context without the optional interfaces.
type plain struct{ device.Context }

func (p plain) NewStream(id graph.StreamID) (device.Stream, error) {
	s, err := p.Context.NewStream(id)
	return struct{ device.Stream }{s}, err
}
