package memplan

import (
	"cmp"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// How many of a space's highest points findCliques looks at, and how far below
// the highest they may be.
const (
	cliquePoints = 64
	cliqueShare  = 0.9
)

// findCliques raises the bound of a space. Steps of different streams that no
// event orders run at the same time, while an order of single steps has one of
// them over before the other starts: of what may be alive together it counts the
// operands of one only. Any set of buffers of which each two overlap in time
// must lie apart, so what overlaps everything that is alive at a high point, and
// each other, is added to it, the largest first.
func (a *analysis) findCliques(sp graph.Space, index []int32) {
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
		members := a.aliveAt(sp, pt, index)
		rest := tl.besideAll(members, stab, &is)
		slices.SortStableFunc(rest, func(x, y int32) int { return cmp.Compare(a.p.Buf(tl.ids[y]).Bytes(), a.p.Buf(tl.ids[x]).Bytes()) })
		total := pt.bytes
		var added []int32
		for _, i := range rest {
			if slices.ContainsFunc(added, func(j int32) bool { return !tl.between(i, j) }) {
				continue
			}
			added = append(added, i)
			total += a.p.Buf(tl.ids[i]).Bytes()
		}
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
	// Classes that peak there have the added bytes too.
	var classes [graph.NumClasses]int64
	for _, id := range append(a.liveAt(sp, at), at.beside...) {
		b := a.p.Buf(id)
		classes[b.Class] += b.Bytes() - b.Pad
		classes[graph.Padding] += b.Pad
	}
	for c, bytes := range classes {
		a.classPeak[sp][c] = max(a.classPeak[sp][c], bytes)
	}
}

// besideAll returns the buffers that are no members and overlap every member in
// time, ascending. They are partners of the member that lives shortest, and most of
// those are members.
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

// highPoints returns local maxima of what is alive in a space, resident buffers
// included, the highest first.
func (a *analysis) highPoints(sp graph.Space) (list []bound) {
	least := int64(cliqueShare * float64(a.bound[sp].bytes))
	for si := range a.sections {
		sec := &a.sections[si]
		n := len(sec.trace.Steps)
		for oi := range sec.orders {
			delta := make([]int64, n+1)
			sec.eachLife(oi, func(id graph.BufID, from, to int32) {
				if b := a.p.Buf(id); b.Space == sp {
					delta[from] += b.Bytes()
					delta[to+1] -= b.Bytes()
				}
			})
			now, last := a.residentBytes[sp], int64(-1)
			for pos := range n {
				now += delta[pos]
				if now >= least && now > last && now >= now+delta[pos+1] && now > a.residentBytes[sp] {
					list = append(list, bound{bytes: now, section: si, order: oi, pos: pos})
				}
				last = now
			}
		}
	}
	slices.SortStableFunc(list, func(x, y bound) int { return cmp.Compare(y.bytes, x.bytes) })
	return list[:min(len(list), cliquePoints)]
}

// liveAt returns what is alive at a point, resident buffers included.
func (a *analysis) liveAt(sp graph.Space, pt bound) (ids []graph.BufID) {
	ids = slices.Clone(a.resident[sp])
	a.sections[pt.section].eachLife(pt.order, func(id graph.BufID, from, to int32) {
		if a.p.Buf(id).Space == sp && int(from) <= pt.pos && pt.pos <= int(to) {
			ids = append(ids, id)
		}
	})
	return ids
}

func (a *analysis) aliveAt(sp graph.Space, pt bound, index []int32) (items []int32) {
	for _, id := range a.liveAt(sp, pt)[len(a.resident[sp]):] {
		items = append(items, index[id])
	}
	return items
}
