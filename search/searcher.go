package search

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
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
	ctx     context.Context
	spec    Spec
	machine *cost.Machine
	layers  int  // of the model
	folded  bool // few of them are planned

	drop   bool          // whether activations may be dropped by choice
	spaces []graph.Space // tiers that may be used by choice

	mu       sync.Mutex
	memo     map[string]*measured
	micros   map[string]float64 // see microBatch
	sets     map[string]*moveSet
	tried    int
	smallest *point // of the least excess over the caps, where nothing fitted
	excess   float64
}

// base is what a search decides beside the moves.
type base struct {
	batch, accum, zero, prefetch int
	precision                    precision.Precision
	layers                       bool // in layer order
}

// asBase is what a search decides beside the moves, as it is.
func (s *Spec) asBase() base {
	return base{s.Batch, s.Accum, s.Stage, s.Prefetch, s.Precision, s.inLayers()}
}

// apply makes a base's choices.
func (b base) apply(s *Spec, asked *Spec) {
	s.Batch, s.Accum, s.Stage, s.Prefetch, s.Precision = b.batch, b.accum, b.zero, b.prefetch, b.precision
	s.LayerOrder, s.OrderChosen = asked.LayerOrder, false
	if b.accum > 1 {
		s.LayerOrder, s.OrderChosen = b.layers, b.layers != asked.LayerOrder
	}
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
	x     mix // nil: recompute and offload as given here
	again recompute.Options
	auto  bool // again is to be chosen
	away  offload.Options
	tier  tiering

	perToken float64   // s, predicted
	device   int64     // bytes
	expected *measured // of ladders
	part     *part     // of a rung: expected by its ends
}

// measured is what a plan says: whole, or extended from few layers.
type measured struct {
	seconds, forward float64                // of a step, and its forward's computing
	need             [graph.NumSpaces]int64 // with what is outside the arenas
	rests            int64                  // bytes that live all the run, of all spaces, with what is outside the arenas
	atOnce           int64                  // of bases without any move: bytes of device memory that one operation needs, with what is outside the arena
	least            *leastTime             // of bases without any move that are planned whole
	err              error
}

// newSearcher looks at a configuration. drop and spaces say what moves may be
// made.
func newSearcher(ctx context.Context, s Spec, m *cost.Machine, drop bool, spaces []graph.Space) *searcher {
	// Names and shares mean something else in a model of few layers.
	named := !drop && namesBuffers(s.Recompute) || len(spaces) == 0 && namesParts(s.Offload)
	if s.Plans == nil {
		s.Plans = &plan.Shared{}
	}
	return &searcher{ctx: ctx, spec: s, machine: m, layers: s.Layers, folded: s.Layers > foldedFrom && !s.Frozen && !named,
		drop: drop, spaces: spaces, memo: map[string]*measured{}, micros: map[string]float64{}, sets: map[string]*moveSet{}}
}

// namesBuffers says whether units or buffers are computed again by name.
func namesBuffers(o recompute.Options) bool {
	return len(o.Drop) > 0 || slices.ContainsFunc(o.Rules, func(r recompute.Rule) bool { return r.Unit != "*" })
}

// namesParts says whether buffers leave the device by name, or classes in part.
func namesParts(o offload.Options) bool {
	return slices.ContainsFunc(o.Parts, func(p offload.Part) bool { return p.Share > 0 || len(p.Buffers) > 0 })
}

// config is a point's configuration for a model of n layers.
func (s *searcher) config(p *point, n int) Spec {
	c := s.spec
	p.apply(&c, &s.spec)
	c.Recompute, c.Auto, c.Offload = p.again, p.auto, p.away
	if p.x != nil {
		c.Recompute, c.Offload = p.set.options(p.x, n)
	}
	return c
}

// whole is a point's configuration for the model.
func (s *searcher) whole(p *point) Spec { return s.config(p, s.layers) }

// keyOf tells configurations of one search apart.
func keyOf(c *Spec) string {
	return fmt.Sprint(c.Batch, c.Accum, c.LayerOrder, c.Stage, c.Prefetch, c.Precision, c.Auto, "|", c.Recompute, "|", c.Offload)
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
		m = s.at(c, 0, p.isPlain())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.memo[key] == nil {
		s.tried++
		s.memo[key] = m
	}
	return s.memo[key]
}

// known is what a point was measured to be; nil: it was not.
func (s *searcher) known(p *point) *measured {
	c := s.whole(p)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.memo[keyOf(&c)]
}

// at plans a configuration for a model of so many layers, 0 for its own; plain: it is a
// base without any move.
func (s *searcher) at(c Spec, layers int, plain bool) *measured {
	f, err := predict(s.ctx, c, s.machine, layers, bounds)
	if err != nil {
		return &measured{err: err}
	}
	m := &measured{seconds: f.Step.Seconds, forward: f.Step.Pass[graph.Forward]}
	for sp := range m.need {
		use, outside := &f.Plan.Layout.Spaces[sp], f.Plan.Config.Outside[sp]
		m.need[sp] = use.LowerBound + outside
		m.rests += use.Resident + outside
	}
	if plain {
		m.atOnce = atOnce(f.Plan.Program) + f.Plan.Config.Outside[graph.Device]
	}
	if plain && layers == 0 {
		m.least = s.leastTime(f)
	}
	return m
}

// extrapolate plans a point at few layers and extends the lines.
func (s *searcher) extrapolate(p *point) *measured {
	var at [2]*measured
	for i, n := range foldedLayers {
		if at[i] = s.at(s.config(p, n), n, p.isPlain()); at[i].err != nil {
			return at[i]
		}
	}
	more := float64(s.layers-foldedLayers[1]) / float64(foldedLayers[1]-foldedLayers[0])
	line := func(a, b float64) float64 { return b + more*(b-a) }
	m := &measured{seconds: line(at[0].seconds, at[1].seconds), forward: line(at[0].forward, at[1].forward)}
	m.rests = int64(line(float64(at[0].rests), float64(at[1].rests)))
	m.atOnce = at[1].atOnce // more layers have the same operations
	for sp := range m.need {
		m.need[sp] = int64(line(float64(at[0].need[sp]), float64(at[1].need[sp])))
	}
	return m
}

func (s *searcher) perToken(p *point, seconds float64) float64 {
	return seconds / (float64(s.spec.Ranks) * float64(p.batch) * float64(p.accum) * float64(s.spec.Seq))
}

// margins are taken off the caps, where plans came out over their lower bounds.
type margins [graph.NumSpaces]int64

// room is what a space may take; 0: anything.
func (s *searcher) room(sp graph.Space, mg margins) int64 {
	limit := s.spec.Capacity[sp]
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

// hopeless says whether no move makes a base fit: what lives all the run moves from one
// space to another and becomes no less, and it is more than all of them may take; or one
// operation, which no move makes smaller, needs more of the device than there is.
func (s *searcher) hopeless(plain *measured) bool {
	if limit := s.spec.Capacity[graph.Device]; limit > 0 && plain.err == nil && plain.atOnce > limit {
		return true
	}
	all := int64(0)
	for sp := range graph.NumSpaces {
		if sp == graph.Disk && !s.spec.Disk {
			continue
		}
		room := s.room(sp, margins{})
		if room == 0 {
			return false
		}
		all += room
	}
	return plain.err == nil && plain.rests > all
}

// atOnce is the most device memory, in bytes, that an operation of a base's forward and
// backward, or a gather before it, has to have all at once: what it reads and writes, of
// each buffer that these lie in the largest part. Moves add operations, and copies to
// and from where something rests; they leave these as they are.
func atOnce(p *graph.Program) (most int64) {
	sec := p.SectionOf(graph.SectionStep, graph.FormWhole)
	if sec == nil {
		return 0
	}
	regions, err := graph.NewRegions(p)
	if err != nil {
		return 0 // it is planned in vain too
	}
	needs := map[graph.BufID]int64{} // by root
	for i := range sec.Phases {
		for k := range sec.Phases[i].Ops {
			op := &sec.Phases[i].Ops[k]
			computes := op.Stream == graph.Compute && (op.Pass == graph.Forward || op.Pass == graph.Backward)
			if !computes && (op.Kind != graph.AllGather || op.Pass == graph.Update) {
				continue
			}
			clear(needs)
			add := func(id graph.BufID) {
				if id == graph.NoBuf {
					return
				}
				if g := regions.Of[id]; p.Buffers[g.Root].Space == graph.Device {
					needs[g.Root] = max(needs[g.Root], g.Hi-g.Lo)
				}
			}
			for _, id := range op.In {
				add(id)
			}
			for _, out := range op.Out {
				add(out.Buf)
			}
			sum := int64(0)
			for _, n := range needs {
				sum += n
			}
			most = max(most, sum)
		}
	}
	return most
}

// refuseAll remembers what comes nearest to the caps of a hopeless base, near enough to be
// told of: with everything off the device.
func (s *searcher) refuseAll(b base, set *moveSet) {
	list := s.presets(b, set)
	p := list[len(list)-1]
	if m := s.measure(p); m.err == nil {
		s.refused(p, m)
	}
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
	return cmp.Or(cmp.Compare(p.zero, q.zero), cmp.Compare(p.batch, q.batch), cmp.Compare(p.prefetch, q.prefetch), cmp.Compare(p.tier, q.tier), cmp.Compare(p.precision.String(), q.precision.String()), compareOrders(p.layers, q.layers), cmp.Compare(p.away.String(), q.away.String()), cmp.Compare(p.again.String(), q.again.String())) < 0
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
	c := s.spec
	c.Batch, c.Accum, c.Precision, c.LayerOrder = b.batch, b.accum, b.precision, b.layers
	set, err := newMoveSet(c, s.drop, s.spaces, s.machine)
	if err == nil {
		s.sets[key] = set
	}
	return set, err
}

// plain is a base without any move.
func (s *searcher) plain(b base, set *moveSet) *point {
	return &point{base: b, set: set, x: make(mix, len(set.moves)), tier: anyTier}
}

// isPlain says that a point is its base without any move.
func (p *point) isPlain() bool {
	return p.x != nil && !slices.ContainsFunc(p.x, func(share float64) bool { return share > 0 })
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

// waveSize is how many bases are looked at before what was found limits the
// next: it does not depend on the processors, so that the outcome doesn't.
const waveSize = 2

// mostSaved is the largest part of a base's time that classes may save which leave,
// where their update runs beside what the device does.
const mostSaved = 0.1

// fastest plans whole the fastest of the bases that fits, with what was found to be
// expected to beside it, the fastest first; beside: others of that are looked for. The
// error is why the last was refused, where none fits.
func (s *searcher) fastest(bases []base, beside bool) (best *Forecast, at *point, all []*point, err error) {
	if s.folded {
		all = s.search(bases)
		best, at, err = s.confirm(all)
		return best, at, all, err
	}
	q := newQueue(s)
	q.begin(bases)
	if best, at, err = q.fastest(); best != nil && beside {
		q.beside(at)
	}
	return best, at, q.points(), err
}

// search returns what fits of the bases, the fastest by prediction first. A base
// that cannot be faster than what was found is left out.
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
	if len(starts) == 0 {
		return nil
	}
	saves := s.saved(starts[0].base) > 0
	var all []*point
	best := math.Inf(1)
	for len(starts) > 0 {
		n := min(waveSize, len(starts))
		found := make([][]*point, n)
		plan.Parallel(n, func(i int) { found[i] = s.branch(starts[i].base, saves, best) })
		for _, f := range found {
			all = append(all, f...)
		}
		for _, p := range all {
			best = p.least(best)
		}
		starts = slices.DeleteFunc(starts[n:], func(b *start) bool {
			return b.perToken >= best && (!saves || b.perToken*(1-mostSaved) >= best || b.perToken-s.saved(b.base) >= best)
		})
	}
	slices.SortStableFunc(all, comparePoints)
	return all
}

// saved is how much of the time a token of a base the classes save that are faster
// off the device.
func (s *searcher) saved(b base) float64 {
	set, err := s.moves(b)
	if err != nil {
		return 0
	}
	plain := s.plain(b, set)
	from := s.measure(plain)
	if from.err != nil {
		return 0
	}
	seconds := 0.0
	for _, mv := range s.priced(b, set, from).moves {
		if mv.kind == placeMove {
			seconds += max(0, -mv.seconds)
		}
	}
	return s.perToken(plain, seconds)
}

// comparePoints orders by predicted time; of equals, the one with less memory on
// the device.
func comparePoints(a, b *point) int {
	return cmp.Or(cmp.Compare(a.perToken, b.perToken), cmp.Compare(a.device, b.device))
}

// Points are planned whole this often at most.
const (
	mostPlans = 24 // until one fits
	morePlans = 6  // after one did: what was expected to be faster
)

// confirm plans points whole, the fastest first, and returns the fastest that
// fits. Where one is over after all, the same tiering of its base is looked at
// again under caps that are as much smaller.
func (s *searcher) confirm(all []*point) (best *Forecast, at *point, err error) {
	open := slices.Clone(all)
	done := map[string]bool{}
	more := map[base]margins{} // what points needed more than was expected
	insert := func(p *point) {
		k, _ := slices.BinarySearchFunc(open, p, comparePoints)
		open = slices.Insert(open, k, p)
	}
	least := math.Inf(1) // of best
	for plans, later := 0, 0; len(open) > 0 && plans < mostPlans && later < morePlans && open[0].perToken < least*(1-1e-12); {
		p := open[0]
		open = open[1:]
		c := s.whole(p)
		key := keyOf(&c)
		if done[key] {
			continue
		}
		mg := more[p.base]
		if _, ok := s.over(p.expected, mg); !ok {
			continue
		}
		done[key] = true
		plans++
		if best != nil {
			later++
		}
		f, fail := predict(s.ctx, c, s.machine, 0, early)
		if fail == nil {
			fail = f.Plan.Fit()
		}
		if fail == nil {
			if speed := 1 / f.TokensPerSecond(); speed < least {
				best, at, least = f, p, speed
			}
			continue
		}
		err = fail
		var refused *plan.DoesNotFit
		if !errors.As(fail, &refused) || p.x == nil {
			continue
		}
		mg = more[p.base]
		mg[refused.Space] = max(mg[refused.Space], s.room(refused.Space, margins{})-refused.Capacity+refused.Peak+refused.Outside-p.expected.need[refused.Space])
		more[p.base] = mg
		for _, q := range s.again(p, mg, least) {
			insert(q)
		}
	}
	if best != nil {
		err = nil
	}
	return best, at, err
}

// again looks for points like p under smaller caps.
func (s *searcher) again(p *point, mg margins, best float64) []*point {
	if p.tier != anyTier {
		return s.climb(p.base, p.set, p.tier, mg, best)
	}
	set := s.priced(p.base, p.set, s.measure(s.plain(p.base, p.set)))
	var list []*point
	for _, t := range set.tierings() {
		list = append(list, s.climb(p.base, set, t, mg, best)...)
	}
	return list
}

// nearest plans the point that came nearest to the caps whole, for what to say
// where nothing fits.
func (s *searcher) nearest() *Forecast {
	if s.smallest == nil {
		return nil
	}
	f, err := predict(s.ctx, s.whole(s.smallest), s.machine, 0, whole)
	if err != nil {
		return nil
	}
	return f
}
