package search

import (
	"math"
	"math/bits"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// Limits of a search. None depends on the processors, so the outcome does not either.
const (
	atOnceTried = 4  // recipes that are filled beside each other
	firstTried  = 8  // anchors that are filled at a base
	mostPlans   = 4  // plans made whole until one fits
	roomyPlans  = 2  // made whole at the end where none of the others fits, those with the most room
	wholePart   = 5  // of the effort, kept for plans made whole and for what they ask for
	wholeEffort = 60 // is the most of that
	againEffort = 20 // for a base whose plan needed more than was expected
	fewBases    = 4  // are all looked at
)

// mostSaved is the largest part of a base's time that classes may save which leave, where
// their update runs beside what the device does.
const mostSaved = 0.1

// hunt is a search over bases.
type hunt struct {
	*searcher
	bases []base
	tries map[base]*try
	found []*point
	best  float64 // time a token of the fastest found
}

// try is the result of searching one base.
type try struct {
	*filler          // nil: no recipe was filled yet
	plain    *point  // without any move
	best     *point  // nil: nothing fits
	excess   float64 // if nothing fits: the excess, as a part of a cap
	hopeless bool
	roomy    bool    // all may stay on the device, so that activations save no time elsewhere
	slower   float64 // time of plans made whole over what was extended from few layers; at least 1
	seen     map[string]bool
}

// filler makes mixes at a base.
func (h *hunt) filler(t *try) *filler {
	if t.filler == nil {
		t.filler = h.newFiller(t.plain.base, t.plain.set, t.plain.expected)
	}
	return t.filler
}

// spent reports whether the effort is used up.
func (s *searcher) spent() bool {
	return s.tried >= s.limit-s.kept || s.budget.refused || s.ctx.Err() != nil
}

// fastest plans whole the fastest of the bases that fits, with what was found beside it,
// the fastest first. The error is why the last was refused, where none fits.
//
// A point is a base and a mix of moves. Bases are searched one coordinate after the other: the
// stage, the micro-batch, the order, the prefetch distance, the precision. At a base, recipes
// say what leaves the device in which order; a recipe is filled until it fits (see filler.fill),
// so that classes are split over device, host and disk as the caps ask for. The anchors that
// take the least by estimate are filled first. At the best bases what differs in one item from
// the best is filled next, until nothing is faster. What effort is left goes into more recipes,
// and into the same at lower caps.
func (s *searcher) fastest(bases []base) (best *Forecast, at *point, all []*point, err error) {
	s.limit, s.kept = s.tried+s.effort, min(wholeEffort, s.effort/wholePart)
	h := &hunt{searcher: s, bases: bases, tries: map[base]*try{}, best: math.Inf(1)}
	h.walk()
	h.refine(firstTried)
	for _, b := range bases { // with what effort is left
		if !h.spent() {
			h.at(b)
		}
	}
	limit := s.limit
	s.limit -= max(0, limit-s.tried) / belowPart
	h.widen()
	s.limit = limit
	h.below()
	h.tell()
	best, at, err = h.confirm()
	return best, at, h.found, err
}

// tell plans the base nearest to the caps if no move makes any base fit, so that the error can
// report it.
func (h *hunt) tell() {
	var near *try
	for _, b := range h.bases {
		t := h.tries[b]
		if t != nil && !t.hopeless {
			return
		}
		if t != nil && (near == nil || h.worst(t.plain.expected) < h.worst(near.plain.expected)) {
			near = t
		}
	}
	if near != nil {
		f := &filler{searcher: h.searcher, base: near.plain.base, set: near.plain.set, items: near.plain.set.items(), from: near.plain.expected,
			known: newLessons(near.plain.set)}
		f.fits()
	}
}

// coordinates return the fields in which bases differ.
var coordinates = []func(base) any{
	func(b base) any { return b.zero },
	func(b base) any { return [2]int{b.batch, b.accum} },
	func(b base) any { return b.layers },
	func(b base) any { return b.prefetch },
	func(b base) any { return b.precision },
}

// walk searches bases along one coordinate after the other, twice.
func (h *hunt) walk() {
	if len(h.bases) == 0 {
		return
	}
	if len(h.bases) <= fewBases {
		for _, b := range h.bases {
			h.at(b)
		}
		return
	}
	now := h.bases[0]
	h.at(now)
	for range 2 {
		for k := range coordinates {
			for _, b := range h.bases {
				if !h.differIn(k, now, b) || h.spent() {
					continue
				}
				if h.better(b, now) {
					now = b
				}
			}
		}
	}
}

// differIn reports whether bases are equal except in one coordinate; layer order follows the
// micro-batch.
func (h *hunt) differIn(k int, a, b base) bool {
	for i, of := range coordinates {
		if i != k && of(a) != of(b) && !(k == 1 && i == 2 && !b.layers) {
			return false
		}
	}
	return true
}

// better searches two bases and reports whether the first is better.
func (h *hunt) better(a, b base) bool {
	x, y := h.at(a), h.at(b)
	switch {
	case x == nil || y == nil:
		return x != nil
	case x.best == nil || y.best == nil:
		return x.best != nil || y.best == nil && x.excess < y.excess
	case a.layers && !b.layers && !h.spec.LayerOrder:
		return x.best.perToken*worthAnOrder < y.best.perToken
	}
	return x.best.perToken < y.best.perToken
}

// worthAnOrder is the factor by which layer order must be faster than micro order, since it changes
// the bits of a tied head's sums.
const worthAnOrder = 1.01

// at searches a base; nil: it cannot be planned.
func (h *hunt) at(b base) *try {
	if t, ok := h.tries[b]; ok {
		return t
	}
	h.tries[b] = nil
	set, err := h.moves(b)
	if err != nil {
		return nil
	}
	plain := h.plain(b, set)
	from := h.measure(plain)
	if from.err != nil {
		return nil
	}
	t := &try{plain: h.expect(plain, from), slower: 1, seen: map[string]bool{}}
	h.tries[b] = t
	if _, t.roomy = h.over(from, margins{}); t.roomy {
		h.keep(t, plain)
		return t
	}
	h.refused(plain, from)
	t.excess = h.worst(from)
	switch {
	case h.hopeless(from):
		t.excess, t.hopeless = math.Inf(1), true
		return t
	case plain.perToken*(1-mostSaved) >= h.best:
		t.excess = math.Inf(1) // it cannot win
		return t
	}
	lean := h.filler(t).fits()
	if lean == nil || h.budget.refused {
		return t
	}
	h.keep(t, lean)
	h.fill(t, t.varied(t.fresh(lean, t.anchors())), firstTried)
	return t
}

// keep records a point that fits.
func (h *hunt) keep(t *try, p *point) {
	h.found = append(h.found, p)
	if t.best == nil || comparePoints(p, t.best) < 0 {
		t.best = p
	}
	h.best = min(h.best, p.perToken)
}

// fresh are the candidates of recipes that were not filled yet, may save time, and are not far slower by
// estimate than a point.
func (t *try) fresh(from *point, recipes []recipe) []guessed {
	bound := t.estimate(from.x) * farSlower
	return slices.DeleteFunc(t.candidates(recipes), func(g guessed) bool { return t.seen[g.key()] || g.seconds > bound || t.roomy && g.acts })
}

// fill fills at most the given number of recipes of a list and keeps those that fit.
func (h *hunt) fill(t *try, list []guessed, most int) (found []*point) {
	for list = list[:min(len(list), most)]; len(list) > 0 && !h.spent(); {
		n := min(atOnceTried, len(list))
		points := make([]*point, n)
		nearest, excess := h.smallest, h.excess
		fillers := slices.Repeat([]filler{*t.filler}, n)
		plan.Parallel(n, func(i int) {
			if t.best != nil {
				fillers[i].bound = t.best.expected.seconds * slowFill
			}
			points[i] = fillers[i].fill(list[i].recipe, false)
		})
		if h.budget.refused { // which of them it was depends on the processors
			h.smallest, h.excess = nearest, excess
			break
		}
		var plans []seen
		for _, f := range fillers {
			plans = append(plans, f.plans...)
		}
		t.learn(plans)
		for i, p := range points {
			t.seen[list[i].key()] = true
			if p != nil {
				h.keep(t, p)
				found = append(found, p)
			}
		}
		list = list[n:]
	}
	return found
}

const (
	slowFill    = 1.05  // a plan that far over the best of its base is filled no further
	farSlower   = 1.1   // a recipe or base that far over another is not looked at
	worthARound = 0.001 // of the time: less is no reason to go on
)

// refine looks at the neighbours of the best points, the fastest base first: so many, of which
// none is faster.
func (h *hunt) refine(most int) {
	for done := map[*point]bool{}; !h.spent(); {
		t := h.leading(done, farSlower)
		if t == nil {
			return
		}
		h.climb(t, t.best, most)
		done[t.best] = true
	}
}

// widen goes on from everything off the device at each base, with the best recipe of one base at
// those beside it, and with all anchors of the bases that are near the best. In small models one
// change after the other ends at points that are slower by a fifth.
func (h *hunt) widen() {
	for done := map[*point]bool{}; !h.spent(); {
		t := h.leading(done, math.Inf(1))
		if t == nil {
			break
		}
		done[t.best] = true
		if t.roomy {
			continue
		}
		if lean := h.filler(t).fits(); lean != nil && !h.spent() {
			lean.how = lean.how.wholly()
			h.climb(t, lean, firstTried)
			done[t.best] = true
		}
	}
	h.settle()
	for done := map[*point]bool{}; !h.spent(); {
		t := h.leading(done, farSlower)
		if t == nil {
			break
		}
		h.fill(t, t.fresh(t.best, h.filler(t).anchors()), math.MaxInt)
		h.climb(t, t.best, math.MaxInt)
		done[t.best] = true
	}
	h.settle()
}

// settle climbs from the best of the bases that are near the best, and carries it to others, until
// nothing is faster.
func (h *hunt) settle() {
	for done := map[*point]bool{}; !h.spent(); {
		t := h.leading(done, farSlower)
		if t == nil {
			return
		}
		h.climb(t, t.best, math.MaxInt)
		done[t.best] = true
		h.carry(t)
	}
}

// Searches go on at caps of one row, whatever the cap is.
const (
	capRow    = 32 // caps for a factor of 2
	belowPart = 4  // of what effort is left
)

// rowUnder returns the largest cap of the row below a limit.
func rowUnder(limit int64) int64 {
	step := max(1, int64(1)<<bits.Len64(uint64(limit-1))/2/capRow)
	return (limit - 1) / step * step
}

// below searches at lower caps on the device, the largest first, and keeps what it finds. A plan
// that moves more than the cap asks for may take less time, since much runs beside what the
// device does. A cap under which the best of the last search fits is left out, since that would be
// found again. So are all caps where the best moves nothing, since its base has been searched for
// moves that save time.
func (h *hunt) below() {
	limit := h.spec.Capacity[graph.Device]
	if limit == 0 || math.IsInf(h.best, 1) {
		return
	}
	last := h.fastestFound()
	if len(last.how) == 0 {
		return
	}
	for lower := rowUnder(limit); lower > limit/2 && !h.spent(); lower = rowUnder(lower) {
		h.spec.Capacity[graph.Device] = lower
		if _, fits := h.over(last.expected, margins{}); fits {
			h.spec.Capacity[graph.Device] = limit
			continue
		}
		under := &hunt{searcher: h.searcher, bases: h.bases, tries: map[base]*try{}, best: math.Inf(1)}
		under.walk()
		under.refine(firstTried)
		under.widen()
		h.spec.Capacity[graph.Device] = limit
		if len(under.found) > 0 {
			last = under.fastestFound()
		}
		for _, b := range h.bases {
			if t := under.tries[b]; t != nil && t.best != nil && h.at(b) != nil {
				h.keep(h.tries[b], t.best)
			}
		}
	}
	h.refine(math.MaxInt)
}

// fastestFound returns the fastest point found.
func (h *hunt) fastestFound() *point { return slices.MinFunc(h.found, comparePoints) }

// climb looks at the neighbours of a point at a base, so many, and goes on from the first that
// is faster.
func (h *hunt) climb(t *try, from *point, most int) {
	f := h.filler(t)
	for more := true; more && !h.spent(); {
		list := t.fresh(from, f.near(from.how))
		list = list[:min(len(list), most)]
		for more = false; len(list) > 0 && !more && !h.spent(); list = list[min(len(list), firstTried):] {
			for _, p := range h.fill(t, list, firstTried) {
				if p.perToken < from.perToken*(1-worthARound) {
					from, more = p, true
				}
			}
		}
	}
}

// leading returns the base with the fastest point that is not done; nil: none is within the given
// factor of the best.
func (h *hunt) leading(done map[*point]bool, within float64) (first *try) {
	for _, b := range h.bases {
		t := h.tries[b]
		if t == nil || t.best == nil || done[t.best] || t.best.perToken > h.best*within {
			continue
		}
		if first == nil || comparePoints(t.best, first.best) < 0 {
			first = t
		}
	}
	return first
}

// carry fills the best recipe of a base at those that differ from it in one coordinate.
func (h *hunt) carry(from *try) {
	for k := range coordinates {
		for _, b := range h.bases {
			if b == from.plain.base || !h.differIn(k, from.plain.base, b) || h.spent() {
				continue
			}
			t := h.at(b)
			if t == nil || t.hopeless {
				continue
			}
			f := h.filler(t)
			var r recipe
			for _, c := range from.best.how {
				c.item = slices.IndexFunc(f.items, func(it item) bool { return it.name == from.items[c.item].name })
				if c.item >= 0 {
					r = append(r, c)
				}
			}
			h.fill(t, f.candidates([]recipe{r}), 1)
		}
	}
}

// kind holds the fields in which runners-up differ.
type kind struct {
	base
	host, disk bool
}

func (p *point) kind() kind {
	k := kind{base: p.base}
	for i, share := range p.x {
		if mv := &p.set.moves[i]; share > 0 && mv.kind != dropMove {
			k.host, k.disk = k.host || mv.space == graph.Host, k.disk || mv.space == graph.Disk
		}
	}
	return k
}

// fewestDrops finds the fastest plan that fits of a base by recomputation only, in the order of
// seconds per byte. some reports whether a point was expected to fit.
func (s *searcher) fewestDrops(b base, set *moveSet, from *measured) (f *Forecast, at *point, some bool) {
	s.exact = true
	h := &hunt{searcher: s, tries: map[base]*try{}, best: math.Inf(1)}
	t := &try{filler: s.newFiller(b, set, from), slower: 1, seen: map[string]bool{}}
	h.tries[b] = t
	if p := t.filler.fill(t.sorted(t.lean()[0]), true); p != nil {
		h.keep(t, p)
	}
	f, at, _ = h.confirm()
	return f, at, len(h.found) > 0
}
