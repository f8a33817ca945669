package search

import (
	"cmp"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
)

// base holds the choices of a search other than its moves.
type base struct {
	batch, accum, zero, prefetch int
	precision                    precision.Precision
	layers                       bool // in layer order
}

// asBase returns the configuration's own values of these choices.
func (s *Spec) asBase() base {
	return base{s.Batch, s.Accum, s.Stage, s.Prefetch, s.Precision, s.inLayers()}
}

// apply sets a base's choices in a configuration.
func (b base) apply(s *Spec, asked *Spec) {
	s.Batch, s.Accum, s.Stage, s.Prefetch, s.Precision = b.batch, b.accum, b.zero, b.prefetch, b.precision
	s.LayerOrder, s.OrderChosen = asked.LayerOrder, false
	if b.accum > 1 {
		s.LayerOrder, s.OrderChosen = b.layers, b.layers != asked.LayerOrder
	}
}

// passes returns the number of times that a step makes activations for the backward: in layer order
// once, for all micro-batches together.
func (b base) passes() int {
	if b.layers {
		return 1
	}
	return b.accum
}

// point is a candidate: a configuration that a search evaluates.
type point struct {
	base
	set   *moveSet
	x     mix // nil: recompute and offload as given here
	again recompute.Options
	auto  bool // again is chosen by Auto
	away  offload.Options
	how   recipe // from which x was made

	perToken float64   // s, predicted
	device   int64     // bytes
	expected *measured // of x
}

// measured is the result of a plan with all layers, or of one extended from few layers.
type measured struct {
	seconds, forward float64                // of a step, and of its forward's computation
	need             [graph.NumSpaces]int64 // bytes, including those outside the arenas
	rests            int64                  // bytes that live all the run, of all spaces, including those outside the arenas
	atOnce           int64                  // bytes of device memory that one operation needs, and those outside the arena
	ops              int                    // of a step
	planned          int                    // of them, where all layers are planned: those of micros micro-batches
	err              error
}

// less orders points that are otherwise equal, so that a search on several processors has one
// outcome.
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

// comparePoints orders by predicted time. Among equals it orders by the number of moved kinds,
// since a plan of few layers may not show their cost, and then by device memory.
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
