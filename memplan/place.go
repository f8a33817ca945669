package memplan

import (
	"cmp"
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
	var best []int64
	var bestRank []int32
	bestExtent, bestTight := int64(-1), false
	for _, try := range tries {
		slices.SortFunc(rank, func(x, y int32) int {
			for _, key := range try.keys {
				if c := key(x, y); c != 0 {
					return c
				}
			}
			return cmp.Compare(x, y)
		})
		if off, extent := pl.run(rank, try.tight, bestExtent); off != nil {
			best, bestExtent, bestTight = off, extent, try.tight
			bestRank = slices.Clone(rank)
		}
		if bestExtent <= bound || pl.work > placeWork && bestExtent <= bound+bound/1000 {
			return best, bestExtent
		}
	}
	// Squeaky wheel optimization (Joslin and Clements, 1999): what ends above the
	// bound moves forward in the ranking, and all is placed again.
	for round := 0; round < 64 && bestExtent > bound && pl.work < 3*placeWork; round++ {
		off, extent := pl.run(bestRank, bestTight, -1)
		if extent < bestExtent {
			best, bestExtent = off, extent
		}
		for k, i := range bestRank {
			if off[i]+pl.size[i] > bound {
				to := k / 2
				copy(bestRank[to+1:k+1], bestRank[to:k])
				bestRank[to] = i
			}
		}
	}
	return best, bestExtent
}

// placeWork is how many pairs of buffers the search looks at before it is
// content with an extent within a thousandth of the bound; three times that is
// when it stops improving by rounds. Counted work, unlike time, gives the same
// plan on every machine.
const placeWork = 50e6

// placer puts buffers one by one where nothing that overlaps them in time is.
type placer struct {
	tl     *timeline
	align  []int64
	size   []int64
	placed []place // by offset
	work   int64   // pairs of buffers looked at so far
}

type place struct {
	lo, hi int64
	item   int32
}

// run places the buffers in the given order, at the lowest place that fits, or
// with tight at the smallest gap that does. It gives up with nil as soon as the
// extent reaches limit (−1: none).
func (pl *placer) run(rank []int32, tight bool, limit int64) (off []int64, extent int64) {
	off = make([]int64, len(rank))
	pl.placed = pl.placed[:0]
	for _, i := range rank {
		row := pl.tl.clash.row(i)
		size := pl.size[i]
		at, gap := int64(-1), int64(-1)
		free := int64(0) // the lowest offset above all clashing buffers so far
		for k := range pl.placed {
			b := &pl.placed[k]
			if row[b.item>>6]>>(b.item&63)&1 == 0 {
				continue
			}
			if room := b.lo - alignUp(free, pl.align[i]); room >= size && (gap < 0 || room < gap) {
				at, gap = alignUp(free, pl.align[i]), room
				if !tight {
					break
				}
			}
			free = max(free, b.hi)
		}
		pl.work += int64(len(pl.placed))
		if at < 0 {
			at = alignUp(free, pl.align[i])
		}
		off[i] = at
		extent = max(extent, at+size)
		if limit >= 0 && extent >= limit {
			return nil, 0
		}
		k, _ := slices.BinarySearchFunc(pl.placed, at, func(b place, at int64) int { return cmp.Compare(b.lo, at) })
		pl.placed = slices.Insert(pl.placed, k, place{at, at + size, i})
	}
	return off, extent
}
