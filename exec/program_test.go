package exec_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/inproc"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/memplan"
)

// Kinds of the test programs' operations, on float32.
const (
	scaleBy graph.Kind = "test_scale_by" // x, hyper → y = x · hyper[0]
	sub     graph.Kind = "test_sub"      // g → p −= g
	sum     graph.Kind = "test_sum"      // x → loss f64, accum
	zero    graph.Kind = "test_zero"     // → y = 0
	spy     graph.Kind = "test_spy"      // calls the library's spy with its operands
)

// library binds the test kinds on the CPU device.
type library struct {
	spy   func(b kernels.Binding) error
	slow  time.Duration                             // duration of scaleBy
	joins func(first, second kernels.Binding) error // nil error: the two run as one; a nil function joins none
}

// errApart is returned by joins for two operations that are not joined.
var errApart = errors.New("apart")

// Join implements kernels.Joiner.
func (l library) Join(first, second kernels.Binding) (device.Kernel, error) {
	if l.joins == nil {
		return nil, nil
	}
	if err := l.joins(first, second); err != nil {
		if err == errApart {
			err = nil
		}
		return nil, err
	}
	a, err := l.Bind(first)
	if err != nil {
		return nil, err
	}
	b, err := l.Bind(second)
	if err != nil {
		return nil, err
	}
	return &kernel{label: "both", touches: append(a.Touches(), b.Touches()...), run: func() error {
		return errors.Join(a.(*kernel).run(), b.(*kernel).run())
	}}, nil
}

type kernel struct {
	label   string
	touches []device.Ptr
	run     func() error
}

func (k *kernel) Label() string         { return k.label }
func (k *kernel) Touches() []device.Ptr { return k.touches }
func (k *kernel) Run() error            { return k.run() }

func (l library) Bind(b kernels.Binding) (device.Kernel, error) {
	k := &kernel{label: b.Op.Name}
	for _, p := range append(append([]device.Ptr(nil), b.In...), b.Out...) {
		if p.Arena != nil {
			k.touches = append(k.touches, p)
		}
	}
	var err error
	f32 := func(p device.Ptr) []float32 {
		v, e := cpu.Slice[float32](p)
		if e != nil {
			err = e
		}
		return v
	}
	f64 := func(p device.Ptr) []float64 {
		v, e := cpu.Slice[float64](p)
		if e != nil {
			err = e
		}
		return v
	}
	switch b.Op.Kind {
	case scaleBy:
		x, h, y := f32(b.In[0]), f64(b.In[1]), f32(b.Out[0])
		k.run = func() error {
			time.Sleep(l.slow)
			for i := range y {
				y[i] = x[i] * float32(h[0])
			}
			return nil
		}
	case sub:
		g, p := f32(b.In[0]), f32(b.Out[0])
		k.run = func() error {
			for i := range p {
				p[i] -= g[i]
			}
			return nil
		}
	case sum:
		x, y := f32(b.In[0]), f64(b.Out[0])
		k.run = func() error {
			for _, v := range x {
				y[0] += float64(v)
			}
			return nil
		}
	case zero:
		y, e := cpu.Bytes(b.Out[0])
		if e != nil {
			err = e
		}
		k.run = func() error { clear(y); return nil }
	case spy:
		k.run = func() error { return l.spy(b) }
	default:
		return nil, fmt.Errorf("no kernel for %s", b.Op.Kind)
	}
	return k, err
}

// builder builds a program. It places the buffers one after another with gaps, except those that
// share another buffer's bytes.
type builder struct {
	p      *graph.Program
	layout *memplan.Layout
	ends   [graph.NumSpaces]int64
}

func newBuilder(mesh ...graph.Axis) *builder {
	n := graph.NoBuf
	return &builder{layout: &memplan.Layout{}, p: &graph.Program{Mesh: mesh,
		Tokens: n, Targets: n, Positions: n, Hyper: n, Key: n, Loss: n, GradNorm: n, Logits: n}}
}

const gap = 64

// port adds a buffer in host memory with the given port.
func (b *builder) port(port graph.Port, name string, d graph.DType, n int64) {
	b.p.Buf(b.buf(name, d, n, graph.Host, graph.LifeRun)).Port = port
}

func (b *builder) buf(name string, d graph.DType, n int64, space graph.Space, life graph.Life) graph.BufID {
	id := b.p.AddBuffer(graph.Buffer{Name: name, DType: d, Shape: []int64{n}, Space: space, Life: life, Unit: -1})
	off := (b.ends[space] + gap + 63) / 64 * 64
	b.layout.Offset = append(b.layout.Offset, off)
	b.ends[space] = off + n*d.Size()
	b.layout.Spaces[space].Peak = b.ends[space]
	return id
}

// over adds a buffer at the same offset as another one.
func (b *builder) over(name string, d graph.DType, n int64, life graph.Life, other graph.BufID) graph.BufID {
	o := b.p.Buf(other)
	if n*d.Size() > o.Bytes() {
		panic("too large")
	}
	id := b.p.AddBuffer(graph.Buffer{Name: name, DType: d, Shape: []int64{n}, Space: o.Space, Life: life, Unit: -1})
	b.layout.Offset = append(b.layout.Offset, b.layout.Offset[other])
	return id
}

func (b *builder) view(name string, d graph.DType, n int64, v graph.View) graph.BufID {
	base := b.p.Buf(v.Base)
	id := b.p.AddBuffer(graph.Buffer{Name: name, DType: d, Shape: []int64{n}, Space: base.Space, Life: base.Life, Unit: -1, View: &v})
	b.layout.Offset = append(b.layout.Offset, -1)
	return id
}

func op(kind graph.Kind, name string, s graph.StreamID, in []graph.BufID, out ...graph.Out) graph.Op {
	return graph.Op{Kind: kind, Name: name, In: in, Out: out, Work: graph.NoBuf, Skip: graph.NoBuf, Stream: s, Unit: -1}
}

func ins(ids ...graph.BufID) []graph.BufID { return ids }

func wr(id graph.BufID) graph.Out  { return graph.Out{Buf: id, Mode: graph.Write} }
func acc(id graph.BufID) graph.Out { return graph.Out{Buf: id, Mode: graph.Accum} }
func rw(id graph.BufID) graph.Out  { return graph.Out{Buf: id, Mode: graph.ReadWrite} }

// with sets the events that an operation records and waits for.
func with(o graph.Op, record graph.EventID, wait ...graph.EventID) graph.Op {
	o.Wait, o.Record = wait, record
	return o
}

// grouped makes the group of a collective the world.
func grouped(o graph.Op) graph.Op {
	o.Attr = graph.GroupAttr{Axis: -1}
	return o
}

// zero3 is a small sharded program whose streams all overlap. Each micro-step gathers the
// parameters, scales them by the host's factor as "gradients", and sums these over the ranks into
// the accumulating shard. The update subtracts it from the parameter shard and copies the loss to
// the host.
//
//	micro (×2): copy-in hyper | gather p → full | g = full · factor, loss += Σ g | gs += Σ ranks g
//	update:     p −= gs; host p += ...; copy-out loss
type zero3 struct {
	*builder
	n                        int64 // elements of the full parameter
	shard, full, g, gs, side graph.BufID
}

func newZero3(w int, n int64) *zero3 {
	b := newBuilder(graph.Axis{Name: "data", Size: w})
	z := &zero3{builder: b, n: n * int64(w)}
	p := b.p
	b.port(graph.PortHyper, "host hyper", graph.F64, graph.NumHyper)
	p.Hyper = b.buf("hyper", graph.F64, graph.NumHyper, graph.Device, graph.LifeStep)
	p.Loss = b.buf("loss", graph.F64, 1, graph.Device, graph.LifeStep)
	b.port(graph.PortLoss, "host loss", graph.F64, 1)
	z.shard = b.buf("p", graph.F32, n, graph.Device, graph.LifeRun)
	z.gs = b.buf("gs", graph.F32, n, graph.Device, graph.LifeStep)
	z.full = b.buf("full", graph.F32, z.n, graph.Device, graph.LifePhase)
	z.g = b.buf("g", graph.F32, z.n, graph.Device, graph.LifePhase)
	z.side = b.over("side", graph.F32, n, graph.LifePhase, z.full) // the update's scratch, where full was
	b.port(graph.PortStaging, "staging", graph.U8, 48)
	hyperIn, hyperFree, gathered, fullFree, gReady, gFree, gsReady, lossReady, zeroed := p.NewEvent(), p.NewEvent(), p.NewEvent(), p.NewEvent(), p.NewEvent(), p.NewEvent(), p.NewEvent(), p.NewEvent(), p.NewEvent()
	p.Units = []graph.Unit{{Name: "h.0"}}
	p.Sections = []graph.Section{{Name: "step", Phases: []graph.Phase{
		{Name: "begin", Repeat: 1, Ops: []graph.Op{
			op(zero, "loss/zero", graph.Compute, nil, wr(p.Loss)),
			with(op(zero, "gs/zero", graph.Compute, nil, wr(z.gs)), zeroed),
		}},
		{Name: "micro", Repeat: 2, Ops: []graph.Op{
			with(op(graph.Copy, "hyper/in", graph.CopyIn, ins(p.Port(graph.PortHyper)), wr(p.Hyper)), hyperIn, hyperFree),
			with(grouped(op(graph.AllGather, "p/gather", graph.Comm, ins(z.shard), wr(z.full))), gathered, fullFree),
			with(op(scaleBy, "g", graph.Compute, ins(z.full, p.Hyper), wr(z.g)), fullFree, hyperIn, gathered, gFree),
			with(op(sum, "loss", graph.Compute, ins(z.g), acc(p.Loss)), gReady),
			with(op(graph.Copy, "hyper/done", graph.Compute, ins(p.Hyper), wr(b.over("scrap", graph.F64, graph.NumHyper, graph.LifePhase, z.full))), hyperFree),
			with(grouped(op(graph.ReduceScatter, "g/scatter", graph.Comm, ins(z.g), acc(z.gs))), gFree, gReady, zeroed),
		}},
		{Name: "update", Repeat: 1, Ops: []graph.Op{
			with(op(graph.Copy, "gs/side", graph.Comm, ins(z.gs), wr(z.side)), gsReady, hyperFree),
			with(op(sub, "p/update", graph.Compute, ins(z.side), rw(z.shard)), lossReady, gsReady),
			with(op(graph.Copy, "loss/out", graph.CopyOut, ins(p.Loss), wr(p.Port(graph.PortLoss))), 0, lossReady),
		}},
	}}}
	// "scrap" overwrites full's bytes once scaleBy is done with them: the gather
	// of the next repeat must come after it.
	micro := p.Sections[0].Phases[1].Ops
	micro[1].Wait = append(micro[1].Wait, hyperFree)
	// The gather of a step must read the values updated in the step before: sections end with a
	// sync.
	return z
}

// want computes a step on plain slices, from the complete parameters and each rank's factors by
// micro-step. It returns each rank's loss.
func (z *zero3) want(w int, params []float32, factors [][2]float64) []float64 {
	loss := make([]float64, w)
	gs := make([]float32, len(params))
	for micro := range 2 {
		g := make([][]float32, w)
		for r := range w {
			g[r] = make([]float32, len(params))
			for i, v := range params {
				g[r][i] = v * float32(factors[r][micro])
				loss[r] += float64(g[r][i])
			}
		}
		column := make([]float32, w)
		for i := range gs {
			for r := range w {
				column[r] = g[r][i]
			}
			gs[i] += treeSum(column)
		}
	}
	for i := range params {
		params[i] -= gs[i]
	}
	return loss
}

func treeSum(v []float32) float32 {
	if len(v) == 1 {
		return v[0]
	}
	p := 1
	for 2*p < len(v) {
		p *= 2
	}
	return treeSum(v[:p]) + treeSum(v[p:])
}

// ranks holds the executors of all ranks of a job on the CPU device.
type ranks struct {
	t     *testing.T
	world *inproc.World
	ex    []*exec.Executor
}

type jobOptions struct {
	timeout time.Duration
	wrap    func(rank int, c device.Context) device.Context
	lib     library
	trace   *exec.Trace
	meter   bool

	unchecked bool // no checker: it runs one kernel at a time, which blocks forever if a kernel hangs
}

func newRanks(t *testing.T, b *builder, o jobOptions) *ranks {
	if o.timeout == 0 {
		o.timeout = time.Minute
	}
	w, err := inproc.New(b.p.Mesh, inproc.Options{Timeout: o.timeout})
	require.NoError(t, err)
	checker := cpu.NewChecker()
	j := &ranks{t: t, world: w}
	for r := range w.Size() {
		opts := cpu.Options{Poison: true, Checker: checker}
		if o.unchecked {
			opts.Checker = nil
		}
		var c device.Context = cpu.New(r, opts)
		if o.wrap != nil {
			c = o.wrap(r, c)
		}
		groups, err := w.Groups(r)
		require.NoError(t, err)
		e, err := exec.New(exec.Config{Program: b.p, Layout: b.layout, Context: c, Library: o.lib, Groups: groups,
			Coord: comm.Coord(b.p.Mesh, r), Trace: o.trace, Meter: o.meter, Poison: true})
		require.NoError(t, err)
		j.ex = append(j.ex, e)
	}
	t.Cleanup(func() {
		j.each(func(r int, e *exec.Executor) error { return e.Close() })
	})
	return j
}

// each runs f on every rank at once and returns their errors.
func (j *ranks) each(f func(rank int, e *exec.Executor) error) []error {
	errs := make([]error, len(j.ex))
	var wg sync.WaitGroup
	for r, e := range j.ex {
		wg.Go(func() { errs[r] = f(r, e) })
	}
	wg.Wait()
	return errs
}

func (j *ranks) all(f func(rank int, e *exec.Executor) error) {
	j.t.Helper()
	for r, err := range j.each(f) {
		require.NoError(j.t, err, "rank %d", r)
	}
}
