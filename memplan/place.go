package memplan

import (
	"cmp"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// place finds offsets for the buffers of one space that are not LifeRun. It
// returns them by index into the space's ids, and their extent. bound is the
// lower bound of the extent: no search goes on once it is met.
func (a *analysis) place(sp graph.Space, align, bound int64) (off []int64, extent int64) {
	tl := &a.spaces[sp]
	n := len(tl.ids)
	if n == 0 {
		return nil, 0
	}
	pl := &placer{tl: tl, align: align, size: make([]int64, n)}
	rank := make([]int32, n)
	for i, id := range tl.ids {
		pl.size[i] = a.p.Buf(id).Bytes()
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
	rankings := [][]func(x, y int32) int{
		{byDur, bySize},
		{bySize, byDur},
		{byArea},
		{byStart, byDur, bySize},
		{byEnd, byDur, bySize},
	}
	var best []int64
	bestExtent := int64(-1)
	for _, keys := range rankings {
		slices.SortFunc(rank, func(x, y int32) int {
			for _, key := range keys {
				if c := key(x, y); c != 0 {
					return c
				}
			}
			return cmp.Compare(x, y)
		})
		for _, tight := range []bool{false, true} {
			if off, extent := pl.run(rank, tight, bestExtent); off != nil {
				best, bestExtent = off, extent
			}
			if bestExtent <= bound {
				return best, bestExtent
			}
		}
	}
	return best, bestExtent
}

// placer puts buffers one by one where nothing that overlaps them in time is.
type placer struct {
	tl     *timeline
	align  int64
	size   []int64
	placed []place // by offset
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
			if room := b.lo - free; room >= size && (gap < 0 || room < gap) {
				at, gap = free, room
				if !tight {
					break
				}
			}
			free = max(free, alignUp(b.hi, pl.align))
		}
		if at < 0 {
			at = free
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
