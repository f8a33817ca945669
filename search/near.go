package search

import "slices"

// near are recipes that differ from one in one item: that it stays, or leaves in another
// way, first or last or where it was.
func (f *filler) near(r recipe) (list []recipe) {
	for i := range f.items {
		it := &f.items[i]
		at := slices.IndexFunc(r, func(c choice) bool { return c.item == i })
		rest := slices.DeleteFunc(slices.Clone(r), func(c choice) bool { return c.item == i })
		if at >= 0 {
			list = append(list, rest)
		}
		for how := again; how <= toDisk; how++ {
			if how == again && it.drop < 0 || how == away && it.host < 0 || how == toDisk && it.disk < 0 {
				continue
			}
			c := choice{item: i, how: how}
			if at >= 0 && r[at].how != how {
				list = append(list, slices.Insert(slices.Clone(rest), at, c))
			}
			list = append(list, slices.Insert(slices.Clone(rest), 0, c), append(slices.Clone(rest), c))
		}
	}
	for _, c := range append(f.parts(), nearParts(r)...) {
		rest := slices.DeleteFunc(slices.Clone(r), func(o choice) bool { return o.item == c.item })
		list = append(list, slices.Insert(rest, 0, c))
	}
	list = append(list, f.instead(r)...)
	for _, o := range list {
		slices.SortStableFunc(o, func(a, b choice) int { return compareOrders(a.part > 0, b.part > 0) })
	}
	return slices.DeleteFunc(list, func(o recipe) bool { return slices.Equal(o, r) })
}

// instead are recipes of which a class stays on the device, and another item leaves in its place.
func (f *filler) instead(r recipe) (list []recipe) {
	for _, c := range r {
		if !f.items[c.item].state {
			continue
		}
		for _, o := range f.parts() {
			if o.item != c.item && o.part == wholeItem {
				rest := slices.DeleteFunc(slices.Clone(r), func(x choice) bool { return x.item == c.item || x.item == o.item })
				list = append(list, slices.Insert(rest, 0, o))
			}
		}
	}
	return list
}

// wholly is a recipe of which all leaves.
func (r recipe) wholly() recipe {
	r = slices.Clone(r)
	for i := range r {
		r[i].part = wholeItem
	}
	return r
}

// parts are quarters of all items.
func (f *filler) parts() (list recipe) {
	for i, it := range f.items {
		for part := wholeItem / 4; part <= wholeItem; part += wholeItem / 4 {
			if it.host >= 0 {
				list = append(list, choice{i, away, part})
			}
			if it.drop >= 0 {
				list = append(list, choice{i, again, part})
			}
		}
	}
	return list
}

// nearParts are parts a little larger and smaller than those of a recipe.
func nearParts(r recipe) (list recipe) {
	for _, c := range r {
		for _, by := range []int{-2, -1, 1, 2} {
			if part := c.part + by; c.part > 0 && part > 0 && part <= wholeItem {
				list = append(list, choice{c.item, c.how, part})
			}
		}
	}
	return list
}
