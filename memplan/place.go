package memplan

import (
	"cmp"
	mathbits "math/bits"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// place finds offsets for the buffers of one space that are not LifeRun. It
// returns them by index into the space's ids, and their extent. bound is the
// lower bound of the extent: no search goes on once it is met.
func (a *analysis) place(sp graph.Space, bound int64) (off []int64, extent int64) {
	tl := &a.spaces[sp]
	n := len(tl.ids)
	if n == 0 {
		return nil, 0
	}
	pl := &placer{tl: tl, align: make([]int64, n), size: make([]int64, n)}
	defer func() { a.work[sp] = pl.work }()
	rank := make([]int32, n)
	for i, id := range tl.ids {
		pl.size[i] = a.p.Buf(id).Bytes()
		pl.align[i] = a.align[id]
		rank[i] = int32(i)
	}
	dur := func(i int32) int64 { return tl.last[i] - tl.first[i] + 1 }
	bySize := func(x, y int32) int { return cmp.Compare(pl.size[y], pl.size[x]) }
	byDur := func(x, y int32) int { return cmp.Compare(dur(y), dur(x)) }
	byArea := func(x, y int32) int {
		return cmp.Compare(float64(pl.size[y])*float64(dur(y)), float64(pl.size[x])*float64(dur(x)))
	}
	byStart := func(x, y int32) int { return cmp.Compare(tl.first[x], tl.first[y]) }
	byEnd := func(x, y int32) int { return cmp.Compare(tl.last[y], tl.last[x]) }
	// Of fromBothEnds: what is kept comes first, in the order in which it is made,
	// so that what stays longest lies outermost. The rest fills the gap.
	steps := slices.Max(tl.last)
	pl.high = make([]bool, n)
	for i := range rank {
		tl.kept[i] = tl.kept[i] || dur(int32(i)) > steps/16
		pl.high[i] = tl.kept[i] && tl.late[i]
	}
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
	pl.ceiling = bound + bound/nearBound
	// What wins most often comes first. Tight by start is what a good allocator
	// does at run time. By size, the last of a size at the bottom, keeps room for
	// what comes at the end of the backward, where gradients have piled up. From
	// both ends suits steps with many layers, by area programs with few large
	// buffers.
	tries := []struct {
		fit  fit
		keys []func(x, y int32) int
	}{
		{tightest, []func(x, y int32) int{byStart, byDur, bySize}},
		{lowest, []func(x, y int32) int{bySize, byEnd}},
		{fromBothEnds, []func(x, y int32) int{byKept, bySize, byStart}},
		{fromBothEnds, []func(x, y int32) int{byKept, bySize, byEnd}},
		{lowest, []func(x, y int32) int{bySize, byDur}},
		{lowest, []func(x, y int32) int{bySize, byStart}},
		{lowest, []func(x, y int32) int{byArea}},
		{lowest, []func(x, y int32) int{byStart, byDur, bySize}},
		{lowest, []func(x, y int32) int{byDur, bySize}},
		{tightest, []func(x, y int32) int{byEnd, byDur, bySize}},
		{tightest, []func(x, y int32) int{bySize, byDur}},
	}
	type start struct {
		rank   []int32
		fit    fit
		extent int64
	}
	var best []int64
	bestExtent := int64(-1)
	var starts []start
	for _, try := range tries {
		slices.SortFunc(rank, func(x, y int32) int {
			for _, key := range try.keys {
				if c := key(x, y); c != 0 {
					return c
				}
			}
			return cmp.Compare(x, y)
		})
		off, extent := pl.run(rank, try.fit)
		if bestExtent < 0 || extent < bestExtent {
			best, bestExtent = off, extent
		}
		starts = append(starts, start{slices.Clone(rank), try.fit, extent})
		if pl.content(bestExtent, bound) {
			return best, bestExtent
		}
	}
	// Squeaky wheel optimization (Joslin and Clements, 1999), from the rankings
	// that came out best: what ends above the bound moves forward in the ranking,
	// and all is placed again. How far it moves changes every three rounds, or the
	// rounds would soon repeat each other.
	pushes := [...][]float64{lowest: {0.5, 0.75, 0, 0.875, 0.25}, tightest: {0.5, 0.75, 0, 0.875, 0.25}, fromBothEnds: {0.97, 0.9, 0.8, 0.95, 0.5}}
	slices.SortStableFunc(starts, func(x, y start) int { return cmp.Compare(x.extent, y.extent) })
	for round := range squeakyRounds {
		for _, s := range starts[:squeakyStarts] {
			off, extent := pl.run(s.rank, s.fit)
			if extent < bestExtent {
				best, bestExtent = off, extent
			}
			if pl.content(bestExtent, bound) || pl.work > maxWork {
				return best, bestExtent
			}
			for k, i := range s.rank {
				if off[i]+pl.size[i] > bound {
					to := int(float64(k) * pushes[s.fit][round/3%len(pushes[s.fit])])
					copy(s.rank[to+1:k+1], s.rank[to:k])
					s.rank[to] = i
				}
			}
		}
	}
	return best, bestExtent
}

// How long the search goes on, in pairs of buffers looked at: counted work,
// unlike time, gives the same plan on every machine. The extent may be one part
// in nearBound above the bound, and for every unitWork a thousandth further; at
// maxWork the search ends anyway.
const (
	nearBound     = 2000
	unitWork      = 20e6
	maxWork       = 150e6
	squeakyStarts = 5 // the best rankings, in turn
	squeakyRounds = 96
)

// content says whether the search is over.
func (pl *placer) content(extent, bound int64) bool {
	return float64(extent-bound) <= float64(bound)/nearBound+float64(bound)/1000*float64(pl.work/unitWork)
}

// fit is where a buffer goes of the places that are free.
type fit uint8

const (
	lowest   fit = iota
	tightest     // the smallest gap
	highest      // below the ceiling, or the lowest where nothing is free there
	// fromBothEnds is highest for what is made in the backward and kept, and
	// otherwise lowest. Activations that are kept go off the stack in the backward
	// while reduced gradients come: from the two ends of the arena, what is free
	// stays one gap between them.
	fromBothEnds
)

// placer puts buffers one by one where nothing that overlaps them in time is.
type placer struct {
	tl    *timeline
	align []int64
	size  []int64
	// Of fromBothEnds: the ceiling, and by buffer whether it goes below that.
	ceiling int64
	high    []bool
	group   []int32 // by buffer: see groups
	placed  []placedGroup
	order   []int32 // by buffer: its position in this run's order
	work    int64   // pairs of buffers looked at so far
}

// groups sorts buffers by the phase that they are used in, so that a search
// need not look at the other phases' ones: a buffer of group g > 0 overlaps in
// time only with buffers of groups g and 0. Phases that no barrier parts are one
// group.
func (tl *timeline) groups() (group []int32, n int) {
	group = slices.Clone(tl.phase)
	n = 1
	for _, g := range group {
		n = max(n, int(g)+1)
	}
	mask := newBitRows(n, len(tl.ids))
	for i, g := range group {
		mask.row(g)[i>>6] |= 1 << (i & 63)
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
	for i, g := range group {
		if g == 0 {
			continue
		}
		own, all := mask.row(g), mask.row(0)
		for w, bits := range tl.clash.row(int32(i)) {
			for rest := bits &^ (own[w] | all[w]); rest != 0; rest &= rest - 1 {
				if a, b := find(g), find(group[w<<6+mathbits.TrailingZeros64(rest)]); a != b {
					into[max(a, b)] = min(a, b)
				}
			}
		}
	}
	for i, g := range group {
		group[i] = find(g)
	}
	return group, n
}

// run places the buffers in the given order.
func (pl *placer) run(rank []int32, how fit) (off []int64, extent int64) {
	if pl.group == nil {
		var n int
		pl.group, n = pl.tl.groups()
		pl.placed = make([]placedGroup, n)
	}
	for g := range pl.placed {
		pl.placed[g].clear()
	}
	off, pl.order = make([]int64, len(rank)), make([]int32, len(rank))
	for k, i := range rank {
		pl.order[i] = int32(k)
	}
	last := pl.lastClash(rank)
	var among []*placedGroup
	for k, i := range rank {
		own := &pl.placed[pl.group[i]]
		among = append(among[:0], own)
		if pl.group[i] == 0 {
			for g := range pl.placed[1:] {
				among = append(among, &pl.placed[1+g])
			}
		} else {
			among = append(among, &pl.placed[0])
		}
		where := how
		if how == fromBothEnds {
			where = lowest
			if pl.high[i] {
				where = highest
			}
		}
		at := pl.find(pl.tl.clash.row(i), pl.size[i], pl.align[i], among, where)
		off[i] = at
		extent = max(extent, at+pl.size[i])
		own.add(i, span{at, at + pl.size[i]}, last, int32(k))
	}
	return off, extent
}

// lastClash returns by buffer the last position in rank of one that overlaps it
// in time, −1 for none: after that nobody asks where it lies.
func (pl *placer) lastClash(rank []int32) []int32 {
	last := make([]int32, len(rank))
	for i := range last {
		last[i] = -1
	}
	seen := make([]uint64, pl.tl.clash.words)
	for k, i := range slices.Backward(rank) {
		for w, bits := range pl.tl.clash.row(i) {
			fresh := bits &^ seen[w]
			seen[w] |= bits
			for ; fresh != 0; fresh &= fresh - 1 {
				last[w<<6+mathbits.TrailingZeros64(fresh)] = int32(k)
			}
		}
	}
	return last
}

// find returns the offset for a buffer of the given size and alignment that
// clashes with those of row, among placed ones. The work that it counts is that of
// a search through all of them, by offset.
func (pl *placer) find(row []uint64, size, align int64, among []*placedGroup, where fit) int64 {
	at, gap := int64(-1), int64(-1)
	free := int64(0) // the lowest aligned offset above all clashing buffers so far
	for _, g := range among {
		g.seek(row, 0)
	}
	for {
		var low *placedGroup // the one whose next clashing buffer lies lowest
		for _, g := range among {
			if g.head < len(g.live) && (low == nil || g.span[g.head].lo < low.span[low.head].lo) {
				low = g
			}
		}
		if low == nil {
			break
		}
		b := low.span[low.head]
		switch room := b.lo - free; {
		case room < size:
		case where == lowest:
			for _, g := range among {
				pl.work += g.passed(pl.order)
			}
			return free
		case where == highest:
			if top := (min(b.lo, pl.ceiling) - size) &^ (align - 1); top >= free {
				at = top
			}
		case gap < 0 || room < gap:
			at, gap = free, room
		}
		if gap == size { // none is tighter
			break
		}
		free = max(free, alignUp(b.hi, align))
		low.seek(row, low.head+1)
	}
	for _, g := range among {
		pl.work += int64(len(g.all))
	}
	if top := (pl.ceiling - size) &^ (align - 1); where == highest && top >= free {
		return top
	}
	if at < 0 {
		at = free
	}
	return at
}
