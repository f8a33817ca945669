package memplan

import "iter"

// runMany does the same as run, for any number of buffers.
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

// leaving lists, for each position of the order, the buffers that no search needs from that
// position on. ending is the first buffer of the list, next leads from one buffer to the next, −1
// ends it.
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

// find returns the offset for the seeker's buffer, with the given alignment, among placed buffers.
// It counts the work of a linear search of all of them by offset.
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
