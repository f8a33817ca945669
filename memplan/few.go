package memplan

import (
	"cmp"
	"slices"
)

// fewBuffers is the largest number of buffers that are placed by runFew. For so few, keeping a
// placedGroup up to date costs more than it saves: runFew searches a plain list of all placed
// buffers by offset.
const fewBuffers = 1 << 12

// lying is a placed buffer and its byte range.
type lying struct {
	span
	buf int32
}

// list holds placed buffers by offset; of those with the same offset the latest is first. at is
// the position of findFew in it.
type list struct {
	all []lying
	at  int
}

// runFew is run for problems of at most fewBuffers buffers, for which it is faster.
func (pl *placer) runFew(rank []int32, how fit) (off []int64, extent int64) {
	for g := range pl.lists {
		pl.lists[g].all = pl.lists[g].all[:0]
	}
	off = make([]int64, len(rank))
	among := make([]*list, 0, len(pl.lists))
	for k, i := range rank {
		if pl.stopAt(k) {
			return off, extent
		}
		own := &pl.lists[pl.group[i]]
		among = append(among[:0], own)
		switch {
		case pl.group[i] != 0:
			among = append(among, &pl.lists[0])
		default:
			for g := range pl.lists[1:] {
				among = append(among, &pl.lists[1+g])
			}
		}
		// Leave out empty lists; a program of one phase has many.
		among = slices.DeleteFunc(among, func(l *list) bool { return len(l.all) == 0 })
		at := pl.findFew(i, among, pl.where(i, how))
		off[i] = at
		extent = max(extent, at+pl.size[i])
		n, _ := slices.BinarySearchFunc(own.all, at, func(x lying, lo int64) int { return cmp.Compare(x.lo, lo) })
		own.all = slices.Insert(own.all, n, lying{span{at, at + pl.size[i]}, i})
	}
	return off, extent
}

// findFew is find over plain lists.
func (pl *placer) findFew(i int32, among []*list, where fit) int64 {
	row, size, align := pl.seeker.rows.row(i), pl.size[i], pl.align[i]
	at, gap := int64(-1), int64(-1)
	free := int64(0) // the lowest aligned offset above all overlapping buffers so far
	for _, l := range among {
		l.at = 0
		l.seek(row, free)
	}
	for {
		var low *list // the list whose next overlapping buffer has the lowest offset
		for _, l := range among {
			if l.at < len(l.all) && (low == nil || l.all[l.at].lo < low.all[low.at].lo) {
				low = l
			}
		}
		if low == nil {
			break
		}
		next := low.all[low.at].span
		switch room := next.lo - free; {
		case room < size:
		case where == lowest:
			for _, l := range among {
				pl.work += int64(min(l.at+1, len(l.all)))
			}
			return free
		case where == highest:
			if top := (min(next.lo, pl.ceiling) - size) &^ (align - 1); top >= free {
				at = top
			}
		case gap < 0 || room < gap:
			at, gap = free, room
		}
		if gap == size { // no gap can be tighter
			break
		}
		free = max(free, alignUp(next.hi, align))
		low.at++
		low.seek(row, free)
	}
	for _, l := range among {
		pl.work += int64(len(l.all))
	}
	if top := (pl.ceiling - size) &^ (align - 1); where == highest && top >= free {
		return top
	}
	if at < 0 {
		at = free
	}
	return at
}

// seek advances to the next buffer that is in row (the set of buffers that overlap in time) and
// ends above free. Buffers that end at free or below cannot change the result.
func (l *list) seek(row []uint64, free int64) {
	k := l.at
	for ; k < len(l.all); k++ {
		if x := &l.all[k]; x.hi > free && row[x.buf>>6]>>(x.buf&63)&1 == 1 {
			break
		}
	}
	l.at = k
}
