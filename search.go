package spillway

import (
	"cmp"
	"fmt"
	"math"
	"reflect"
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

	known    map[string]*Forecast // planned whole, whatever the caps, by keyOf
	remember bool                 // what is planned whole is known from then on

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
}

// point is a configuration that a search looks at.
type point struct {
	base
	set   *moveSet
	x     mix    // nil: recompute and offload as given here
	again string // --recompute
	away  string // --offload
	tier  tiering

	perToken float64                // s, predicted
	floor    float64                // of confirm: what another point must be expected below to be looked at first
	device   int64                  // bytes
	need     [graph.NumSpaces]int64 // bytes, of confirm
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
	return &searcher{cfg: cfg, machine: m, layers: h.Layers, folded: h.Layers > foldedFrom && len(cfg.Freeze) == 0 && !named,
		drop: drop, spaces: spaces, known: map[string]*Forecast{}, memo: map[string]*measured{}, sets: map[string]*moveSet{}}, nil
}

// config is a point's configuration for a model of n layers.
func (s *searcher) config(p *point, n int) Config {
	c := s.cfg
	c.Batch, c.Accum, c.Zero, c.Prefetch, c.Precision = p.batch, p.accum, p.zero, p.prefetch, p.precision
	c.Recompute, c.Offload = p.again, p.away
	if p.x != nil {
		c.Recompute, c.Offload = p.set.texts(p.x, n)
	}
	return c
}

// whole is a point's configuration for the model.
func (s *searcher) whole(p *point) Config { return s.config(p, s.layers) }

// keyOf tells configurations of one search apart.
func keyOf(c *Config) string {
	return fmt.Sprint(c.Batch, c.Accum, c.Zero, c.Prefetch, c.precision(), "|", orNone(c.Recompute), "|", orNone(c.Offload))
}

// measure plans a point to the lower bounds of its peaks.
func (s *searcher) measure(p *point) *measured {
	c := s.whole(p)
	key := keyOf(&c)
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
	return f.measured()
}

// measured is what a forecast says to a search.
func (f *Forecast) measured() *measured {
	m := &measured{seconds: f.Step.Seconds, forward: f.Step.Pass[graph.Forward]}
	for sp := range m.need {
		m.need[sp] = f.Plan.Layout.Spaces[sp].LowerBound + f.Plan.Config.Outside[sp]
	}
	return m
}

// know takes forecasts that differ from what is searched only in what a search
// chooses, and in caps.
func (s *searcher) know(list []*Forecast) {
	job := func(c Config) Config {
		c.Batch, c.Accum, c.Zero, c.Prefetch, c.Precision, c.Recompute, c.Offload, c.Auto, c.Tokenizer = 0, 0, 0, 0, "", "", "", "", ""
		c.DeviceMemory, c.HostMemory, c.DiskMemory, c.Allow = 0, 0, 0, nil
		return c
	}
	for _, f := range list {
		if reflect.DeepEqual(job(f.Config), job(s.cfg)) {
			s.known[keyOf(&f.Config)] = f
		}
	}
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

// room is what a space may take; 0: anything.
func (s *searcher) room(sp graph.Space) int64 {
	limit := [graph.NumSpaces]int64{graph.Device: s.cfg.DeviceMemory, graph.Host: s.cfg.HostMemory, graph.Disk: s.cfg.DiskMemory}[sp]
	if s.folded {
		limit = int64(float64(limit) * foldedSlack)
	}
	return limit
}

// over is the space that a point is over the cap of; ok: it is over none.
func (s *searcher) over(m *measured) (sp graph.Space, ok bool) {
	for sp := range graph.NumSpaces {
		if room := s.room(sp); room > 0 && m.need[sp] > room {
			return sp, false
		}
	}
	return 0, true
}

// refused remembers the point that came nearest to the caps.
func (s *searcher) refused(p *point, m *measured) {
	worst := 0.0
	for sp := range graph.NumSpaces {
		if room := s.room(sp); room > 0 {
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
// processors has one candidates.
func (p *point) less(q *point) bool {
	return cmp.Or(cmp.Compare(p.zero, q.zero), cmp.Compare(p.batch, q.batch), cmp.Compare(p.prefetch, q.prefetch), cmp.Compare(p.tier, q.tier), cmp.Compare(p.precision, q.precision), cmp.Compare(p.away, q.away), cmp.Compare(p.again, q.again)) < 0
}

// moves returns what a base offers, with the classes' bytes and seconds as the
// simulator has them.
func (s *searcher) moves(b base) (*moveSet, error) {
	key := fmt.Sprint(b.batch, b.accum, b.precision)
	s.mu.Lock()
	defer s.mu.Unlock()
	if set := s.sets[key]; set != nil {
		return set, nil
	}
	c := s.cfg
	c.Batch, c.Accum, c.Precision = b.batch, b.accum, b.precision
	set, err := newMoveSet(c, s.layers, s.drop, s.spaces, s.machine)
	if err == nil {
		s.sets[key] = set
	}
	return set, err
}

// plain says that no move is made.
func (p *point) plain() bool {
	return p.x != nil && !slices.ContainsFunc(p.x, func(share float64) bool { return share > 0 })
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

// branch finds what fits of a base: the feet of its ladders, and whole policies
// and classes.
func (s *searcher) branch(b base) (o candidates) {
	set, err := s.moves(b)
	if err != nil {
		return o
	}
	from := s.measure(s.plain(b, set))
	if from.err != nil {
		return o
	}
	set = s.priced(b, set, from)
	_, plain := s.over(from)
	saves := slices.ContainsFunc(set.moves, func(mv move) bool { return mv.kind == placeMove && mv.seconds < 0 })
	for _, t := range set.tierings() {
		if t == onDevice && !set.canDrop {
			continue
		}
		for _, l := range s.ladders(b, set, t, from) {
			var f *foot
			if plain { // it may be over the cap when it is placed
				f = &foot{ladder: l, late: !saves}
				f.point, _ = s.fitting(l, 0)
			} else {
				f = s.foot(l)
			}
			if f != nil {
				o.feet = append(o.feet, f)
				if f.point != nil {
					o.points = append(o.points, f.point)
				}
			}
		}
	}
	if plain {
		if len(o.points) == 0 {
			p, _ := s.fitting(&ladder{base: b, set: set, tier: anyTier, start: []int{0}}, 0)
			o.points = append(o.points, p)
		}
		return o
	}
	for _, p := range s.presets(b, set) {
		m := s.measure(p)
		if m.err != nil {
			continue
		}
		if _, ok := s.over(m); !ok {
			s.refused(p, m)
			continue
		}
		p.perToken, p.device = s.perToken(p, m.seconds), m.need[graph.Device]
		o.points = append(o.points, p)
	}
	return o
}

// waveSize is how many bases are looked at before what was found limits the
// next: it does not depend on the processors, so that the candidates doesn't.
const waveSize = 2

// mostSaved is the largest part of a base's time that moves may save: where the update
// on the host runs beside what the device does, a class that leaves saves time.
const mostSaved = 0.1

// search returns what fits of the bases. A base that cannot come below the time of
// what was found is left out.
func (s *searcher) search(bases []base) *candidates {
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
	all := &candidates{}
	best := math.Inf(1)
	for len(starts) > 0 {
		n := min(waveSize, len(starts))
		found := make([]candidates, n)
		plan.Parallel(n, func(i int) {
			if b := starts[i]; b.perToken*(1-mostSaved) < best && s.least(b.base) < best {
				found[i] = s.branch(b.base)
			}
		})
		starts = starts[n:]
		for _, f := range found {
			all.points, all.feet = append(all.points, f.points...), append(all.feet, f.feet...)
			for _, p := range f.points {
				best = min(best, p.perToken)
			}
		}
	}
	slices.SortStableFunc(all.points, comparePoints)
	return all
}

// least is the time a token of a base without what costs time and with every class
// that saves some.
func (s *searcher) least(b base) float64 {
	set, err := s.moves(b)
	if err != nil {
		return math.Inf(1)
	}
	from := s.measure(s.plain(b, set))
	if from.err != nil {
		return math.Inf(1)
	}
	seconds := from.seconds
	for _, mv := range s.priced(b, set, from).moves {
		if mv.kind == placeMove {
			seconds += min(0, mv.seconds)
		}
	}
	return s.perToken(s.plain(b, set), seconds)
}

// comparePoints orders by predicted time; of equals, the one with less memory on
// the device.
func comparePoints(a, b *point) int {
	return cmp.Or(cmp.Compare(a.perToken, b.perToken), cmp.Compare(a.device, b.device))
}

// planned is a configuration planned whole, unless its lower bounds are over a cap.
// One that is known is not planned again.
func (s *searcher) planned(c Config) (*Forecast, error) {
	key := keyOf(&c)
	if f := s.known[key]; f != nil {
		return f.capped(&s.cfg), nil
	}
	if !s.remember {
		return predict(c, s.machine, early)
	}
	f, err := predict(c, s.machine, whole)
	if err == nil {
		s.known[key] = f
		f = f.capped(&s.cfg)
	}
	return f, err
}

// capped is a forecast under other caps.
func (f *Forecast) capped(c *Config) *Forecast {
	p := *f.Plan
	p.Config.Capacity = [graph.NumSpaces]int64{graph.Device: c.DeviceMemory, graph.Host: c.HostMemory, graph.Disk: c.DiskMemory}
	g := &Forecast{Config: f.Config, Plan: &p, Step: f.Step, Fits: p.Fit() == nil}
	g.Config.DeviceMemory, g.Config.HostMemory, g.Config.DiskMemory = c.DeviceMemory, c.HostMemory, c.DiskMemory
	return g
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
