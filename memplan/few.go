package memplan

import "slices"

// trail holds results of a run for the next one, whose ranking starts with the same positions.
type trail struct {
	off  []int64 // by buffer
	work []int64 // by position: the increase of placer.work from placing its buffer
	same int     // number of first positions that have not changed since
}

// runFew does the same as run for at most fewBuffers buffers, for which it is faster.
func (pl *placer) runFew(rank []int32, how fit, last *trail) (off []int64, extent int64) {
	for g := range pl.lists {
		pl.lists[g].clear()
	}
	if last.work == nil {
		last.work = make([]int64, len(rank))
	}
	off = make([]int64, len(rank))
	among := make([]*list, 0, len(pl.lists))
	for k, i := range rank {
		if pl.stopAt(k) {
			return off, extent
		}
		own := &pl.lists[pl.group[i]]
		if k < last.same {
			off[i] = last.off[i]
			pl.work += last.work[k]
			extent = max(extent, off[i]+pl.size[i])
			own.insert(i, off[i], off[i]+pl.size[i])
			continue
		}
		before := pl.work
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
		among = slices.DeleteFunc(among, func(l *list) bool { return len(l.buf) == 0 })
		at := pl.findFew(i, among, pl.where(i, how))
		off[i], last.work[k] = at, pl.work-before
		extent = max(extent, at+pl.size[i])
		own.insert(i, at, at+pl.size[i])
	}
	last.off, last.same = off, len(rank)
	return off, extent
}

// findFew does the same as find on plain lists.
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
			if l.at < len(l.lo) && (low == nil || l.lo[l.at] < low.lo[low.at]) {
				low = l
			}
		}
		if low == nil {
			break
		}
		next := span{low.lo[low.at], low.hi[low.at]}
		switch room := next.lo - free; {
		case room < size:
		case where == lowest:
			for _, l := range among {
				pl.work += int64(min(l.at+1, len(l.buf)))
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
		pl.work += int64(len(l.buf))
	}
	if top := (pl.ceiling - size) &^ (align - 1); where == highest && top >= free {
		return top
	}
	if at < 0 {
		at = free
	}
	return at
}
