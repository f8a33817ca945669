package cpu

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/attn"
)

func attnShape(a graph.AttentionAttr) attn.Shape {
	return attn.Shape{B: int(a.Batch), Tq: int(a.Seq), Tk: int(a.Seq), H: int(a.Heads), KV: int(a.KVHeads), D: int(a.HeadDim), Causal: a.Causal}
}

// heads is where queries, keys and values lie: side by side in the rows of one
// buffer, or in a buffer each.
type heads struct {
	q, k, v   []float32
	ldq, ldkv int // row strides in elements
	operands  int // that hold them
}

func attnHeads(a graph.AttentionAttr, get func(i int) []float32) heads {
	wq, wkv := int(a.Heads*a.HeadDim), int(a.KVHeads*a.HeadDim)
	if !a.Packed {
		return heads{get(0), get(1), get(2), wq, wkv, 3}
	}
	s := get(0)
	if len(s) < wq+2*wkv {
		return heads{operands: 1}
	}
	return heads{s, s[wq:], s[wq+wkv:], wq + 2*wkv, wq + 2*wkv, 1}
}

func bindAttention(b *binding) func() error {
	a := attr[graph.AttentionAttr](b)
	h := attnHeads(a, func(i int) []float32 { return in[float32](b, i) })
	f := &attn.Forward[float32]{
		Shape: attnShape(a), Scale: float32(a.Scale),
		Q: h.q, K: h.k, V: h.v, Y: out[float32](b, 0), Lse: out[float32](b, 1),
		LdQ: h.ldq, LdK: h.ldkv, LdV: h.ldkv,
	}
	work := slab(b.work(workspace(b.Program, b.Op)))
	f.Work = take[float32](&work, int64(attn.ForwardWorkspace(f.Shape)))
	pool := b.pool
	return func() error { return f.Run(pool) }
}

func bindAttentionGrad(b *binding) func() error {
	a := attr[graph.AttentionAttr](b)
	h := attnHeads(a, func(i int) []float32 { return in[float32](b, i) })
	d := attnHeads(a, func(i int) []float32 { return out[float32](b, i) })
	n := h.operands
	f := &attn.Backward[float32]{
		Shape: attnShape(a), Scale: float32(a.Scale),
		Q: h.q, K: h.k, V: h.v,
		Y: in[float32](b, n), Lse: in[float32](b, n+1), Dy: in[float32](b, n+2),
		Dq: d.q, Dk: d.k, Dv: d.v,
		LdQ: h.ldq, LdK: h.ldkv, LdV: h.ldkv, LdDq: d.ldq, LdDk: d.ldkv, LdDv: d.ldkv,
	}
	work := slab(b.work(workspace(b.Program, b.Op)))
	f.Work = take[float32](&work, int64(attn.BackwardWorkspace(f.Shape)))
	pool := b.pool
	return func() error { return f.Run(pool) }
}
