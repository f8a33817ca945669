package cuda

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/device"
	devcpu "github.com/spillway-ml/spillway/device/cpu"
	devcuda "github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
)

// binding is an operation while its kernel is prepared. graph.Check has passed it: required
// operands are present, with the dtypes and shapes of the operation's kind. err keeps the
// first error; once it is set, addresses are invalid.
type binding struct {
	kernels.Binding
	lib    *Library
	kernel *kernel
	skip   driver.Address // the predicate's address, 0 if there is no predicate
	err    error
}

func (b *binding) failf(format string, args ...any) {
	if b.err == nil {
		b.err = fmt.Errorf("cuda: bind %s (%s): %w", b.Op.Name, b.Op.Kind, fmt.Errorf(format, args...))
	}
}

// onHost says whether all operands are in host memory.
func (b *binding) onHost() bool {
	for _, p := range b.kernel.touches {
		if p.Arena.Space() != graph.Host {
			return false
		}
	}
	return len(b.kernel.touches) > 0
}

// bindHost binds an operation on host memory with the CPU's kernel library.
func (b *binding) bindHost() (device.Kernel, error) {
	for _, p := range b.kernel.touches {
		if _, ok := p.Arena.(devcpu.HostMemory); !ok {
			b.failf("host memory is a %T, which the CPU's kernels do not reach", p.Arena)
			return nil, b.err
		}
	}
	k, err := b.lib.o.Host.Bind(b.Binding)
	if err != nil {
		return nil, err
	}
	run, ok := k.(devcpu.Kernel)
	if !ok {
		b.failf("the host's library gave a %T, want a kernel that the CPU runs", k)
		return nil, b.err
	}
	return &hostKernel{b.kernel.operands, run}, nil
}

// address returns the device address of an operand, 0 if it is absent.
func (b *binding) address(what string, p device.Ptr) driver.Address {
	if p.Arena == nil {
		return 0
	}
	a, err := devcuda.Address(p)
	if err != nil {
		b.failf("%s: %w", what, err)
	}
	return a
}

// in and out return the addresses of operands, 0 for absent ones.
func (b *binding) in(i int) driver.Address {
	if !b.hasIn(i) {
		return 0
	}
	return b.address(fmt.Sprintf("input %d", i), b.In[i])
}

func (b *binding) out(i int) driver.Address {
	if !b.hasOut(i) {
		return 0
	}
	return b.address(fmt.Sprintf("output %d", i), b.Out[i])
}

// hasIn and hasOut say whether an optional operand is present.
func (b *binding) hasIn(i int) bool { return i < len(b.Op.In) && b.Op.In[i] != graph.NoBuf }
func (b *binding) hasOut(i int) bool {
	return i < len(b.Op.Out) && b.Op.Out[i].Buf != graph.NoBuf
}

// accum says whether the operation adds to an output, as the int32 that kernels take.
func (b *binding) accum(i int) int32 {
	return flag(b.hasOut(i) && b.Op.Out[i].Mode == graph.Accum)
}

// inBuf and outBuf describe an operand that is present.
func (b *binding) inBuf(i int) *graph.Buffer  { return b.Program.Buf(b.Op.In[i]) }
func (b *binding) outBuf(i int) *graph.Buffer { return b.Program.Buf(b.Op.Out[i].Buf) }

// matrix returns a buffer's leading dimensions multiplied, and its last one.
func matrix(buf *graph.Buffer) (rows, cols int64) {
	rows, cols = 1, 1
	for i, d := range buf.Shape {
		if i == len(buf.Shape)-1 {
			cols = d
		} else {
			rows *= d
		}
	}
	return rows, cols
}

// suffix is the ending of a kernel's name for the element type that it stores.
var suffix = map[graph.DType]string{graph.F32: "f32", graph.BF16: "bf16", graph.F16: "f16"}

// float returns the kernel name suffix of a floating-point buffer: f32, bf16 or f16.
func (b *binding) float(buf *graph.Buffer) string {
	switch buf.DType {
	case graph.F32, graph.BF16, graph.F16:
	default:
		b.failf("%s is %v; the kernel takes f32, bf16 or f16", buf.Name, buf.DType)
	}
	return suffix[buf.DType]
}

// work returns the address of the operation's workspace of at least n bytes.
func (b *binding) work(n int64) driver.Address {
	if n == 0 {
		return 0
	}
	if b.Op.Work == graph.NoBuf || b.Work.Len < n {
		b.failf("workspace has %d bytes, want %d", b.Work.Len, n)
		return 0
	}
	if b.Work.Off%workAlign != 0 {
		b.failf("workspace starts at byte %d, want a multiple of %d", b.Work.Off, workAlign)
		return 0
	}
	return b.address("workspace", b.Work)
}

// workAlign is the alignment of a workspace in its arena, in bytes. The driver aligns its
// allocations to the same number.
const workAlign = 256

// cut holds the tile and chunk sizes of this package's kernels. The planner computes the
// size of their workspaces from the same numbers.
var cut = graph.CUDATarget().CUDA

// attr returns the operation's attribute struct, whose type graph.Check knows.
func attr[A any](b *binding) A {
	a, ok := b.Op.Attr.(A)
	if !ok {
		b.failf("attribute is %T, want %T", b.Op.Attr, a)
	}
	return a
}

// args starts a kernel's parameter list. The first parameter of every kernel is the
// address of the predicate; the kernel does nothing if the predicate exists and is not 0.
func (b *binding) args() *driver.Args { return new(driver.Args).Pointer(b.skip) }

// operands returns args with the addresses of all inputs and outputs appended.
func (b *binding) operands() *driver.Args { return b.operandsFrom(0, b.args()) }

// operandsFrom adds the addresses of inputs first and up, and of all outputs.
func (b *binding) operandsFrom(first int, args *driver.Args) *driver.Args {
	for i := first; i < len(b.Op.In); i++ {
		args.Pointer(b.in(i))
	}
	for i := range b.Op.Out {
		args.Pointer(b.out(i))
	}
	return args
}

// launch adds the launch of kernel name in a source file, over grid blocks of block
// threads with shared bytes of dynamic shared memory.
func (b *binding) launch(source, name string, grid, block driver.Dim, shared int, args *driver.Args) {
	if b.err != nil || grid.X == 0 || grid.Y == 0 || grid.Z == 0 {
		return
	}
	f, err := b.lib.function(source, name, shared)
	if err != nil {
		b.failf("%w", err)
		return
	}
	b.kernel.steps = append(b.kernel.steps, &launch{f: f, grid: grid, block: block, shared: shared, args: args})
}

// threads is the block size of elementwise kernels.
const threads = 256

// perThread is the number of elements that a thread of an elementwise kernel processes at
// a time: 16 bytes.
func perThread(buf *graph.Buffer) int64 { return 16 / buf.DType.Size() }

// over adds the launch of a grid-stride kernel over n elements, in which each thread
// processes per elements at a time.
func (b *binding) over(source, name string, n, per int64, args *driver.Args) {
	b.blocks(source, name, n, per, threads, 0, args)
}

// blocks does the same as over, with blocks of block threads and shared bytes of dynamic shared
// memory.
func (b *binding) blocks(source, name string, n, per, block int64, shared int, args *driver.Args) {
	most := int64(max(b.lib.o.Device.SMs, 1)) * 16 * threads / block
	x := min((n+block*per-1)/(block*per), most)
	b.launch(source, name, driver.Dim{X: uint32(x), Y: 1, Z: 1}, driver.Dim{X: uint32(block), Y: 1, Z: 1}, shared, args)
}

// overRows adds the launch of a kernel over rows of cols elements, in which each thread
// processes per elements at a time. Rows are the grid's second dimension, so that threads
// need no division to find their row. A block has at most the threads that one row needs.
func (b *binding) overRows(source, name string, rows, cols, per int64, args *driver.Args) {
	if rows == 0 || cols == 0 {
		return
	}
	wanted := (cols + per - 1) / per
	block := min(roundUp(wanted, 32), threads)
	most := int64(max(b.lib.o.Device.SMs, 1)) * 16 * threads / block
	x := min((wanted+block-1)/block, most)
	y := min(rows, (most+x-1)/x, 65535)
	b.launch(source, name, driver.Dim{X: uint32(x), Y: uint32(y), Z: 1}, driver.Dim{X: uint32(block), Y: 1, Z: 1}, 0, args)
}

// rows adds the launch of a kernel that has one block for each of n rows or pieces, in a
// one-dimensional grid.
func (b *binding) rows(source, name string, n, block int64, shared int, args *driver.Args) {
	if n > 1<<31-1 {
		b.failf("%d rows are more than a grid has blocks", n)
		return
	}
	b.launch(source, name, driver.Dim{X: uint32(n), Y: 1, Z: 1}, driver.Dim{X: uint32(block), Y: 1, Z: 1}, shared, args)
}

// report reserves a slot in which the kernel reports an invalid element of operand what,
// and returns the slot's device address.
func (b *binding) report(what, want string) driver.Address {
	if b.err != nil {
		return 0
	}
	s, err := b.lib.slot()
	if err != nil {
		b.failf("memory for what the kernel finds wrong: %w", err)
		return 0
	}
	b.kernel.report = &report{slot: s.slot, op: b.Op.Name, kind: b.Op.Kind, what: what, want: want}
	return s.at
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// aligned says whether all addresses are multiples of n bytes.
func aligned(n driver.Address, places ...driver.Address) bool {
	return !slices.ContainsFunc(places, func(p driver.Address) bool { return p%n != 0 })
}

// flag converts a bool to the int32 that kernels take.
func flag(v bool) int32 {
	if v {
		return 1
	}
	return 0
}
