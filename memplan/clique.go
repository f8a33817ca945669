package memplan

import (
	"cmp"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// cliquePoints is the largest number of a space's local maxima that findCliques examines.
// cliqueShare is the smallest share of the highest maximum that they may have.
const (
	cliquePoints = 64
	cliqueShare  = 0.9
)

// findCliques raises the lower bound of a space. Steps of different streams without an event
// between them may run at the same time, but an order of single steps counts the operands of only
// one of them. Buffers that all overlap each other in time must have separate bytes. So findCliques
// starts with all buffers that are live at a maximum. It adds further buffers, the largest first,
// that overlap all of these and each other. It also sets the space's floor.
func (a *Analysis) findCliques(sp graph.Space) {
	tl := &a.spaces[sp]
	if len(tl.ids) == 0 {
		return
	}
	var best []int32
	most := a.bound[sp].bytes
	var at bound
	stab := tl.stabber()
	is := newMarks(len(tl.ids))
	for _, pt := range a.highPoints(sp) {
		members := a.aliveAt(sp, pt)
		rest := tl.besideAll(members, stab, &is)
		slices.SortStableFunc(rest, func(x, y int32) int { return cmp.Compare(a.size[tl.ids[y]], a.size[tl.ids[x]]) })
		total := pt.bytes
		var added []int32
		for _, i := range rest {
			if slices.ContainsFunc(added, func(j int32) bool { return !tl.between(i, j) }) {
				continue
			}
			added = append(added, i)
			total += a.size[tl.ids[i]]
		}
		a.floor[sp] = max(a.floor[sp], a.aligned(tl, append(members, added...)))
		if total > most {
			most, best, at = total, added, pt
		}
	}
	if best == nil {
		return
	}
	at.bytes = most
	for _, i := range best {
		at.beside = append(at.beside, tl.ids[i])
	}
	a.bound[sp] = at
	// The bytes by class include at.beside, the buffers of steps that may run at the same time.
	var classes [graph.NumClasses]int64
	for _, id := range append(a.liveAt(sp, at), at.beside...) {
		b := a.p.Buf(id)
		classes[b.Class] += a.size[id] - b.Pad
		classes[graph.Padding] += b.Pad
	}
	for c, bytes := range classes {
		a.classPeak[sp][c] = max(a.classPeak[sp][c], bytes)
	}
}

// aligned returns the smallest possible extent of buffers that all have separate bytes. Each offset
// is a multiple of the buffer's alignment. So all buffers except the highest end in padding, unless
// their size is such a multiple.
func (a *Analysis) aligned(tl *timeline, members []int32) (extent int64) {
	least := a.align[tl.ids[members[0]]]
	for _, i := range members {
		least = min(least, a.align[tl.ids[i]])
	}
	most := int64(0) // the largest padding: the highest buffer needs none
	for _, i := range members {
		n := a.size[tl.ids[i]]
		extent += alignUp(n, least)
		most = max(most, alignUp(n, least)-n)
	}
	return extent - most
}

// besideAll returns, in ascending order, the buffers that overlap every member in time and are not
// members. It examines only the partners of the member with the shortest life, since most of these
// are members themselves.
func (o *overlaps) besideAll(members []int32, stab *stabber, is *marks) (list []int32) {
	short := slices.MinFunc(members, func(i, j int32) int { return cmp.Compare(o.last[i]-o.first[i], o.last[j]-o.first[j]) })
	is.set(members)
	o.partners(stab, short, func(j int32) {
		if is.of[j] == is.now {
			return
		}
		is.of[j] = is.now
		if !slices.ContainsFunc(members, func(i int32) bool { return !o.between(i, j) }) {
			list = append(list, j)
		}
	})
	slices.Sort(list)
	return list
}

// highPoints returns the local maxima of live bytes in a space, including resident buffers, in
// descending order.
func (a *Analysis) highPoints(sp graph.Space) (list []bound) {
	highest := func() []bound {
		slices.SortFunc(list, func(x, y bound) int {
			return cmp.Or(cmp.Compare(y.bytes, x.bytes), cmp.Compare(x.section, y.section),
				cmp.Compare(x.order, y.order), cmp.Compare(x.pos, y.pos))
		})
		return list[:min(len(list), cliquePoints)]
	}
	least := int64(cliqueShare * float64(a.bound[sp].bytes))
	for si := range a.sections {
		sec := &a.sections[si]
		n := len(sec.trace.Steps)
		for oi := range sec.orders {
			delta := make([]int64, n+1)
			for _, l := range sec.lives(oi) {
				if a.p.Buf(l.buf).Space == sp {
					delta[l.from] += a.size[l.buf]
					delta[l.to+1] -= a.size[l.buf]
				}
			}
			now, last := a.residentBytes[sp], int64(-1)
			for pos := range n {
				now += delta[pos]
				if now >= least && now > last && now >= now+delta[pos+1] && now > a.residentBytes[sp] {
					list = append(list, bound{bytes: now, section: si, order: oi, pos: pos})
					if len(list) == 16*cliquePoints { // lower points cannot be among the highest
						list = highest()
						least = list[len(list)-1].bytes
					}
				}
				last = now
			}
		}
	}
	return highest()
}

// liveAt returns the buffers that are live at a point, including resident ones.
func (a *Analysis) liveAt(sp graph.Space, pt bound) (ids []graph.BufID) {
	ids = slices.Clone(a.resident[sp])
	for _, l := range a.sections[pt.section].lives(pt.order) {
		if int(l.from) <= pt.pos && pt.pos <= int(l.to) && a.p.Buf(l.buf).Space == sp {
			ids = append(ids, l.buf)
		}
	}
	return ids
}

func (a *Analysis) aliveAt(sp graph.Space, pt bound) (items []int32) {
	for _, id := range a.liveAt(sp, pt)[len(a.resident[sp]):] {
		items = append(items, a.index[id])
	}
	return items
}
