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
	// What wins most often comes first. Tight by start is what a good allocator
	// does at run time; by size and by area suit programs with few large buffers.
	tries := []struct {
		tight bool
		keys  []func(x, y int32) int
	}{
		{true, []func(x, y int32) int{byStart, byDur, bySize}},
		{false, []func(x, y int32) int{bySize, byDur}},
		{false, []func(x, y int32) int{byArea}},
		{false, []func(x, y int32) int{byStart, byDur, bySize}},
		{false, []func(x, y int32) int{byDur, bySize}},
		{true, []func(x, y int32) int{byEnd, byDur, bySize}},
		{true, []func(x, y int32) int{bySize, byDur}},
	}
	type start struct {
		rank   []int32
		tight  bool
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
		off, extent := pl.run(rank, try.tight)
		if bestExtent < 0 || extent < bestExtent {
			best, bestExtent = off, extent
		}
		starts = append(starts, start{slices.Clone(rank), try.tight, extent})
		if pl.content(bestExtent, bound) {
			return best, bestExtent
		}
	}
	// Squeaky wheel optimization (Joslin and Clements, 1999), from the rankings
	// that came out best: what ends above the bound moves forward in the ranking,
	// and all is placed again. How far it moves changes every three rounds, or the
	// rounds would soon repeat each other.
	pushes := [...]float64{0.5, 0.75, 0, 0.875, 0.25}
	slices.SortStableFunc(starts, func(x, y start) int { return cmp.Compare(x.extent, y.extent) })
	for _, s := range starts[:4] {
		for round := range squeakyRounds {
			off, extent := pl.run(s.rank, s.tight)
			if extent < bestExtent {
				best, bestExtent = off, extent
			}
			if pl.content(bestExtent, bound) || pl.work > maxWork {
				return best, bestExtent
			}
			for k, i := range s.rank {
				if off[i]+pl.size[i] > bound {
					to := int(float64(k) * pushes[round/3%len(pushes)])
					copy(s.rank[to+1:k+1], s.rank[to:k])
					s.rank[to] = i
				}
			}
		}
	}
	return best, bestExtent
}

// How long the search goes on, in pairs of buffers looked at: counted work,
// unlike time, gives the same plan on every machine. For every unitWork the
// extent may be a thousandth further above the bound; at maxWork it ends anyway.
const (
	unitWork      = 20e6
	maxWork       = 150e6
	squeakyRounds = 96 // of each of the best rankings
)

// content says whether the search is over.
func (pl *placer) content(extent, bound int64) bool {
	return float64(extent-bound) <= float64(bound)/1000*float64(pl.work/unitWork)
}

// placer puts buffers one by one where nothing that overlaps them in time is.
type placer struct {
	tl     *timeline
	align  []int64
	size   []int64
	group  []int32 // by buffer: see groups
	placed [][]place
	work   int64 // pairs of buffers looked at so far
}

// place is where a buffer lies.
type place struct {
	lo, hi int64
	item   int32
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

// run places the buffers in the given order, at the lowest place that fits, or
// with tight at the smallest gap that does.
func (pl *placer) run(rank []int32, tight bool) (off []int64, extent int64) {
	if pl.group == nil {
		var n int
		pl.group, n = pl.tl.groups()
		pl.placed = make([][]place, n)
	}
	for g := range pl.placed {
		pl.placed[g] = pl.placed[g][:0]
	}
	off = make([]int64, len(rank))
	var lists [][]place
	for _, i := range rank {
		g := pl.group[i]
		if g == 0 {
			lists = append(lists[:0], pl.placed...)
		} else {
			lists = append(lists[:0], pl.placed[0], pl.placed[g])
		}
		at := pl.find(pl.tl.clash.row(i), pl.size[i], pl.align[i], lists, tight)
		off[i] = at
		extent = max(extent, at+pl.size[i])
		k, _ := slices.BinarySearchFunc(pl.placed[g], at, func(b place, at int64) int { return cmp.Compare(b.lo, at) })
		pl.placed[g] = slices.Insert(pl.placed[g], k, place{at, at + pl.size[i], i})
	}
	return off, extent
}

// find returns the offset for a buffer of the given size and alignment that
// clashes with those of row, among the buffers of lists, each sorted by offset.
func (pl *placer) find(row []uint64, size, align int64, lists [][]place, tight bool) int64 {
	at, gap := int64(-1), int64(-1)
	free := int64(0)                     // the lowest aligned offset above all clashing buffers so far
	next := func(list []place) []place { // from the first that clashes on
		for k := range list {
			if i := list[k].item; row[i>>6]>>(i&63)&1 == 1 {
				pl.work += int64(k) + 1
				return list[k:]
			}
		}
		pl.work += int64(len(list))
		return nil
	}
	for l := range lists {
		lists[l] = next(lists[l])
	}
	for {
		low := -1 // the list whose next buffer lies lowest
		for l, list := range lists {
			if len(list) > 0 && (low < 0 || list[0].lo < lists[low][0].lo) {
				low = l
			}
		}
		if low < 0 {
			break
		}
		b := lists[low][0]
		if room := b.lo - free; room >= size && (gap < 0 || room < gap) {
			at, gap = free, room
			if !tight {
				break
			}
		}
		free = max(free, alignUp(b.hi, align))
		lists[low] = next(lists[low][1:])
	}
	if at < 0 {
		at = free
	}
	return at
}
