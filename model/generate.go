package model

import "github.com/spillway-ml/spillway/graph"

// What differs between a forward over whole rows and one that goes on from keys
// and values that are kept.

// promptRows is how many rows of a prompt are computed at a time: enough that reading the
// weights costs little, few enough that a short prompt, or what a chat adds, does not wait
// for rows that it does not have.
const promptRows = 64

// PromptRows is how many rows a Prompt of so many positions computes at a time.
func PromptRows(seq int) int { return min(seq, promptRows) }

// caches says that keys and values are kept.
func (w *writer) caches() bool { return w.kind == Prompt || w.kind == Next }

// places are the positions of the rows.
func (w *writer) places() graph.Value { return w.Positions(w.batch, w.seq) }

// positions adds the table of positions (P,C) to x (N,C).
func (w *writer) positions(name string, x, table graph.Value) graph.Value {
	if w.caches() {
		return w.Add(name, x, w.Embed(name+".rows", w.places(), table))
	}
	return w.AddPos(name, x, table, w.seq, graph.InPlace)
}

// turn gives x (N, heads·D) its rotary positions.
func (w *writer) turn(name string, x graph.Value, heads int) graph.Value {
	if w.caches() {
		return w.RopeAt(name, x, w.places(), w.rope(heads), graph.InPlace)
	}
	return w.Rope(name, x, w.rope(heads), graph.InPlace)
}

// attend is attention; with k and v none, q is all three side by side.
func (w *writer) attend(name string, q, k, v graph.Value, a graph.AttentionAttr) graph.Value {
	if w.caches() {
		width := a.KVHeads * a.HeadDim
		keys, values := w.Cache("cache/"+name+".keys", w.slots, w.kept, width), w.Cache("cache/"+name+".values", w.slots, w.kept, width)
		return w.AttentionCached(name, q, k, v, w.places(), keys, values, a)
	}
	if k.None() {
		return w.AttentionPacked(name, q, a)
	}
	return w.Attention(name, q, k, v, a)
}
