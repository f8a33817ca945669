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
	opened  int // bases whose moves wait
	found   []*point
	best    float64 // time a token of the fastest that was planned and fits
	hope    float64 // time a token of the fastest base that is expected to fit without any move
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
	set    *moveSet // with what classes save
	from   *measured
	floor  float64
	at     int // so many bases were opened before
	climbs []*climb
}

// waiting is a point to be planned, a ladder to be climbed on or, where it is neither,
// what open does to find some.
type waiting struct {
	least  float64 // time a token
	device int64   // bytes
	turn   turn
	point  *point
	climb  *climb
	open   func()
}

// turn orders what takes the same time and memory.
type turn struct{ base, kind, ladder, position int }

// Kinds of turns, in their order.
const (
	ofLadders = iota
	ofParts
	ofPresets
)

func (t turn) compare(u turn) int {
	return cmp.Or(cmp.Compare(t.base, u.base), cmp.Compare(t.kind, u.kind), cmp.Compare(t.ladder, u.ladder), cmp.Compare(t.position, u.position))
}

func newQueue(s *searcher) *queue {
	return &queue{searcher: s, shown: map[string]bool{}, failed: map[string]bool{}, over: map[outcome]bool{}, bases: map[base]*bounded{}, best: math.Inf(1), hope: math.Inf(1)}
}

// wait keeps the order: the least time first, of equals the least device memory, then
// whose turn is first.
func (q *queue) wait(w waiting) {
	k, _ := slices.BinarySearchFunc(q.open, w, func(a, b waiting) int {
		return cmp.Or(cmp.Compare(a.least, b.least), cmp.Compare(a.device, b.device), a.turn.compare(b.turn), -1)
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
func (q *queue) show(b *bounded, p *point, at turn) {
	m := q.measure(p)
	if !q.fits(p, m) {
		return
	}
	q.expect(p, m)
	c := q.whole(p)
	if key := keyOf(&c); !q.shown[key] && p.perToken >= q.countsFrom(b, p) {
		q.shown[key] = true
		q.found = append(q.found, p)
		q.wait(waiting{least: p.perToken, device: p.device, turn: at, point: p})
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
		if p := q.plain(b.base, b.set); q.fits(p, b.from) && q.least(b) >= b.floor {
			q.hope = min(q.hope, q.least(b))
		}
		q.wait(waiting{least: b.floor, open: func() { q.branch(b) }})
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
			q.wait(waiting{least: least, open: func() { q.offers(b) }})
			return
		}
	}
	q.offers(b)
}

// offers lets wait what may fit of a base: its ladders and presets.
func (q *queue) offers(b *bounded) {
	q.opened++
	b.at = q.opened
	plain := q.plain(b.base, b.set)
	q.show(b, plain, turn{base: b.at})
	if q.fits(plain, b.from) && !q.saves {
		return // nothing of it that counts takes less
	}
	if q.hopeless(b.from) {
		q.refuseAll(b.base, b.set)
		return
	}
	if b.set.canOffload {
		b.set = q.priced(b.base, b.set, b.from)
	}
	for i, l := range q.ladders(b) {
		c := q.newClimb(b, l, i+1)
		b.climbs = append(b.climbs, c)
		q.wait(waiting{least: c.before(0), turn: c.turn(ofLadders, 0), climb: c})
	}
	if q.presets {
		q.waitForPresets(b)
	}
}

// reconsider looks at a base whose plan came out larger when it was placed: at the parts of
// its ladders' rungs and at its presets, as if that had not fitted.
func (q *queue) reconsider(b *bounded) {
	for _, c := range b.climbs {
		if c.found && c.foot > 0 {
			q.waitForParts(c)
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

// waitForPresets lets presets wait. Those of a placement are left out that is over a cap
// with everything computed again.
func (q *queue) waitForPresets(b *bounded) {
	list := q.searcher.presets(b.base, b.set)
	slices.Reverse(list) // the most that is computed again first
	fullest := map[string]*point{}
	for i, p := range list {
		away := p.away.String()
		if fullest[away] == nil {
			fullest[away] = p
		}
		at := turn{b.at, ofPresets, 0, i}
		most := fullest[away]
		blocked := func() bool {
			m := q.measure(most)
			return isFull(most.again) && m.err == nil && !q.fits(most, m)
		}
		open := func() {
			if math.IsInf(q.likely(), 1) && blocked() || !q.fits(p, q.measure(p)) || blocked() {
				return
			}
			q.show(b, p, at)
		}
		least := q.cheapest(b, p)
		q.wait(waiting{least: least, turn: at, open: func() {
			if floor := q.countsFrom(b, p); floor > least {
				q.wait(waiting{least: floor, turn: at, open: open})
				return
			}
			open()
		}})
	}
}

// fastest plans what waits, the least first, until nothing that waits can be faster than
// a plan that fits.
func (q *queue) fastest() (best *Forecast, at *point, err error) {
	for len(q.open) > 0 && q.open[0].least < q.best*(1-1e-12) {
		if q.ctx.Err() != nil {
			return nil, nil, q.ctx.Err()
		}
		w := q.open[0]
		switch {
		case w.climb != nil:
			q.climbOn()
			continue
		case w.point == nil:
			q.open = q.open[1:]
			w.open()
			continue
		}
		q.open = q.open[1:]
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
			if time := 1 / f.TokensPerSecond(); time < q.best {
				best, at, q.best = f, p, time
			}
			continue
		}
		err = fail
		q.failed[keyOf(&c)], q.over[outcome{p.base, p.expected.seconds, p.expected.need}] = true, true
		var refused *plan.DoesNotFit
		if errors.As(fail, &refused) {
			q.reconsider(q.bases[p.base]) // what it stood before
		}
	}
	if best != nil {
		err = nil
	}
	return best, at, err
}

// mostBeside is how many configurations are planned for what else fits.
const mostBeside = 24

// beside looks, after the fastest was found, for the next ones of other bases and tiers.
func (q *queue) beside(at *point) {
	for most := q.tried + mostBeside; len(q.open) > 0 && q.tried < most && q.ctx.Err() == nil; {
		w := q.open[0]
		kinds := map[kind]bool{at.kind(): true}
		for _, p := range q.found {
			if p.perToken <= w.least {
				kinds[p.kind()] = true
			}
		}
		if len(kinds) > mostRunnersUp {
			return
		}
		if w.climb != nil {
			q.climbOn()
			continue
		}
		q.open = q.open[1:]
		if w.point == nil {
			w.open()
		}
	}
}

// points are those that were found within the caps, the fastest first.
func (q *queue) points() []*point {
	slices.SortStableFunc(q.found, comparePoints)
	return q.found
}
