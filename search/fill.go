package search

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// item is one kind of activation or one class of units' states, with the moves that
// there are for it; −1: none.
type item struct {
	name             string
	drop, host, disk int
	class            graph.Class
	state            bool    // it is a class
	bytes            float64 // of device memory
}

// items are all kinds of activations, what is dearest to compute again first, and then
// the classes, what a step reads most often first: host memory goes to them in this order.
func (set *moveSet) items() (list []item) {
	index := map[string]int{}
	for i := range set.moves {
		mv := &set.moves[i]
		key := mv.before + "\x00" + mv.after
		if mv.kind == placeMove {
			key = mv.class.String()
		}
		at, ok := index[key]
		if !ok {
			at = len(list)
			index[key] = at
			list = append(list, item{key, -1, -1, -1, mv.class, mv.kind == placeMove, mv.bytes})
		}
		switch it := &list[at]; {
		case mv.kind == dropMove:
			it.drop = i
		case mv.space == graph.Host:
			it.host, it.bytes = i, max(it.bytes, mv.bytes)
		default:
			it.disk = i
		}
	}
	reads := []graph.Class{graph.Activations, graph.Parameters, graph.Gradients, graph.Optimizer}
	rank := func(it item) int {
		if !it.state {
			return 0
		}
		return slices.Index(reads, it.class)
	}
	slices.SortStableFunc(list, func(a, b item) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(set.dropRatio(b), set.dropRatio(a)))
	})
	return list
}

// dropRatio is what an item takes to be computed again, in seconds for a byte; +Inf: it
// cannot be.
func (set *moveSet) dropRatio(it item) float64 {
	if it.drop < 0 {
		return math.Inf(1)
	}
	return set.moves[it.drop].seconds / set.moves[it.drop].bytes
}

// way is what becomes of an item that does not stay on the device.
type way int

const (
	again  way = iota // computed again
	away              // to the host, and to disk what the host has no room for
	toDisk            // to disk
)

// wholeItem is the part of a choice that is all of its item: parts are in sixteenths.
const wholeItem = 16

// choice is an item, by its number, and what becomes of it. A part leaves
// whatever the cap asks for: the update of what is on the host runs beside what the device
// does, so that a step may take less with it. 0: as much of it leaves as the cap asks for.
type choice struct {
	item int
	how  way
	part int
}

// recipe lists what leaves the device, in that order: first the parts, then as much as the
// cap asks for.
type recipe []choice

// stepsOf is in how many parts an item is moved: layers, or percent of a class.
func (it *item) stepsOf(set *moveSet, layers int) int {
	if it.state {
		return 100
	}
	return set.moves[max(it.drop, it.host, it.disk)].layers(layers)
}

// stepsOf is how many steps a choice takes at most.
func (f *filler) stepsOf(c choice) int {
	n := f.items[c.item].stepsOf(f.set, f.layers)
	if c.part > 0 {
		n = max(1, n*c.part/wholeItem)
	}
	return n
}

// filler makes mixes of recipes at a base.
type filler struct {
	*searcher
	base  base
	set   *moveSet // priced
	items []item
	from  *measured
	mg    margins
	known *lessons
	plans []seen                   // that it measured
	bound float64                  // s of a step: what takes longer is not filled further; 0: none
	slack [graph.NumSpaces]float64 // bytes that pass to a space beside the forward in a pass
	link  [graph.NumSpaces]float64 // seconds a byte to a space and back, of a step
}

func (s *searcher) newFiller(b base, set *moveSet, from *measured) *filler {
	f := &filler{searcher: s, base: b, set: set, from: from}
	if set.canOffload {
		f.set = s.priced(b, set, from)
	}
	if f.known = s.lessons[b]; f.known == nil {
		f.known = newLessons(f.set)
		s.lessons[b] = f.known
	}
	f.items = f.set.items()
	for _, sp := range []graph.Space{graph.Host, graph.Disk} {
		f.link[sp], f.slack[sp] = linkTo(s.machine, sp, from.forward, b.passes())
	}
	return f
}

// steps is how far a recipe goes at least, and at most.
func (f *filler) steps(r recipe) (least, most int) {
	for _, c := range r {
		most += f.stepsOf(c)
		if c.part > 0 {
			least = most
		}
	}
	return least, most
}

// spread makes the first steps of a recipe, with so many bytes of host memory for what
// leaves: what finds none goes to disk where there is one, and stays where there is none.
func (f *filler) spread(r recipe, steps int, host float64) mix {
	x := make(mix, len(f.set.moves))
	leaves := make([]float64, len(f.items))
	for _, c := range r {
		it := &f.items[c.item]
		n := f.stepsOf(c)
		share := float64(min(n, steps)) / float64(it.stepsOf(f.set, f.layers))
		steps = max(0, steps-n)
		switch {
		case share == 0:
		case c.how == again && it.drop >= 0:
			x[it.drop] = share
		case c.how == toDisk && it.disk >= 0:
			x[it.disk] = share
		case it.host >= 0:
			leaves[c.item] = share
		}
	}
	for i, share := range leaves {
		if share == 0 {
			continue
		}
		it := &f.items[i]
		n, mv := float64(it.stepsOf(f.set, f.layers)), &f.set.moves[it.host]
		there := share
		if takes := mv.takes; takes > 0 && share*takes > host {
			there = math.Floor(max(0, host)/takes*n) / n
		}
		host -= float64(there * mv.takes)
		x[it.host] = there
		if it.state && it.disk >= 0 {
			x[it.disk] = share - there
		}
	}
	return x
}

// frees is how much device memory the first steps of a recipe free by estimate, as far as
// the host has room.
func (f *filler) frees(x mix) (bytes float64) {
	for i, share := range x {
		bytes += float64(share * f.set.moves[i].bytes)
	}
	return bytes
}

// estimate is the time of a step with a mix, corrected by lessons.
func (f *filler) estimate(x mix) float64 { return f.corrected(x, f.known.correct(x)) }

func (f *filler) corrected(x mix, off offBy) float64 {
	return float64(f.seconds(x) * max(leastOfEstimate, 1+off.time))
}

// leastOfEstimate is the least part that a correction leaves of an estimate.
const leastOfEstimate = 0.1

// seconds is the time of a step with a mix, by the moves' own.
func (f *filler) seconds(x mix) float64 {
	seconds := f.from.seconds
	var parked [graph.NumSpaces]float64
	for i, share := range x {
		mv := &f.set.moves[i]
		switch mv.kind {
		case parkMove:
			parked[mv.space] += float64(share * mv.bytes)
		default:
			seconds += float64(share * mv.seconds)
		}
	}
	for sp, bytes := range parked {
		seconds += float64(max(0, bytes-f.slack[sp]) * f.link[sp])
	}
	return seconds
}

// hostRoom is what the host has room for of what leaves the device.
func (f *filler) hostRoom() float64 {
	room := f.room(graph.Host, f.mg)
	if room == 0 || len(f.spaces) == 0 {
		return math.Inf(1)
	}
	return float64(room - f.from.need[graph.Host])
}

// nearlyFits is the part of what must leave that the parts of a recipe free by estimate, where they
// are looked at.
const nearlyFits = 0.85

// guess is the least number of steps that fits by estimate, its mix and its time; false: none does.
func (f *filler) guess(r recipe) (int, mix, float64, bool) {
	by, _ := f.over(f.from, f.mg)
	over, host := float64(by[graph.Device]), f.hostRoom()
	least, most := f.steps(r)
	x := f.spread(r, most, host)
	off := f.known.correct(x)
	if frees := f.frees(x) + off.freed; frees < over && least < most || frees < nearlyFits*over {
		return most, x, f.corrected(x, off), false
	}
	at := most
	for range 2 { // the second time by the lessons near what the first gives
		before, lo := at, least
		for at = most; lo < at; {
			if mid := (lo + at) / 2; f.frees(f.spread(r, mid, host))+off.freed >= over {
				at = mid
			} else {
				lo = mid + 1
			}
		}
		if at == before {
			break
		}
		x = f.spread(r, at, host)
		off = f.known.correct(x)
	}
	return at, x, f.corrected(x, off), true
}

// Plans that a recipe is looked at with: until it is within closeTo of the caps, or all.
const (
	mostFills = 6
	closeTo   = 0.01
)

// fill makes as little of a recipe as fits; exact: to a step, otherwise nearly. nil: it
// does not fit.
func (f *filler) fill(r recipe, exact bool) (best *point) {
	low, high := f.steps(r)
	low, high = low-1, high+1 // too little; enough
	host := f.hostRoom()
	at, _, _, _ := f.guess(r)
	grown := 0
	for look := 0; high-low > 1 && (exact || look < mostFills) && f.ctx.Err() == nil; look++ {
		p := &point{base: f.base, set: f.set, x: f.spread(r, at, host), how: r}
		m := f.measure(p)
		if m.err != nil {
			return best
		}
		f.plans = append(f.plans, seen{p.x, m})
		by, fits := f.over(m, f.mg)
		if f.bound > 0 && m.seconds > f.bound {
			if fits {
				best = f.expect(p, m)
			}
			return best
		}
		if over := by[graph.Host]; over > 0 && by[graph.Device] <= 0 && look < mostFills-1 && !math.IsInf(host, 1) {
			f.refused(p, m)
			host -= float64(over) // more than was reckoned with
			continue
		}
		if unused := float64(-by[graph.Host]); fits && grown < 2 && f.spills(p.x) && unused > closeTo*float64(f.room(graph.Host, f.mg)) {
			grown++
			best = f.expect(p, m)
			host += unused // the disk takes what has room there
			continue
		}
		step := 0
		switch device := by[graph.Device]; {
		case fits:
			high, best = at, f.expect(p, m)
			if !exact && (at == low+1 || -device <= int64(closeTo*float64(f.room(graph.Device, f.mg)))) {
				return best
			}
			step = -f.toward(r, at, host, float64(-device))
		default:
			f.refused(p, m)
			low = at
			step = f.toward(r, at, host, float64(max(device, 1)))
		}
		at += step
		if look > 2 || at <= low || at >= high { // the estimate is off
			at = (low + high) / 2
		}
		at = min(max(at, low+1), high-1)
	}
	return best
}

// spills says whether a mix has on disk what leaves for the host.
func (f *filler) spills(x mix) bool {
	return slices.ContainsFunc(f.items, func(it item) bool { return it.host >= 0 && it.disk >= 0 && x[it.host] > 0 && x[it.disk] > 0 })
}

// toward is how many steps further, or back, free so many bytes by estimate.
func (f *filler) toward(r recipe, at int, host, bytes float64) (n int) {
	now := f.frees(f.spread(r, at, host))
	if _, top := f.steps(r); bytes > 0 {
		for at+n < top && f.frees(f.spread(r, at+n, host))-now < bytes {
			n++
		}
	}
	return n
}

// lean are recipes of everything that frees device memory: by way of the host, and to disk,
// which takes less of the host.
func (f *filler) lean() (list []recipe) {
	for _, state := range []way{away, toDisk} {
		var r recipe
		for i, it := range f.items {
			switch {
			case it.drop >= 0:
				r = append(r, choice{item: i, how: again})
			case it.state && (state == away && it.host >= 0 || it.disk >= 0):
				r = append(r, choice{item: i, how: state})
			case it.host >= 0:
				r = append(r, choice{item: i, how: away})
			}
		}
		if len(list) == 0 || !slices.Equal(r, list[0]) {
			list = append(list, r)
		}
	}
	return list
}

// fits says whether a base fits with everything off the device, or computed again: a point
// that does, or nil.
func (f *filler) fits() *point {
	for _, r := range f.lean() {
		host := f.hostRoom()
		for range 4 {
			_, all := f.steps(r)
			p := &point{base: f.base, set: f.set, x: f.spread(r, all, host), how: r}
			m := f.measure(p)
			if m.err != nil {
				break
			}
			f.learn([]seen{{p.x, m}})
			by, fits := f.over(m, f.mg)
			if fits {
				return f.expect(p, m)
			}
			f.refused(p, m)
			if math.IsInf(host, 1) || by[graph.Device] > 0 && by[graph.Host] >= -int64(closeTo*float64(f.room(graph.Host, f.mg))) {
				break
			}
			host -= float64(by[graph.Host]) // more, or less, than was reckoned with
		}
	}
	return nil
}

// acts are ways to deal with activations, which recipes begin or end with.
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

// states are ways to deal with the classes, what leaves first at the front.
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
	orders := [][]graph.Class{{graph.Optimizer}, {graph.Parameters}, {graph.Gradients}, {graph.Optimizer, graph.Gradients}, {graph.Optimizer, graph.Parameters}, {graph.Parameters, graph.Optimizer},
		{graph.Optimizer, graph.Gradients, graph.Parameters}, {graph.Optimizer, graph.Parameters, graph.Gradients}, {graph.Parameters, graph.Gradients, graph.Optimizer}}
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

// key tells recipes apart: there are fewer than 65,536 items, and a part is at most wholeItem.
func (r recipe) key() string {
	b := make([]byte, 0, 4*len(r))
	for _, c := range r {
		b = append(b, byte(c.item), byte(c.item>>8), byte(c.how), byte(c.part))
	}
	return string(b)
}

// key tells mixes apart.
func (x mix) key() string {
	b := make([]byte, 0, 8*len(x))
	for _, share := range x {
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(share))
	}
	return string(b)
}

// guessed is a recipe with what it comes to by estimate.
type guessed struct {
	recipe
	seconds float64
}

// candidates are recipes that fit by estimate, the fastest first, one for each mix.
func (f *filler) candidates(from []recipe) (list []guessed) {
	seen := map[string]bool{}
	for _, r := range from {
		_, x, seconds, ok := f.guess(r)
		if !ok {
			continue
		}
		if key := x.key(); !seen[key] {
			seen[key] = true
			list = append(list, guessed{r, seconds})
		}
	}
	slices.SortStableFunc(list, func(a, b guessed) int { return cmp.Compare(a.seconds, b.seconds) })
	return list
}

// varied is a list with the fastest of each placement of classes first.
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

// ratio is what a choice takes by estimate, in seconds for a byte.
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

// sorted is a recipe in the order of seconds for a byte.
func (f *filler) sorted(r recipe) recipe {
	r = slices.Clone(r)
	slices.SortStableFunc(r, func(a, b choice) int { return cmp.Compare(f.ratio(a), f.ratio(b)) })
	return r
}
