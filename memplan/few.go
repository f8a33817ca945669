package memplan

import (
	"cmp"
	"slices"
)

// fewBuffers are placed by runFew. Of few buffers what placedGroup keeps of them
// costs more than it saves: here a search looks at all that has been placed, in one
// list by offset.
const fewBuffers = 1 << 12

// lying is a placed buffer and its bytes.
type lying struct {
	span
	buf int32
}

// list is lyings by offset, of one offset the latest first, and where findFew stands
// in it.
type list struct {
	all []lying
	at  int
}

// runFew is run of few buffers.
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
		// Empty lists, of which there are many in a program of one phase, have no part.
		among = slices.DeleteFunc(among, func(l *list) bool { return len(l.all) == 0 })
		at := pl.findFew(i, among, pl.where(i, how))
		off[i] = at
		extent = max(extent, at+pl.size[i])
		n, _ := slices.BinarySearchFunc(own.all, at, func(x lying, lo int64) int { return cmp.Compare(x.lo, lo) })
		own.all = slices.Insert(own.all, n, lying{span{at, at + pl.size[i]}, i})
	}
	return off, extent
}

// findFew is find among lists.
func (pl *placer) findFew(i int32, among []*list, where fit) int64 {
	row, size, align := pl.seeker.rows.row(i), pl.size[i], pl.align[i]
	at, gap := int64(-1), int64(-1)
	free := int64(0) // the lowest aligned offset above all overlapping buffers so far
	for _, l := range among {
		l.at = 0
		l.seek(row, free)
	}
	for {
		var low *list // the one whose next overlapping buffer lies lowest
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
		if gap == size { // none is tighter
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

// seek moves on to the next one that is in a row and ends above free: what ends there
// or below changes nothing, whether it overlaps or not.
func (l *list) seek(row []uint64, free int64) {
	k := l.at
	for ; k < len(l.all); k++ {
		if x := &l.all[k]; x.hi > free && row[x.buf>>6]>>(x.buf&63)&1 == 1 {
			break
		}
	}
	l.at = k
}
