package cpu

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/attn"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

func attnShape(a graph.AttentionAttr) attn.Shape {
	return attn.Shape{B: int(a.Batch), Tq: int(a.Seq), Tk: int(a.Seq), H: int(a.Heads), KV: int(a.KVHeads), D: int(a.HeadDim), Causal: a.Causal, Window: int(a.Window)}
}

// heads holds the queries, keys and values: side by side in the rows of one buffer (packed), or
// in three separate buffers.
type heads[T any] struct {
	q, k, v   []T
	ldq, ldkv int // row strides in elements
	operands  int // number of operands: 1 if packed, else 3
}

func attnHeads[T any](a graph.AttentionAttr, get func(i int) []T) heads[T] {
	wq, wkv := int(a.Heads*a.HeadDim), int(a.KVHeads*a.HeadDim)
	if !a.Packed {
		return heads[T]{get(0), get(1), get(2), wq, wkv, 3}
	}
	s := get(0)
	if len(s) < wq+2*wkv {
		return heads[T]{operands: 1}
	}
	return heads[T]{s, s[wq:], s[wq+wkv:], wq + 2*wkv, wq + 2*wkv, 1}
}

func bindAttention16(b *binding, a graph.AttentionAttr) func() error {
	h := attnHeads(a, func(i int) []uint16 { return in[uint16](b, i) })
	f := &attn.Forward[float32]{
		Shape: attnShape(a), Scale: float32(a.Scale), Cap: float32(a.Cap), As: b.asIn(0),
		Q16: h.q, K16: h.k, V16: h.v, Y16: out[uint16](b, 0), Lse: out[float32](b, 1),
		LdQ: h.ldq, LdK: h.ldkv, LdV: h.ldkv, Starts: in[float32](b, h.operands),
	}
	work := slab(b.work(workspace(b.Program, b.Op)))
	f.Work = take[float32](&work, int64(attn.ForwardWorkspace(f.Shape)))
	pool := b.pool
	return func() error { return f.Run(pool) }
}

func bindAttentionGrad16(b *binding, a graph.AttentionAttr) func() error {
	h := attnHeads(a, func(i int) []uint16 { return in[uint16](b, i) })
	d := attnHeads(a, func(i int) []uint16 { return out[uint16](b, i) })
	n := h.operands
	f := &attn.Backward[float32]{
		Shape: attnShape(a), Scale: float32(a.Scale), Cap: float32(a.Cap), As: b.asIn(0),
		Q16: h.q, K16: h.k, V16: h.v,
		Y16: in[uint16](b, n), Lse: in[float32](b, n+1), Dy16: in[uint16](b, n+2),
		Dq16: d.q, Dk16: d.k, Dv16: d.v,
		LdQ: h.ldq, LdK: h.ldkv, LdV: h.ldkv, LdDq: d.ldq, LdDk: d.ldkv, LdDv: d.ldkv, Starts: in[float32](b, n+3),
	}
	work := slab(b.work(workspace(b.Program, b.Op)))
	f.Work = take[float32](&work, int64(attn.BackwardWorkspace16(f.Shape)))
	pool := b.pool
	return func() error { return f.Run(pool) }
}

func bindAttention(b *binding) func() error {
	a := attr[graph.AttentionAttr](b)
	if b.asIn(0) != vec.NoHalf {
		return bindAttention16(b, a)
	}
	h := attnHeads(a, func(i int) []float32 { return in[float32](b, i) })
	f := &attn.Forward[float32]{
		Shape: attnShape(a), Scale: float32(a.Scale), Cap: float32(a.Cap),
		Q: h.q, K: h.k, V: h.v, Y: out[float32](b, 0), Lse: out[float32](b, 1),
		LdQ: h.ldq, LdK: h.ldkv, LdV: h.ldkv, Starts: in[float32](b, h.operands),
	}
	work := slab(b.work(workspace(b.Program, b.Op)))
	f.Work = take[float32](&work, int64(attn.ForwardWorkspace(f.Shape)))
	pool := b.pool
	return func() error { return f.Run(pool) }
}

func bindAttentionGrad(b *binding) func() error {
	a := attr[graph.AttentionAttr](b)
	if b.asIn(0) != vec.NoHalf {
		return bindAttentionGrad16(b, a)
	}
	h := attnHeads(a, func(i int) []float32 { return in[float32](b, i) })
	d := attnHeads(a, func(i int) []float32 { return out[float32](b, i) })
	n := h.operands
	f := &attn.Backward[float32]{
		Shape: attnShape(a), Scale: float32(a.Scale), Cap: float32(a.Cap),
		Q: h.q, K: h.k, V: h.v,
		Y: in[float32](b, n), Lse: in[float32](b, n+1), Dy: in[float32](b, n+2),
		Dq: d.q, Dk: d.k, Dv: d.v,
		LdQ: h.ldq, LdK: h.ldkv, LdV: h.ldkv, LdDq: d.ldq, LdDk: d.ldkv, LdDv: d.ldkv, Starts: in[float32](b, n+3),
	}
	work := slab(b.work(workspace(b.Program, b.Op)))
	f.Work = take[float32](&work, int64(attn.BackwardWorkspace(f.Shape)))
	pool := b.pool
	return func() error { return f.Run(pool) }
}
