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
type heads struct {
	q, k, v   matrix
	ldq, ldkv int // row strides in elements
	operands  int // number of operands: 1 if packed, else 3
}

func attnHeads(a graph.AttentionAttr, get func(i int) matrix) heads {
	wq, wkv := int(a.Heads*a.HeadDim), int(a.KVHeads*a.HeadDim)
	if !a.Packed {
		return heads{get(0), get(1), get(2), wq, wkv, 3}
	}
	s := get(0)
	if s.len() < wq+2*wkv {
		return heads{operands: 1}
	}
	return heads{s, s.from(wq), s.from(wq + wkv), wq + 2*wkv, wq + 2*wkv, 1}
}

func bindAttention(b *binding) func() error {
	a := attr[graph.AttentionAttr](b)
	h, y := attnHeads(a, b.inMatrix), b.outMatrix(0)
	f := &attn.Forward[float32]{
		Shape: attnShape(a), Scale: float32(a.Scale), Cap: float32(a.Cap), As: b.asIn(0),
		Q: h.q.f32, K: h.k.f32, V: h.v.f32, Y: y.f32, Q16: h.q.u16, K16: h.k.u16, V16: h.v.u16, Y16: y.u16,
		Lse: out[float32](b, 1), LdQ: h.ldq, LdK: h.ldkv, LdV: h.ldkv, Starts: in[float32](b, h.operands),
	}
	work := b.work()
	f.Work = take[float32](&work, int64(attn.ForwardWorkspace(f.Shape)))
	return b.run(f)
}

func bindAttentionGrad(b *binding) func() error {
	a := attr[graph.AttentionAttr](b)
	h, d := attnHeads(a, b.inMatrix), attnHeads(a, b.outMatrix)
	n := h.operands
	y, dy := b.inMatrix(n), b.inMatrix(n+2)
	f := &attn.Backward[float32]{
		Shape: attnShape(a), Scale: float32(a.Scale), Cap: float32(a.Cap), As: b.asIn(0),
		Q: h.q.f32, K: h.k.f32, V: h.v.f32, Y: y.f32, Dy: dy.f32, Dq: d.q.f32, Dk: d.k.f32, Dv: d.v.f32,
		Q16: h.q.u16, K16: h.k.u16, V16: h.v.u16, Y16: y.u16, Dy16: dy.u16, Dq16: d.q.u16, Dk16: d.k.u16, Dv16: d.v.u16,
		Lse: in[float32](b, n+1), Starts: in[float32](b, n+3),
		LdQ: h.ldq, LdK: h.ldkv, LdV: h.ldkv, LdDq: d.ldq, LdDk: d.ldkv, LdDv: d.ldkv,
	}
	size := attn.BackwardWorkspace
	if f.As != vec.NoHalf {
		size = attn.BackwardWorkspace16
	}
	work := b.work()
	f.Work = take[float32](&work, int64(size(f.Shape)))
	return b.run(f)
}
