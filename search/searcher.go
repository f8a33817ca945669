package search

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"sync"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/recompute"
)

// A model of more layers than foldedFrom is planned at the numbers of
// foldedLayers only: layers are alike, so memory and time grow by the same with
// each. What is chosen is then planned whole.
const foldedFrom = 16

var foldedLayers = [2]int{4, 7}

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
	effort  int  // plans that one search may evaluate, of budget
	limit   int  // of tried
	kept    int  // of limit, for plans made whole
	budget  *Budget
	exact   bool // recipes are filled to a step

	drop   bool          // whether activations may be dropped by choice
	spaces []graph.Space // tiers that may be used by choice

	memo *memo // may be others' too

	mu       sync.Mutex
	counted  map[string]bool // of memo, by key: in tried
	sets     map[string]*moveSet
	lessons  map[base]*lessons // do not depend on the caps
	tried    int
	smallest *point // of the least excess over the caps, where nothing fitted
	excess   float64
}

// newSearcher looks at a configuration. drop and spaces say what moves may be
// made.
func newSearcher(ctx context.Context, s Spec, m *cost.Machine, drop bool, spaces []graph.Space) *searcher {
	// Names and shares mean something else in a model of few layers.
	named := !drop && namesBuffers(s.Recompute) || len(spaces) == 0 && namesParts(s.Offload)
	if s.Plans == nil {
		s.Plans = &plan.Shared{}
	}
	return &searcher{ctx: ctx, spec: s, machine: m, layers: s.Layers, folded: s.Layers > foldedFrom && s.Pipeline < 2 && !s.Frozen && !named,
		effort: math.MaxInt / 2, budget: NewBudget(math.MaxInt),
		drop: drop, spaces: spaces, memo: &memo{looks: map[string]*look{}}, counted: map[string]bool{}, sets: map[string]*moveSet{}, lessons: map[base]*lessons{}}
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

// measure plans a point to the lower bounds of its peaks. In few layers a share is not the same part
// of a class or of the layers as in all of them. A part of a move is made in the first layers, so that
// the model is a row of segments, whose layers make some of the moves wholly and the others not at all:
// memory and time lie between those of models whose layers are all alike, by the lengths of the segments.
func (s *searcher) measure(p *point) *measured {
	if !s.folded || p.x == nil {
		return s.measured(p)
	}
	from, to := s.segments(p)
	ends := []float64{0, 1}
	for i := range p.x {
		ends = append(ends, from[i], to[i])
	}
	slices.Sort(ends)
	ends = slices.Compact(ends)
	var sum measured
	var seconds, forward, rests float64
	var need [graph.NumSpaces]float64
	for k, end := range ends[1:] {
		q := *p
		q.x = make(mix, len(p.x))
		for i := range q.x {
			if from[i] <= ends[k] && to[i] >= end {
				q.x[i] = 1
			}
		}
		m := s.measured(&q)
		if m.err != nil || len(ends) == 2 {
			return m
		}
		part := end - ends[k]
		seconds += float64(part * m.seconds)
		forward += float64(part * m.forward)
		rests += float64(part * float64(m.rests))
		for sp := range need {
			need[sp] += float64(part * float64(m.need[sp]))
		}
		sum.ops, sum.atOnce = max(sum.ops, m.ops), max(sum.atOnce, m.atOnce)
	}
	sum.seconds, sum.forward, sum.rests = seconds, forward, int64(rests)
	for sp := range need {
		sum.need[sp] = int64(need[sp])
	}
	return &sum
}

// segments returns where each of a point's moves begins and ends, in parts of the layers. Of a class
// that is split over host and disk, a layer's buffers are in one of both, on the host if the shares
// split them.
func (s *searcher) segments(p *point) (from, to []float64) {
	from, to = make([]float64, len(p.x)), slices.Clone([]float64(p.x))
	n := float64(s.layers)
	for i := range p.set.moves {
		for k := range p.set.moves {
			host, disk := &p.set.moves[i], &p.set.moves[k]
			both := host.kind == placeMove && disk.kind == placeMove && host.class == disk.class && p.x[i] > 0 && p.x[k] > 0
			if both && host.space == graph.Host && disk.space == graph.Disk {
				to[i] = math.Ceil(float64(p.x[i]*n)-1e-9) / n
				from[k], to[k] = to[i], max(to[i], math.Floor(float64((p.x[i]+p.x[k])*n)+1e-9)/n)
			}
		}
	}
	return from, to
}

// memo has what configurations of a job came to.
type memo struct {
	mu    sync.Mutex
	looks map[string]*look // by keyOf
}

// look is a configuration that is planned once.
type look struct {
	once sync.Once
	*measured
}

// measured is what a configuration came to, which is planned if it was not.
func (m *memo) measured(key string, plan func() *measured) *measured {
	m.mu.Lock()
	l := m.looks[key]
	if l == nil {
		l = &look{}
		m.looks[key] = l
	}
	m.mu.Unlock()
	l.once.Do(func() { l.measured = plan() })
	return l.measured
}

// share takes what another searcher measured, whose configurations differ from this one's in
// nothing else than what a search decides, and in caps, of which lower bounds are independent.
func (s *searcher) share(other *searcher) {
	job := func(s *searcher) Spec {
		c := s.spec
		base{}.apply(&c, &Spec{})
		c.Recompute, c.Offload, c.Auto, c.AutoOn = recompute.Options{}, offload.Options{}, false, nil
		c.Capacity, c.Disk, c.variant, c.moreHost, c.Plans, c.measurer = [graph.NumSpaces]int64{}, false, nil, 0, nil, nil
		return c
	}
	if s.folded == other.folded && reflect.DeepEqual(s.machine, other.machine) && reflect.DeepEqual(job(s), job(other)) {
		s.memo = other.memo
	}
}

// ErrSpent says that a plan was not evaluated, since the Budget is used up.
var ErrSpent = errors.New("search: as many plans as were allowed have been evaluated")

// take counts a plan, and leaves so many of what is allowed.
func (s *searcher) take(leave int) bool {
	if !s.budget.take(leave) {
		return false
	}
	s.tried++
	return true
}

// measured is measure of a point as it is.
func (s *searcher) measured(p *point) *measured {
	c := s.whole(p)
	key := keyOf(&c)
	s.mu.Lock()
	if !s.counted[key] && !s.take(s.kept) {
		s.mu.Unlock()
		return &measured{err: ErrSpent}
	}
	s.counted[key] = true
	s.mu.Unlock()
	return s.memo.measured(key, func() *measured {
		if s.folded {
			return s.extrapolate(p)
		}
		return s.at(c, 0)
	})
}

// at plans a configuration for a model of so many layers, 0 for its own.
func (s *searcher) at(c Spec, layers int) *measured {
	all := c.Accum
	c.Accum = c.micros()
	f, err := predict(s.ctx, c, s.machine, layers, bounds)
	if err != nil {
		return &measured{err: err}
	}
	m := &measured{seconds: f.Step.Seconds, forward: f.Step.Pass[graph.Forward], ops: f.ops(-1)}
	m.planned = m.ops
	for sp := range m.need {
		use, outside := &f.Plan.Layout.Spaces[sp], f.Plan.Config.Outside[sp]
		m.need[sp] = use.LowerBound + outside
		m.rests += use.Resident + outside
	}
	if more := all - c.Accum; more > 0 {
		m.seconds += float64(float64(more) * f.period())
		m.forward *= float64(all) / float64(c.Accum)
		m.ops += more * f.ops(1)
	}
	m.atOnce = atOnce(f.Plan.Largest(graph.Device).Program) + f.Plan.Config.Outside[graph.Device]
	return m
}

// extrapolate plans a point at few layers and extends the lines.
func (s *searcher) extrapolate(p *point) *measured {
	var at [2]*measured
	for i, n := range foldedLayers {
		if at[i] = s.at(s.config(p, n), n); at[i].err != nil {
			return at[i]
		}
	}
	more := float64(s.layers-foldedLayers[1]) / float64(foldedLayers[1]-foldedLayers[0])
	line := func(a, b float64) float64 { return b + float64(more*(b-a)) }
	m := &measured{seconds: line(at[0].seconds, at[1].seconds), forward: line(at[0].forward, at[1].forward)}
	m.rests = int64(line(float64(at[0].rests), float64(at[1].rests)))
	m.ops = int(line(float64(at[0].ops), float64(at[1].ops)))
	m.atOnce = at[1].atOnce // more layers have the same operations
	for sp := range m.need {
		m.need[sp] = int64(line(float64(at[0].need[sp]), float64(at[1].need[sp])))
	}
	return m
}

func (s *searcher) perToken(p *point, seconds float64) float64 {
	return seconds / (float64(s.spec.dataRanks()) * float64(p.batch) * float64(p.accum) * float64(s.spec.Seq))
}

// margins are taken off the caps, in bytes, where plans came out over their lower
// bounds; where they came out under what was extended from few layers, they are negative.
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

// over says how many bytes a point is over the cap of each space; fits: it is over none.
func (s *searcher) over(m *measured, mg margins) (by [graph.NumSpaces]int64, fits bool) {
	fits = m.err == nil
	for sp := range graph.NumSpaces {
		if room := s.room(sp, mg); room > 0 {
			by[sp] = m.need[sp] - room
			fits = fits && by[sp] <= 0
		}
	}
	return by, fits
}

// hopeless says whether no move makes a base fit: what lives all the run moves from one
// space to another and becomes no less, and it is more than all of them may take; or one
// operation, which no move makes smaller, needs more of the device than there is.
func (s *searcher) hopeless(plain *measured) bool {
	if limit := s.spec.Capacity[graph.Device]; limit > 0 && plain.err == nil && plain.atOnce > limit {
		return true
	}
	return plain.err == nil && plain.rests > s.allRoom()
}

// allRoom is what all spaces together may take; math.MaxInt64: anything.
func (s *searcher) allRoom() (all int64) {
	for sp := range graph.NumSpaces {
		if sp == graph.Disk && !s.spec.Disk {
			continue
		}
		room := s.room(sp, margins{})
		if room == 0 {
			return math.MaxInt64
		}
		all += room
	}
	return all
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

// refused remembers the point that came nearest to the caps.
func (s *searcher) refused(p *point, m *measured) {
	worst := s.worst(m)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.smallest == nil || worst < s.excess || worst == s.excess && p.less(s.smallest) {
		s.smallest, s.excess = p, worst
	}
}

// worst is the largest of what a point takes of a cap, over that cap.
func (s *searcher) worst(m *measured) (worst float64) {
	for sp := range graph.NumSpaces {
		if room := s.room(sp, margins{}); room > 0 {
			worst = max(worst, float64(m.need[sp])/float64(room))
		}
	}
	return worst
}

// expect notes what a point comes to.
func (s *searcher) expect(p *point, m *measured) *point {
	p.perToken, p.device, p.expected = s.perToken(p, m.seconds), m.need[graph.Device], m
	return p
}

// moves returns what a base offers.
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
	return &point{base: b, set: set, x: make(mix, len(set.moves))}
}

// priced returns the set with what each class's place takes and gives at a base.
func (s *searcher) priced(b base, set *moveSet, from *measured) *moveSet {
	q := *set
	q.moves = slices.Clone(set.moves)
	var places []int
	for i := range q.moves {
		if q.moves[i].kind == placeMove {
			places = append(places, i)
		}
	}
	plan.Parallel(len(places), func(k int) {
		mv := &q.moves[places[k]]
		p := s.plain(b, set)
		p.x[places[k]] = 1
		if m := s.measure(p); m.err == nil {
			mv.bytes, mv.seconds = float64(from.need[graph.Device]-m.need[graph.Device]), m.seconds-from.seconds
			mv.takes = float64(m.need[mv.space] - from.need[mv.space])
		}
	})
	return &q
}

// nearest plans the point that came nearest to the caps whole, for what to say
// where nothing fits.
func (s *searcher) nearest() *Forecast {
	if s.smallest == nil || !s.take(0) {
		return nil
	}
	f, err := predict(s.ctx, s.whole(s.smallest), s.machine, 0, whole)
	if err != nil {
		return nil
	}
	return f
}
