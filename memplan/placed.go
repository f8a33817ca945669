package memplan

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
)

// placedGroup has the placed buffers of one group (see timeline.groups), by offset.
type placedGroup struct {
	n   int     // number of buffers placed
	all offsets // of all buffers; only if ranked
	// ranked says that the search needs the number of buffers below an offset.
	ranked bool
	// pieces has only buffers that a buffer still to be placed may overlap in time. For a deep
	// model placed by first step these are the live buffers, not all buffers placed before.
	pieces []piece
	homes  *homes // maps each buffer to its piece; nil: no such map
	live   int
	at     cursor // position of find
	// every has all placed buffers in its pieces, for wide buffers; nil in every itself.
	every *placedGroup
}

// placed is a buffer's offset and its position in the order of placing.
type placed struct {
	lo int64
	at int32
}

// before compares by offset; with equal offsets the latest comes first.
func (p placed) before(q placed) int { return cmp.Or(cmp.Compare(p.lo, q.lo), cmp.Compare(q.at, p.at)) }

// offsets is a sorted list in parts of at most mostOffsets, so that an insertion moves few
// elements.
type offsets [][]placed

const mostOffsets = 256

// find returns the part, and the index in it, of an element or of the place where it belongs.
func (all offsets) find(p placed) (at, n int) {
	at, _ = slices.BinarySearchFunc(all, p, func(part []placed, p placed) int { return part[len(part)-1].before(p) })
	if at < len(all) {
		n, _ = slices.BinarySearchFunc(all[at], p, placed.before)
	}
	return at, n
}

func (all *offsets) insert(p placed) {
	at, n := all.find(p)
	if at == len(*all) {
		if at == 0 {
			*all = append(*all, []placed{p})
			return
		}
		at--
		n = len((*all)[at])
	}
	part := slices.Insert((*all)[at], n, p)
	if (*all)[at] = part; len(part) > mostOffsets {
		const half = mostOffsets / 2
		(*all)[at] = part[:half:half]
		*all = slices.Insert(*all, at+1, part[half:])
	}
}

// below counts the elements before p.
func (all offsets) below(p placed) int64 {
	at, n := all.find(p)
	for _, part := range all[:at] {
		n += len(part)
	}
	return int64(n)
}

// span is a range of bytes, [lo, hi).
type span struct{ lo, hi int64 }

// piece is a run of buffers that are neighbours by offset, with a summary. In a deep model a search
// skips most pieces by their summary.
type piece struct {
	span []span
	buf  []int32 // by index into span: the buffer
	life []life  // and the time in which it may be live
	hi   int64   // the highest end
	gap  int64   // the largest number of free bytes between two neighbours
	in   uint64  // set of phases in which at least one of them has ranges
	id   int32   // ID for homes, from 1; 0 without homes
	// By phase, over the buffers that have ranges in it.
	bounds []bounds
}

// bounds limit the first and last steps of several buffers in a phase. If some buffer has several
// ranges there, latestFirst is the largest value, so that the piece never counts as overlapping
// completely: between its ranges the buffer overlaps nothing.
type bounds struct{ earliestFirst, latestFirst, earliestLast, latestLast int64 }

func (g *placedGroup) newPiece(spans []span, bufs []int32, o *overlaps) piece {
	c := piece{span: spans, buf: bufs, life: make([]life, len(bufs), pieceSize+1), bounds: make([]bounds, o.phases)}
	c.id = g.homes.add(bufs)
	for k, i := range bufs {
		c.life[k] = o.life(i)
	}
	c.summarize(o)
	return c
}

func (c *piece) summarize(o *overlaps) {
	c.in = 0
	for e := range c.bounds {
		c.bounds[e] = bounds{math.MaxInt64, math.MinInt64, math.MaxInt64, math.MinInt64}
	}
	c.measure()
	for _, i := range c.buf {
		c.bound(i, o)
	}
}

func (c *piece) measure() {
	c.hi, c.gap = c.span[0].lo, 0
	for _, s := range c.span {
		c.gap, c.hi = max(c.gap, s.lo-c.hi), max(c.hi, s.hi)
	}
}

// bound widens the bounds of a piece to include buffer i.
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

func (g *placedGroup) clear(ranked bool, h *homes) {
	*g = placedGroup{ranked: ranked, pieces: g.pieces[:0], homes: h, every: &placedGroup{}}
}

// homes maps each placed buffer to its piece. A search for the buffers of overlaps.beside visits
// only pieces that contain one of them.
type homes struct {
	piece []int32 // by buffer, 0: not placed
	meets []int32 // by piece: the last set of marks that contains one of its buffers
}

func newHomes(n int) *homes { return &homes{piece: make([]int32, n), meets: make([]int32, 1)} }

// add returns the ID of a new piece with the given buffers.
func (h *homes) add(bufs []int32) int32 {
	if h == nil {
		return 0
	}
	id := int32(len(h.meets))
	h.meets = append(h.meets, 0)
	for _, i := range bufs {
		h.piece[i] = id
	}
	return id
}

// whole returns the group whose pieces have all placed buffers, also those that g's no longer have.
func (g *placedGroup) whole() *placedGroup {
	g.every.n, g.every.all = g.n, g.all
	return g.every
}

// add counts a buffer at offset lo, which is at position k of the order of placing.
func (g *placedGroup) add(lo int64, k int32) {
	g.n++
	if g.ranked {
		g.all.insert(placed{lo, k})
	}
}

// insert puts buffer i before the buffers of the same or a higher offset.
func (g *placedGroup) insert(i int32, s span, o *overlaps) {
	g.live++
	if len(g.pieces) == 0 {
		g.pieces = append(g.pieces, g.newPiece([]span{s}, []int32{i}, o))
		return
	}
	at, n := g.find(s.lo)
	if at == len(g.pieces) {
		at--
		n = len(g.pieces[at].span)
	}
	c := &g.pieces[at]
	c.span, c.buf, c.life = slices.Insert(c.span, n, s), slices.Insert(c.buf, n, i), slices.Insert(c.life, n, o.life(i))
	if len(c.span) <= pieceSize {
		if g.homes != nil {
			g.homes.piece[i] = c.id
		}
		c.measure()
		c.bound(i, o)
		return
	}
	const half = pieceSize / 2
	upper := g.newPiece(slices.Clone(c.span[half:]), slices.Clone(c.buf[half:]), o)
	*c = g.newPiece(c.span[:half], c.buf[:half], o)
	g.pieces = slices.Insert(g.pieces, at+1, upper)
}

// remove removes buffer i, whose offset is lo.
func (g *placedGroup) remove(i int32, lo int64, o *overlaps) {
	at, n := g.find(lo)
	for g.pieces[at].buf[n] != i {
		if n++; n == len(g.pieces[at].buf) {
			at, n = at+1, 0
		}
	}
	g.live--
	c := &g.pieces[at]
	c.span, c.buf, c.life = slices.Delete(c.span, n, n+1), slices.Delete(c.buf, n, n+1), slices.Delete(c.life, n, n+1)
	if len(c.span) == 0 {
		g.pieces = slices.Delete(g.pieces, at, at+1)
		return
	}
	c.summarize(o)
}

// find returns the piece and the index of the first buffer with an offset of at least lo.
func (g *placedGroup) find(lo int64) (at, n int) {
	at, _ = slices.BinarySearchFunc(g.pieces, lo, func(p piece, lo int64) int { return cmp.Compare(p.span[len(p.span)-1].lo, lo) })
	if at < len(g.pieces) {
		n, _ = slices.BinarySearchFunc(g.pieces[at].span, lo, func(t span, lo int64) int { return cmp.Compare(t.lo, lo) })
	}
	return at, n
}

// seeker is the buffer for which find seeks a place.
type seeker struct {
	o     *overlaps
	buf   int32
	size  int64
	rows  bitRows  // overlaps.rows, if there are at most mostRows buffers
	row   []uint64 // the buffer's row; nil without rows
	life  life     // the time in which it may be live
	marks marks    // the buffers of overlaps.beside
	homes *homes   // of the run; not used with rows
	// The phases of the buffer and of those beside it, and the lowest and highest step of these in
	// each phase. findReach computes them on first use.
	found bool
	in    uint64
	reach [mostPhases]steps
}

func newSeeker(o *overlaps) *seeker {
	q := &seeker{o: o, marks: newMarks(len(o.first))}
	if n := len(o.first); n <= fewBuffers || n <= mostRows && o.several {
		q.rows = o.rows()
	}
	return q
}

// marks is a set of buffers that can be replaced by another without clearing it.
type marks struct {
	of  []int32 // by buffer: number of the last set that contained it
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
	q.buf, q.size, q.life, q.found = i, size, q.o.life(i), false
	if q.rows.words > 0 {
		q.row = q.rows.row(i)
	} else {
		q.marks.set(q.o.beside[i])
		for _, j := range q.o.beside[i] {
			q.homes.meets[q.homes.piece[j]] = q.marks.now
		}
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

// first returns the index in a piece, at or after that of the cursor, of the first buffer that
// overlaps the seeker's in time and ends above free; the number of buffers if there is none.
func (q *seeker) first(c *piece, at *cursor, free int64) int {
	if row := q.row; row != nil {
		for k, j := range c.buf[at.span:] {
			if c.span[at.span+k].hi > free && row[j>>6]>>(j&63)&1 == 1 {
				return at.span + k
			}
		}
		return len(c.buf)
	}
	if at.span == 0 {
		at.shares, at.beside = q.shares(c), q.besides(c)
	}
	for some := (at.shares | at.beside) >> at.span << at.span; some != 0; some &= some - 1 {
		k := bits.TrailingZeros64(some)
		if c.span[k].hi > free && (!q.o.several || at.beside>>k&1 == 1 || q.o.share(q.buf, c.buf[k])) {
			return k
		}
	}
	return len(c.buf)
}

// shares returns the set of a piece's buffers that may share a step with the seeker's. It avoids
// branches, because the processor would mispredict them.
func (q *seeker) shares(c *piece) (set uint64) {
	from, to := q.life.from-1, q.life.to+1
	if q.o.several {
		for k := range c.life {
			l := &c.life[k]
			both := l.parts & q.life.parts
			set |= uint64((l.from-to)&(from-l.to)&-int64(both>>1|both&1)) >> 63 << (k & 63)
		}
		return set
	}
	for k := range c.life {
		l := &c.life[k]
		set |= uint64((l.from-to)&(from-l.to)) >> 63 << (k & 63)
	}
	return set
}

// besides returns the set of a piece's buffers that are in overlaps.beside of the seeker's.
func (q *seeker) besides(c *piece) (set uint64) {
	if len(q.o.beside[q.buf]) == 0 || c.id > 0 && q.homes.meets[c.id] != q.marks.now {
		return 0
	}
	for k, j := range c.buf {
		if q.marks.of[j] == q.marks.now {
			set |= 1 << (k & 63)
		}
	}
	return set
}

// passes says whether it is certain that no buffer of the piece overlaps the seeker's in time.
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

// meetsAll says whether it is certain that all buffers of the piece overlap the seeker's in time.
func (q *seeker) meetsAll(c *piece) bool {
	for one := q.o.in[q.buf] &^ q.o.split[q.buf] & c.in; one != 0; one &= one - 1 {
		e := bits.TrailingZeros64(one)
		if b, s := &c.bounds[e], q.o.phase(q.buf, e); b.latestFirst <= s.to && b.earliestLast >= s.from {
			return true
		}
	}
	return false
}

// cursor is the position of a search in a group: at a buffer, or at a piece that blocks the
// seeker's buffer like one large buffer, because no gap of the piece is large enough.
type cursor struct {
	piece, span int
	all         bool // all buffers of the piece overlap the seeker's in time
	whole       bool
	lo, hi      int64 // bytes of the buffer or piece
	// For a seeker without rows, the buffers of the piece by index: those that may share a step
	// with the seeker's, and those of overlaps.beside.
	shares, beside uint64
}

func (g *placedGroup) done() bool { return g.at.piece >= len(g.pieces) }

// begin moves the cursor to the first buffer that overlaps q's in time.
func (g *placedGroup) begin(q *seeker) {
	g.at = cursor{}
	g.seek(q, 0)
}

// next moves the cursor to the next buffer that overlaps q's in time and ends above free. Other
// buffers cannot change the result.
func (g *placedGroup) next(q *seeker, free int64) {
	c := &g.pieces[g.at.piece]
	switch g.at.span++; {
	case g.at.whole:
		g.at = cursor{piece: g.at.piece + 1}
	case g.at.all && g.at.span < len(c.span):
		g.at.lo, g.at.hi = c.span[g.at.span].lo, c.span[g.at.span].hi
		return
	}
	g.seek(q, free)
}

func (g *placedGroup) seek(q *seeker, free int64) {
	skip := g.live > fewLive || q.row == nil
	for ; g.at.piece < len(g.pieces); g.at = (cursor{piece: g.at.piece + 1}) {
		c := &g.pieces[g.at.piece]
		if c.hi <= free {
			continue
		}
		if g.at.span == 0 && skip {
			if q.passes(c) {
				continue
			}
			if q.meetsAll(c) {
				g.at.all, g.at.lo, g.at.hi = true, c.span[0].lo, c.span[0].hi
				if c.gap < q.size {
					g.at.whole, g.at.hi = true, c.hi
				}
				return
			}
		}
		if k := q.first(c, &g.at, free); k < len(c.span) {
			g.at.span, g.at.lo, g.at.hi = k, c.span[k].lo, c.span[k].hi
			return
		}
	}
}

// passed counts the buffers below the cursor.
func (g *placedGroup) passed(order []int32) int64 {
	if g.done() {
		return int64(g.n)
	}
	c := &g.pieces[g.at.piece]
	return g.all.below(placed{c.span[g.at.span].lo, order[c.buf[g.at.span]]}) + 1
}
