package memplan

import (
	"cmp"
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

// ranking is an order in which buffers are placed: sorted by the first key, ties by the next ones
// and finally by index. fit chooses the place of each buffer.
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

// rankings returns the rankings to try, those that win most often first. tightest by start matches
// a good run-time allocator. The ranking by size, with the last buffer of equal size at the bottom,
// leaves room for the end of the backward, where gradients have accumulated. fromBothEnds suits
// steps with many layers, by area suits programs with few large buffers.
func (pl *placer) rankings() []ranking {
	tl := pl.tl
	bySize := func(x, y int32) int { return cmp.Compare(pl.size[y], pl.size[x]) }
	byDur := func(x, y int32) int { return cmp.Compare(pl.duration(y), pl.duration(x)) }
	byArea := func(x, y int32) int {
		return cmp.Compare(float64(pl.size[y])*float64(pl.duration(y)), float64(pl.size[x])*float64(pl.duration(x)))
	}
	byStart := func(x, y int32) int { return cmp.Compare(tl.first[x], tl.first[y]) }
	byEnd := func(x, y int32) int { return cmp.Compare(tl.last[y], tl.last[x]) }
	// For fromBothEnds: kept buffers come first, in the order in which they are made, so that those
	// with the longest lives are outermost. The other buffers fill the gap between them.
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

// start is a ranked list of all buffers and the extent of their placement in that order.
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
// placed again. The distance that they move changes every three rounds; otherwise rounds would soon
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

// take keeps a placement if its extent is the lowest; with equal extents the first stays.
func (pl *placer) take(off []int64, extent int64) {
	if pl.extent < 0 || extent < pl.extent {
		pl.best, pl.extent = off, extent
	}
}

// content says whether the search is over.
func (pl *placer) content() bool {
	return pl.extent <= pl.floor ||
		float64(pl.extent-pl.bound) <= float64(pl.bound)/nearBound+float64(float64(pl.bound)/1000*float64(pl.work/unitWork))
}

// run places the buffers in the given order. last is the trail of the previous run of this ranking.
func (pl *placer) run(rank []int32, how fit, last *trail) (off []int64, extent int64) {
	pl.prepare()
	if len(rank) <= fewBuffers {
		return pl.runFew(rank, how, last)
	}
	return pl.known.run(pl, rank, how)
}
