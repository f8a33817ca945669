package search

import (
	"context"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/recompute"
)

// Feasible reports whether a configuration that Fit could choose may fit. It examines the smallest
// one, by lower bounds and with a few plans. If it returns false, Fit finds nothing either, and
// least is the share of a cap that the nearest of these plans needs. If it returns true, placement
// may still need more.
func Feasible(ctx context.Context, s Spec, given Given, rows int, hw Hardware) (fits bool, least float64, err error) {
	hw.prefer(&s, given)
	hw.assumed(&s)
	d, err := newFitDomain(&s, given, nil, rows)
	if err != nil {
		return false, 0, err
	}
	drop := !given.Recompute || s.Auto
	if s.Auto {
		s.Recompute, s.Auto = recompute.Options{}, false
	}
	var spaces []graph.Space
	if !given.Offload {
		spaces = s.tiers()
	}
	w := newSearcher(ctx, s, hw.Machine(s.Ranks), drop, spaces)
	if hw.Budget != nil {
		if err := w.allow(&hw); err != nil {
			return false, 0, err
		}
	}
	b := d.smallest()
	set, err := w.moves(b)
	if err != nil {
		return false, 0, err
	}
	from := w.measure(w.plain(b, set))
	if from.err != nil {
		return false, 0, from.err
	}
	if _, fits := w.over(from, margins{}); fits {
		return true, 0, nil
	}
	w.refused(w.plain(b, set), from)
	fits = !w.hopeless(from) && w.newFiller(b, set, from).fits() != nil
	return fits, w.excess, ctx.Err()
}

// smallest returns the base of a domain that needs the least memory: the highest stage, the
// smallest micro-batch, the least prefetch.
func (d fitDomain) smallest() base {
	b := d.batches[len(d.batches)-1]
	least := d.prefetches[0]
	for _, n := range d.prefetches {
		least = min(least, n)
	}
	return base{b[0], b[1], d.zeros[0], least, d.precisions[0], d.orders[0] && b[1] > 1}
}
