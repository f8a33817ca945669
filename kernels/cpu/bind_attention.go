package cpu

import (
	"unsafe"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/attn"
)

// attnShape checks an attention's attribute and the rows of its operands.
func (b *binding) attnShape(a graph.AttentionAttr) attn.Shape {
	s := attn.Shape{B: int(a.Batch), Tq: int(a.Seq), Tk: int(a.Seq), H: int(a.Heads), KV: int(a.KVHeads), D: int(a.HeadDim), Causal: a.Causal}
	if err := s.Validate(); err != nil && b.err == nil {
		b.failf("%w", err)
	}
	return s
}

// qkv is where the heads of queries, keys and values lie, packed in rows of one
// buffer or in a buffer each.
type qkv struct {
	q, k, v   []float32
	ldq, ldkv int // row strides
}

// attnOperands collects q, k and v, or the packed qkv, from get(i, name).
func (b *binding) attnOperands(a graph.AttentionAttr, prefix string, get func(i int, name string) operand) (r qkv, used int) {
	n := a.Batch * a.Seq
	wq, wkv := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
	if a.Packed {
		o := get(0, prefix+"qkv")
		b.matrix(o, n, wq+2*wkv)
		if b.err != nil {
			return r, 1
		}
		s := f32(o)
		if len(s) == 0 {
			return r, 1
		}
		ld := int(wq + 2*wkv)
		return qkv{q: s, k: s[wq:], v: s[wq+wkv:], ldq: ld, ldkv: ld}, 1
	}
	q, k, v := get(0, prefix+"q"), get(1, prefix+"k"), get(2, prefix+"v")
	b.matrix(q, n, wq)
	b.matrix(k, n, wkv)
	b.matrix(v, n, wkv)
	if b.err != nil {
		return r, 3
	}
	return qkv{q: f32(q), k: f32(k), v: f32(v), ldq: int(wq), ldkv: int(wkv)}, 3
}

func bindAttention(b *binding) func() error {
	b.arity(3, 2)
	a := attr[graph.AttentionAttr](b)
	shape := b.attnShape(a)
	in, _ := b.attnOperands(a, "", func(i int, name string) operand { return b.in(i, name, graph.F32) })
	y := b.out(0, "y", graph.F32, modeW...)
	lse := b.out(1, "lse", graph.F32, modeW...)
	b.matrix(y, a.Batch*a.Seq, a.Heads*a.HeadDim)
	b.vector(lse, a.Batch*a.Heads*a.Seq)
	work := floats(b.work(4 * int64(attn.ForwardWorkspace(shape))))
	if b.err != nil {
		return nil
	}
	f := &attn.Forward[float32]{
		Shape: shape, Scale: float32(a.Scale),
		Q: in.q, K: in.k, V: in.v, Y: f32(y), Lse: f32(lse), Work: work,
		LdQ: in.ldq, LdK: in.ldkv, LdV: in.ldkv,
	}
	pool := b.pool
	return func() error { return f.Run(pool) }
}

func bindAttentionGrad(b *binding) func() error {
	b.arity(6, 3)
	a := attr[graph.AttentionAttr](b)
	shape := b.attnShape(a)
	in, n := b.attnOperands(a, "", func(i int, name string) operand { return b.in(i, name, graph.F32) })
	y, lse, dy := b.in(n, "y", graph.F32), b.in(n+1, "lse", graph.F32), b.in(n+2, "dy", graph.F32)
	out, _ := b.attnOperands(a, "d", func(i int, name string) operand { return b.out(i, name, graph.F32, modeW...) })
	b.matrix(y, a.Batch*a.Seq, a.Heads*a.HeadDim)
	b.matrix(dy, a.Batch*a.Seq, a.Heads*a.HeadDim)
	b.vector(lse, a.Batch*a.Heads*a.Seq)
	work := floats(b.work(4 * int64(attn.BackwardWorkspace(shape))))
	if b.err != nil {
		return nil
	}
	f := &attn.Backward[float32]{
		Shape: shape, Scale: float32(a.Scale),
		Q: in.q, K: in.k, V: in.v, Y: f32(y), Dy: f32(dy), Lse: f32(lse),
		Dq: out.q, Dk: out.k, Dv: out.v, Work: work,
		LdQ: in.ldq, LdK: in.ldkv, LdV: in.ldkv, LdDq: out.ldq, LdDk: out.ldkv, LdDv: out.ldkv,
	}
	pool := b.pool
	return func() error { return f.Run(pool) }
}

// floats views workspace bytes, whose start is aligned, as float32.
func floats(b []byte) []float32 {
	if len(b) < 4 {
		return nil
	}
	return unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/4)
}

// doubles views workspace bytes as float64, words as int64.
func doubles(b []byte) []float64 {
	if len(b) < 8 {
		return nil
	}
	return unsafe.Slice((*float64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
}

func words(b []byte) []int64 {
	if len(b) < 8 {
		return nil
	}
	return unsafe.Slice((*int64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
}
