package search

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// acts returns recipes for activations, with which complete recipes begin or end.
func (f *filler) acts() (list []recipe) {
	var drops, parks, mixed, free, all recipe
	left := f.slack[graph.Host]
	for i, it := range f.items {
		if it.state {
			continue
		}
		c := choice{item: i, how: again}
		if it.drop < 0 {
			c.how = away
		}
		if all = append(all, c); it.drop >= 0 {
			drops = append(drops, c)
		}
		if it.host < 0 {
			mixed, free = append(mixed, c), append(free, c)
			continue
		}
		parks = append(parks, choice{item: i, how: away})
		if f.set.dropRatio(it) > f.link[graph.Host] {
			mixed = append(mixed, choice{item: i, how: away})
		} else {
			mixed = append(mixed, c)
		}
		if it.bytes <= left {
			left -= it.bytes
			free = append(free, choice{item: i, how: away})
		} else if it.drop >= 0 {
			free = append(free, c)
		}
	}
	return []recipe{nil, drops, free, mixed, parks, all}
}

// states returns recipes for the classes of states; the first choice leaves first.
func (f *filler) states() (list []recipe) {
	list = append(list, nil)
	at := map[graph.Class]int{}
	for i, it := range f.items {
		if it.state {
			at[it.class] = i
		}
	}
	if len(at) == 0 {
		return list
	}
	const o, p, g = graph.Optimizer, graph.Parameters, graph.Gradients
	orders := [][]graph.Class{{o}, {p}, {g}, {o, g}, {o, p}, {p, o}, {o, g, p}, {o, p, g}, {p, g, o}}
	for _, order := range orders {
		var host, disk, split recipe
		for k, c := range order {
			i := at[c]
			host, disk = append(host, choice{item: i, how: away}), append(disk, choice{item: i, how: toDisk})
			if k == 0 || c == graph.Optimizer {
				split = append(split, choice{item: i, how: toDisk})
			} else {
				split = append(split, choice{item: i, how: away})
			}
		}
		list = append(list, host)
		if f.items[at[order[0]]].disk >= 0 {
			list = append(list, disk, split)
		}
	}
	return list
}

// parts returns choices of one to four quarters of each item.
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

// near returns recipes that differ from one in one item: it stays, or leaves in another way, first
// or last or at its present position.
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

// instead returns recipes in which a class stays on the device and another item leaves in its
// place.
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

// anchors are recipes of every way to deal with activations and classes, in the order of
// seconds for a byte, and with either first, and of parts of a class with either.
func (f *filler) anchors() (list []recipe) {
	for _, acts := range f.acts() {
		for _, states := range f.states() {
			both := slices.Concat(acts, states)
			list = append(list, f.sorted(both))
			if len(acts) > 0 {
				acts := f.sorted(acts)
				list = append(list, slices.Concat(acts, states), slices.Concat(states, acts))
			}
		}
		for _, c := range f.parts() {
			if f.items[c.item].state {
				list = append(list, slices.Concat(recipe{c}, f.sorted(acts)))
			}
		}
	}
	return list
}

// ratio returns the estimated cost of a choice, in seconds per byte.
func (f *filler) ratio(c choice) float64 {
	it := &f.items[c.item]
	at := it.host
	switch c.how {
	case again:
		return f.set.dropRatio(*it)
	case toDisk:
		at = it.disk
	}
	if at < 0 {
		return math.Inf(1)
	}
	mv := &f.set.moves[at]
	switch {
	case mv.kind == parkMove && mv.bytes <= f.slack[mv.space]:
		return 0
	case mv.kind == parkMove:
		return f.link[mv.space]
	case mv.bytes <= 0:
		return math.Inf(1)
	}
	return max(0, mv.seconds) / mv.bytes
}

// sorted returns a recipe ordered by seconds per byte.
func (f *filler) sorted(r recipe) recipe {
	r = slices.Clone(r)
	slices.SortStableFunc(r, func(a, b choice) int { return cmp.Compare(f.ratio(a), f.ratio(b)) })
	return r
}

// guessed is a recipe with its estimates.
type guessed struct {
	recipe
	seconds float64
	acts    bool // activations leave
}

// movesActs reports whether activations leave the device, or are computed again, in a mix.
func (f *filler) movesActs(x mix) bool {
	for i, share := range x {
		if share > 0 && f.set.moves[i].kind != placeMove {
			return true
		}
	}
	return false
}

// candidates returns the recipes that fit by estimate, the fastest first, one for each mix.
func (f *filler) candidates(from []recipe) (list []guessed) {
	seen := map[string]bool{}
	for _, r := range from {
		_, x, seconds, ok := f.guess(r)
		if !ok {
			continue
		}
		if key := x.key(); !seen[key] {
			seen[key] = true
			list = append(list, guessed{r, seconds, f.movesActs(x)})
		}
	}
	slices.SortStableFunc(list, func(a, b guessed) int { return cmp.Compare(a.seconds, b.seconds) })
	return list
}

// varied returns a list with the fastest of each placement of classes first.
func (f *filler) varied(list []guessed) []guessed {
	var first, rest []guessed
	seen := map[string]bool{}
	for _, g := range list {
		key := ""
		for _, c := range g.recipe {
			if f.items[c.item].state {
				key += fmt.Sprint(c)
			}
		}
		if seen[key] {
			rest = append(rest, g)
			continue
		}
		seen[key] = true
		first = append(first, g)
	}
	return append(first, rest...)
}
