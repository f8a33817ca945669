// Command estimate estimates the time of a training step on one GPU, kernel by kernel, from the
// step's program and the kernels' machine code. It needs no GPU, and nothing that it prints was
// measured on one: README.md is its output.
//
//	go run ./benchmarks/cuda/estimate
package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"unsafe"

	"github.com/spillway-ml/spillway/device"
	devcuda "github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/sass"
	"github.com/spillway-ml/spillway/kernels"
	kernelscpu "github.com/spillway-ml/spillway/kernels/cpu"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	kernelscuda "github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/zero"
)

// cases are the steps of the page.
var cases = []struct {
	name                                         string
	layers, heads, width, vocab, positions, rows int
	precision                                    string
}{
	{"GPT-2 124M, 16 × 1,024 tokens, bf16", 12, 12, 768, 50257, 1024, 16, "bf16"},
	{"GPT-2 124M, 4 × 1,024 tokens, fp32", 12, 12, 768, 50257, 1024, 4, "fp32"},
	{"GPT-2 1.5B (1,600 wide, 48 layers), 16 × 1,024 tokens, bf16", 48, 25, 1600, 50257, 1024, 16, "bf16"},
	{"1.5B of 2,048 wide, 28 layers, 16 × 1,024 tokens, bf16", 28, 16, 2048, 50257, 1024, 16, "bf16"},
}

func build(layers, heads, width, vocab, positions, rows int, prec string) (*plan.Plan, error) {
	p, err := precision.Parse(prec)
	if err != nil {
		return nil, err
	}
	f, err := model.Build(model.Config{Family: model.GPT2, Layers: layers, Width: width, Heads: heads, Vocab: vocab, Positions: positions, TiedHead: true},
		model.Train, rows, positions)
	if err != nil {
		return nil, err
	}
	return plan.Build(plan.Forward{Train: f}, plan.Config{Ranks: 1, Accum: 1, Clip: 1, Target: graph.CUDATarget(), Precision: p,
		Optimizer: zero.Optimizer{Name: "adamw", Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1}})
}

// paper is a driver that runs nothing: it names functions and records launches.
type paper struct {
	driver.API
	modules   []string // sources
	functions []function
	launched  []launch // since the list was last emptied
	pages     [][]byte // of host memory
}

func (p *paper) LoadModule(image []byte) (driver.Module, error) {
	p.modules = append(p.modules, string(image))
	return driver.Module(len(p.modules)), nil
}
func (p *paper) UnloadModule(driver.Module) error { return nil }

// function is a kernel of a source.
type function struct{ source, name string }

// launch is a launch of a kernel, with its grid and its packed parameters.
type launch struct {
	function
	grid   driver.Dim
	params []byte
	moved  float64 // bytes, for a function of the driver
}

func (p *paper) Function(m driver.Module, name string) (driver.Function, error) {
	p.functions = append(p.functions, function{p.modules[m-1], name})
	return driver.Function(len(p.functions)), nil
}
func (p *paper) AllowShared(driver.Function, int) error { return nil }

func (p *paper) HostAlloc(bytes int64) (unsafe.Pointer, driver.Address, error) {
	page := make([]byte, bytes)
	p.pages = append(p.pages, page)
	at := unsafe.Pointer(unsafe.SliceData(page))
	return at, driver.Address(uintptr(at)), nil
}
func (p *paper) HostFree(unsafe.Pointer) error { return nil }

func (p *paper) Launch(f driver.Function, grid, _ driver.Dim, _ int, _ driver.Stream, params unsafe.Pointer, size uintptr) error {
	p.launched = append(p.launched, launch{p.functions[f-1], grid, bytes.Clone(unsafe.Slice((*byte)(params), size)), 0})
	return nil
}
func (p *paper) Fill32(_ driver.Address, _ uint32, n int64, _ driver.Stream) error {
	return p.move(4 * n)
}
func (p *paper) Fill8(_ driver.Address, _ byte, n int64, _ driver.Stream) error { return p.move(n) }
func (p *paper) CopyOnDevice(_, _ driver.Address, n int64, _ driver.Stream) error {
	return p.move(2 * n)
}

func (p *paper) move(bytes int64) error {
	p.launched = append(p.launched, launch{function: driversOwn, moved: float64(bytes)})
	return nil
}

var driversOwn = function{name: "(driver)"}

// Compile returns the source's name in place of code.
func (p *paper) Compile(name, _ string, _ driver.Device) ([]byte, error) { return []byte(name), nil }

// products records the products that are enqueued.
type products struct{ enqueued []blas.Product }

func (l *products) Bind(p blas.Product, at blas.Places) (blas.Call, error) {
	return &product{l, p}, p.Validate(at)
}
func (l *products) Close() error { return nil }

type product struct {
	l *products
	p blas.Product
}

func (c *product) Enqueue(driver.Stream) error {
	c.l.enqueued = append(c.l.enqueued, c.p)
	return nil
}

// unbacked is a rank's memory that has addresses only.
type unbacked struct {
	space graph.Space
	size  int64
}

func (u *unbacked) Space() graph.Space      { return u.space }
func (u *unbacked) Size() int64             { return u.size }
func (u *unbacked) Touched() int64          { return 0 }
func (u *unbacked) Address() driver.Address { return driver.Address(1+u.space) << 44 }

// row has the operations of a step that launch the same kernels.
type row struct {
	kind, kernels string
	times         int
	flops, bytes  float64
	roof, seconds float64
	took          map[string]float64 // seconds by the resource that bounds them
	mix           sass.Code
}

// bound returns the resource that bounds most of the time.
func (r *row) bound() string {
	return slices.MaxFunc(slices.Sorted(maps.Keys(r.took)), func(a, b string) int { return cmp.Compare(r.took[a], r.took[b]) })
}

// estimator adds up the estimated times of a program's operations on a GPU, by kind of operation.
type estimator struct {
	plan  *plan.Plan
	api   *paper
	lib   *kernelscuda.Library
	mats  *products
	codes map[function]sass.Code
	rates *rates
	rows  map[string]*row
	made  map[blas.Product]int // number of products by shape
	space [graph.NumSpaces]*unbacked
}

func (e *estimator) place(id graph.BufID) (p device.Ptr) {
	if id != graph.NoBuf {
		root, off := e.plan.Program.Resolve(id, nil)
		p.Arena, p.Off, p.Len = e.space[e.plan.Program.Buf(root).Space], e.plan.Layout.Offset[root]+off, e.plan.Program.Buf(id).Bytes()
	}
	return p
}

// transfers are kinds that launch no kernel on a single rank.
var transfers = []graph.Kind{graph.Join, graph.Copy, graph.AllGather, graph.ReduceScatter, graph.AllReduce, graph.AllToAll}

// phase adds a phase's operations. Two operations that the GPU's library joins are added as one.
func (e *estimator) phase(ops []graph.Op) error {
	joined, second := make([]bool, len(ops)), map[int]int{}
	var wrong error
	graph.Pairs(ops, graph.Compute, func(i, j int) bool {
		k, err := e.lib.Join(e.binding(&ops[i]), e.binding(&ops[j]))
		if err != nil {
			wrong = err
		}
		if k == nil || err != nil {
			return false
		}
		joined[i], second[j] = true, i
		return true
	})
	for k := range ops {
		if wrong != nil {
			return wrong
		}
		switch i, ok := second[k]; {
		case joined[k]: // added with the operation after it
		case ok:
			wrong = e.both(&ops[i], &ops[k])
		default:
			wrong = e.add(&ops[k])
		}
	}
	return wrong
}

func (e *estimator) binding(op *graph.Op) kernels.Binding {
	b := kernels.Binding{Program: e.plan.Program, Op: op, Work: e.place(op.Work), Skip: e.place(op.Skip), Coord: make([]int, len(e.plan.Program.Mesh))}
	for _, id := range op.In {
		b.In = append(b.In, e.place(id))
	}
	for _, out := range op.Out {
		b.Out = append(b.Out, e.place(out.Buf))
	}
	return b
}

func (e *estimator) add(op *graph.Op) error {
	if slices.Contains(transfers, op.Kind) {
		return nil
	}
	k, err := e.lib.Bind(e.binding(op))
	gpu, ok := k.(devcuda.Kernel)
	if err != nil || !ok { // the host runs it
		return err
	}
	flops, _ := graph.Cost(e.plan.Program, op)
	return e.enqueue(gpu, string(op.Kind), float64(flops))
}

// both adds two operations that run as one kernel.
func (e *estimator) both(first, second *graph.Op) error {
	k, err := e.lib.Join(e.binding(first), e.binding(second))
	if err != nil {
		return err
	}
	flops, _ := graph.Cost(e.plan.Program, first)
	f, _ := graph.Cost(e.plan.Program, second)
	return e.enqueue(k.(devcuda.Kernel), string(first.Kind)+", "+string(second.Kind), float64(flops+f))
}

// enqueue records a kernel's launches and adds their predicted time, flops and bytes to the estimate.
func (e *estimator) enqueue(k devcuda.Kernel, kind string, flops float64) error {
	e.api.launched, e.mats.enqueued = e.api.launched[:0], e.mats.enqueued[:0]
	if err := k.Enqueue(e.api, 0); err != nil {
		return err
	}
	return e.note(kind, flops)
}

// note adds the operation with the last recorded launches, which run one after the other.
func (e *estimator) note(kind string, flops float64) error {
	var names []string
	var mix sass.Code
	for _, f := range e.api.launched {
		names = append(names, f.name)
		if f.function == driversOwn {
			continue
		}
		c, ok := e.codes[f.function]
		if !ok {
			return fmt.Errorf("%s: the table of machine code has no kernel %s of %s", kind, f.name, f.source)
		}
		sum(&mix, c)
	}
	launches := len(names) + len(e.mats.enqueued)
	slices.Sort(names)
	names = slices.Compact(names)
	if len(e.mats.enqueued) > 0 {
		names = append(names, "cuBLASLt")
	}
	label := strings.Join(names, ", ")
	r := e.rows[kind+label]
	if r == nil {
		r = &row{kind: kind, kernels: label}
		e.rows[kind+label] = r
	}
	took := map[string]float64{"launches": float64(launches) * e.rates.of["launch"]}
	rest, moved := flops, 0.0
	for _, p := range e.mats.enqueued {
		moved += productBytes(p)
		rest -= 2 * float64(p.M) * float64(p.N) * float64(p.K)
		took["products"] += e.rates.product(p)
		e.made[p]++
	}
	for i := range e.api.launched {
		l := &e.api.launched[i]
		n, err := l.bytes()
		if err != nil {
			return fmt.Errorf("%s: %w", kind, err)
		}
		moved += n
		memory, compute := n/e.rates.of["memory"], e.instructions(e.codes[l.function], mix, max(rest, 0))
		if compute > memory {
			took["instructions"] += compute
		} else {
			took["memory"] += memory
		}
	}
	arithmetic := flops / e.rates.of["scalar"]
	if e.onTensors(mix) {
		arithmetic = flops / e.rates.of["tensor"]
	}
	r.times++
	r.flops, r.bytes, r.mix = r.flops+flops, r.bytes+moved, mix
	r.roof += max(moved/e.rates.of["memory"], arithmetic)
	for what, s := range took {
		r.seconds += s
		if r.took == nil {
			r.took = map[string]float64{}
		}
		r.took[what] += s
	}
	return nil
}

// instructions returns the time in which a kernel issues instructions for its part of an
// operation's arithmetic. If a kernel of the operation uses tensor cores, their arithmetic counts.
// Otherwise each kernel has a share by its number of fp32 instructions.
func (e *estimator) instructions(c, all sass.Code, flops float64) float64 {
	switch {
	case all.Tensor > 0 && c.Tensor > 0:
		issue := e.rates.of["issue"]
		cycles := max(issue/e.rates.of["mma"], float64(c.Total)/float64(c.Tensor))
		return flops * float64(c.Tensor) / float64(all.Tensor) / e.rates.of["tensor"] * cycles / issue
	case all.Tensor == 0 && c.Float > 0:
		return flops * float64(c.Float) / float64(all.Float) / (e.rates.of["scalar"] * float64(c.Float) / float64(c.Total))
	}
	return 0
}

func (e *estimator) onTensors(mix sass.Code) bool {
	for _, p := range e.mats.enqueued {
		return p.A.Type != graph.F32
	}
	return mix.Tensor > 0
}

// sum adds a launch's instruction counts to an operation's.
func sum(to *sass.Code, c sass.Code) {
	to.Total += c.Total
	to.Load16, to.Load8, to.Load4 = to.Load16+c.Load16+c.Async, to.Load8+c.Load8, to.Load4+c.Load4
	to.Store16, to.Store8, to.Store4 = to.Store16+c.Store16, to.Store8+c.Store8, to.Store4+c.Store4
	to.Tensor, to.Float = to.Tensor+c.Tensor, to.Float+c.Float
}

// step estimates a program's step.
func step(p *plan.Plan, codes map[function]sass.Code, rates *rates) (*estimator, error) {
	workers := pool.New(1)
	defer workers.Close()
	e := &estimator{plan: p, api: &paper{}, mats: &products{}, codes: codes, rates: rates, rows: map[string]*row{}, made: map[blas.Product]int{}}
	for s := range e.space {
		e.space[s] = &unbacked{graph.Space(s), p.Layout.Spaces[s].Peak}
	}
	var err error
	e.lib, err = kernelscuda.New(kernelscuda.Options{API: e.api, Compiler: e.api, Products: e.mats, Host: kernelscpu.New(workers),
		Device: driver.Device{Name: "H200", Major: 9, SMs: int(rates.of["processors"]), SharedOptin: 227 << 10, Memory: 141 << 30}})
	if err != nil {
		return nil, err
	}
	for i := range p.Program.Sections {
		if p.Program.Sections[i].Kind != graph.SectionStep {
			continue // of the start, or between steps
		}
		for j := range p.Program.Sections[i].Phases {
			if err := e.phase(p.Program.Sections[i].Phases[j].Ops); err != nil {
				return nil, errors.Join(err, e.lib.Close())
			}
		}
	}
	return e, e.lib.Close()
}

// recorded returns the recorded machine code of an architecture's kernels by name.
func recorded(arch string) (map[function]sass.Code, error) {
	t, err := sass.Recorded()
	if err != nil {
		return nil, err
	}
	codes := map[function]sass.Code{}
	for _, r := range t.Rows {
		if r.Arch == arch {
			codes[function{r.Source, r.Kernel}] = r.Code
		}
	}
	return codes, nil
}

func thousands(x float64) string {
	s := fmt.Sprintf("%.0f", x)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "estimate:", err)
		os.Exit(1)
	}
}
