package search

import (
	"cmp"
	"encoding/binary"
	"math"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// stepsOf returns the largest number of steps of a choice.
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

// steps returns the smallest and largest number of steps of a recipe.
func (f *filler) steps(r recipe) (least, most int) {
	for _, c := range r {
		most += f.stepsOf(c)
		if c.part > 0 {
			least = most
		}
	}
	return least, most
}

// spread returns the mix of the first steps of a recipe, with host bytes of host memory. Buffers
// for which the host has no room go to disk, or stay if there is no disk tier.
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

// learn corrects later estimates of the filler's base by plans.
func (f *filler) learn(plans []seen) {
	l, before := f.known, len(f.known.of)
	for _, p := range plans {
		at := l.features(p.x)
		if slices.ContainsFunc(l.of, func(o lesson) bool { return slices.Equal(o.bytes, at.bytes) }) {
			continue
		}
		freed := float64(f.from.need[graph.Device] - p.m.need[graph.Device])
		l.of = append(l.of, lesson{at, offBy{freed - f.frees(p.x), p.m.seconds/f.seconds(p.x) - 1}})
	}
	if len(l.of) == before {
		return
	}
	if over := len(l.of) - mostLessons; over > 0 { // a quarter at once: the factor is made again
		l.of, l.lower = slices.Delete(l.of, 0, over+mostLessons/4), nil
	}
	l.factor()
	l.solve()
}

// frees returns the device memory that a mix frees by estimate, as far as the host has room.
func (f *filler) frees(x mix) (bytes float64) {
	for i, share := range x {
		bytes += float64(share * f.set.moves[i].bytes)
	}
	return bytes
}

// estimate returns the time of a step with a mix, corrected by lessons.
func (f *filler) estimate(x mix) float64 { return f.corrected(x, f.known.correct(x)) }

func (f *filler) corrected(x mix, off offBy) float64 {
	return float64(f.seconds(x) * max(leastOfEstimate, 1+off.time))
}

// leastOfEstimate is the least part that a correction leaves of an estimate.
const leastOfEstimate = 0.1

// seconds returns the time of a step with a mix, from the estimates of the moves.
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

// hostRoom returns the bytes of host memory that are free for buffers from the device.
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

// guess returns the least number of steps that fits by estimate, its mix and its time; false: none
// fits.
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

// spills reports whether a mix puts on disk buffers that leave for the host.
func (f *filler) spills(x mix) bool {
	return slices.ContainsFunc(f.items, func(it item) bool { return it.host >= 0 && it.disk >= 0 && x[it.host] > 0 && x[it.disk] > 0 })
}

// toward returns the number of steps forward, or back, that free the given bytes by estimate.
func (f *filler) toward(r recipe, at int, host, bytes float64) (n int) {
	now := f.frees(f.spread(r, at, host))
	if _, top := f.steps(r); bytes > 0 {
		for at+n < top && f.frees(f.spread(r, at+n, host))-now < bytes {
			n++
		}
	}
	return n
}

// lean returns recipes that recompute or offload everything that they can: to the host; to disk,
// which needs less host memory; and, if host memory has a cap, to the host with only the classes
// that thrifty returns.
func (f *filler) lean() (list []recipe) {
	add := func(state way, leaves func(i int) bool) {
		var r recipe
		for i, it := range f.items {
			switch {
			case it.drop >= 0:
				r = append(r, choice{item: i, how: again})
			case it.state && !leaves(i):
			case it.state && (state == away && it.host >= 0 || it.disk >= 0):
				r = append(r, choice{item: i, how: state})
			case it.host >= 0:
				r = append(r, choice{item: i, how: away})
			}
		}
		if !slices.ContainsFunc(list, func(o recipe) bool { return slices.Equal(o, r) }) {
			list = append(list, r)
		}
	}
	every := func(int) bool { return true }
	add(away, every)
	add(toDisk, every)
	if room := f.hostRoom(); !math.IsInf(room, 1) {
		thrifty := f.thrifty(room)
		add(away, func(i int) bool { return slices.Contains(thrifty, i) })
	}
	return list
}

// thrifty returns the classes, as item indices, that free the most device memory per byte of host
// memory: as many as fit in room bytes, and at least one. spread cannot choose them, because it
// serves the classes that a step reads most often first.
func (f *filler) thrifty(room float64) (list []int) {
	frees := func(i int) float64 { mv := &f.set.moves[f.items[i].host]; return mv.bytes / max(1, mv.takes) }
	for i, it := range f.items {
		if it.state && it.host >= 0 && f.set.moves[it.host].bytes > 0 {
			list = append(list, i)
		}
	}
	slices.SortStableFunc(list, func(a, b int) int { return cmp.Compare(frees(b), frees(a)) })
	for n, i := range list {
		if room -= f.set.moves[f.items[i].host].takes; room < 0 {
			return list[:max(1, n)]
		}
	}
	return list
}

// If the plan with everything off the device exceeds a cap by at most the factor nearMiss, moving
// less off may fit, because buffers off the device need device memory while they are used. The
// search then fills nearMissed of the usual recipes, with one nearPart-th of the effort.
const (
	nearMiss   = 1.1
	nearMissed = 12
	nearPart   = 8
)

// leanest returns a point that fits with everything off the device or recomputed. If none fits, it
// returns the point nearest to the caps and the factor by which that exceeds one.
func (f *filler) leanest() (fit, nearest *point, least float64) {
	least = math.Inf(1)
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
				return f.expect(p, m), nil, 0
			}
			f.refused(p, m)
			if worst := f.worst(m); worst < least {
				least, nearest = worst, p
			}
			if math.IsInf(host, 1) || by[graph.Device] > 0 && by[graph.Host] >= -int64(closeTo*float64(f.room(graph.Host, f.mg))) {
				break
			}
			host -= float64(by[graph.Host]) // more, or less, than was reckoned with
		}
	}
	return nil, nearest, least
}

// fits returns a point that fits with everything, or nearly everything, off the device or
// recomputed; nil: none fits.
func (f *filler) fits() *point {
	fit, nearest, least := f.leanest()
	if fit != nil || least > nearMiss {
		return fit
	}
	end := f.tried + f.effort/nearPart
	list := f.varied(f.candidates(f.anchors()))
	for _, g := range list[:min(len(list), nearMissed)] {
		if f.tried >= end {
			return nil
		}
		best := f.fill(g.recipe, false)
		plans := f.plans
		f.plans = nil // a copy of the filler appends its own
		if best != nil {
			return best
		}
		f.learn(plans)
	}
	return f.lessOff(nearest.how.wholly(), least, end)
}

// lessOff looks for a plan that fits by recomputing less than r does, because recomputing
// everything may need more memory than keeping a part. First it recomputes a quarter of one kind at
// a time. The kinds for which that lowers the excess are then reduced together: each to a quarter,
// to none and to half, kept where it lowers the excess. It stops when tried reaches end.
func (f *filler) lessOff(r recipe, least float64, end int) *point {
	var plans []seen
	look := func(r recipe) (worst float64, fit *point) {
		if f.tried >= end {
			return math.Inf(1), nil
		}
		_, all := f.steps(r)
		p := &point{base: f.base, set: f.set, x: f.spread(r, all, f.hostRoom()), how: r}
		m := f.measure(p)
		if m.err != nil {
			return math.Inf(1), nil
		}
		plans = append(plans, seen{p.x, m})
		if _, fits := f.over(m, f.mg); fits {
			f.learn(plans)
			return 0, f.expect(p, m)
		}
		f.refused(p, m)
		return f.worst(m), nil
	}
	type kept struct {
		choice
		worst float64 // with a quarter of it
	}
	var help []kept
	less := func(c choice, part int) recipe {
		q := slices.DeleteFunc(slices.Clone(r), func(o choice) bool { return o.item == c.item })
		if part > 0 {
			q = append(q, choice{c.item, c.how, part})
		}
		return q
	}
	for _, c := range r {
		if c.how != again {
			continue
		}
		worst, fit := look(less(c, wholeItem/4))
		if fit != nil {
			return fit
		}
		if worst < least {
			help = append(help, kept{c, worst})
		}
	}
	slices.SortStableFunc(help, func(a, b kept) int { return cmp.Compare(a.worst, b.worst) })
	for _, part := range []int{wholeItem / 4, 0, wholeItem / 2} {
		for _, k := range help {
			q := less(k.choice, part)
			worst, fit := look(q)
			if fit != nil {
				return fit
			}
			if worst < least {
				least, r = worst, q
			}
		}
	}
	return nil
}

// key returns a text that identifies a mix.
func (x mix) key() string {
	b := make([]byte, 0, 8*len(x))
	for _, share := range x {
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(share))
	}
	return string(b)
}
