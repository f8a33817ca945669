package search

import (
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/recompute"
)

// presets are whole classes and policies, which a person would try.
func (s *searcher) presets(b base, set *moveSet) []*point {
	again, away := []recompute.Options{set.recompute}, []offload.Options{set.offload}
	if set.canDrop {
		again = []recompute.Options{{}, policyOf(recompute.Selective), policyOf(recompute.Full)}
	}
	if set.canOffload {
		away = away[:0]
		for _, classes := range wholePlacements {
			away = append(away, resting(classes, graph.Host))
			if len(classes) > 0 && slices.Contains(s.spaces, graph.Disk) {
				away = append(away, resting(classes, graph.Disk))
			}
		}
	}
	var list []*point
	for _, o := range away {
		for _, r := range again {
			list = append(list, &point{base: b, set: set, again: r, away: o, tier: presetTier})
		}
	}
	return list
}

// wholePlacements are classes that leave the device, each row a step further than the
// one before.
var wholePlacements = [][]graph.Class{nil, {graph.Optimizer}, {graph.Activations}, {graph.Optimizer, graph.Activations}, {graph.Optimizer, graph.Parameters, graph.Activations},
	{graph.Optimizer, graph.Parameters, graph.Gradients, graph.Activations}}

// resting has whole classes in a space.
func resting(classes []graph.Class, space graph.Space) (o offload.Options) {
	for _, c := range classes {
		switch c {
		case graph.Optimizer:
			o.Optimizer = space
		case graph.Parameters:
			o.Parameters = space
		case graph.Gradients:
			o.Gradients = space
		default:
			o.Activations = space
		}
	}
	return o
}

// policyOf is a policy for all units.
func policyOf(p recompute.Policy) recompute.Options {
	return recompute.Options{Rules: []recompute.Rule{{Policy: p, Unit: "*"}}}
}

// isFull says that everything is computed again.
func isFull(o recompute.Options) bool {
	return len(o.Drop) == 0 && len(o.Rules) == 1 && o.Rules[0] == recompute.Rule{Policy: recompute.Full, Unit: "*"}
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

// branch finds what fits of a base: the offers of its ladders, and the presets.
// A base is no faster than it is without any move, unless a class that leaves saves
// time.
func (s *searcher) branch(b base, saves bool, best float64) (found []*point) {
	set, err := s.moves(b)
	if err != nil {
		return nil
	}
	plain := s.plain(b, set)
	from := s.measure(plain)
	if from.err != nil || s.notWorth(b, from) {
		return nil
	}
	_, fits := s.over(from, margins{})
	if fits {
		found = append(found, s.expect(plain, from))
		best = min(best, plain.perToken)
		if !saves {
			return found
		}
	} else {
		s.refused(plain, from)
	}
	if s.hopeless(from) {
		s.refuseAll(b, set)
		return nil
	}
	set = s.priced(b, set, from)
	for _, t := range set.tierings() {
		if t == onDevice && !set.canDrop {
			continue
		}
		for _, p := range s.climb(b, set, t, margins{}, best) {
			found = append(found, p)
			best = p.least(best)
		}
	}
	if !fits {
		found = append(found, s.ready(b, set, from, best)...)
	}
	if !saves {
		least := s.perToken(plain, from.seconds)
		found = slices.DeleteFunc(found, func(p *point) bool { return p.perToken < least })
	}
	return found
}

// ready are the presets within the caps. Those of a placement are left out whose
// classes cost more time than best, and where it is over a cap with everything computed
// again.
func (s *searcher) ready(b base, set *moveSet, from *measured, best float64) (found []*point) {
	blocked := map[string]bool{} // by placement
	list := s.presets(b, set)
	slices.Reverse(list) // the most that is computed again first
	for _, p := range list {
		seconds := from.seconds
		for _, mv := range set.moves {
			if mv.kind == placeMove && p.away.Whole(mv.class) == mv.space {
				seconds += mv.seconds
			}
		}
		away := p.away.String()
		if blocked[away] || s.perToken(p, seconds)*(1-dip) >= best {
			continue
		}
		m := s.measure(p)
		if m.err != nil {
			continue
		}
		if _, ok := s.over(m, margins{}); !ok {
			s.refused(p, m)
			blocked[away] = isFull(p.again)
			continue
		}
		found = append(found, s.expect(p, m))
	}
	return found
}

// worthAnOrder is how much faster layer order must be than micro order that fits as it
// is: it needs more memory, and a tied head's sums get bits of their own.
const worthAnOrder = 1.01

// notWorth says that a base in layer order wins nothing over the same in micro order.
func (s *searcher) notWorth(b base, from *measured) bool {
	if !b.layers || s.spec.LayerOrder {
		return false
	}
	b.layers = false
	set, err := s.moves(b)
	if err != nil {
		return false
	}
	m := s.measure(s.plain(b, set))
	if m.err != nil {
		return false
	}
	_, fits := s.over(m, margins{})
	return fits && m.seconds <= worthAnOrder*from.seconds
}
