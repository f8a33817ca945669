package search

import (
	"math"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// climb is the way up a ladder to its foot and what is above it: the positions that a
// bisection over all of it comes to. Where a position and all above it are sure to take
// longer than something that fits, it is taken to fit without a look, until something
// below it is found that may be the fastest: then it is looked at, so that the foot is
// the same whatever is known of other ladders.
type climb struct {
	*ladder
	base  *bounded
	index int          // of the ladder
	least []float64    // by position: a time a token that it takes at least
	sure  []bool       // by position: least has what its classes take alone
	known map[int]bool // positions that were looked at: whether they fit
	low   int          // the foot is not below
	foot  int          // once found
	found bool
}

// newClimb starts at the bottom of a base's ladder.
func (q *queue) newClimb(b *bounded, l *ladder, index int) *climb {
	n := len(l.rungs) + 1
	c := &climb{ladder: l, base: b, index: index, least: make([]float64, n), sure: make([]bool, n), known: map[int]bool{}}
	for k := range c.least {
		c.least[k] = q.cheapest(b, l.at(k))
	}
	return c
}

func (c *climb) turn(kind, k int) turn { return turn{c.base.at, kind, c.index, k} }

// before is the least time a token of a position, what is above it, and the parts of the
// rung that leads to it.
func (c *climb) before(k int) float64 { return slices.Min(c.least[max(k-1, 0):]) }

// within says whether a position, one above it or a part of the rung that leads to it may
// take less than limit s a token. It measures classes alone to find out.
func (q *queue) within(c *climb, k int, limit float64) bool {
	for i := max(k-1, 0); i < len(c.least); i++ {
		if c.least[i] < limit && !c.sure[i] {
			c.sure[i] = true
			c.least[i] = max(c.least[i], q.countsFrom(c.base, c.at(i)))
		}
		if c.least[i] < limit {
			return true
		}
	}
	return false
}

// look says whether a position fits, and notes what it takes.
func (q *queue) look(c *climb, k int) bool {
	if yes, ok := c.known[k]; ok {
		return yes
	}
	p := c.at(k)
	m := q.measure(p)
	room := q.room(graph.Device, margins{})
	c.known[k] = m.err == nil && (room == 0 || m.need[graph.Device] <= room)
	if m.err == nil {
		c.least[k] = max(c.least[k], q.perToken(p, m.seconds))
		if !c.known[k] {
			q.refused(p, m)
		}
	}
	return c.known[k]
}

// mostClimbs is how many ladders are climbed beside each other: it does not depend on the
// processors, so that the outcome doesn't.
const mostClimbs = 8

// likely is the time a token of the fastest that is known to fit, or expected to.
func (q *queue) likely() float64 {
	limit := min(q.best, q.hope)
	if k := slices.IndexFunc(q.open, func(w waiting) bool { return w.point != nil }); k >= 0 {
		limit = min(limit, q.open[k].least)
	}
	return limit
}

// above is a time just longer than another, or limit where that is longer.
func above(time, limit float64) float64 { return max(limit, math.Nextafter(time, math.Inf(1))) }

// climbOn looks for the feet of the ladders that wait first, no higher than what may be
// faster than what is likely to fit.
func (q *queue) climbOn() {
	limit := q.likely()
	n := 1
	if !math.IsInf(limit, 1) {
		for n < min(mostClimbs, len(q.open)) && q.open[n].climb != nil {
			n++
		}
	}
	list := slices.Clone(q.open[:n])
	q.open = q.open[n:]
	plan.Parallel(n, func(i int) { q.climb(list[i].climb, above(list[i].least, limit)) })
	for _, w := range list {
		q.climbed(w.climb)
	}
}

// climb looks for the foot among positions that may take less than limit s a token.
func (q *queue) climb(c *climb, limit float64) {
	top := len(c.rungs)
	for {
		var unseen []int // taken to fit
		fits := func(k int) bool {
			if _, ok := c.known[k]; !ok && !q.within(c, k, limit) {
				unseen = append(unseen, k)
				return true
			}
			return q.look(c, k)
		}
		if !fits(top) {
			c.low = top + 1
			return
		}
		lo, hi := 0, top
		for lo < hi {
			if mid := (lo + hi) / 2; fits(mid) {
				hi = mid
			} else {
				lo = mid + 1
			}
		}
		c.low = hi
		if !q.within(c, hi, limit) {
			return
		}
		if len(unseen) == 0 {
			c.foot, c.found = hi, true
			return
		}
		for _, k := range unseen {
			q.look(c, k)
		}
	}
}

// climbed lets wait what a climb came to.
func (q *queue) climbed(c *climb) {
	if !c.found {
		if c.low <= len(c.rungs) {
			q.wait(waiting{least: c.before(c.low), turn: c.turn(ofLadders, c.low), climb: c})
		}
		return
	}
	for k := c.foot; k <= len(c.rungs); k++ {
		p, at := c.at(k), c.turn(ofLadders, k)
		if q.known(p) != nil {
			q.show(c.base, p, at)
			continue
		}
		q.wait(waiting{least: c.least[k], turn: at, open: func() { q.show(c.base, p, at) }})
	}
	if c.foot > 0 {
		q.waitForParts(c)
	}
}

// classParts is how many parts the bytes of a class are left in.
const classParts = 25

// waitForParts lets the parts of the rung at a ladder's foot wait under the time without
// it.
func (q *queue) waitForParts(c *climb) {
	l, k := c.ladder, c.foot
	none, all := q.measure(l.at(k-1)), q.measure(l.at(k))
	if none.err != nil || all.err != nil || all.seconds <= none.seconds {
		return // all of it costs no time
	}
	n := classParts
	if mv := &l.set.moves[l.rungs[k-1].move]; mv.kind != placeMove {
		n = mv.layers(q.layers)
	}
	if n > 1 {
		q.waitForPart(c, part{ladder: l, rung: k, n: n}, max(c.base.floor, q.perToken(l.at(k), none.seconds)))
	}
}

func (q *queue) waitForPart(c *climb, of part, least float64) {
	q.wait(waiting{least: least, turn: c.turn(ofParts, 0), open: func() { q.parts(c, of, above(least, q.likely())) }})
}

// parts shows the parts of a rung that a bisection comes to. One that takes less time
// than a smaller one does not count, and ends it under every cap that comes to it: the
// smaller one may be all that a higher cap comes to. What is sure to take limit s a token
// is taken to fit, as of positions.
func (q *queue) parts(c *climb, of part, limit float64) {
	none, all := q.measure(of.at(of.rung-1)), q.measure(of.at(of.rung))
	seen := map[int]bool{}
	for {
		var shown, unseen []*point
		least := math.Inf(1)
		slowest := none.seconds // of those that are over
		for lo, hi := 1, of.n; lo < hi; {
			of.i = (lo + hi) / 2
			p := q.partOf(of, none, all)
			if bound := q.cheapest(c.base, p); bound >= limit && !seen[of.i] {
				least, unseen, hi = min(least, bound), append(unseen, p), of.i
				continue
			}
			seen[of.i] = true
			m := q.measure(p)
			if m.err != nil || m.seconds < slowest {
				break
			}
			if room := q.room(graph.Device, margins{}); room == 0 || m.need[graph.Device] <= room {
				shown, least = append(shown, p), min(least, q.perToken(p, m.seconds))
				if c := q.whole(p); !q.failed[keyOf(&c)] {
					hi = of.i
					continue
				}
			} else {
				q.refused(p, m)
			}
			slowest, lo = m.seconds, of.i+1
		}
		if len(unseen) == 0 {
			for _, p := range shown {
				at := c.turn(ofParts, p.part.i)
				p.part = nil
				q.show(c.base, p, at)
			}
			return
		}
		if least >= limit {
			q.waitForPart(c, of, least)
			return
		}
		for _, p := range unseen {
			seen[p.part.i] = true
		}
	}
}
