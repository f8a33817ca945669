package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/spillway-ml/spillway/device"
	devcuda "github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	kernelscuda "github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/zero"
)

// microRow is the time of an operation at a shape, or of a product's algorithms.
type microRow struct {
	Shape     string    `json:"shape"`
	Precision string    `json:"precision"`
	Op        string    `json:"op"` // kind and shapes
	Micros    float64   `json:"us,omitempty"`
	GBs       float64   `json:"gb_per_s,omitempty"`      // of operands
	TFs       float64   `json:"tflop_per_s,omitempty"`   // of the arithmetic
	Copy      float64   `json:"of_copy,omitempty"`       // share of the measured copy's rate
	Matrix    float64   `json:"of_matrix,omitempty"`     // share of the measured square product's
	Each      []float64 `json:"algorithms_us,omitempty"` // of a product, in the library's order
	// Apart is the time of the two operations that a fused one replaces. ByKernels says that
	// kernels run after the product, because the library has no algorithm for it.
	Apart     float64 `json:"apart_us,omitempty"`
	ByKernels bool    `json:"by_kernels,omitempty"`
	Error     string  `json:"error,omitempty"`
}

// microShapes are models of two layers, whose operations have the shapes of the complete models.
var microShapes = map[string]struct {
	heads, width, vocab, positions int
	batch                          int
	layers                         int // of the whole
}{
	"124m": {12, 768, 50257, 1024, 16, 12},
	"1.5b": {25, 1600, 50257, 1024, 16, 48},
	"tiny": {2, 16, 61, 8, 1, 4},
}

func microPlan(shape, prec string, layers int, epilogues graph.Epilogues) (*plan.Plan, error) {
	s, ok := microShapes[shape]
	if !ok {
		return nil, fmt.Errorf("shape %q, want 124m, 1.5b or tiny", shape)
	}
	p, err := precision.Parse(prec)
	if err != nil {
		return nil, err
	}
	f, err := model.Build(model.Config{Family: model.GPT2, Layers: layers, Width: s.width, Heads: s.heads, Vocab: s.vocab, Positions: s.positions, TiedHead: true},
		model.Train, s.batch, s.positions)
	if err != nil {
		return nil, err
	}
	return plan.Build(plan.Forward{Train: f}, plan.Config{Ranks: 1, Accum: 1, Clip: 1, Target: graph.CUDATarget(), Precision: p, Epilogues: epilogues,
		Optimizer: zero.Optimizer{Name: "adamw", Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1}})
}

// micros times the operations of a plan, one at a time.
type micros struct {
	contacts
	shape, precision string
	plan             *plan.Plan
	lib              *kernelscuda.Library
	products         *heard
	arenas           [graph.NumSpaces]*memory
	copyRate, matrix float64 // bytes/s; FLOP/s of a square product of the precision's type
	row              func(microRow)
}

// heard is a library that records which products were bound.
type heard struct {
	blas.Library
	list   []bound
	told   map[blas.Product]bool // products that were in a list
	joined int                   // with something in the epilogue
}

type bound struct {
	p  blas.Product
	at blas.Places
}

func (h *heard) Bind(p blas.Product, at blas.Places) (blas.Call, error) {
	c, err := h.Library.Bind(p, at)
	if err != nil {
		return c, err
	}
	if p.GELU || p.DGELU || p.Sums != blas.NoSums {
		h.joined++
	}
	if !h.told[p] {
		h.told[p] = true
		h.list = append(h.list, bound{p, at})
	}
	return c, err
}

// memory is a rank's in a space.
type memory struct {
	space graph.Space
	size  int64
	at    driver.Address
	host  unsafe.Pointer // nil: on the device
}

func (m *memory) Space() graph.Space      { return m.space }
func (m *memory) Size() int64             { return m.size }
func (m *memory) Touched() int64          { return 0 }
func (m *memory) Address() driver.Address { return m.at }

// allocate makes the arenas. It fills the device's with random bits that are finite in fp32 and in
// 16 bits, and with tokens and targets of the vocabulary. Other integers are 0.
func (m *micros) allocate() error {
	var err error
	for s := range graph.NumSpaces {
		a := &memory{space: s, size: m.plan.Layout.Spaces[s].Peak}
		m.arenas[s] = a
		if a.size == 0 {
			continue
		}
		if s != graph.Device {
			if a.host, a.at, err = m.api.HostAlloc(a.size); err != nil {
				return err
			}
			clear(unsafe.Slice((*byte)(a.host), a.size))
			continue
		}
		if a.at, err = m.api.Alloc(a.size); err != nil {
			return err
		}
		err = m.randomize(a.at, a.size)
	}
	prog := m.plan.Program
	for id := range prog.Buffers {
		b := prog.Buf(graph.BufID(id))
		if root, off := prog.Resolve(graph.BufID(id), nil); err == nil && b.Space == graph.Device && (b.DType == graph.I32 || b.DType == graph.I64) && m.plan.Layout.Offset[root] >= 0 {
			err = m.api.Fill8(m.arenas[graph.Device].at+driver.Address(m.plan.Layout.Offset[root]+off), 0, b.Bytes(), m.stream)
		}
	}
	for _, id := range []graph.BufID{prog.Tokens, prog.Targets} {
		if err == nil && prog.Buf(id).Space == graph.Device {
			err = m.randomTokens(id)
		}
	}
	return errors.Join(err, m.api.Synchronize(m.stream))
}

// randomTokens fills a buffer with random tokens. With equal tokens, the sums of a table's row
// would be one long chain.
func (m *micros) randomTokens(id graph.BufID) error {
	size := m.plan.Program.Buf(id).Bytes()
	p, _, err := m.api.HostAlloc(size)
	if err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(2, 2))
	tokens := unsafe.Slice((*int32)(p), size/4)
	for i := range tokens {
		tokens[i] = int32(rng.IntN(microShapes[m.shape].vocab))
	}
	root, off := m.plan.Program.Resolve(id, nil)
	err = m.api.CopyToDevice(m.arenas[graph.Device].at+driver.Address(m.plan.Layout.Offset[root]+off), p, size, m.stream)
	return errors.Join(err, m.api.Synchronize(m.stream), m.api.HostFree(p))
}

func (m *micros) free() error {
	var errs []error
	for i, a := range m.arenas {
		m.arenas[i] = nil
		switch {
		case a == nil || a.at == 0:
		case a.host != nil:
			errs = append(errs, m.api.HostFree(a.host))
		default:
			errs = append(errs, m.api.Free(a.at))
		}
	}
	return errors.Join(errs...)
}

// place returns the place of a buffer in the plan.
func (m *micros) place(id graph.BufID) (p device.Ptr) {
	if id != graph.NoBuf {
		root, off := m.plan.Program.Resolve(id, nil)
		p.Arena, p.Off, p.Len = m.arenas[m.plan.Program.Buf(root).Space], m.plan.Layout.Offset[root]+off, m.plan.Program.Buf(id).Bytes()
	}
	return p
}

// describe names an operation by the properties that determine its time.
func (m *micros) describe(op *graph.Op) string {
	var b strings.Builder
	b.WriteString(string(op.Kind))
	say := func(id graph.BufID) {
		if id != graph.NoBuf {
			buf := m.plan.Program.Buf(id)
			fmt.Fprintf(&b, " %v%v", buf.DType, buf.Shape)
		}
	}
	for _, id := range op.In {
		say(id)
	}
	b.WriteString(" to")
	for _, o := range op.Out {
		say(o.Buf)
	}
	return b.String()
}

// peaks measures the rates to which others are compared.
func (m *micros) peaks() error {
	n, t := m.edge, graph.F32
	switch m.precision {
	case "bf16":
		t = graph.BF16
	case "fp16":
		t = graph.F16
	}
	at, err := m.api.Alloc(12*n*n + squareWork)
	if err != nil {
		return err
	}
	defer func() { _ = m.api.Free(at) }() // what was measured matters more
	half := 6 * n * n
	d, err := m.timed(func() error { return m.api.CopyOnDevice(at, at+driver.Address(half), half, m.stream) })
	if err != nil {
		return err
	}
	m.copyRate = 2 * float64(half) / max(d.Seconds(), 1e-9)
	ld, next := blas.Matrix{Type: t, Ld: n}, driver.Address(4*n*n)
	call, err := m.products.Library.Bind(blas.Product{M: n, N: n, K: n, A: ld, B: ld, C: ld, Workspace: squareWork}, blas.Places{A: at, B: at + next, C: at + 2*next, Work: at + 3*next})
	if err == nil {
		err = m.randomize(at, 12*n*n)
	}
	if err != nil {
		return err
	}
	if d, err = m.steady(func() error { return call.Enqueue(m.stream) }); err == nil {
		m.matrix = 2 * float64(n) * float64(n) * float64(n) / max(d.Seconds(), 1e-9)
	}
	return err
}

// run times every distinct GPU operation of the program once.
func (m *micros) run() error {
	if err := m.peaks(); err != nil {
		return fmt.Errorf("measure the peaks: %w", err)
	}
	err := m.allocate()
	if err == nil {
		seen := map[string]bool{}
		prog := m.plan.Program
		for i := range prog.Sections {
			for j := range prog.Sections[i].Phases {
				for k := range prog.Sections[i].Phases[j].Ops {
					op := &prog.Sections[i].Phases[j].Ops[k]
					if what := m.describe(op); !seen[what] && !transfers(op.Kind) {
						seen[what] = true
						m.operation(op, what)
					}
				}
				m.pairs(prog.Sections[i].Phases[j].Ops, seen)
			}
		}
		m.algorithms()
	}
	return errors.Join(err, m.free())
}

func transfers(k graph.Kind) bool {
	return slices.Contains([]graph.Kind{graph.Join, graph.Copy, graph.AllGather, graph.ReduceScatter, graph.AllReduce, graph.AllToAll}, k)
}

// inARow is the number of launches timed together, because one is too short for an event.
const inARow = 10

func (m *micros) operation(op *graph.Op, what string) {
	k, err := m.lib.Bind(m.binding(op))
	flops, moved := graph.Cost(m.plan.Program, op)
	m.kernel(what, k, err, float64(flops), float64(moved))
}

// pairs times pairs of operations that the library runs as one, each distinct pair once.
func (m *micros) pairs(ops []graph.Op, seen map[string]bool) {
	graph.Pairs(ops, graph.Compute, func(i, j int) bool {
		k, err := m.lib.Join(m.binding(&ops[i]), m.binding(&ops[j]))
		if k == nil && err == nil {
			return false
		}
		if what := m.describe(&ops[i]) + ", " + m.describe(&ops[j]); !seen[what] {
			seen[what] = true
			flops, moved := graph.Cost(m.plan.Program, &ops[i])
			f, b := graph.Cost(m.plan.Program, &ops[j])
			between := m.plan.Program.Buf(ops[j].In[0]).Bytes() // is not read
			m.kernel(what, k, err, float64(flops+f), float64(moved+b-between))
		}
		return true
	})
}

func (m *micros) binding(op *graph.Op) kernels.Binding {
	b := kernels.Binding{Program: m.plan.Program, Op: op, Work: m.place(op.Work), Skip: m.place(op.Skip), Coord: make([]int, len(m.plan.Program.Mesh))}
	for _, id := range op.In {
		b.In = append(b.In, m.place(id))
	}
	for _, out := range op.Out {
		b.Out = append(b.Out, m.place(out.Buf))
	}
	return b
}

// kernel times a bound kernel and records the result, or the error of binding it.
func (m *micros) kernel(what string, k device.Kernel, err error, flops, moved float64) {
	r := microRow{Shape: m.shape, Precision: m.precision, Op: what}
	gpu, ok := k.(devcuda.Kernel)
	if err == nil && !ok {
		return // on the host
	}
	var seconds float64
	if err == nil {
		seconds, err = m.inARow(gpu)
	}
	if err != nil {
		r.Error = err.Error()
		m.row(r)
		return
	}
	r.Micros, r.GBs, r.TFs = seconds*1e6, moved/seconds/1e9, flops/seconds/1e12
	r.Copy, r.Matrix = r.GBs*1e9/m.copyRate, r.TFs*1e12/m.matrix
	m.row(r)
}

// algorithms times all of the library's algorithms for each product that was bound.
func (m *micros) algorithms() {
	lib, ok := m.products.Library.(interface {
		Candidates(p blas.Product, at blas.Places) ([]blas.Call, error)
	})
	if !ok {
		return // a double has one for each
	}
	for _, b := range m.products.list {
		r := microRow{Shape: m.shape, Precision: m.precision, Op: b.p.String()}
		calls, err := lib.Candidates(b.p, b.at)
		for _, c := range calls {
			d, e := m.timed(func() error { return c.Enqueue(m.stream) })
			err = errors.Join(err, e)
			r.Each = append(r.Each, micro(d))
		}
		if err != nil {
			r.Error = err.Error()
		}
		m.row(r)
	}
}

// microChild runs in the child process, for one shape and precision.
func microChild(out io.Writer, c contacts, host kernels.Library, shape, prec string) error {
	lines := json.NewEncoder(out)
	all, err := microPlan(shape, prec, 2, graph.NoEpilogues|graph.CUDATarget().CUDA.Epilogues)
	if err != nil {
		return err
	}
	return withMicros(c, host, shape, prec, func(m *micros) error {
		m.row = func(r microRow) { _ = lines.Encode(r) } // a closed pipe has no reader
		if err := m.run(); err != nil {
			return err
		}
		m.plan = all
		return m.beside()
	})
}

// withMicros calls use with the kernels of a plan of two layers, on the first GPU.
func withMicros(c contacts, host kernels.Library, shape, prec string, use func(*micros) error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p, err := microPlan(shape, prec, 2, 0)
	if err != nil {
		return err
	}
	ctx, err := c.api.Retain(0)
	if err != nil {
		return err
	}
	defer func() { _ = c.api.Release(0) }() // the process ends
	if err := c.api.SetCurrent(ctx); err != nil {
		return err
	}
	devices, err := c.api.Devices()
	if err != nil {
		return err
	}
	if c.stream, err = c.api.NewStream(); err != nil {
		return err
	}
	compiler, err := c.compiler()
	if err != nil {
		return err
	}
	products, err := c.products()
	if err != nil {
		return err
	}
	m := &micros{contacts: c, shape: shape, precision: prec, plan: p, products: &heard{Library: products, told: map[blas.Product]bool{}}}
	if m.lib, err = kernelscuda.New(kernelscuda.Options{API: c.api, Device: devices[0], Compiler: compiler, Products: m.products, Host: host}); err != nil {
		return err
	}
	return errors.Join(use(m), m.lib.Close(), products.Close(), c.api.DestroyStream(c.stream))
}

// runMicro times the kernels at both models' shapes, with one process for each model and precision.
func runMicro(ctx context.Context, b *bundle, r *result) {
	if b.gpu == nil {
		r.skip("on the CPU there are no kernels of a GPU")
		return
	}
	var rows []microRow
	for _, shape := range []string{"124m", "1.5b"} {
		for _, prec := range []string{"bf16", "fp32"} {
			o := b.within(ctx, 30*time.Second, "kernels-"+shape+"-"+prec, b.work, nil, b.self, "-child", "kernels", "-shape", shape, "-precision", prec)
			for line := range bytes.Lines(o.out) {
				var row microRow
				if json.Unmarshal(line, &row) == nil && row.Op != "" {
					rows = append(rows, row)
				}
			}
			if o.status != 0 {
				r.fail("%s in %s %s", shape, prec, o.ended())
			}
		}
	}
	r.Data, r.Table = rows, microTable(rows)
	for _, row := range rows {
		if row.Error != "" {
			r.fail("%s, %s, %s: %s", row.Shape, row.Precision, row.Op, shorten(row.Error, 200))
		}
	}
}

// mostRows is the number of operations on a page; results.json has all.
const mostRows = 40

// microTable returns the slowest operations, the products whose first algorithm is not the fastest,
// and the time that epilogues save.
func microTable(rows []microRow) [][]string {
	table := [][]string{{"model", "precision", "operation", "µs", "GB/s", "of the copy", "TFLOP/s", "of the square product"}}
	var times, products []microRow
	for _, r := range rows {
		switch {
		case r.Error != "":
		case r.Apart > 0: // see besideTable
		case len(r.Each) > 0:
			products = append(products, r)
		default:
			times = append(times, r)
		}
	}
	slices.SortStableFunc(times, func(a, b microRow) int { return cmp.Compare(b.Micros, a.Micros) })
	for _, r := range times[:min(len(times), mostRows)] {
		table = append(table, []string{r.Shape, r.Precision, r.Op, fmt.Sprintf("%.1f", r.Micros), fmt.Sprintf("%.0f", r.GBs), percent(r.Copy), fmt.Sprintf("%.1f", r.TFs), percent(r.Matrix)})
	}
	for _, r := range products {
		if best := slices.Min(r.Each); best < 0.97*r.Each[0] {
			table = append(table, []string{r.Shape, r.Precision, fmt.Sprintf("%s: algorithm %d of %d is faster than the first", r.Op, slices.Index(r.Each, best)+1, len(r.Each)), fmt.Sprintf("%.1f, not %.1f", best, r.Each[0]), "", "", "", ""})
		}
	}
	return append(table, besideTable(rows)...)
}

func percent(share float64) string { return fmt.Sprintf("%.0f %%", 100*share) }
