// Package recompute drops activations after the forward and recomputes them before the backward
// that reads them (activation checkpointing: Chen et al., "Training Deep Nets with Sublinear
// Memory Cost", 2016; the selective policy follows Korthikanti et al., "Reducing Activation
// Recomputation in Large Transformer Models", 2022, section 5).
//
// The rewrite works on the differentiated program, before it is sharded: a clone (an operation that
// recomputes) reads a unit's parameters next to the unit's backward, so that both share one
// all-gather.
//
//	before:  x ─ ln ─ a ─ fc ─ b ─ proj ─ y │ … │ dproj(b) ─ dfc(a) ─ dln(x)
//	full:    x ─ ln ─ a ─ fc ─ b ─ proj ─ y │ … │ ln' ─ fc' ─ dproj(b') ─ dfc(a') ─ dln(x)
//
// Values that pass from one unit to the next (x, y) are kept; a and b are dropped in the forward. A
// clone runs the same kernel on the same bytes with the same attributes, including a dropout's
// site, so every bit is the same.
package recompute
