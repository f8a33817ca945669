package memplan

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
)

// placedGroup is what has been placed of a group (see timeline.groups), by offset.
type placedGroup struct {
	n   int      // all of them
	all []placed // by offset, of one offset the latest first; only where ranked
	// ranked says that ranks by offset are asked for.
	ranked bool
	// pieces hold those that a buffer still to be placed may overlap in time. Of a
	// deep model placed by first steps that is what is alive, not all that came
	// before.
	pieces []piece
	live   int
	at     cursor // of find
}

// placed is a buffer's offset and its position in the order of placing.
type placed struct {
	lo int64
	at int32
}

// span is the bytes that a buffer takes.
type span struct{ lo, hi int64 }

// piece is neighbours by offset, and what can be said of all of them at once: in a
// deep model a search passes most pieces without a look at what is in them.
type piece struct {
	span []span
	buf  []int32 // whose
	hi   int64   // the highest end
	gap  int64   // the largest number of free bytes between two of them
	in   uint64  // phases that one of them is in
	// By phase, of those that are in it.
	bounds []bounds
}

// bounds are of the first and last steps of several buffers in a phase. where not
// all have one range there, latestFirst is the highest value: between its ranges a
// buffer overlaps nothing.
type bounds struct{ earliestFirst, latestFirst, earliestLast, latestLast int64 }

// pieceSize is the most that a piece holds.
const pieceSize = 64

func newPiece(spans []span, bufs []int32, o *overlaps) piece {
	c := piece{span: spans, buf: bufs, bounds: make([]bounds, o.phases)}
	for e := range c.bounds {
		c.bounds[e] = bounds{math.MaxInt64, math.MinInt64, math.MaxInt64, math.MinInt64}
	}
	c.measure()
	for _, i := range bufs {
		c.bound(i, o)
	}
	return c
}

func (c *piece) measure() {
	c.hi, c.gap = c.span[0].lo, 0
	for _, s := range c.span {
		c.gap, c.hi = max(c.gap, s.lo-c.hi), max(c.hi, s.hi)
	}
}

// bound takes a buffer's steps into the bounds of a piece.
func (c *piece) bound(i int32, o *overlaps) {
	c.in |= o.in[i]
	for e := range c.bounds {
		b := &c.bounds[e]
		if o.in[i]>>e&1 == 0 {
			b.latestFirst = math.MaxInt64
			continue
		}
		s := o.phase(i, e)
		b.earliestFirst, b.latestFirst = min(b.earliestFirst, s.from), max(b.latestFirst, s.from)
		b.earliestLast, b.latestLast = min(b.earliestLast, s.to), max(b.latestLast, s.to)
		if o.split[i]>>e&1 == 1 {
			b.latestFirst = math.MaxInt64
		}
	}
}

func (g *placedGroup) clear(ranked bool) {
	*g = placedGroup{all: g.all[:0], ranked: ranked, pieces: g.pieces[:0]}
}

// add counts a buffer, the one at position k of the order of placing.
func (g *placedGroup) add(lo int64, k int32) {
	g.n++
	if g.ranked {
		n, _ := slices.BinarySearchFunc(g.all, lo, func(p placed, lo int64) int { return cmp.Compare(p.lo, lo) })
		g.all = slices.Insert(g.all, n, placed{lo, k})
	}
}

// insert puts a buffer before those of the same offset and above.
func (g *placedGroup) insert(i int32, s span, o *overlaps) {
	g.live++
	if len(g.pieces) == 0 {
		g.pieces = append(g.pieces, newPiece([]span{s}, []int32{i}, o))
		return
	}
	at, n := g.find(s.lo)
	if at == len(g.pieces) {
		at--
		n = len(g.pieces[at].span)
	}
	c := &g.pieces[at]
	c.span, c.buf = slices.Insert(c.span, n, s), slices.Insert(c.buf, n, i)
	if len(c.span) <= pieceSize {
		c.measure()
		c.bound(i, o)
		return
	}
	const half = pieceSize / 2
	upper := newPiece(slices.Clone(c.span[half:]), slices.Clone(c.buf[half:]), o)
	*c = newPiece(c.span[:half], c.buf[:half], o)
	g.pieces = slices.Insert(g.pieces, at+1, upper)
}

// remove takes out a buffer that lies at lo.
func (g *placedGroup) remove(i int32, lo int64, o *overlaps) {
	at, n := g.find(lo)
	for g.pieces[at].buf[n] != i {
		if n++; n == len(g.pieces[at].buf) {
			at, n = at+1, 0
		}
	}
	g.live--
	c := &g.pieces[at]
	c.span, c.buf = slices.Delete(c.span, n, n+1), slices.Delete(c.buf, n, n+1)
	switch {
	case len(c.span) == 0:
		g.pieces = slices.Delete(g.pieces, at, at+1)
	case g.live > fewLive:
		*c = newPiece(c.span, c.buf, o)
	default: // its bounds are as wide as they were
		c.measure()
	}
}

// find returns the first place in a piece with an offset of lo or above.
func (g *placedGroup) find(lo int64) (at, n int) {
	at, _ = slices.BinarySearchFunc(g.pieces, lo, func(p piece, lo int64) int { return cmp.Compare(p.span[len(p.span)-1].lo, lo) })
	if at < len(g.pieces) {
		n, _ = slices.BinarySearchFunc(g.pieces[at].span, lo, func(t span, lo int64) int { return cmp.Compare(t.lo, lo) })
	}
	return at, n
}

// seeker is a buffer that looks for its place.
type seeker struct {
	o     *overlaps
	buf   int32
	size  int64
	rows  bitRows  // of everything, where there are not too many buffers for it
	row   []uint64 // nil without rows
	marks marks    // of those beside it
	// Phases that it or one beside it is in, and there their lowest and highest step;
	// found when they are first asked for.
	found bool
	in    uint64
	reach [mostPhases]steps
}

// mostRows is how many buffers have rows at most: 32 MiB of them.
const mostRows = 1 << 14

func newSeeker(o *overlaps) *seeker {
	q := &seeker{o: o, marks: newMarks(len(o.first))}
	if len(o.first) <= mostRows {
		q.rows = o.rows()
	}
	return q
}

// marks are sets of buffers, one after another.
type marks struct {
	of  []int32 // by buffer: the last set that it was in
	now int32
}

func (m *marks) set(list []int32) {
	m.now++
	for _, j := range list {
		m.of[j] = m.now
	}
}

func newMarks(n int) marks { return marks{of: make([]int32, n)} }

func (q *seeker) start(i int32, size int64) {
	q.buf, q.size, q.found = i, size, false
	if q.rows.words > 0 {
		q.row = q.rows.row(i)
	} else {
		q.marks.set(q.o.beside[i])
	}
}

func (q *seeker) findReach() {
	q.found, q.in = true, 0
	q.widen(q.buf)
	for _, j := range q.o.beside[q.buf] {
		q.widen(j)
	}
}

func (q *seeker) widen(i int32) {
	for in := q.o.in[i]; in != 0; in &= in - 1 {
		e := bits.TrailingZeros64(in)
		s, r := q.o.phase(i, e), &q.reach[e]
		if q.in>>e&1 == 0 {
			*r = s
		}
		r.from, r.to = min(r.from, s.from), max(r.to, s.to)
	}
	q.in |= q.o.in[i]
}

// first returns the first in a piece, from the given one on, that overlaps the
// seeker's buffer in time; the number of all: there is none.
func (q *seeker) first(c *piece, from int) int {
	if row := q.row; row != nil {
		for k, j := range c.buf[from:] {
			if row[j>>6]>>(j&63)&1 == 1 {
				return from + k
			}
		}
		return len(c.buf)
	}
	for k, j := range c.buf[from:] {
		if q.marks.of[j] == q.marks.now || q.o.share(q.buf, j) {
			return from + k
		}
	}
	return len(c.buf)
}

// passes says that nothing in a piece overlaps the seeker's buffer in time.
func (q *seeker) passes(c *piece) bool {
	if !q.found {
		q.findReach()
	}
	for both := q.in & c.in; both != 0; both &= both - 1 {
		e := bits.TrailingZeros64(both)
		if b, r := &c.bounds[e], &q.reach[e]; b.latestLast >= r.from && b.earliestFirst <= r.to {
			return false
		}
	}
	return true
}

// blocked says that all of a piece overlaps the seeker's buffer in time, and that
// between them there is no room for it.
func (q *seeker) blocked(c *piece) bool {
	if c.gap >= q.size {
		return false
	}
	for one := q.o.in[q.buf] &^ q.o.split[q.buf] & c.in; one != 0; one &= one - 1 {
		e := bits.TrailingZeros64(one)
		if b, s := &c.bounds[e], q.o.phase(q.buf, e); b.latestFirst <= s.to && b.earliestLast >= s.from {
			return true
		}
	}
	return false
}

// cursor is where a search stands in a group: at a buffer, or at a whole piece that
// is like one.
type cursor struct {
	piece, span int
	whole       bool
	lo, hi      int64 // its bytes
}

func (g *placedGroup) done() bool { return g.at.piece >= len(g.pieces) }

// begin moves to the first buffer that overlaps q's in time.
func (g *placedGroup) begin(q *seeker) {
	g.at = cursor{}
	g.seek(q)
}

// next moves on to the next one.
func (g *placedGroup) next(q *seeker) {
	if g.at.whole {
		g.at = cursor{piece: g.at.piece + 1}
	} else {
		g.at.span++
	}
	g.seek(q)
}

func (g *placedGroup) seek(q *seeker) {
	skip := g.live > fewLive || q.row == nil
	for ; g.at.piece < len(g.pieces); g.at = (cursor{piece: g.at.piece + 1}) {
		c := &g.pieces[g.at.piece]
		if g.at.span == 0 && skip {
			if q.passes(c) {
				continue
			}
			if q.blocked(c) {
				g.at.whole, g.at.lo, g.at.hi = true, c.span[0].lo, c.hi
				return
			}
		}
		if k := q.first(c, g.at.span); k < len(c.span) {
			g.at.span, g.at.lo, g.at.hi = k, c.span[k].lo, c.span[k].hi
			return
		}
	}
}

// fewLive are looked at one by one in less time than by pieces, where they have
// rows.
const fewLive = 8 * pieceSize

// passed counts the buffers up to the one that the cursor stands at.
func (g *placedGroup) passed(order []int32) int64 {
	if g.done() {
		return int64(g.n)
	}
	c := &g.pieces[g.at.piece]
	n, _ := slices.BinarySearchFunc(g.all, placed{c.span[g.at.span].lo, order[c.buf[g.at.span]]}, func(p, want placed) int {
		return cmp.Or(cmp.Compare(p.lo, want.lo), cmp.Compare(want.at, p.at))
	})
	return int64(n) + 1
}
