package memplan

import (
	"cmp"
	"iter"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// place finds offsets for the buffers of one space that are not LifeRun. It returns them by
// index into the space's ids, and their extent. bound is the lower bound of the extent; a
// search that reaches it stops.
func (a *Analysis) place(sp graph.Space, bound int64, opt Options) (off []int64, extent int64, err error) {
	pl := a.placer(sp, bound, opt.Stop)
	if pl == nil {
		return nil, 0, nil
	}
	pl.known = opt.Known
	defer func() { a.work[sp] = pl.work }()
	starts, done := pl.tries()
	if !done {
		pl.squeak(starts)
	}
	return pl.best, pl.extent, pl.stopped
}

// placer returns the placer of a space, nil if there is nothing to place.
func (a *Analysis) placer(sp graph.Space, bound int64, stop func() error) *placer {
	tl := &a.spaces[sp]
	n := len(tl.ids)
	if n == 0 {
		return nil
	}
	pl := &placer{tl: tl, stop: stop, align: make([]int64, n), size: make([]int64, n), high: make([]bool, n),
		bound: bound, floor: a.floor[sp], ceiling: bound + bound/nearBound, extent: -1}
	steps := slices.Max(tl.last)
	for i, id := range tl.ids {
		pl.size[i], pl.align[i] = a.size[id], a.align[id]
		tl.kept[i] = tl.kept[i] || pl.duration(int32(i)) > steps/16
		pl.high[i] = tl.kept[i] && tl.late[i]
	}
	return pl
}

// duration is the number of steps from a buffer's first to its last.
func (pl *placer) duration(i int32) int64 { return pl.tl.last[i] - pl.tl.first[i] + 1 }

// ranking is an order in which buffers are placed: sorted by the first key, ties by the next
// ones and finally by index. fit says where each buffer goes.
type ranking struct {
	fit  fit
	keys []func(x, y int32) int
}

func (r ranking) sort(rank []int32) {
	slices.SortFunc(rank, func(x, y int32) int {
		for _, key := range r.keys {
			if c := key(x, y); c != 0 {
				return c
			}
		}
		return cmp.Compare(x, y)
	})
}

// rankings returns the rankings that are tried, those that win most often first. tightest by
// start is what a good run-time allocator does. By size, with the last of a size at the bottom,
// leaves room for the end of the backward, where gradients have accumulated. fromBothEnds
// suits steps with many layers, by area programs with few large buffers.
func (pl *placer) rankings() []ranking {
	tl := pl.tl
	bySize := func(x, y int32) int { return cmp.Compare(pl.size[y], pl.size[x]) }
	byDur := func(x, y int32) int { return cmp.Compare(pl.duration(y), pl.duration(x)) }
	byArea := func(x, y int32) int {
		return cmp.Compare(float64(pl.size[y])*float64(pl.duration(y)), float64(pl.size[x])*float64(pl.duration(x)))
	}
	byStart := func(x, y int32) int { return cmp.Compare(tl.first[x], tl.first[y]) }
	byEnd := func(x, y int32) int { return cmp.Compare(tl.last[y], tl.last[x]) }
	// For fromBothEnds: kept buffers come first, in the order in which they are made, so that
	// the longest-lived lie outermost. The rest fills the gap between them.
	byKept := func(x, y int32) int {
		switch {
		case tl.kept[x] && tl.kept[y]:
			return byStart(x, y)
		case tl.kept[x]:
			return -1
		case tl.kept[y]:
			return 1
		}
		return 0
	}
	type keys = []func(x, y int32) int
	return []ranking{
		{tightest, keys{byStart, byDur, bySize}},
		{lowest, keys{bySize, byEnd}},
		{fromBothEnds, keys{byKept, bySize, byStart}},
		{fromBothEnds, keys{byKept, bySize, byEnd}},
		{lowest, keys{bySize, byDur}},
		{lowest, keys{bySize, byStart}},
		{lowest, keys{byArea}},
		{lowest, keys{byStart, byDur, bySize}},
		{lowest, keys{byDur, bySize}},
		{tightest, keys{byEnd, byDur, bySize}},
		{tightest, keys{bySize, byDur}},
	}
}

// start is a ranked list of all buffers and the extent that placing them in that order gives.
type start struct {
	rank   []int32
	fit    fit
	extent int64
	last   trail
}

// tries places the buffers by each ranking. done says that the search is over; otherwise
// starts has the results.
func (pl *placer) tries() (starts []start, done bool) {
	rank := make([]int32, len(pl.size))
	for i := range rank {
		rank[i] = int32(i)
	}
	for _, by := range pl.rankings() {
		by.sort(rank)
		var last trail
		off, extent := pl.run(rank, by.fit, &last)
		pl.take(off, extent)
		if pl.stopped != nil || pl.content() {
			return nil, true
		}
		starts = append(starts, start{slices.Clone(rank), by.fit, extent, last})
	}
	return starts, false
}

// squeak does squeaky wheel optimization (Joslin and Clements, 1999), starting from the best
// rankings: buffers that end above the bound move forward in the ranking, and all buffers are
// placed again. How far they move changes every three rounds; otherwise rounds would soon
// repeat each other.
func (pl *placer) squeak(starts []start) {
	pushes := [...][]float64{lowest: {0.5, 0.75, 0, 0.875, 0.25}, tightest: {0.5, 0.75, 0, 0.875, 0.25}, fromBothEnds: {0.97, 0.9, 0.8, 0.95, 0.5}}
	slices.SortStableFunc(starts, func(x, y start) int { return cmp.Compare(x.extent, y.extent) })
	for round := range squeakyRounds {
		for n := range starts[:squeakyStarts] {
			s := &starts[n]
			off, extent := pl.run(s.rank, s.fit, &s.last)
			pl.take(off, extent)
			if pl.stopped != nil || pl.content() || pl.work > min(maxWork, pl.bound) {
				return
			}
			for k, i := range s.rank {
				if off[i]+pl.size[i] > pl.bound {
					to := int(float64(k) * pushes[s.fit][round/3%len(pushes[s.fit])])
					copy(s.rank[to+1:k+1], s.rank[to:k])
					s.rank[to] = i
					s.last.same = min(s.last.same, to)
				}
			}
		}
	}
}

// take keeps the placement with the lowest extent; of equal ones the first.
func (pl *placer) take(off []int64, extent int64) {
	if pl.extent < 0 || extent < pl.extent {
		pl.best, pl.extent = off, extent
	}
}

// Limits of the search, in pairs of buffers compared: counted work, unlike time, gives the same
// plan on every machine. The search is over when no extent can be lower, or when it exceeds the
// bound by at most one part in nearBound, and for every unitWork of work by a thousandth more; maxWork ends it in
// any case, and one pair for each byte of the bound: in a small arena there is little to save.
const (
	nearBound     = 2000
	unitWork      = 20e6
	maxWork       = 150e6
	squeakyStarts = 5 // how many of the best rankings squeak uses, in turn
	squeakyRounds = 96
	// stopEvery is the number of buffers between two calls of stop, about a millisecond.
	stopEvery = 256
)

// content says whether the search is over.
func (pl *placer) content() bool {
	return pl.extent <= pl.floor ||
		float64(pl.extent-pl.bound) <= float64(pl.bound)/nearBound+float64(float64(pl.bound)/1000*float64(pl.work/unitWork))
}

// fit says which of the free places a buffer gets.
type fit uint8

const (
	lowest   fit = iota
	tightest     // in the smallest gap
	highest      // directly below the ceiling, or the lowest if nothing below it is free
	// fromBothEnds is highest for buffers that are made in the backward and kept, and lowest
	// for others. In the backward, kept activations are freed like a stack while reduced
	// gradients are added: at two ends of the arena, they leave one connected gap.
	fromBothEnds
)

// placer places buffers one by one where no buffer that overlaps them in time lies.
type placer struct {
	tl    *timeline
	align []int64
	size  []int64
	// For fromBothEnds: the ceiling, and by buffer whether it is placed below it.
	ceiling int64
	high    []bool
	group   []int32 // by buffer: see groups
	lists   []list  // by group; for runFew
	// For runMany: the placed buffers by group, and each buffer's position in the order of
	// this run.
	placed []placedGroup
	order  []int32
	seeker *seeker
	// The best placement so far and its extent, and the lower bound of any extent.
	best          []int64
	extent, bound int64
	floor         int64 // see Analysis
	work          int64 // pairs of buffers compared so far
	known         *Known
	digest        []byte // see lives; nil: not made yet
	stop          func() error
	stopped       error // the error of stop; later placements are invalid
}

// groups numbers buffers by the phase that uses them, so that a search can skip other phases:
// a buffer of group g > 0 overlaps in time only with buffers of groups g and 0 (several
// phases). Phases that no barrier separates form one group.
func (tl *timeline) groups() (group []int32, n int) {
	group = slices.Clone(tl.phase)
	n = 1
	for _, g := range group {
		n = max(n, int(g)+1)
	}
	into := make([]int32, n)
	for g := range into {
		into[g] = int32(g)
	}
	find := func(g int32) int32 {
		for into[g] != g {
			g = into[g]
		}
		return g
	}
	join := func(g, h int32) {
		if g != 0 && h != 0 {
			g, h = find(g), find(h)
			into[max(g, h)] = min(g, h)
		}
	}
	// Find ranges of different phases that share a step, by counting what runs of each phase.
	spans := tl.stabber().span
	byEnd := slices.Clone(spans)
	slices.SortFunc(byEnd, func(x, y ofBuffer) int { return cmp.Compare(x.to, y.to) })
	running := make([]int, n)
	for _, s := range spans {
		for ; byEnd[0].to < s.from; byEnd = byEnd[1:] {
			running[group[byEnd[0].buf]]--
		}
		for h, count := range running {
			if count > 0 {
				join(group[s.buf], int32(h))
			}
		}
		running[group[s.buf]]++
	}
	for i, list := range tl.beside {
		for _, j := range list {
			join(group[i], group[j])
		}
	}
	for i, g := range group {
		group[i] = find(g)
	}
	return group, n
}

// run places the buffers in the given order. last is of the last run of this ranking.
func (pl *placer) run(rank []int32, how fit, last *trail) (off []int64, extent int64) {
	pl.prepare()
	if len(rank) <= fewBuffers {
		return pl.runFew(rank, how, last)
	}
	return pl.known.run(pl, rank, how)
}

// prepare makes the data that all runs share.
func (pl *placer) prepare() {
	if pl.group != nil {
		return
	}
	var n int
	pl.group, n = pl.tl.groups()
	pl.placed, pl.lists = make([]placedGroup, n), make([]list, n)
	pl.seeker = newSeeker(pl.tl.overlaps)
}

// where returns the fit of one buffer.
func (pl *placer) where(i int32, how fit) fit {
	switch {
	case how != fromBothEnds:
		return how
	case pl.high[i]:
		return highest
	}
	return lowest
}

// stopAt calls stop every stopEvery buffers, and says whether the search must end.
func (pl *placer) stopAt(k int) bool {
	if pl.stop != nil && k%stopEvery == 0 {
		pl.stopped = pl.stop()
	}
	return pl.stopped != nil
}

// runMany does what run does, for any number of buffers.
func (pl *placer) runMany(rank []int32, how fit) (off []int64, extent int64) {
	pl.seeker.homes = newHomes(len(rank))
	for g := range pl.placed {
		pl.placed[g].clear(how != tightest, pl.seeker.homes)
	}
	off, pl.order = make([]int64, len(rank)), make([]int32, len(rank))
	for k, i := range rank {
		pl.order[i] = int32(k)
	}
	last, wide := pl.tl.lastOverlap(rank)
	gone := newLeaving(last, pl.order)
	var among []*placedGroup
	for k, i := range rank {
		if pl.stopAt(k) {
			return off, extent
		}
		own := &pl.placed[pl.group[i]]
		among = append(among[:0], own)
		if pl.group[i] == 0 {
			for g := range pl.placed[1:] {
				among = append(among, &pl.placed[1+g])
			}
		} else {
			among = append(among, &pl.placed[0])
		}
		if pl.tl.wide(i) {
			for at, g := range among {
				among[at] = g.whole()
			}
		}
		pl.seeker.start(i, pl.size[i])
		at := pl.find(pl.align[i], among, pl.where(i, how))
		off[i] = at
		extent = max(extent, at+pl.size[i])
		own.add(at, int32(k))
		if last[i] > int32(k) {
			own.insert(i, span{at, at + pl.size[i]}, pl.tl.overlaps)
		}
		if wide > k {
			own.every.insert(i, span{at, at + pl.size[i]}, pl.tl.overlaps)
		}
		for j := range gone.after(k) {
			pl.placed[pl.group[j]].remove(j, off[j], pl.tl.overlaps)
		}
	}
	return off, extent
}

// leaving has, for each position of the order, a list of the buffers that no search needs from
// there on: ending is its first buffer, next leads from one buffer to the next, −1 ends it.
type leaving struct{ ending, next []int32 }

func newLeaving(last, order []int32) leaving {
	l := leaving{make([]int32, len(last)), make([]int32, len(last))}
	for k := range l.ending {
		l.ending[k] = -1
	}
	for i, k := range last {
		if k > order[i] {
			l.next[i], l.ending[k] = l.ending[k], int32(i)
		}
	}
	return l
}

func (l leaving) after(k int) iter.Seq[int32] {
	return func(yield func(int32) bool) {
		for j := l.ending[k]; j >= 0 && yield(j); j = l.next[j] {
		}
	}
}

// find returns the offset for the seeker's buffer, with the given alignment, among placed
// buffers. It counts as work what a linear search of all of them by offset would do.
func (pl *placer) find(align int64, among []*placedGroup, where fit) int64 {
	q := pl.seeker
	size := q.size
	at, gap := int64(-1), int64(-1)
	free := int64(0) // the lowest aligned offset above all overlapping buffers so far
	for _, g := range among {
		g.begin(q)
	}
	for {
		var low *placedGroup // the group whose next overlapping buffer has the lowest offset
		for _, g := range among {
			if !g.done() && (low == nil || g.at.lo < low.at.lo) {
				low = g
			}
		}
		if low == nil {
			break
		}
		switch room := low.at.lo - free; {
		case room < size:
		case where == lowest:
			for _, g := range among {
				pl.work += g.passed(pl.order)
			}
			return free
		case where == highest:
			if top := (min(low.at.lo, pl.ceiling) - size) &^ (align - 1); top >= free {
				at = top
			}
		case gap < 0 || room < gap:
			at, gap = free, room
		}
		if gap == size { // no gap can be tighter
			break
		}
		free = max(free, alignUp(low.at.hi, align))
		low.next(q, free)
	}
	for _, g := range among {
		pl.work += int64(g.n)
	}
	if top := (pl.ceiling - size) &^ (align - 1); where == highest && top >= free {
		return top
	}
	if at < 0 {
		at = free
	}
	return at
}
