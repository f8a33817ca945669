package model

import "github.com/spillway-ml/spillway/graph"

// What differs between a forward over whole rows and one that goes on from keys
// and values that are kept.

// capacity is how many positions are kept: the caches' rows.
func (w *writer) capacity() int64 { return w.kept }

// positions adds the table of positions (P,C) to x (N,C).
func (w *writer) positions(name string, x, table graph.Value) graph.Value {
	if w.kind == Next {
		return w.Add(name, x, w.SelectRow(name+".row", table))
	}
	return w.AddPos(name, x, table, w.seq, graph.InPlace)
}

// turn gives x (N, heads·D) its rotary positions.
func (w *writer) turn(name string, x graph.Value, heads int) graph.Value {
	if w.kind == Next {
		return w.RopeAt(name, x, w.rope(heads), graph.InPlace)
	}
	return w.Rope(name, x, w.rope(heads), graph.InPlace)
}

// attend is attention; with k and v none, q is all three side by side.
func (w *writer) attend(name string, q, k, v graph.Value, a graph.AttentionAttr) graph.Value {
	if w.kind == Prompt || w.kind == Next {
		width := a.KVHeads * a.HeadDim
		keys, values := w.Cache("cache/"+name+".keys", w.capacity(), width), w.Cache("cache/"+name+".values", w.capacity(), width)
		return w.AttentionCached(name, q, k, v, keys, values, a)
	}
	if k.None() {
		return w.AttentionPacked(name, q, a)
	}
	return w.Attention(name, q, k, v, a)
}
