package search

import (
	"math"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// A ladder is moves in an order that no cap on device memory changes: at position 0
// none is made, at position k the first k. What it offers under a cap is the lowest
// position that fits, a part of the last rung instead of all of it, and what is
// higher up. A lower cap leaves less of the same, so that the fastest of it is never
// faster.
type ladder struct {
	base
	set   *moveSet
	tier  tiering
	rungs []rung
}

// order changes the order of a ladder's moves.
type order struct {
	first []graph.Class // leave before anything else: what is cheaper for a byte is not needed where all of a large class goes
	last  bool          // classes leave after everything else: a part of one may cost more than it seems
}

// climbOrders are those of a ladder to the host or disk.
var climbOrders = []order{{}, {first: []graph.Class{graph.Optimizer}}, {first: []graph.Class{graph.Optimizer, graph.Parameters, graph.Gradients}}, {last: true}}

// newLadder has room on the host for hostFree bytes.
func (s *searcher) newLadder(b base, set *moveSet, t tiering, from *measured, hostFree float64, o order) *ladder {
	rungs := set.ladder(s.machine, from.forward, b.passes(), t, hostFree)
	rank := func(r rung) int {
		switch mv := &set.moves[r.move]; {
		case mv.kind != placeMove:
			return 0
		case slices.Contains(o.first, mv.class):
			return slices.Index(o.first, mv.class) - len(o.first)
		case o.last:
			return 1
		}
		return 0
	}
	slices.SortStableFunc(rungs, func(x, y rung) int { return rank(x) - rank(y) })
	return &ladder{base: b, set: set, tier: t, rungs: rungs}
}

// at is the configuration at a position.
func (l *ladder) at(k int) *point {
	p := &point{base: l.base, set: l.set, x: make(mix, len(l.set.moves)), tier: l.tier}
	for _, r := range l.rungs[:k] {
		p.x[r.move] = r.share
	}
	return p
}

// foot is the lowest position found within the cap on device memory; −1: not even
// the top is. Of two caps the lower has the higher foot, whatever the positions
// need: the bisections are the same until a position lies between the caps.
func (s *searcher) foot(l *ladder, mg margins) int {
	room := s.room(graph.Device, mg)
	fits := func(k int) bool {
		p := l.at(k)
		m := s.measure(p)
		if m.err != nil {
			return false
		}
		if room > 0 && m.need[graph.Device] > room {
			s.refused(p, m)
			return false
		}
		return true
	}
	lo, hi := 0, len(l.rungs)
	if !fits(hi) {
		return -1
	}
	for lo < hi {
		if mid := (lo + hi) / 2; fits(mid) {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return hi
}

// dip is how much less time a position may take than a lower one: moves cost time,
// but what waits for what changes with them.
const dip = 0.02

// offers are what a ladder has within the cap on device memory, whatever it takes
// of other spaces. What is higher up than where it takes longer than best s a token
// by more than dip is left out.
func (s *searcher) offers(l *ladder, mg margins, best float64) (list []*point) {
	k := s.foot(l, mg)
	if k < 0 {
		return nil
	}
	if k > 0 {
		list = s.parts(l, k, s.room(graph.Device, mg))
	}
	for ; k <= len(l.rungs); k++ {
		p := l.at(k)
		m := s.measure(p)
		if m.err != nil {
			continue
		}
		list = append(list, s.expect(p, m))
		if p.perToken*(1-dip) >= best {
			break
		}
		best = min(best, p.perToken)
	}
	return list
}

// least is the less of a time a token and what a point is sure to take.
func (p *point) least(best float64) float64 {
	if p.part != nil {
		return best
	}
	return min(best, p.perToken)
}

// expect notes what a point comes to.
func (s *searcher) expect(p *point, m *measured) *point {
	p.perToken, p.device, p.expected = s.perToken(p, m.seconds), m.need[graph.Device], m
	return p
}

// part says that i of n of a ladder's rung are made. What that comes to is expected
// to lie on the line between none and all of it.
type part struct {
	*ladder
	rung, i, n int
}

// parts make as little of a ladder's rung k as fits, or somewhat more: a part that
// comes out larger than expected has another behind it.
func (s *searcher) parts(l *ladder, k int, room int64) (list []*point) {
	none, all := s.measure(l.at(k-1)), s.measure(l.at(k))
	span := none.need[graph.Device] - all.need[graph.Device]
	if room == 0 || none.err != nil || all.err != nil || span <= 0 || all.seconds <= none.seconds {
		return nil // all of the rung costs no time
	}
	n := 100 // percent
	if mv := &l.set.moves[l.rungs[k-1].move]; mv.kind != placeMove {
		n = mv.layers(s.layers)
	}
	share := float64(none.need[graph.Device]-room) / float64(span)
	first := max(1, int(math.Ceil(share*float64(n))))
	for i := first; i < n; i++ {
		if i > first+2 && i*4%n >= 4 { // then the quarters
			continue
		}
		list = append(list, s.partOf(part{l, k, i, n}, none, all))
	}
	return list
}

// partOf is a part of a rung with what is expected of it.
func (s *searcher) partOf(of part, none, all *measured) *point {
	share := float64(of.i) / float64(of.n)
	line := func(a, b float64) float64 { return a + share*(b-a) }
	m := &measured{seconds: line(none.seconds, all.seconds), forward: line(none.forward, all.forward)}
	for sp := range m.need {
		m.need[sp] = int64(math.Ceil(line(float64(none.need[sp]), float64(all.need[sp]))))
	}
	p := of.at(of.rung)
	p.x[of.rungs[of.rung-1].move] *= share
	p.part = &of
	return s.expect(p, m)
}

// Levels of host memory that ladders leave to fill, each this much less than the
// one above; the first is all that could go there.
const (
	hostLevel  = 0.92
	hostLevels = 36
	mostLevels = 4 // ladders that are climbed of those below the cap
)

// climb finds what a base has within the caps in one tiering. Where the host's cap
// is in the way of the ladder that does not know it, ladders that leave less to the
// host take its place, with levels that do not depend on the cap. They take no less
// time than the ladder whose place they take: with the host's memory it would be
// there to be chosen.
func (s *searcher) climb(b base, set *moveSet, t tiering, mg margins, best float64) (found []*point) {
	from := s.measure(s.plain(b, set))
	if from.err != nil {
		return nil
	}
	within := func(list []*point) (ok []*point) {
		for _, p := range list {
			if _, fits := s.over(p.expected, mg); fits {
				ok = append(ok, p)
				best = p.least(best)
			} else {
				s.refused(p, p.expected)
			}
		}
		return ok
	}
	orders := climbOrders
	if t == onDevice {
		orders = orders[:1]
	}
	var seen [][]rung
	fresh := func(l *ladder) bool {
		if slices.ContainsFunc(seen, func(o []rung) bool { return slices.Equal(o, l.rungs) }) {
			return false
		}
		seen = append(seen, l.rungs)
		return true
	}
	blocked, floor := false, math.Inf(1)
	for _, o := range orders {
		l := s.newLadder(b, set, t, from, math.Inf(1), o)
		if !fresh(l) {
			continue
		}
		offers := s.offers(l, mg, best)
		ok := within(offers)
		blocked = blocked || len(ok) < len(offers)
		for _, p := range offers {
			floor = min(floor, p.perToken)
		}
		found = append(found, ok...)
	}
	if t != hostTier && t != hostThenDisk || !blocked {
		return found
	}
	most := 0.0
	for i := range set.moves {
		if mv := &set.moves[i]; mv.space == graph.Host && mv.kind != dropMove {
			most += mv.bytes
		}
	}
	room := float64(s.room(graph.Host, mg) - from.need[graph.Host])
	var under []*point
	level, climbed := most, 0
	for range hostLevels {
		level *= hostLevel
		if level > room {
			continue
		}
		for _, o := range orders {
			if l := s.newLadder(b, set, t, from, level, o); fresh(l) {
				climbed++
				under = append(under, within(s.offers(l, mg, best))...)
			}
		}
		if climbed >= mostLevels*len(orders) {
			break
		}
	}
	slower := slices.DeleteFunc(slices.Clone(under), func(p *point) bool { return p.perToken < floor })
	if len(found)+len(slower) > 0 {
		under = slower
	}
	return append(found, under...)
}
