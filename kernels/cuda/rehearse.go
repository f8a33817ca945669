package cuda

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
)

// Rehearsal describes a program as the ranks of this process will run it on one device.
type Rehearsal struct {
	Program *graph.Program
	Coords  [][]int                // mesh coordinates of the device's ranks
	Sums    bool                   // the device sums buffers over ranks (RankSum)
	Offset  []int64                // of each root buffer in its arena, in bytes
	Size    [graph.NumSpaces]int64 // sizes of a rank's arenas, in bytes
	Graphs  bool                   // sequences of a step's operations are launched as CUDA graphs
}

// Rehearse makes the driver allocate all the device memory that it needs for a program's kernels
// and products, before the arenas are allocated. This is needed because a driver loads code, and
// grows the threads' local memory, at the first launch. Rehearse launches every kernel once with a
// predicate that makes it do nothing, and runs every product once on temporary memory. It only
// loads user-defined operations, because they may ignore the predicate. With Graphs it also
// creates, launches and destroys the same number of CUDA graphs as the program has, each with the
// same number of launches. inGraphs is the memory that this freed, in bytes. Nothing else may use
// the library during the call.
func (l *Library) Rehearse(r Rehearsal, s driver.Stream) (inGraphs int64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	o, products := l.o, &recorder{Library: l.o.Products, seen: map[blas.Product]recorded{}}
	if o.Products != nil {
		o.Products = products
	}
	dry := &Library{o: o, modules: l.modules, functions: l.functions, shared: l.shared}
	defer func() {
		for _, page := range dry.reports {
			err = errors.Join(err, o.API.HostFree(unsafe.Pointer(page)))
		}
	}()
	launches := map[driver.Function]*launch{}
	var runs []int
	for _, coord := range r.Coords {
		part, err := dry.rehearseBinding(&r, coord, launches)
		if err != nil {
			return 0, err
		}
		runs = append(runs, part...)
	}
	if err := dry.rehearseSums(&r, launches); err != nil {
		return 0, err
	}
	if err := products.run(o.API, s); err != nil {
		return 0, err
	}
	return rehearseLaunches(o.API, launches, runs, s)
}

// unbacked is an arena with addresses but no memory, for binding without running.
type unbacked struct {
	space graph.Space
	size  int64
}

func (u *unbacked) Space() graph.Space      { return u.space }
func (u *unbacked) Size() int64             { return u.size }
func (u *unbacked) Touched() int64          { return 0 }
func (u *unbacked) Address() driver.Address { return driver.Address(1+u.space) << 44 }

// rehearseBinding binds the operations of a rank to unbacked memory and collects their
// launches. runs is the number of launches in each sequence of operations that would be one
// CUDA graph.
func (l *Library) rehearseBinding(r *Rehearsal, coord []int, launches map[driver.Function]*launch) (runs []int, err error) {
	var arenas [graph.NumSpaces]*unbacked
	for s := range arenas {
		arenas[s] = &unbacked{graph.Space(s), r.Size[s]}
	}
	device := func(id graph.BufID) (p device.Ptr) {
		if id != graph.NoBuf {
			root, off := r.Program.Resolve(id, coord)
			p.Arena, p.Off, p.Len = arenas[r.Program.Buf(root).Space], r.Offset[root]+off, r.Program.Buf(id).Bytes()
		}
		return p
	}
	for i := range r.Program.Sections {
		for j := range r.Program.Sections[i].Phases {
			ops := r.Program.Sections[i].Phases[j].Ops
			count, places := make([]int, len(ops)), make([]kernels.Binding, len(ops)) // count: launches per op
			for k := range ops {
				b, onGPU := placed(r.Program, &ops[k], coord, device)
				if !onGPU {
					continue
				}
				bound, err := l.Bind(b)
				if err != nil {
					return nil, err
				}
				count[k], places[k] = max(1, len(bound.(*kernel).steps)), b
				if !b.Op.BringsKernels() {
					collect(launches, bound.(*kernel).steps)
				}
			}
			first, err := l.rehearsePairs(ops, places, launches)
			if err != nil {
				return nil, err
			}
			if !r.Graphs || r.Program.Sections[i].Kind != graph.SectionStep {
				continue
			}
			for _, run := range graph.Runs(ops, graph.Compute, graph.MinRun, func(k int) bool { return count[k] > 0 }, nil) {
				n := 0
				for _, k := range run {
					if !first[k] {
						n += count[k]
					}
				}
				runs = append(runs, n)
			}
		}
	}
	return runs, nil
}

// rehearsePairs adds the launches of pairs of operations that run as one fused kernel. It
// returns the indices of the first operation of each pair, which has no launch of its own.
func (l *Library) rehearsePairs(ops []graph.Op, places []kernels.Binding, launches map[driver.Function]*launch) (first map[int]bool, wrong error) {
	first = map[int]bool{}
	graph.Pairs(ops, graph.Compute, func(i, j int) bool {
		if wrong != nil || places[i].Op == nil || places[j].Op == nil {
			return false
		}
		k, err := l.Join(places[i], places[j])
		if err != nil {
			wrong = err
		}
		if k == nil || err != nil {
			return false
		}
		first[i] = true
		collect(launches, k.(*kernel).steps)
		return true
	})
	return first, wrong
}

// placed returns an operation with the memory of its operands. onGPU says that it runs as a GPU
// kernel: it is not a transfer, and some operand is outside host memory.
func placed(p *graph.Program, op *graph.Op, coord []int, at func(graph.BufID) device.Ptr) (b kernels.Binding, onGPU bool) {
	switch op.Kind {
	case graph.Join, graph.Copy, graph.AllGather, graph.ReduceScatter, graph.AllReduce, graph.AllToAll:
		return b, false
	}
	b = kernels.Binding{Program: p, Op: op, Coord: coord, Work: at(op.Work), Skip: at(op.Skip)}
	for _, id := range op.In {
		b.In = append(b.In, at(id))
	}
	for _, out := range op.Out {
		b.Out = append(b.Out, at(out.Buf))
	}
	for _, list := range [][]device.Ptr{b.In, b.Out, {b.Work, b.Skip}} {
		for _, ptr := range list {
			onGPU = onGPU || ptr.Arena != nil && ptr.Arena.Space() != graph.Host
		}
	}
	return b, onGPU
}

// collect keeps for each function the launch with the most shared memory.
func collect(launches map[driver.Function]*launch, steps []step) {
	for _, s := range steps {
		if l, ok := s.(*launch); ok && (launches[l.f] == nil || launches[l.f].shared < l.shared) {
			launches[l.f] = l
		}
	}
}

// rehearseSums adds the launches of RankSum for the types that the program's ranks reduce.
func (l *Library) rehearseSums(r *Rehearsal, launches map[driver.Function]*launch) error {
	if !r.Sums {
		return nil
	}
	for _, order := range []graph.SumOrder{graph.SumTree, graph.SumSequential} {
		for _, t := range []graph.DType{graph.F32, graph.F64, graph.I64, graph.BF16, graph.F16} {
			if order == graph.SumSequential && (t == graph.F64 || t == graph.I64) {
				continue // no RankSum for this type and order
			}
			sum, err := l.RankSum(t, order)
			if err != nil {
				return err
			}
			args := new(driver.Args)
			for range unsafe.Offsetof(sum.args.accumulate) / 8 {
				args.Int64(0)
			}
			for range (sum.args.size() - unsafe.Offsetof(sum.args.accumulate)/8*8) / 4 {
				args.Int32(0)
			}
			launches[sum.f] = &launch{f: sum.f, block: driver.Dim{X: treeThreads, Y: 1, Z: 1}, args: args}
		}
	}
	return nil
}

// rehearseLaunches launches each function once, in one block, with a predicate that makes
// it do nothing. Then it calls rehearseGraphs with the same launches.
func rehearseLaunches(api driver.API, launches map[driver.Function]*launch, runs []int, s driver.Stream) (int64, error) {
	word, err := api.Alloc(predicateBytes)
	if err != nil {
		return 0, fmt.Errorf("a predicate: %w", err)
	}
	var list []*launch
	err = api.Fill32(word, 1, predicateBytes/4, s)
	one := driver.Dim{X: 1, Y: 1, Z: 1}
	for _, l := range launches {
		if err != nil {
			break
		}
		p, size := l.args.Packed()
		args := new(driver.Args).Pointer(word)
		for _, v := range unsafe.Slice((*int32)(unsafe.Add(p, 8)), (size-8)/4) {
			args.Int32(v)
		}
		list = append(list, &launch{f: l.f, grid: one, block: l.block, shared: l.shared, args: args})
		err = list[len(list)-1].enqueue(api, s)
	}
	err = errors.Join(err, api.Synchronize(s))
	var bytes int64
	if err == nil && len(list) > 0 {
		bytes, err = rehearseGraphs(api, list, runs, s)
	}
	return bytes, errors.Join(err, api.Free(word))
}

// rehearseGraphs creates a graph for each element of runs, with that many launches taken
// from list in turn. It launches all graphs, destroys them and returns the device memory that
// this freed, in bytes. If the driver refuses to capture it returns 0; the training run will
// report the refusal.
func rehearseGraphs(api driver.API, list []*launch, runs []int, s driver.Stream) (int64, error) {
	var ready []driver.GraphExec
	var err error
	for _, n := range runs {
		var captured driver.Graph
		if captured, err = captureLaunches(api, list, n, s); err != nil {
			break
		}
		var exec driver.GraphExec
		exec, err = api.Instantiate(captured)
		if err == nil {
			ready = append(ready, exec)
			err = api.LaunchGraph(exec, s)
		}
		if err = errors.Join(err, api.DestroyGraph(captured)); err != nil {
			break
		}
	}
	refused := errors.As(err, new(*captureRefused))
	if refused {
		err = nil
	}
	err = errors.Join(err, api.Synchronize(s))
	held, _, e := api.MemInfo()
	err = errors.Join(err, e)
	for _, exec := range ready {
		err = errors.Join(err, api.DestroyGraphExec(exec))
	}
	free, _, e := api.MemInfo()
	return max(0, free-held), errors.Join(err, e)
}

// captureRefused is the driver's refusal to capture.
type captureRefused struct{ error }

func (c *captureRefused) Unwrap() error { return c.error }

// captureLaunches creates a graph of n launches, taken from list in turn.
func captureLaunches(api driver.API, list []*launch, n int, s driver.Stream) (driver.Graph, error) {
	if err := api.BeginCapture(s); err != nil {
		return 0, &captureRefused{err}
	}
	var err error
	for i := 0; i < n && err == nil; i++ {
		err = list[i%len(list)].enqueue(api, s)
	}
	captured, end := api.EndCapture(s)
	if err == nil && end == nil {
		return captured, nil
	}
	if end == nil {
		end = api.DestroyGraph(captured)
	}
	return 0, &captureRefused{errors.Join(err, end)}
}

const predicateBytes = 256

// recorder binds each product once and remembers it.
type recorder struct {
	blas.Library

	mu   sync.Mutex
	list []blas.Product // in the order of the program
	seen map[blas.Product]recorded
}

type recorded struct {
	call blas.Call
	err  error
}

func (r *recorder) Bind(p blas.Product, at blas.Places) (blas.Call, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known, ok := r.seen[p]
	if !ok {
		known.call, known.err = r.Library.Bind(p, at)
		r.seen[p] = known
		if known.err == nil {
			r.list = append(r.list, p)
		}
	}
	return known.call, known.err
}

// sizes returns the sizes in bytes of a product's A, B, C, bias, aux, sums and workspace.
func sizes(p blas.Product) [7]int64 {
	s := [7]int64{p.A.Elems(p.M, p.K) * p.A.Type.Size(), p.B.Elems(p.K, p.N) * p.B.Type.Size(), p.C.Elems(p.M, p.N) * p.C.Type.Size(), 0, 0, p.SumsLen() * p.C.Type.Size(), p.Workspace}
	if p.Bias {
		s[3] = p.N * p.C.Type.Size()
	}
	if p.GELU || p.DGELU {
		s[4] = p.M * p.N * p.C.Type.Size()
	}
	for i := range s {
		s[i] = roundUp(s[i], workAlign)
	}
	return s
}

// run runs every recorded product once, on memory that it allocates and frees.
func (r *recorder) run(api driver.API, s driver.Stream) error {
	most := int64(0)
	for _, p := range r.list {
		total := int64(0)
		for _, n := range sizes(p) {
			total += n
		}
		most = max(most, total)
	}
	if most == 0 {
		return nil
	}
	at, err := api.Alloc(most)
	if err != nil {
		return fmt.Errorf("%d bytes for the operands of the largest product: %w", most, err)
	}
	err = api.Fill8(at, 0, most, s)
	for _, p := range r.list {
		if err != nil {
			break
		}
		var places [7]driver.Address
		next := at
		for i, n := range sizes(p) {
			if n > 0 {
				places[i] = next
			}
			next += driver.Address(n)
		}
		var call blas.Call
		call, err = r.Library.Bind(p, blas.Places{A: places[0], B: places[1], C: places[2], Bias: places[3], Aux: places[4], Sums: places[5], Work: places[6]})
		if err == nil {
			err = call.Enqueue(s)
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", p, err)
		}
	}
	return errors.Join(err, api.Synchronize(s), api.Free(at))
}
