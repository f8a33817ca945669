package cpu

import (
	"fmt"
	"unsafe"

	"github.com/spillway-ml/spillway/device"
	devcpu "github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// binding is an operation whose kernel is being prepared. graph.Check has passed it: operands are
// present unless optional, and have the kind's dtypes and shapes. Their memory remains to be
// checked. err keeps the first error; once it is set, slices are empty and must not be used.
type binding struct {
	kernels.Binding
	pool     *pool.Pool
	portable bool // see NewPortable
	err      error
	touches  []device.Ptr
}

func (b *binding) failf(format string, args ...any) {
	if b.err == nil {
		b.err = fmt.Errorf("cpu: bind %s (%s): %w", b.Op.Name, b.Op.Kind, fmt.Errorf(format, args...))
	}
}

// places checks the memory of the operands; see kernels.Binding.Places.
func (b *binding) places() {
	touches, err := b.Places()
	if err != nil {
		b.failf("%w", err)
		return
	}
	b.touches = touches
}

// shape returns an operand's leading dimensions multiplied, and its last one.
func (b *binding) shape(id graph.BufID) (rows, cols int) {
	rows, cols = 1, 1
	if id == graph.NoBuf {
		return 0, 0
	}
	s := b.Program.Buf(id).Shape
	for i, d := range s {
		if i == len(s)-1 {
			cols = int(d)
		} else {
			rows *= int(d)
		}
	}
	return rows, cols
}

func (b *binding) inShape(i int) (rows, cols int)  { return b.shape(b.Op.In[i]) }
func (b *binding) outShape(i int) (rows, cols int) { return b.shape(b.Op.Out[i].Buf) }

// hasIn and hasOut say whether an optional operand is present.
func (b *binding) hasIn(i int) bool  { return i < len(b.Op.In) && b.Op.In[i] != graph.NoBuf }
func (b *binding) hasOut(i int) bool { return i < len(b.Op.Out) && b.Op.Out[i].Buf != graph.NoBuf }

// accum says whether the operation adds to an output.
func (b *binding) accum(i int) bool { return b.hasOut(i) && b.Op.Out[i].Mode == graph.Accum }

// in and out return operands as slices, nil for absent ones.
func in[T devcpu.Element](b *binding, i int) []T {
	if !b.hasIn(i) || !typed[T](b, fmt.Sprintf("input %d", i), b.Op.In[i]) {
		return nil
	}
	return view[T](b, fmt.Sprintf("input %d", i), b.In[i])
}

func out[T devcpu.Element](b *binding, i int) []T {
	if !b.hasOut(i) || !typed[T](b, fmt.Sprintf("output %d", i), b.Op.Out[i].Buf) {
		return nil
	}
	return view[T](b, fmt.Sprintf("output %d", i), b.Out[i])
}

// matrix is a float32 operand, or a 16-bit one.
type matrix struct {
	f32 []float32
	u16 []uint16
}

// inMatrix and outMatrix return operands that may be of either type.
func (b *binding) inMatrix(i int) matrix {
	if b.hasIn(i) && b.asIn(i) != vec.NoHalf {
		return matrix{u16: in[uint16](b, i)}
	}
	return matrix{f32: in[float32](b, i)}
}

func (b *binding) outMatrix(i int) matrix {
	if b.hasOut(i) && b.asOut(i) != vec.NoHalf {
		return matrix{u16: out[uint16](b, i)}
	}
	return matrix{f32: out[float32](b, i)}
}

func (m matrix) len() int    { return max(len(m.f32), len(m.u16)) }
func (m matrix) there() bool { return m.f32 != nil || m.u16 != nil }

// part returns elements [lo, hi).
func (m matrix) part(lo, hi int) matrix {
	switch {
	case m.u16 != nil:
		return matrix{u16: m.u16[lo:hi]}
	case m.f32 != nil:
		return matrix{f32: m.f32[lo:hi]}
	}
	return m
}

func (m matrix) from(lo int) matrix { return m.part(lo, m.len()) }

// rows returns rows [r0, r1) of width c.
func (m matrix) rows(r0, r1, c int) matrix { return m.part(r0*c, r1*c) }

func (m matrix) bytes() []byte {
	if m.u16 != nil {
		return gemm.Bytes(m.u16)
	}
	return gemm.Bytes(m.f32)
}

// copy copies the elements of from, as many as m has, to m.
func (m matrix) copy(from matrix) {
	copy(m.f32, from.f32)
	copy(m.u16, from.u16)
}

// asIn and asOut return the 16-bit types of operands, NoHalf for float32 operands.
func (b *binding) asIn(i int) vec.Half  { return halves[b.Program.Buf(b.Op.In[i]).DType] }
func (b *binding) asOut(i int) vec.Half { return halves[b.Program.Buf(b.Op.Out[i].Buf).DType] }

// sum returns the output i for a sum over rows of 16-bit operands; none if it is absent.
func (b *binding) sum(i int) vec.HalfSum {
	s := vec.HalfSum{Accumulate: b.accum(i)}
	switch {
	case !b.hasOut(i):
	case b.asOut(i) != vec.NoHalf:
		s.To = out[uint16](b, i)
	default:
		s.To32 = out[float32](b, i)
	}
	return s
}

// typed reports whether the kernel supports the element type of an operand; if not, it sets the
// binding's error.
func typed[T devcpu.Element](b *binding, what string, id graph.BufID) bool {
	var want []graph.DType
	switch any(*new(T)).(type) {
	case float32:
		want = []graph.DType{graph.F32}
	case uint16:
		want = []graph.DType{graph.BF16, graph.F16}
	default:
		return true // the kind table has one type for these
	}
	buf := b.Program.Buf(id)
	for _, t := range want {
		if buf.DType == t {
			return true
		}
	}
	b.failf("%s (%s) is %v; the CPU's kernel takes %v", what, buf.Name, buf.DType, want[0])
	return false
}

func view[T devcpu.Element](b *binding, what string, p device.Ptr) []T {
	if b.err != nil {
		return nil
	}
	s, err := devcpu.Slice[T](p)
	if err != nil {
		b.failf("%s: %w", what, err)
		return nil
	}
	return s
}

// workAlign is the alignment of a workspace in its arena, in bytes: a cache
// line, and a vector of 512 bits.
const workAlign = 64

// work returns the operation's workspace, of the size that the planner gave it; nil if it has none.
func (b *binding) work() slab {
	n := graph.CPUTarget().Workspace(b.Program, b.Op)
	if b.err != nil || n == 0 {
		return nil
	}
	if b.Op.Work == graph.NoBuf || b.Work.Len < n {
		b.failf("workspace has %d bytes, want %d", b.Work.Len, n)
		return nil
	}
	if b.Work.Off%workAlign != 0 {
		b.failf("workspace starts at byte %d, want a multiple of %d", b.Work.Off, workAlign)
		return nil
	}
	return view[byte](b, "workspace", b.Work)[:n]
}

// slab divides workspace into typed pieces. Pieces are multiples of workAlign.
type slab []byte

// aligned rounds bytes up to a piece's size.
func aligned(bytes int64) int64 { return (bytes + workAlign - 1) / workAlign * workAlign }

func take[T any](s *slab, n int64) []T {
	var z T
	size := aligned(n * int64(unsafe.Sizeof(z)))
	if n == 0 || int64(len(*s)) < size {
		return nil
	}
	p := unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(*s))), n)
	*s = (*s)[size:]
	return p
}

// attr returns the operation's attribute struct, whose type graph.Check knows.
func attr[A any](b *binding) A {
	a, ok := b.Op.Attr.(A)
	if !ok {
		b.failf("attribute is %T, want %T", b.Op.Attr, a)
	}
	return a
}
