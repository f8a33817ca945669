package cpu

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/device"
	devcpu "github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// operand is one operand of an operation that is being bound. An absent
// optional operand has a nil buf; so has one whose check failed, and then the
// bindings's err is set.
type operand struct {
	name string
	buf  *graph.Buffer
	ptr  device.Ptr
	mode graph.Mode // of an output
	out  bool
}

func (o operand) ok() bool { return o.buf != nil }

func (o operand) accum() bool { return o.mode == graph.Accum }

func (o operand) elems() int64 {
	if o.buf == nil {
		return 0
	}
	return o.buf.Elems()
}

// cols is the last dimension (1 for a scalar), rows the product of the others.
func (o operand) cols() int64 {
	if o.buf == nil || len(o.buf.Shape) == 0 {
		return 1
	}
	return o.buf.Shape[len(o.buf.Shape)-1]
}

func (o operand) rows() int64 {
	if o.buf == nil || len(o.buf.Shape) == 0 {
		return 1
	}
	n := int64(1)
	for _, d := range o.buf.Shape[:len(o.buf.Shape)-1] {
		n *= d
	}
	return n
}

// binding collects the operands of an operation and what is wrong with them:
// the first error sticks, and binders return it before they take any slice.
type binding struct {
	kernels.Binding
	pool    *pool.Pool
	err     error
	all     []operand
	inPlace [][2]string // output and operand that may be the same range
}

func (b *binding) failf(format string, args ...any) {
	if b.err == nil {
		b.err = fmt.Errorf("cpu: bind %s (%s): %w", b.Op.Name, b.Op.Kind, fmt.Errorf(format, args...))
	}
}

// arity refuses operations with more operands than the kind has.
func (b *binding) arity(in, out int) {
	if len(b.Op.In) > in {
		b.failf("has %d inputs, want at most %d", len(b.Op.In), in)
	}
	if len(b.Op.Out) > out {
		b.failf("has %d outputs, want at most %d", len(b.Op.Out), out)
	}
	if len(b.In) != len(b.Op.In) || len(b.Out) != len(b.Op.Out) {
		b.failf("got places for %d inputs and %d outputs, the operation has %d and %d",
			len(b.In), len(b.Out), len(b.Op.In), len(b.Op.Out))
	}
}

func (b *binding) operand(name string, id graph.BufID, ptr device.Ptr, dt graph.DType) operand {
	o := operand{name: name}
	if b.err != nil {
		return o
	}
	if id < 0 || int(id) >= len(b.Program.Buffers) {
		b.failf("operand %s: the program has no buffer %d", name, id)
		return o
	}
	buf := b.Program.Buf(id)
	switch {
	case buf.DType != dt:
		b.failf("operand %s (%s): is %v, want %v", name, buf.Name, buf.DType, dt)
	case slices.ContainsFunc(buf.Shape, func(d int64) bool { return d < 0 }):
		b.failf("operand %s (%s): has a negative dimension in %v", name, buf.Name, buf.Shape)
	case ptr.Arena == nil:
		b.failf("operand %s (%s): has no place in an arena", name, buf.Name)
	case ptr.Len != buf.Bytes():
		b.failf("operand %s (%s): got a place of %d bytes, its shape %v takes %d", name, buf.Name, ptr.Len, buf.Shape, buf.Bytes())
	case ptr.Off < 0 || ptr.Len > ptr.Arena.Size() || ptr.Off > ptr.Arena.Size()-ptr.Len:
		b.failf("operand %s (%s): bytes [%d, %d) are outside the %v arena of %d bytes", name, buf.Name, ptr.Off, ptr.Off+ptr.Len, ptr.Arena.Space(), ptr.Arena.Size())
	case ptr.Off%dt.Size() != 0:
		b.failf("operand %s (%s): offset %d is not a multiple of %d, the size of %v", name, buf.Name, ptr.Off, dt.Size(), dt)
	default:
		o.buf, o.ptr = buf, ptr
	}
	return o
}

// in returns input i; optIn one that may be absent.
func (b *binding) in(i int, name string, dt graph.DType) operand {
	o := b.optIn(i, name, dt)
	if b.err == nil && !o.ok() {
		b.failf("operand %s (input %d) is missing", name, i)
	}
	return o
}

func (b *binding) optIn(i int, name string, dt graph.DType) operand {
	if b.err != nil || i >= len(b.Op.In) || b.Op.In[i] == graph.NoBuf {
		return operand{name: name}
	}
	o := b.operand(name, b.Op.In[i], b.In[i], dt)
	b.all = append(b.all, o)
	return o
}

// out returns output i, used in one of the modes that the kind allows; optOut
// one that may be absent.
func (b *binding) out(i int, name string, dt graph.DType, modes ...graph.Mode) operand {
	o := b.optOut(i, name, dt, modes...)
	if b.err == nil && !o.ok() {
		b.failf("operand %s (output %d) is missing", name, i)
	}
	return o
}

func (b *binding) optOut(i int, name string, dt graph.DType, modes ...graph.Mode) operand {
	if b.err != nil || i >= len(b.Op.Out) || b.Op.Out[i].Buf == graph.NoBuf {
		return operand{name: name}
	}
	o := b.operand(name, b.Op.Out[i].Buf, b.Out[i], dt)
	o.mode, o.out = b.Op.Out[i].Mode, true
	if b.err == nil && !slices.Contains(modes, o.mode) {
		b.failf("operand %s (%s): mode is %v, want one of %v", name, o.buf.Name, o.mode, modes)
	}
	b.all = append(b.all, o)
	return o
}

// Output modes as the kind table writes them.
var (
	modeW  = []graph.Mode{graph.Write}
	modeWA = []graph.Mode{graph.Write, graph.Accum}
	modeA  = []graph.Mode{graph.Accum}
	modeRW = []graph.Mode{graph.ReadWrite}
)

// size checks one dimension of an operand.
func (b *binding) size(o operand, dim string, got, want int64) {
	if b.err == nil && o.ok() && got != want {
		b.failf("operand %s (%s, shape %v): %s is %d, want %d", o.name, o.buf.Name, o.buf.Shape, dim, got, want)
	}
}

// vector checks that o has n elements.
func (b *binding) vector(o operand, n int64) { b.size(o, "number of elements", o.elems(), n) }

// matrix checks that o is (rows, cols): the last dimension is cols, the product
// of the others rows.
func (b *binding) matrix(o operand, rows, cols int64) {
	b.size(o, "last dimension", o.cols(), cols)
	b.size(o, "number of rows", o.rows(), rows)
}

// atLeast checks a lower bound.
func (b *binding) atLeast(o operand, dim string, got, least int64) {
	if b.err == nil && o.ok() && got < least {
		b.failf("operand %s (%s, shape %v): %s is %d, want at least %d", o.name, o.buf.Name, o.buf.Shape, dim, got, least)
	}
}

// allow lets output out be the same range as operand with.
func (b *binding) allow(out, with string) { b.inPlace = append(b.inPlace, [2]string{out, with}) }

// work returns the operation's workspace of exactly n bytes, or nil for 0.
func (b *binding) work(n int64) []byte {
	if b.err != nil {
		return nil
	}
	if n == 0 {
		return nil
	}
	if b.Op.Work == graph.NoBuf || b.Work.Arena == nil {
		b.failf("workspace is missing, want %d bytes", n)
		return nil
	}
	o := b.operand("workspace", b.Op.Work, b.Work, graph.U8)
	if b.err != nil {
		return nil
	}
	if o.ptr.Len < n {
		b.failf("workspace (%s) has %d bytes, want %d", o.buf.Name, o.ptr.Len, n)
		return nil
	}
	if o.ptr.Off%workAlign != 0 {
		b.failf("workspace (%s) starts at byte %d, want a multiple of %d", o.buf.Name, o.ptr.Off, workAlign)
		return nil
	}
	o.out = true
	b.all = append(b.all, o)
	return slice[byte](o)[:n]
}

// workAlign is the alignment of a workspace in its arena, in bytes: a cache
// line and a 512-bit vector.
const workAlign = 64

// checkAliases refuses outputs that overlap another operand, except where they
// are the same range and the kind allows that.
func (b *binding) checkAliases() {
	for i, o := range b.all {
		if !o.out || o.ptr.Len == 0 {
			continue
		}
		for j, q := range b.all {
			if i == j || q.out && j < i || q.ptr.Arena != o.ptr.Arena ||
				o.ptr.Off >= q.ptr.Off+q.ptr.Len || q.ptr.Off >= o.ptr.Off+o.ptr.Len {
				continue
			}
			if o.ptr == q.ptr && slices.Contains(b.inPlace, [2]string{o.name, q.name}) {
				continue
			}
			b.failf("operands %s (%s) and %s (%s) overlap", o.name, o.buf.Name, q.name, q.buf.Name)
			return
		}
	}
}

// slice returns an operand's elements, nil for an absent one. The operand's
// dtype, place and length were checked when it was collected.
func slice[T any](o operand) []T {
	if !o.ok() {
		return nil
	}
	return devcpu.Slice[T](o.ptr)
}

func f32(o operand) []float32 { return slice[float32](o) }

// attr returns the operation's attribute struct.
func attr[A any](b *binding) A {
	a, ok := b.Op.Attr.(A)
	if !ok {
		b.failf("attribute is %s, want %T", typeName(b.Op.Attr), a)
	}
	return a
}

func typeName(v any) string {
	if v == nil {
		return "absent"
	}
	return strings.TrimPrefix(fmt.Sprintf("%T", v), "*")
}
