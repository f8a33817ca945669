package search

import (
	"cmp"
	"errors"
	"math"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// queue is a search over models that are planned whole. What it chooses from is such
// that less memory is never faster: no cap changes which configurations there are, nor
// what is left out for being faster than what needs more memory; a lower cap only has
// fewer of them, and what another cap's bisection doesn't come to has something at
// least as fast that it does come to. Nothing is left out for being slower than what
// may turn out not to fit: it waits under the least time that it may have, and the
// search ends once that is no less than the time of a plan that fits.
type queue struct {
	*searcher
	saves   bool // classes that leave may save time
	presets bool // whole classes and policies are tried too
	open    []waiting
	shown   map[string]bool // configurations that wait, or did
	failed  map[string]bool // over a cap when they were placed
	over    map[outcome]bool
	bases   map[base]*bounded
	found   []*point
}

// outcome tells plans of a base apart: other shares may come to the same units.
type outcome struct {
	base
	seconds float64
	need    [graph.NumSpaces]int64
}

// bounded is a base with the least time a token that counts: what takes less is left
// out under every cap.
type bounded struct {
	base
	set   *moveSet // with what classes save
	from  *measured
	floor float64
}

// waiting is a point to be planned or, where it has none, what open does to find some.
type waiting struct {
	least  float64 // time a token
	device int64   // bytes
	point  *point
	open   func()
}

func newQueue(s *searcher) *queue {
	return &queue{searcher: s, shown: map[string]bool{}, failed: map[string]bool{}, over: map[outcome]bool{}, bases: map[base]*bounded{}}
}

// wait keeps the order: the least time first, of equals the least device memory, then
// what came first.
func (q *queue) wait(w waiting) {
	k, _ := slices.BinarySearchFunc(q.open, w, func(a, b waiting) int {
		return cmp.Or(cmp.Compare(a.least, b.least), cmp.Compare(a.device, b.device), -1)
	})
	q.open = slices.Insert(q.open, k, w)
}

// fits says whether a point is within the caps, as far as is known.
func (q *queue) fits(p *point, m *measured) bool {
	if m.err != nil {
		return false
	}
	if _, ok := q.searcher.over(m, margins{}); !ok {
		q.refused(p, m)
		return false
	}
	c := q.whole(p)
	return !q.failed[keyOf(&c)] && !q.over[outcome{p.base, m.seconds, m.need}]
}

// show lets a point wait to be planned that is within the caps and takes no less than
// the least that counts.
func (q *queue) show(b *bounded, p *point) {
	m := q.measure(p)
	if !q.fits(p, m) {
		return
	}
	q.expect(p, m)
	c := q.whole(p)
	if key := keyOf(&c); p.perToken >= b.floor && !q.shown[key] {
		q.shown[key] = true
		q.found = append(q.found, p)
		q.wait(waiting{p.perToken, p.device, p, nil})
	}
}

// begin lets bases wait, with presets too.
func (q *queue) begin(starts []base) {
	q.presets = true
	list := make([]*bounded, len(starts))
	plan.Parallel(len(starts), func(i int) {
		set, err := q.moves(starts[i])
		if err != nil {
			return
		}
		if m := q.measure(q.plain(starts[i], set)); m.err == nil {
			list[i] = &bounded{base: starts[i], set: set, from: m}
		}
	})
	list = slices.DeleteFunc(list, func(b *bounded) bool { return b == nil })
	if len(list) == 0 {
		return
	}
	q.saves = q.saved(slices.MinFunc(list, func(a, b *bounded) int { return cmp.Compare(q.least(a), q.least(b)) }).base) > 0
	for _, b := range list {
		b.floor = max(q.least(b), q.orderFloor(b))
		if q.saves {
			b.floor *= 1 - mostSaved
		}
		q.bases[b.base] = b
		q.wait(waiting{b.floor, 0, nil, func() { q.branch(b) }})
	}
}

// least is the time a token without any move.
func (q *queue) least(b *bounded) float64 {
	return q.perToken(q.plain(b.base, b.set), b.from.seconds)
}

// orderFloor is what layer order has to take where it wins nothing over the same in
// micro order: no less than that.
func (q *queue) orderFloor(b *bounded) float64 {
	if !b.layers || q.spec.LayerOrder {
		return 0
	}
	micro := b.base
	micro.layers = false
	set, err := q.moves(micro)
	if err != nil {
		return 0
	}
	m := q.measure(q.plain(micro, set))
	if m.err != nil || m.seconds > worthAnOrder*b.from.seconds {
		return 0
	}
	return q.perToken(q.plain(micro, set), m.seconds)
}

// drops has a base of its own alone, without presets, whatever time it takes.
func (q *queue) drops(b base, set *moveSet, from *measured) {
	only := &bounded{base: b, set: set, from: from}
	q.bases[b] = only
	q.offers(only)
}

// branch lets a base's own time wait, and behind it what its moves offer.
func (q *queue) branch(b *bounded) {
	if q.saves {
		if least := max(q.least(b), q.orderFloor(b)) - q.saved(b.base); least > b.floor {
			b.floor = least
			q.wait(waiting{least, 0, nil, func() { q.offers(b) }})
			return
		}
	}
	q.offers(b)
}

// offers lets wait what fits of a base: all positions of its ladders from the foot up,
// parts of the foot's rung, and presets.
func (q *queue) offers(b *bounded) {
	plain := q.plain(b.base, b.set)
	q.show(b, plain)
	if q.fits(plain, b.from) && !q.saves {
		return // nothing of it that counts takes less
	}
	if b.set.canOffload {
		b.set = q.priced(b.base, b.set, b.from)
	}
	ladders := q.ladders(b)
	feet := make([]int, len(ladders))
	plan.Parallel(len(ladders), func(i int) {
		feet[i] = q.foot(ladders[i], margins{})
		for k := max(feet[i], 0); k <= len(ladders[i].rungs) && feet[i] >= 0; k++ {
			q.measure(ladders[i].at(k))
		}
	})
	for i, l := range ladders {
		if feet[i] < 0 {
			continue
		}
		for k := feet[i]; k <= len(l.rungs); k++ {
			q.show(b, l.at(k))
		}
		if feet[i] > 0 {
			q.waitForParts(b, l, feet[i])
		}
	}
	if q.presets {
		q.waitForPresets(b)
	}
}

// ladders are all that a base has: of each tiering in each order, as if the host's
// memory had no end, and with each level of it that the cap has room for.
func (q *queue) ladders(b *bounded) (list []*ladder) {
	most := 0.0
	for i := range b.set.moves {
		if mv := &b.set.moves[i]; mv.space == graph.Host && mv.kind != dropMove {
			most += mv.bytes
		}
	}
	room := math.Inf(1)
	if limit := q.room(graph.Host, margins{}); limit > 0 {
		room = float64(limit - b.from.need[graph.Host])
	}
	for _, t := range b.set.tierings() {
		if t == onDevice && !b.set.canDrop {
			continue
		}
		orders := climbOrders
		if t == onDevice {
			orders = orders[:1]
		}
		levels := []float64{math.Inf(1)}
		if t == hostTier || t == hostThenDisk {
			for level := most * wholeLevel; level > most*leastLevel; level *= wholeLevel {
				if level <= room {
					levels = append(levels, level)
				}
			}
		}
		first := len(list)
		for _, level := range levels {
			for _, o := range orders {
				l := q.newLadder(b.base, b.set, t, b.from, level, o)
				if !slices.ContainsFunc(list[first:], func(o *ladder) bool { return slices.Equal(o.rungs, l.rungs) }) {
					list = append(list, l)
				}
			}
		}
	}
	return list
}

// Levels of host memory that ladders leave to fill, each this much less than the one
// above, of all that could go there.
const (
	wholeLevel = 0.85
	leastLevel = 0.05
)

// classParts is how many parts the bytes of a class are left in.
const classParts = 25

// waitForParts lets the parts of a ladder's rung k wait under the time without it.
func (q *queue) waitForParts(b *bounded, l *ladder, k int) {
	none, all := q.measure(l.at(k-1)), q.measure(l.at(k))
	if none.err != nil || all.err != nil || all.seconds <= none.seconds {
		return // all of it costs no time
	}
	n := classParts
	if mv := &l.set.moves[l.rungs[k-1].move]; mv.kind != placeMove {
		n = mv.layers(q.layers)
	}
	if n > 1 {
		least := max(b.floor, q.perToken(l.at(k), none.seconds))
		q.wait(waiting{least, 0, nil, func() { q.parts(b, part{ladder: l, rung: k, n: n}, none, all) }})
	}
}

// parts shows the parts of a rung that a bisection comes to. One that takes less time
// than a smaller one does not count, and ends it under every cap that comes to it: the
// smaller one may be all that a higher cap comes to.
func (q *queue) parts(b *bounded, of part, none, all *measured) {
	slowest := none.seconds // of those that are over
	for lo, hi := 1, of.n; lo < hi; {
		of.i = (lo + hi) / 2
		p := q.partOf(of, none, all)
		m := q.measure(p)
		if m.err != nil || m.seconds < slowest {
			return
		}
		p.part = nil
		if room := q.room(graph.Device, margins{}); room == 0 || m.need[graph.Device] <= room {
			q.show(b, p)
			if c := q.whole(p); !q.failed[keyOf(&c)] {
				hi = of.i
				continue
			}
		} else {
			q.refused(p, m)
		}
		slowest, lo = m.seconds, of.i+1
	}
}

// waitForPresets lets presets wait under what the dearest of their classes costs, less
// what a position may fall short of that: together classes cost less than their sum, as
// copies of one wait where those of another would. Those of a placement are left out that
// is over a cap with everything computed again.
func (q *queue) waitForPresets(b *bounded) {
	list := q.searcher.presets(b.base, b.set)
	slices.Reverse(list) // the most that is computed again first
	blocked := map[string]bool{}
	for _, p := range list {
		dearest := 0.0
		for _, mv := range b.set.moves {
			if mv.kind == placeMove && p.away.Whole(mv.class) == mv.space {
				dearest = max(dearest, mv.seconds)
			}
		}
		floor := *b
		floor.floor = max(b.floor, q.perToken(p, b.from.seconds+dearest)*(1-dip))
		away := p.away.String()
		q.wait(waiting{floor.floor, 0, nil, func() {
			if blocked[away] {
				return
			}
			m := q.measure(p)
			blocked[away] = m.err == nil && !q.fits(p, m) && isFull(p.again)
			q.show(&floor, p)
		}})
	}
}

// best plans what waits, the least first, until nothing that waits can be faster than
// a plan that fits.
func (q *queue) best() (best *Forecast, at *point, err error) {
	least := math.Inf(1) // of best
	for len(q.open) > 0 && q.open[0].least < least*(1-1e-12) {
		w := q.open[0]
		q.open = q.open[1:]
		if q.ctx.Err() != nil {
			return nil, nil, q.ctx.Err()
		}
		if w.point == nil {
			w.open()
			continue
		}
		p := w.point
		if !q.fits(p, p.expected) {
			continue // other shares came to the same units
		}
		c := q.whole(p)
		f, fail := predict(q.ctx, c, q.machine, 0, early)
		if fail == nil {
			fail = f.Plan.Fit()
		}
		if fail == nil {
			if time := 1 / f.TokensPerSecond(); time < least {
				best, at, least = f, p, time
			}
			continue
		}
		err = fail
		q.failed[keyOf(&c)], q.over[outcome{p.base, p.expected.seconds, p.expected.need}] = true, true
		var refused *plan.DoesNotFit
		if errors.As(fail, &refused) {
			q.offers(q.bases[p.base]) // what it stood before
		}
	}
	if best != nil {
		err = nil
	}
	return best, at, err
}

// points are those that were within the caps, the fastest first.
func (q *queue) points() []*point {
	slices.SortStableFunc(q.found, comparePoints)
	return q.found
}
