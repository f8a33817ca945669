// Command estimate says what a training step on one GPU would take, kernel by kernel, by
// the step's own program and the kernels' machine code. It needs no GPU, and nothing that
// it prints was measured on one: README.md is its output.
//
//	go run ./benchmarks/cuda/estimate
package main

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
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

// card is what is assumed of the GPU: an H200.
var card = struct {
	copyRate, matrix, scalar, clock float64
	multiprocessors                 int
}{
	copyRate: 4.3e12, // bytes/s of a copy, read and written, as seen through PyTorch
	matrix:   788e12, // FLOP/s of a product of 8,192 in bf16, random data, as seen through PyTorch
	scalar:   67e12,  // FLOP/s in fp32, the datasheet's
	clock:    1.755e9, multiprocessors: 132,
}

// Assumptions, each a share of a rate above.
const (
	// Of the copy's: a kernel that has accesses of 16 bytes, of 8 at most, of less.
	wide, middle, narrow = 0.9, 0.7, 0.45
	library              = 0.9  // of the square product's: cuBLASLt's, where its tiles fill the card
	libraryF32           = 0.78 // of the datasheet's
	tileRows             = 128  // of cuBLASLt's tiles, which whole waves of multiprocessors compute
	tileCols             = 256

	// Cycles that an mma.sync of 16×8×16 keeps a tensor core: 4 at the peak, which that
	// instruction does not reach on Hopper. Meanwhile its scheduler starts one instruction
	// a cycle.
	mmaPeak, mmaSync = 4, 6.5

	launchSeconds = 2e-6 // between two launches of a stream
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

// paper is a driver that runs nothing: it gives functions names and hears launches.
type paper struct {
	driver.API
	modules   []string // sources
	functions []function
	launched  []launch // since it was emptied
	pages     [][]byte // of host memory
}

func (p *paper) LoadModule(image []byte) (driver.Module, error) {
	p.modules = append(p.modules, string(image))
	return driver.Module(len(p.modules)), nil
}
func (p *paper) UnloadModule(driver.Module) error { return nil }

// function is a kernel of a source.
type function struct{ source, name string }

// launch is a kernel's, with the rows of its grid and its packed parameters.
type launch struct {
	function
	blocks int64
	params []byte
}

// number is a parameter of 8 bytes.
func (l *launch) number(at int) float64 {
	return float64(int64(binary.LittleEndian.Uint64(l.params[at:])))
}

func (p *paper) Function(m driver.Module, name string) (driver.Function, error) {
	p.functions = append(p.functions, function{p.modules[m-1], name})
	return driver.Function(len(p.functions)), nil
}
func (p *paper) FunctionInfo(driver.Function) (driver.FunctionInfo, error) {
	return driver.FunctionInfo{MaxThreads: 1024}, nil
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
	p.launched = append(p.launched, launch{p.functions[f-1], int64(grid.X), bytes.Clone(unsafe.Slice((*byte)(params), size))})
	return nil
}
func (p *paper) Fill32(driver.Address, uint32, int64, driver.Stream) error { return p.fill() }
func (p *paper) Fill8(driver.Address, byte, int64, driver.Stream) error    { return p.fill() }
func (p *paper) CopyOnDevice(_, _ driver.Address, _ int64, _ driver.Stream) error {
	return p.fill()
}

func (p *paper) fill() error {
	p.launched = append(p.launched, launch{function: driversOwn})
	return nil
}

var driversOwn = function{name: "(driver)"}

// Compile "compiles" to the source's name.
func (p *paper) Compile(name, _ string, _ driver.Device) ([]byte, error) { return []byte(name), nil }

// products hears of products.
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

// unbacked is memory of a rank that is addressed only.
type unbacked struct {
	space graph.Space
	size  int64
}

func (u *unbacked) Space() graph.Space      { return u.space }
func (u *unbacked) Size() int64             { return u.size }
func (u *unbacked) Touched() int64          { return 0 }
func (u *unbacked) Address() driver.Address { return driver.Address(1+u.space) << 44 }

// row is the operations of a step that launch the same kernels.
type row struct {
	kind, kernels string
	times         int
	flops, bytes  float64
	roof, seconds float64
	bound         string // of the longest of them
	mix           sass.Code
	longest       float64
}

// estimator adds the operations of a program up.
type estimator struct {
	plan  *plan.Plan
	api   *paper
	lib   *kernelscuda.Library
	mats  *products
	codes map[function]sass.Code
	rows  map[string]*row
	space [graph.NumSpaces]*unbacked
}

func (e *estimator) place(id graph.BufID) (p device.Ptr) {
	if id != graph.NoBuf {
		root, off := e.plan.Program.Resolve(id, nil)
		p.Arena, p.Off, p.Len = e.space[e.plan.Program.Buf(root).Space], e.plan.Layout.Offset[root]+off, e.plan.Program.Buf(id).Bytes()
	}
	return p
}

// transfers have no kernel of one rank's.
var transfers = []graph.Kind{graph.Join, graph.Copy, graph.AllGather, graph.ReduceScatter, graph.AllReduce, graph.AllToAll}

// phase adds a phase's operations: two that the GPU's library runs as one, as one.
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
		case joined[k]: // with the one after it
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
	if err != nil || !ok { // on the host
		return err
	}
	flops, bytes := graph.Cost(e.plan.Program, op)
	return e.enqueue(gpu, string(op.Kind), float64(flops), float64(bytes))
}

// both adds two operations that run as one: the second does not read what the first
// leaves, which is its first input.
func (e *estimator) both(first, second *graph.Op) error {
	k, err := e.lib.Join(e.binding(first), e.binding(second))
	if err != nil {
		return err
	}
	flops, bytes := graph.Cost(e.plan.Program, first)
	f, b := graph.Cost(e.plan.Program, second)
	between := e.plan.Program.Buf(second.In[0]).Bytes()
	return e.enqueue(k.(devcuda.Kernel), string(first.Kind)+", "+string(second.Kind), float64(flops+f), float64(bytes+b-between))
}

// enqueue hears a kernel's launches and notes them.
func (e *estimator) enqueue(k devcuda.Kernel, kind string, flops, bytes float64) error {
	e.api.launched, e.mats.enqueued = e.api.launched[:0], e.mats.enqueued[:0]
	if err := k.Enqueue(e.api, 0); err != nil {
		return err
	}
	return e.note(kind, flops, bytes)
}

// note adds the operation whose launches were heard last.
func (e *estimator) note(kind string, flops, bytes float64) error { // bytes: of operands, where no product is
	var names []string
	var mix sass.Code
	share := wide // of the copy's rate, by the kernel with the narrowest accesses
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
		share = min(share, reach(c))
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
	memory, compute, after := bytes/(card.copyRate*share), 0.0, 0.0
	matrix := flops / card.scalar
	if e.onTensors(mix) {
		matrix = flops / card.matrix
	}
	switch {
	case len(e.mats.enqueued) > 0:
		for _, p := range e.mats.enqueued {
			compute += max(productSeconds(p), productBytes(p)/(card.copyRate*wide))
		}
		bytes = 0
		for _, p := range e.mats.enqueued {
			bytes += productBytes(p)
		}
		for i := range e.api.launched {
			l := &e.api.launched[i]
			n, err := besideProduct(l)
			if err != nil {
				return fmt.Errorf("%s: %w", kind, err)
			}
			bytes += n
			after += max(n/(card.copyRate*reach(e.codes[l.function])), launchSeconds)
		}
		memory = 0 // counted by launch: a kernel after a product waits for it
	case mix.Tensor > 0:
		cycles := max(mmaSync, float64(mix.Total)/float64(mix.Tensor))
		compute = flops / (card.matrix * mmaPeak / cycles)
	case mix.Float > 0:
		compute = flops / (card.scalar * float64(mix.Float) / float64(mix.Total))
	}
	gaps := float64(launches) * launchSeconds
	compute += after
	seconds, bound := memory, "memory"
	if compute > seconds {
		seconds, bound = compute, "arithmetic"
		if len(e.mats.enqueued) == 0 {
			bound = "instructions"
		}
	}
	if gaps > seconds {
		seconds, bound = gaps, "launches"
	}
	r.times++
	r.flops, r.bytes = r.flops+flops, r.bytes+bytes
	r.roof += max(bytes/card.copyRate, matrix)
	r.seconds += seconds
	r.mix = mix
	if seconds > r.longest {
		r.longest, r.bound = seconds, bound
	}
	return nil
}

func (e *estimator) onTensors(mix sass.Code) bool {
	for _, p := range e.mats.enqueued {
		return p.A.Type != graph.F32
	}
	return mix.Tensor > 0
}

// sum adds a launch's code to an operation's.
func sum(to *sass.Code, c sass.Code) {
	to.Total += c.Total
	to.Load16, to.Load8, to.Load4 = to.Load16+c.Load16+c.Async, to.Load8+c.Load8, to.Load4+c.Load4
	to.Store16, to.Store8, to.Store4 = to.Store16+c.Store16, to.Store8+c.Store8, to.Store4+c.Store4
	to.Tensor, to.Float = to.Tensor+c.Tensor, to.Float+c.Float
}

// reach is the share of the copy's rate that a kernel's accesses reach. A kernel that has
// wide ones takes them at the shapes here; its others are for what is left over.
func reach(c sass.Code) float64 {
	switch {
	case c.Total == 0 || c.Load16+c.Store16 > 0:
		return wide
	case c.Load8+c.Store8 > 0:
		return middle
	}
	return narrow
}

// productSeconds is a product's arithmetic: whole waves of tiles.
func productSeconds(p blas.Product) float64 {
	flops := 2 * float64(p.M) * float64(p.N) * float64(p.K)
	if p.A.Type == graph.F32 {
		return flops / (card.scalar * libraryF32)
	}
	tiles := math.Ceil(float64(p.M)/tileRows) * math.Ceil(float64(p.N)/tileCols)
	waves := tiles / float64(card.multiprocessors)
	if waves < 1 {
		waves = 1 // K is split over what is idle
	}
	return flops / (card.matrix * library) * math.Ceil(waves) / waves
}

// productBytes is what a product reads and writes at least once.
func productBytes(p blas.Product) float64 {
	m, n, k := float64(p.M), float64(p.N), float64(p.K)
	times := 1.0
	if p.Accumulate {
		times = 2
	}
	return m*k*float64(p.A.Type.Size()) + k*n*float64(p.B.Type.Size()) + times*m*n*float64(p.C.Type.Size())
}

// besideProduct is the bytes that a kernel of an operation with a product reads and writes,
// re-reads included, by its parameters. Those are packed after the predicate's 8 bytes, in
// the order of the kernel's source.
func besideProduct(l *launch) (float64, error) {
	size := 2.0
	if strings.HasSuffix(l.name, "_f32") && !strings.Contains(l.name, "16_f32") {
		size = 4
	}
	switch name := l.name; {
	case l.function == driversOwn:
		return 0, nil
	case strings.HasPrefix(name, "act_grad_"): // dy, pre, dx, n
		return 3 * size * l.number(32), nil
	case strings.HasPrefix(name, "act_"): // x, y, n
		return 2 * size * l.number(24), nil
	case strings.HasPrefix(name, "add_bias_"): // bias, y, rows, cols
		return 2 * size * l.number(24) * l.number(32), nil
	case strings.HasPrefix(name, "column_parts_"): // part, parts, cols
		return 4 * l.number(16) * l.number(24), nil
	case strings.HasPrefix(name, "columns_"): // x, rows, cols
		return size * l.number(16) * l.number(24), nil
	case strings.HasPrefix(name, "head_"): // logits in fp32 twice, gradients; v. A block has a row
		return float64(l.blocks) * l.number(16) * (2*4 + size), nil
	case name == "loss_sum": // losses in fp64, rows
		return 8 * l.number(16), nil
	case strings.HasPrefix(name, "cast_f32_"): // x, y, n
		return (4 + size) * l.number(24), nil
	}
	return 0, fmt.Errorf("the estimate does not know how many bytes kernel %s of %s moves", l.name, l.source)
}

// step estimates a program's step.
func step(p *plan.Plan, codes map[function]sass.Code) (map[string]*row, error) {
	workers := pool.New(1)
	defer workers.Close()
	e := &estimator{plan: p, api: &paper{}, mats: &products{}, codes: codes, rows: map[string]*row{}}
	for s := range e.space {
		e.space[s] = &unbacked{graph.Space(s), p.Layout.Spaces[s].Peak}
	}
	var err error
	e.lib, err = kernelscuda.New(kernelscuda.Options{API: e.api, Compiler: e.api, Products: e.mats, Host: kernelscpu.New(workers),
		Device: driver.Device{Name: "H200", Major: 9, SMs: card.multiprocessors, SharedOptin: 227 << 10, Memory: 141 << 30}})
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
	return e.rows, e.lib.Close()
}

// recorded is the machine code of an architecture's kernels by name.
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

func run(w io.Writer) error {
	codes, err := recorded("sm_90")
	if err != nil {
		return err
	}
	fmt.Fprint(w, preamble())
	for _, c := range cases {
		p, err := build(c.layers, c.heads, c.width, c.vocab, c.positions, c.rows, c.precision)
		if err != nil {
			return err
		}
		rows, err := step(p, codes)
		if err != nil {
			return err
		}
		write(w, c.name, c.rows*c.positions, rows)
	}
	return nil
}

func preamble() string {
	return fmt.Sprintf(`# What a step would take on a GPU: an estimate

Nothing here was measured: no kernel ran on a GPU. This is the output of

    go run ./benchmarks/cuda/estimate

from the operations that the planner's program has, the kernels that the GPU's library
launches for each, and [their machine code](../../../internal/testkit/sass/machine-code.txt)
for sm_90. Taken for an H200: a copy of %.1f TB/s, a bf16 product of %.0f TFLOP/s on random
data (both as others saw them through PyTorch), %.0f TFLOP/s in fp32 (the datasheet).

**Roofline** is the larger of bytes over the copy's rate and arithmetic over the product's.
**Estimate** takes less of both: a kernel with accesses of 16 bytes reaches %.0f %% of a
copy's rate, of 8 %.0f %%, of fewer %.0f %%; cuBLASLt %.0f %% of the square product where its tiles
fill whole waves, %.0f %% of the datasheet in fp32; an mma.sync keeps its tensor core %.1f cycles instead of %d, or as many as there are instructions for each, one of which a
scheduler starts a cycle; fp32 arithmetic its share of a kernel's instructions; %.0f µs a
launch. Instructions are counted where they stand: a loop's body weighs as much as what
surrounds it. Only the section of a step counts. A kernel after a product waits for it, and
its bytes count as often as it reads them. Shares of rates are assumptions: no published
table of cuBLASLt's rates at these shapes was found, so products of short K may be slower.
All of that may be wrong by a third.

Independent arithmetic, before the two slow kernels were mended, gave 440,000 to 500,000
tokens/s for GPT-2 124M and 45,000 to 48,000 for 1.5B, both at 16 × 1,024 tokens in bf16. It
has 450 to 600 TFLOP/s for products of K = 768 where this page has 709, a gradient of norms
bound by latency (4 to 8 ms of 124M's step, 15 to 30 ms of 1.5B's) and attention that re-reads
up to 123 GB a step at 1.5B (28 ms): the last two are what the kernels no longer do.
`, card.copyRate/1e12, card.matrix/1e12, card.scalar/1e12, 100*wide, 100*middle, 100*narrow, 100*library, 100*libraryF32, mmaSync, mmaPeak, launchSeconds*1e6)
}

// write writes a step's table, what takes longest first.
func write(w io.Writer, name string, tokens int, rows map[string]*row) {
	list := slices.SortedFunc(maps.Values(rows), func(a, b *row) int {
		return cmp.Or(cmp.Compare(b.seconds, a.seconds), strings.Compare(a.kind+a.kernels, b.kind+b.kernels))
	})
	var total, roof, matrix float64
	for _, r := range list {
		total, roof = total+r.seconds, roof+r.roof
		if strings.Contains(r.kernels, "cuBLASLt") || r.mix.Tensor > 0 {
			matrix += r.flops
		}
	}
	fmt.Fprintf(w, "\n## %s\n\nEstimate: **%.1f ms a step, %s tokens/s**; roofline %.1f ms. Products and attention's are %.0f TFLOP/s of it, %.0f %% of the square product.\n\n",
		name, total*1e3, thousands(float64(tokens)/total), roof*1e3, matrix/total/1e12, 100*matrix/total/card.matrix)
	t := tabwriter.NewWriter(w, 0, 0, 1, ' ', 0)
	fmt.Fprintln(t, "| operation\t| kernels\t| times\t| GFLOP\t| GB\t| roofline µs\t| estimate µs\t| share\t| bound by\t| of instructions: tensor, fp32, 16-byte accesses\t|")
	fmt.Fprintln(t, "| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t|")
	for _, r := range list {
		mix := "–"
		if n := float64(r.mix.Total); n > 0 {
			mix = fmt.Sprintf("%.0f %%, %.0f %%, %.0f %%", 100*float64(r.mix.Tensor)/n, 100*float64(r.mix.Float)/n, 100*float64(r.mix.Load16+r.mix.Store16)/n)
		}
		fmt.Fprintf(t, "| %s\t| %s\t| %d\t| %.1f\t| %.2f\t| %.0f\t| %.0f\t| %.1f %%\t| %s\t| %s\t|\n",
			r.kind, r.kernels, r.times, r.flops/1e9, r.bytes/1e9, r.roof*1e6, r.seconds*1e6, 100*r.seconds/total, r.bound, mix)
	}
	_ = t.Flush() // to w, whose errors nobody could act on
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
