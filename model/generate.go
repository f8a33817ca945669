package model

import "github.com/spillway-ml/spillway/graph"

// These functions differ between a forward over complete rows and one that continues from cached
// keys and values.

// promptRows is the number of tokens of a prompt that are computed at a time. That is enough to
// amortize reading the weights, and few enough that a short prompt or chat turn does not compute
// many unused ones.
const promptRows = 64

// PromptRows returns how many tokens a Prompt program for seq positions computes at a time.
func PromptRows(seq int) int { return min(seq, promptRows) }

// caches says whether the program caches keys and values.
func (w *writer) caches() bool { return w.kind == Prompt || w.kind == Next }

// places returns the positions of the tokens.
func (w *writer) places() graph.Value { return w.Positions(w.batch, w.seq) }

// positions adds the position table (P,C) to x (N,C).
func (w *writer) positions(name string, x, table graph.Value) graph.Value {
	if w.caches() {
		return w.Add(name, x, w.Embed(name+".rows", w.places(), table))
	}
	return w.AddPos(name, x, table, w.seq, graph.InPlace)
}

// turn applies rotary positions to x (N, heads·D).
func (w *writer) turn(name string, x graph.Value, heads int) graph.Value {
	if w.caches() {
		return w.RopeAt(name, x, w.places(), w.rope(heads), graph.InPlace)
	}
	return w.Rope(name, x, w.rope(heads), graph.InPlace)
}

// attend adds attention. If k and v are empty, q holds queries, keys and values side by side.
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
