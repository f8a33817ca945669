package spillway

import (
	"cmp"
	"errors"
	"math"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// A ladder is moves in an order that does not depend on the cap on device memory,
// and its positions are configurations: at 0 no move is made, and each position
// makes a part more of a rung than the one below it. A lower cap asks for a higher
// position.
type ladder struct {
	base
	set   *moveSet
	tier  tiering
	rungs []rung
	start []int // by rung: the position at which none of it is made; then the top
}

// A rung is made in this many parts at most.
const (
	layerParts = 16 // of the layers that have its buffers
	classParts = 20 // of the bytes of its class
)

// newLadder has room on the host for what hostFree says, in bytes; first are
// classes that leave before anything else.
func (s *searcher) newLadder(b base, set *moveSet, t tiering, from *measured, hostFree float64, first []graph.Class) *ladder {
	l := &ladder{base: b, set: set, tier: t, rungs: set.ladder(s.machine, from.forward, b.accum, t, hostFree)}
	slices.SortStableFunc(l.rungs, func(x, y rung) int {
		rank := func(r rung) int {
			if mv := &set.moves[r.move]; mv.kind == placeMove && slices.Contains(first, mv.class) {
				return slices.Index(first, mv.class) - len(first)
			}
			return 0
		}
		return cmp.Compare(rank(x), rank(y))
	})
	l.start = []int{0}
	for _, r := range l.rungs {
		n := classParts
		if mv := &set.moves[r.move]; mv.kind != placeMove {
			n = min(layerParts, mv.layers(s.layers))
		}
		l.start = append(l.start, l.start[len(l.start)-1]+n)
	}
	return l
}

func (l *ladder) top() int { return l.start[len(l.start)-1] }

// rungAt returns the rung that a position above 0 makes a part of, or all.
func (l *ladder) rungAt(pos int) int {
	n, _ := slices.BinarySearch(l.start, pos)
	return n - 1
}

// at is the configuration at a position, without what it needs.
func (l *ladder) at(pos int) *point {
	p := &point{base: l.base, set: l.set, x: make(mix, len(l.set.moves)), tier: l.tier}
	if pos == 0 {
		return p
	}
	n := l.rungAt(pos)
	for _, r := range l.rungs[:n] {
		p.x[r.move] = r.share
	}
	p.x[l.rungs[n].move] = l.rungs[n].share * float64(pos-l.start[n]) / float64(l.start[n+1]-l.start[n])
	return p
}

// need is what a position comes to. A model planned at few layers has no parts of
// them: the line between without and with the rung says how much. A part of a class
// is updated in two places, which takes time of its own, as half of it shows.
func (s *searcher) need(l *ladder, pos int) *measured {
	if pos == 0 || !s.folded {
		return s.measure(l.at(pos))
	}
	n := l.rungAt(pos)
	from, to := l.start[n], l.start[n+1]
	all := s.measure(l.at(to))
	if pos == to || all.err != nil {
		return all
	}
	none := s.measure(l.at(from))
	if none.err != nil {
		return none
	}
	share := float64(pos-from) / float64(to-from)
	line := func(a, b float64) float64 { return a + share*(b-a) }
	m := &measured{seconds: line(none.seconds, all.seconds), forward: line(none.forward, all.forward)}
	if l.set.moves[l.rungs[n].move].kind == placeMove {
		if half := s.measure(l.at((from + to) / 2)); half.err == nil {
			m.seconds = max(m.seconds, half.seconds)
		}
	}
	for sp := range m.need {
		m.need[sp] = int64(math.Ceil(line(float64(none.need[sp]), float64(all.need[sp]))))
	}
	return m
}

// fitting is the configuration at a position where it is within the caps; nil: it is
// not. device: it is within that of the device.
func (s *searcher) fitting(l *ladder, pos int) (p *point, device bool) {
	m := s.need(l, pos)
	if m.err != nil {
		return nil, false
	}
	sp, ok := s.over(m)
	if !ok {
		s.refused(l.at(pos), m)
		return nil, sp != graph.Device
	}
	p = l.at(pos)
	p.perToken, p.device = s.perToken(p, m.seconds), m.need[graph.Device]
	return p, true
}

// foot is the lowest position of a ladder that is found to be within the cap on
// device memory.
type foot struct {
	*ladder
	pos   int
	point *point // nil: another cap is in the way there
	// late is a foot at the bottom of a ladder on which nothing saves time: what is
	// above is of interest only where the bottom does not fit when it is placed.
	late bool
}

// foot finds it by bisection, first over whole rungs and then within one; nil: the
// top is over the cap. Of two caps the lower one has the higher foot, whatever the
// positions need: their bisections are the same until a position is within one cap
// and not within the other.
func (s *searcher) foot(l *ladder) *foot {
	device := func(pos int) bool {
		_, ok := s.fitting(l, pos)
		return ok
	}
	if !device(l.top()) {
		return nil
	}
	lowest := func(lo, hi int, position func(int) int) int { // position(hi) is within the cap
		for lo < hi {
			if mid := (lo + hi) / 2; device(position(mid)) {
				hi = mid
			} else {
				lo = mid + 1
			}
		}
		return hi
	}
	n := lowest(0, len(l.rungs), func(n int) int { return l.start[n] })
	f := &foot{ladder: l}
	if n > 0 {
		f.pos = lowest(l.start[n-1]+1, l.start[n], func(pos int) int { return pos })
	}
	f.point, _ = s.fitting(l, f.pos)
	return f
}

// above returns what else of a ladder is within the caps: the other parts of the
// foot's rung, those of the next one where the foot is all of a rung, and the rungs
// above.
func (s *searcher) above(f *foot) (list []*point) {
	for pos := f.pos + 1; pos <= f.top(); pos++ {
		if n := f.rungAt(pos); f.pos < f.start[n] && pos < f.start[n+1] {
			continue
		}
		if p, _ := s.fitting(f.ladder, pos); p != nil {
			list = append(list, p)
		}
	}
	return list
}

// firsts are classes that leave before anything else, on one ladder each: what is
// cheaper for a byte is not needed where all of a large class goes.
var firsts = [][]graph.Class{nil, {graph.Optimizer}, {graph.Optimizer, graph.Parameters, graph.Gradients}}

// hostShares are how much of what could go to the host a ladder lets go there: more
// is not always faster, and less leaves more for those that a cap is low for.
var hostShares = []float64{1, 1.0 / 2, 1.0 / 4, 1.0 / 8}

// hostFilled is how much of the host's cap the ladder that goes by it fills: bytes
// of moves are estimates.
const hostFilled = 0.98

// ladders are those of a base and a tiering.
func (s *searcher) ladders(b base, set *moveSet, t tiering, from *measured) (list []*ladder) {
	if t == onDevice {
		return []*ladder{s.newLadder(b, set, t, from, 0, nil)}
	}
	for _, first := range firsts {
		list = append(list, s.newLadder(b, set, t, from, math.Inf(1), first))
	}
	if t == diskTier {
		return list
	}
	most := 0.0
	for i := range set.moves {
		if mv := &set.moves[i]; mv.space == graph.Host && mv.kind != dropMove {
			most += mv.bytes
		}
	}
	for _, share := range hostShares[1:] {
		list = append(list, s.newLadder(b, set, t, from, share*most, nil))
	}
	if room := s.room(graph.Host); room > 0 {
		if free := hostFilled*float64(room) - float64(from.need[graph.Host]); free < most {
			for _, first := range firsts {
				list = append(list, s.newLadder(b, set, t, from, free, first))
			}
		}
	}
	return list
}

// candidates are what a search found: points within the caps by their lower bounds,
// the fastest first, and the feet of ladders whose other positions were not looked
// at.
type candidates struct {
	points []*point
	feet   []*foot
}

// dip is how much less time a position may take than one below it on its ladder:
// moves cost time, but what waits for what changes with them.
const dip = 1.002

// look adds what is above the feet that come near a time.
func (s *searcher) look(o *candidates, perToken float64) {
	var near []*foot
	o.feet = slices.DeleteFunc(o.feet, func(f *foot) bool {
		if f.late && !math.IsInf(perToken, 1) || f.point != nil && f.point.perToken > perToken*dip {
			return false
		}
		near = append(near, f)
		return true
	})
	found := make([][]*point, len(near))
	plan.Parallel(len(near), func(i int) { found[i] = s.above(near[i]) })
	for _, list := range found {
		o.points = append(o.points, list...)
	}
	slices.SortStableFunc(o.points, comparePoints)
}

// How far confirm goes.
const (
	mostExamined = 64 // points planned to their lower bounds at all layers
	mostPlans    = 32 // points planned whole
	// foldedError is how much the time at few layers, extended, may be off.
	foldedError = 0.001
)

// confirm plans points whole, the fastest first, and returns the fastest that
// fits: what is placed may be over the lower bounds that a search goes by.
//
// What is chosen is the fastest of positions that do not depend on the cap on
// device memory, of those that are within it: so less memory never gives a faster
// plan. That rests on dip and foldedError.
func (s *searcher) confirm(o *candidates) (best *Forecast, at *point, err error) {
	examined, planned := 0, 0
	more := map[base]int64{} // the least that points of a base needed beyond what few layers said
	done := map[string]bool{}
	var open []*point // examined
	off := 0.0
	if s.folded {
		off = foldedError
	}
	failed := func(p *point) {
		for _, f := range o.feet {
			f.late = f.late && (f.base != p.base || !p.plain())
		}
	}
	for planned < mostPlans {
		next := math.Inf(1)
		if len(o.points) > 0 && examined < mostExamined {
			next = o.points[0].perToken * (1 - off)
		}
		if len(open) > 0 && open[0].floor <= next {
			p := open[0]
			open = open[1:]
			planned++
			var f *Forecast
			if f, err = s.planned(s.whole(p)); err == nil {
				err = f.Plan.Fit()
			}
			if err == nil {
				return f, p, nil
			}
			var refused *plan.DoesNotFit
			if !errors.As(err, &refused) {
				return nil, nil, err
			}
			failed(p)
			continue
		}
		if examined == mostExamined {
			break
		}
		if len(o.points) == 0 {
			if len(o.feet) == 0 {
				break
			}
			s.look(o, math.Inf(1))
			continue
		}
		if n := len(o.feet); n > 0 {
			if s.look(o, o.points[0].perToken); len(o.feet) < n {
				continue
			}
		}
		p := o.points[0]
		o.points = o.points[1:]
		c := s.whole(p)
		key := keyOf(&c)
		if by, ok := more[p.base]; done[key] || ok && float64(p.device)+moreAlike*float64(by) > float64(s.cfg.DeviceMemory) {
			continue
		}
		done[key] = true
		examined++
		q := s.examine(p, c)
		switch {
		case q == nil:
		case s.fitsAll(q.need):
			k, _ := slices.BinarySearchFunc(open, q, comparePoints)
			open = slices.Insert(open, k, q)
		default:
			failed(p)
		}
		switch by, ok := more[p.base]; {
		case q == nil || s.fitsAll(q.need):
		case s.cfg.DeviceMemory > 0 && q.need[graph.Device] > s.cfg.DeviceMemory && (!ok || q.device-p.device < by):
			more[p.base] = q.device - p.device
		}
	}
	return nil, nil, err
}

// moreAlike is how alike points of a base are in what they need beyond what few
// layers said.
const moreAlike = 0.8

// fitsAll says that what is needed is within the caps, without foldedSlack.
func (s *searcher) fitsAll(need [graph.NumSpaces]int64) bool {
	caps := [graph.NumSpaces]int64{graph.Device: s.cfg.DeviceMemory, graph.Host: s.cfg.HostMemory, graph.Disk: s.cfg.DiskMemory}
	for sp, limit := range caps {
		if limit > 0 && need[sp] > limit {
			return false
		}
	}
	return true
}

// examine is a point with its own time and lower bounds at all layers; nil: it
// cannot be planned.
func (s *searcher) examine(p *point, c Config) *point {
	q := *p
	q.floor = p.perToken
	if !s.folded {
		return &q
	}
	key := keyOf(&c)
	m := s.memo["whole|"+key]
	if m == nil {
		if f := s.known[key]; f != nil {
			m = f.measured()
		} else {
			m = s.at(c)
		}
		s.memo["whole|"+key] = m
	}
	if m.err != nil {
		return nil
	}
	q.perToken, q.device, q.need = s.perToken(p, m.seconds), m.need[graph.Device], m.need
	q.floor = q.perToken
	if q.plain() { // moves cost time: that few layers have it otherwise is their error
		q.floor = p.perToken * (1 - foldedError)
	}
	return &q
}
