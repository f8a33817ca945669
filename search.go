package spillway

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
)

// A model of more layers than foldedFrom is planned at the numbers of
// foldedLayers only: layers are alike, so memory and time grow by the same with
// each. The peak is the highest of several such lines (at the head, in a layer),
// so that the extension is under it where another line takes over: nothing that
// fits is left out, and what is chosen is then planned whole.
const foldedFrom = 16

var foldedLayers = [2]int{5, 9}

// foldedSlack is how much over a cap an extrapolated plan may be and still be
// planned whole: placement and the ends of the model are not quite linear.
const foldedSlack = 1.01

// searcher plans configurations that differ in what a search decides.
type searcher struct {
	cfg     Config // Seq filled in
	machine *cost.Machine
	layers  int  // of the model
	folded  bool // few of them are planned

	drop   bool          // whether activations may be dropped by choice
	spaces []graph.Space // tiers that may be used by choice

	mu       sync.Mutex
	memo     map[string]*measured
	sets     map[string]*moveSet
	tried    int
	smallest *point // of the least excess over the caps, where nothing fitted
	excess   float64
}

// base is what a search decides beside the moves.
type base struct {
	batch, accum, zero, prefetch int
	precision                    string
	layers                       bool // in layer order
}

// asBase is what a search decides beside the moves, as it is.
func (c *Config) asBase() base {
	return base{c.Batch, c.Accum, c.Zero, c.Prefetch, c.precision(), c.inLayers()}
}

// order is a value of Config.AccumOrder.
func (b base) order() string {
	if b.layers {
		return layerOrder
	}
	return microOrder
}

// passes is how often a step goes through what the forward leaves for the backward:
// in layer order once, with the activations of all micro-batches.
func (b base) passes() int {
	if b.layers {
		return 1
	}
	return b.accum
}

// point is a configuration that a search looks at.
type point struct {
	base
	set   *moveSet
	x     mix    // nil: recompute and offload as given here
	again string // --recompute
	away  string // --offload
	tier  tiering

	perToken float64 // s, predicted
	device   int64   // bytes
}

// measured is what a plan says: whole, or extended from few layers.
type measured struct {
	seconds, forward float64                // of a step, and its forward's computing
	need             [graph.NumSpaces]int64 // with what is outside the arenas
	err              error
}

// newSearcher looks at a configuration. drop and spaces say what moves may be
// made.
func newSearcher(cfg Config, m *cost.Machine, drop bool, spaces []graph.Space) (*searcher, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	h, err := modelConfig(cfg.Model)
	if err != nil {
		return nil, err
	}
	if cfg.Seq == 0 {
		cfg.Seq = min(256, h.Positions)
	}
	// Names and shares mean something else in a model of few layers.
	named := !drop && strings.Contains(cfg.Recompute, ":") || len(spaces) == 0 && strings.Contains(cfg.Offload, ":")
	cfg = cfg.Sharing()
	return &searcher{cfg: cfg, machine: m, layers: h.Layers, folded: h.Layers > foldedFrom && len(cfg.Freeze) == 0 && !named,
		drop: drop, spaces: spaces, memo: map[string]*measured{}, sets: map[string]*moveSet{}}, nil
}

// config is a point's configuration for a model of n layers.
func (s *searcher) config(p *point, n int) Config {
	c := s.cfg
	c.Batch, c.Accum, c.Zero, c.Prefetch, c.Precision = p.batch, p.accum, p.zero, p.prefetch, p.precision
	c.AccumOrder, c.orderChosen = p.order(), p.accum > 1 && p.layers != s.cfg.asksLayers()
	c.Recompute, c.Offload = p.again, p.away
	if p.x != nil {
		c.Recompute, c.Offload = p.set.texts(p.x, n)
	}
	return c
}

// whole is a point's configuration for the model.
func (s *searcher) whole(p *point) Config { return s.config(p, s.layers) }

// measure plans a point to the lower bounds of its peaks.
func (s *searcher) measure(p *point) *measured {
	c := s.whole(p)
	key := fmt.Sprint(c.Batch, c.Accum, c.AccumOrder, c.Zero, c.Prefetch, c.Precision, "|", c.Recompute, "|", c.Offload)
	s.mu.Lock()
	m, ok := s.memo[key]
	s.mu.Unlock()
	if ok {
		return m
	}
	if s.folded {
		m = s.extrapolate(p)
	} else {
		m = s.at(c)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.memo[key] == nil {
		s.tried++
		s.memo[key] = m
	}
	return s.memo[key]
}

func (s *searcher) at(c Config) *measured {
	f, err := predict(c, s.machine, bounds)
	if err != nil {
		return &measured{err: err}
	}
	m := &measured{seconds: f.Step.Seconds, forward: f.Step.Pass[graph.Forward]}
	for sp := range m.need {
		m.need[sp] = f.Plan.Layout.Spaces[sp].LowerBound + f.Plan.Config.Outside[sp]
	}
	return m
}

// extrapolate plans a point at few layers and extends the lines.
func (s *searcher) extrapolate(p *point) *measured {
	var at [2]*measured
	for i, n := range foldedLayers {
		c := s.config(p, n)
		c.layers = n
		if at[i] = s.at(c); at[i].err != nil {
			return at[i]
		}
	}
	more := float64(s.layers-foldedLayers[1]) / float64(foldedLayers[1]-foldedLayers[0])
	line := func(a, b float64) float64 { return b + more*(b-a) }
	m := &measured{seconds: line(at[0].seconds, at[1].seconds), forward: line(at[0].forward, at[1].forward)}
	for sp := range m.need {
		m.need[sp] = int64(line(float64(at[0].need[sp]), float64(at[1].need[sp])))
	}
	return m
}

func (s *searcher) perToken(p *point, seconds float64) float64 {
	return seconds / (float64(s.cfg.Ranks) * float64(p.batch) * float64(p.accum) * float64(s.cfg.Seq))
}

// margins are taken off the caps, where plans came out over their lower bounds.
type margins [graph.NumSpaces]int64

// room is what a space may take; 0: anything.
func (s *searcher) room(sp graph.Space, mg margins) int64 {
	limit := [graph.NumSpaces]int64{graph.Device: s.cfg.DeviceMemory, graph.Host: s.cfg.HostMemory, graph.Disk: s.cfg.DiskMemory}[sp]
	if limit == 0 {
		return 0
	}
	if s.folded {
		limit = int64(float64(limit) * foldedSlack)
	}
	return max(1, limit-mg[sp])
}

// over is the space that a point is over the cap of; ok: it is over none.
func (s *searcher) over(m *measured, mg margins) (sp graph.Space, ok bool) {
	for sp := range graph.NumSpaces {
		if room := s.room(sp, mg); room > 0 && m.need[sp] > room {
			return sp, false
		}
	}
	return 0, true
}

// refused remembers the point that came nearest to the caps.
func (s *searcher) refused(p *point, m *measured) {
	worst := 0.0
	for sp := range graph.NumSpaces {
		if room := s.room(sp, margins{}); room > 0 {
			worst = max(worst, float64(m.need[sp])/float64(room))
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.smallest == nil || worst < s.excess || worst == s.excess && p.less(s.smallest) {
		s.smallest, s.excess = p, worst
	}
}

// less orders points where nothing else does, so that a search on several
// processors has one outcome.
func (p *point) less(q *point) bool {
	return cmp.Or(cmp.Compare(p.zero, q.zero), cmp.Compare(p.batch, q.batch), cmp.Compare(p.prefetch, q.prefetch), cmp.Compare(p.tier, q.tier), cmp.Compare(p.precision, q.precision), cmp.Compare(p.order(), q.order()), cmp.Compare(p.away, q.away), cmp.Compare(p.again, q.again)) < 0
}

// moves returns what a base offers, with the classes' bytes and seconds as the
// simulator has them.
func (s *searcher) moves(b base) (*moveSet, error) {
	key := fmt.Sprint(b.batch, b.accum, b.precision, b.layers)
	s.mu.Lock()
	defer s.mu.Unlock()
	if set := s.sets[key]; set != nil {
		return set, nil
	}
	c := s.cfg
	c.Batch, c.Accum, c.Precision, c.AccumOrder = b.batch, b.accum, b.precision, b.order()
	set, err := newMoveSet(c, s.layers, s.drop, s.spaces, s.machine)
	if err == nil {
		s.sets[key] = set
	}
	return set, err
}

// plain is a base without any move.
func (s *searcher) plain(b base, set *moveSet) *point {
	return &point{base: b, set: set, x: make(mix, len(set.moves)), tier: anyTier}
}

// priced returns the set with what each class's place takes and gives at a base.
func (s *searcher) priced(b base, set *moveSet, from *measured) *moveSet {
	q := *set
	q.moves = slices.Clone(set.moves)
	for i := range q.moves {
		mv := &q.moves[i]
		if mv.kind != placeMove {
			continue
		}
		p := s.plain(b, set)
		p.x[i] = 1
		if m := s.measure(p); m.err == nil {
			mv.bytes, mv.seconds = float64(from.need[graph.Device]-m.need[graph.Device]), m.seconds-from.seconds
		}
	}
	return &q
}

// climb finds how far up a ladder a base must go to fit, and takes back what
// was not needed; nil: all of it is not enough, or another cap is in the way.
func (s *searcher) climb(b base, set *moveSet, t tiering, mg margins) *point {
	from := s.measure(s.plain(b, set))
	if from.err != nil {
		return nil
	}
	hostFree := 1e30
	if room := s.room(graph.Host, mg); room > 0 {
		hostFree = float64(room - from.need[graph.Host])
	}
	rungs := set.ladder(s.machine, from.forward, b.passes(), t, hostFree)
	made := func(n int) *point {
		p := s.plain(b, set)
		p.tier = t
		for _, r := range rungs[:n] {
			p.x[r.move] = r.share
		}
		return p
	}
	fits := func(p *point) (*measured, bool, graph.Space) {
		m := s.measure(p)
		if m.err != nil {
			return m, false, graph.Device
		}
		sp, ok := s.over(m, mg)
		if !ok {
			s.refused(p, m)
		}
		return m, ok, sp
	}
	device := func(n int) bool {
		_, ok, sp := fits(made(n))
		return ok || sp != graph.Device
	}
	if !device(len(rungs)) {
		return nil
	}
	lo, hi := 0, len(rungs) // hi is small enough for the device
	for lo < hi {
		mid := (lo + hi) / 2
		if device(mid) {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	best := made(hi)
	m, ok, _ := fits(best)
	if !ok {
		return nil
	}
	// What stands before a large move may not be needed with it.
	back := slices.Clone(rungs[:max(0, hi-1)])
	slices.SortStableFunc(back, func(x, y rung) int { return cmp.Compare(set.moves[y.move].bytes, set.moves[x.move].bytes) })
	slices.SortStableFunc(back, func(x, y rung) int {
		return cmp.Compare(set.moves[y.move].seconds, set.moves[x.move].seconds)
	})
	for _, r := range back {
		p := *best
		p.x = slices.Clone(best.x)
		p.x[r.move] = 0
		if less, ok, _ := fits(&p); ok && less.seconds <= m.seconds {
			best, m = &p, less
		}
	}
	seconds, need := m.seconds, m.need[graph.Device]
	if hi > 0 {
		seconds, need = s.part(best, rungs[hi-1], m, fits, mg)
	}
	best.perToken, best.device = s.perToken(best, seconds), need
	return best
}

// part makes as little of the last rung as fits, and returns the time and device
// memory with that. A model planned at few layers has no parts of them: the line
// between without and with the rung says how much.
func (s *searcher) part(p *point, r rung, all *measured, fits func(*point) (*measured, bool, graph.Space), mg margins) (seconds float64, need int64) {
	without := *p
	without.x = slices.Clone(p.x)
	without.x[r.move] = 0
	none, ok, _ := fits(&without)
	if ok || none.err != nil {
		if ok {
			p.x = without.x
			return none.seconds, none.need[graph.Device]
		}
		return all.seconds, all.need[graph.Device]
	}
	room := s.room(graph.Device, mg)
	span := float64(none.need[graph.Device] - all.need[graph.Device])
	if room == 0 || span <= 0 || all.seconds <= none.seconds {
		return all.seconds, all.need[graph.Device] // the whole rung costs no time
	}
	step := func(share float64) float64 { // a share that can be made
		mv := &p.set.moves[r.move]
		if mv.kind == placeMove {
			return float64(percentOf(share)) / 100
		}
		n := mv.layers(s.layers)
		return float64(layersOf(share, n)) / float64(n)
	}
	share := step(float64(none.need[graph.Device]-room) / span)
	if share >= 1 {
		return all.seconds, all.need[graph.Device]
	}
	if s.folded {
		p.x[r.move] = share
		return none.seconds + share*(all.seconds-none.seconds), none.need[graph.Device] - int64(share*span)
	}
	got := all
	low, high := 0.0, 1.0 // high fits
	for range 5 {
		if share <= low || share >= high {
			break
		}
		try := *p
		try.x = slices.Clone(p.x)
		try.x[r.move] = share
		if m, ok, _ := fits(&try); ok {
			high, got = share, m
		} else {
			low = share
		}
		share = step((low + high) / 2)
	}
	p.x[r.move] = high
	return got.seconds, got.need[graph.Device]
}

// presets are whole classes and policies, which a person would try.
func (s *searcher) presets(b base, set *moveSet) []*point {
	again, away := []string{set.recompute}, []string{set.offload}
	if set.canDrop {
		again = []string{"none", "selective", "full"}
	}
	if set.canOffload {
		away = away[:0]
		for _, text := range wholePlacements {
			away = append(away, text)
			if text != "" && slices.Contains(s.spaces, graph.Disk) {
				away = append(away, strings.ReplaceAll(text, "host", "disk"))
			}
		}
	}
	var list []*point
	for _, o := range away {
		for _, r := range again {
			list = append(list, &point{base: b, set: set, again: r, away: o, tier: presetTier})
		}
	}
	return list
}

// wholePlacements are classes on the host, each a step further than the one
// before.
var wholePlacements = []string{"", "optimizer=host", "activations=host", "optimizer=host,activations=host", "optimizer=host,parameters=host,activations=host",
	"optimizer=host,parameters=host,gradients=host,activations=host"}

// closeEnough is how near to the time without any move ends the search of a base.
const closeEnough = 1.002

// branch finds what fits of a base: the best of every tiering, and of the
// presets.
func (s *searcher) branch(b base) (found []*point) {
	set, err := s.moves(b)
	if err != nil {
		return nil
	}
	from := s.measure(s.plain(b, set))
	if from.err != nil {
		return nil
	}
	if s.notWorth(b, from) {
		return nil
	}
	if _, ok := s.over(from, margins{}); ok {
		p := s.plain(b, set)
		p.perToken, p.device = s.perToken(p, from.seconds), from.need[graph.Device]
		return []*point{p}
	}
	s.refused(s.plain(b, set), from)
	set = s.priced(b, set, from)
	good := func(p *point) bool { return p.perToken <= closeEnough*s.perToken(p, from.seconds) }
	for _, t := range set.tierings() {
		if t == onDevice && !set.canDrop {
			continue
		}
		if p := s.climb(b, set, t, margins{}); p != nil {
			if found = append(found, p); good(p) {
				return found
			}
		}
	}
	for _, p := range s.presets(b, set) {
		m := s.measure(p)
		if m.err != nil {
			continue
		}
		if _, ok := s.over(m, margins{}); !ok {
			s.refused(p, m)
			continue
		}
		p.perToken, p.device = s.perToken(p, m.seconds), m.need[graph.Device]
		found = append(found, p)
	}
	return found
}

// worthAnOrder is how much faster layer order must be than micro order that fits as it
// is: it needs more memory, and a tied head's sums get bits of their own.
const worthAnOrder = 1.01

// notWorth says that a base in layer order wins nothing over the same in micro order.
func (s *searcher) notWorth(b base, from *measured) bool {
	if !b.layers || s.cfg.asksLayers() {
		return false
	}
	b.layers = false
	set, err := s.moves(b)
	if err != nil {
		return false
	}
	m := s.measure(s.plain(b, set))
	if m.err != nil {
		return false
	}
	_, fits := s.over(m, margins{})
	return fits && m.seconds <= worthAnOrder*from.seconds
}

// waveSize is how many bases are looked at before what was found limits the
// next: it does not depend on the processors, so that the outcome doesn't.
const waveSize = 2

// search returns what fits of the bases, the fastest by prediction first. A base
// whose time without any move is no better than what was found is left out.
func (s *searcher) search(bases []base) []*point {
	type start struct {
		base
		perToken float64
	}
	starts := make([]*start, len(bases))
	plan.Parallel(len(bases), func(i int) {
		set, err := s.moves(bases[i])
		if err != nil {
			return
		}
		p := s.plain(bases[i], set)
		if m := s.measure(p); m.err == nil {
			starts[i] = &start{bases[i], s.perToken(p, m.seconds)}
		}
	})
	starts = slices.DeleteFunc(starts, func(b *start) bool { return b == nil })
	slices.SortStableFunc(starts, func(a, b *start) int { return cmp.Compare(a.perToken, b.perToken) })
	var all []*point
	for len(starts) > 0 {
		n := min(waveSize, len(starts))
		found := make([][]*point, n)
		plan.Parallel(n, func(i int) { found[i] = s.branch(starts[i].base) })
		for _, f := range found {
			all = append(all, f...)
		}
		starts = starts[n:]
		if len(all) > 0 {
			best := slices.MinFunc(all, comparePoints)
			starts = slices.DeleteFunc(starts, func(b *start) bool { return b.perToken*closeEnough >= best.perToken })
		}
	}
	slices.SortStableFunc(all, comparePoints)
	return all
}

// comparePoints orders by predicted time; of equals, the one with less memory on
// the device.
func comparePoints(a, b *point) int {
	return cmp.Or(cmp.Compare(a.perToken, b.perToken), cmp.Compare(a.device, b.device))
}

// confirms is how many points are planned whole at most.
const confirms = 4

// confirm plans points whole, the fastest first, and returns the fastest that
// fits. One that is over after all goes further up its ladder.
func (s *searcher) confirm(all []*point) (best *Forecast, at *point, err error) {
	for i, p := range all {
		if best != nil && (p.perToken >= 1/best.TokensPerSecond() || i >= confirms) {
			break
		}
		var mg margins
		for try := range int64(8) {
			var f *Forecast
			f, err = predict(s.whole(p), s.machine, early)
			if err == nil {
				err = f.Plan.Fit()
			}
			if err == nil {
				if best == nil || f.TokensPerSecond() > best.TokensPerSecond() {
					best, at = f, p
				}
				break
			}
			var refused *plan.DoesNotFit
			if !errors.As(err, &refused) {
				break
			}
			by := refused.Peak + refused.Outside - refused.Capacity
			mg[refused.Space] += by + by/8 + 1 + try*refused.Capacity/256
			if s.folded {
				mg[refused.Space] += int64(float64(refused.Capacity) * (foldedSlack - 1) / 2)
			}
			if p.x == nil {
				break
			}
			if p = s.again(p, mg); p == nil {
				break
			}
		}
	}
	if best != nil {
		err = nil
	}
	return best, at, err
}

// again looks for a point like p under smaller caps; nil: there is none.
func (s *searcher) again(p *point, mg margins) *point {
	if p.tier != anyTier {
		return s.climb(p.base, p.set, p.tier, mg)
	}
	var best *point
	set := s.priced(p.base, p.set, s.measure(s.plain(p.base, p.set)))
	for _, t := range set.tierings() {
		if q := s.climb(p.base, set, t, mg); q != nil && (best == nil || comparePoints(q, best) < 0) {
			best = q
		}
	}
	return best
}

// nearest plans the point that came nearest to the caps whole, for what to say
// where nothing fits.
func (s *searcher) nearest() *Forecast {
	if s.smallest == nil {
		return nil
	}
	f, err := predict(s.whole(s.smallest), s.machine, whole)
	if err != nil {
		return nil
	}
	return f
}
