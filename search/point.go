package search

import (
	"cmp"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
)

// base is what a search decides beside the moves.
type base struct {
	batch, accum, zero, prefetch int
	precision                    precision.Precision
	layers                       bool // in layer order
}

// asBase is what a search decides beside the moves, as it is.
func (s *Spec) asBase() base {
	return base{s.Batch, s.Accum, s.Stage, s.Prefetch, s.Precision, s.inLayers()}
}

// apply makes a base's choices.
func (b base) apply(s *Spec, asked *Spec) {
	s.Batch, s.Accum, s.Stage, s.Prefetch, s.Precision = b.batch, b.accum, b.zero, b.prefetch, b.precision
	s.LayerOrder, s.OrderChosen = asked.LayerOrder, false
	if b.accum > 1 {
		s.LayerOrder, s.OrderChosen = b.layers, b.layers != asked.LayerOrder
	}
}

// passes is how often a step goes through what the forward leaves for the backward:
// in layer order once, with the activations of all micro-batches.
func (b base) passes() int {
	if b.layers {
		return 1
	}
	return b.accum
}

// point is a configuration that a search looks at.
type point struct {
	base
	set   *moveSet
	x     mix // nil: recompute and offload as given here
	again recompute.Options
	auto  bool // again is to be chosen
	away  offload.Options
	how   recipe // that x was made of

	perToken float64   // s, predicted
	device   int64     // bytes
	expected *measured // of x
}

// measured is what a plan says: whole, or extended from few layers.
type measured struct {
	seconds, forward float64                // of a step, and its forward's computing
	need             [graph.NumSpaces]int64 // with what is outside the arenas
	rests            int64                  // bytes that live all the run, of all spaces, with what is outside the arenas
	atOnce           int64                  // bytes of device memory that one operation needs, with what is outside the arena
	ops              int                    // of a step
	planned          int                    // of them, where all layers are planned: those of micros micro-batches
	err              error
}

// less orders points where nothing else does, so that a search on several
// processors has one outcome.
func (p *point) less(q *point) bool {
	return cmp.Or(cmp.Compare(p.zero, q.zero), cmp.Compare(p.batch, q.batch), cmp.Compare(p.prefetch, q.prefetch),
		cmp.Compare(p.precision.String(), q.precision.String()), compareOrders(p.layers, q.layers), slices.Compare(p.x, q.x),
		cmp.Compare(p.away.String(), q.away.String()), cmp.Compare(p.again.String(), q.again.String())) < 0
}

// compareOrders is cmp.Compare for orders of micro-batches: layer order first.
func compareOrders(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// comparePoints orders by predicted time; of equals, by how many kinds are moved, since few layers may not
// show what these take, and then by memory on the device.
func comparePoints(a, b *point) int {
	return cmp.Or(cmp.Compare(a.perToken, b.perToken), cmp.Compare(a.x.moved(), b.x.moved()), cmp.Compare(a.device, b.device))
}

// moved counts the moves of a mix.
func (x mix) moved() (n int) {
	for _, share := range x {
		if share > 0 {
			n++
		}
	}
	return n
}
