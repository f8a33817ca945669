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

// A model of more layers than foldedFrom is planned only with the numbers of layers in
// foldedLayers: layers are alike, so each adds the same memory and time. The chosen configurations
// are then planned with all layers.
const foldedFrom = 16

var foldedLayers = [2]int{4, 7}

// foldedSlack is the factor by which an extrapolated plan may exceed a cap and still be planned
// with all layers: placement and the ends of the model are not exactly linear.
const foldedSlack = 1.01

// searcher plans configurations that differ in what a search decides.
type searcher struct {
	ctx     context.Context
	spec    Spec
	machine *cost.Machine
	layers  int  // of the model
	folded  bool // only few of them are planned
	effort  int  // plans that one search may evaluate, of budget
	limit   int  // of tried
	kept    int  // of limit, for plans made whole
	budget  *Budget
	exact   bool // recipes are filled to a step

	drop   bool          // whether activations may be dropped by choice
	spaces []graph.Space // tiers that may be used by choice

	memo *memo // may be shared with other searchers

	mu       sync.Mutex
	counted  map[string]bool // of memo, by key: in tried
	sets     map[string]*moveSet
	lessons  map[base]*lessons // do not depend on the caps
	tried    int
	smallest *point // with the least excess over the caps, if nothing fitted
	excess   float64
}

// newSearcher returns a searcher for a configuration. drop and spaces select the moves that it may
// make.
func newSearcher(ctx context.Context, s Spec, m *cost.Machine, drop bool, spaces []graph.Space) *searcher {
	// Names and shares have another meaning in a model of few layers.
	named := !drop && namesBuffers(s.Recompute) || len(spaces) == 0 && namesParts(s.Offload)
	if s.Plans == nil {
		s.Plans = &plan.Shared{}
	}
	return &searcher{ctx: ctx, spec: s, machine: m, layers: s.Layers, folded: s.Layers > foldedFrom && s.Pipeline < 2 && !s.Frozen && !named,
		effort: math.MaxInt / 2, budget: NewBudget(math.MaxInt),
		drop: drop, spaces: spaces, memo: &memo{looks: map[string]*look{}}, counted: map[string]bool{}, sets: map[string]*moveSet{}, lessons: map[base]*lessons{}}
}

// namesBuffers reports whether units or buffers are recomputed by name.
func namesBuffers(o recompute.Options) bool {
	return len(o.Drop) > 0 || slices.ContainsFunc(o.Rules, func(r recompute.Rule) bool { return r.Unit != "*" })
}

// namesParts reports whether buffers leave the device by name, or classes in part.
func namesParts(o offload.Options) bool {
	return slices.ContainsFunc(o.Parts, func(p offload.Part) bool { return p.Share > 0 || len(p.Buffers) > 0 })
}

// config returns a point's configuration for a model of n layers.
func (s *searcher) config(p *point, n int) Spec {
	c := s.spec
	p.apply(&c, &s.spec)
	c.Recompute, c.Auto, c.Offload = p.again, p.auto, p.away
	if p.x != nil {
		c.Recompute, c.Offload = p.set.options(p.x, n)
	}
	return c
}

// whole returns a point's configuration for the complete model.
func (s *searcher) whole(p *point) Spec { return s.config(p, s.layers) }

// keyOf returns a key that identifies a configuration within one search.
func keyOf(c *Spec) string {
	return fmt.Sprint(c.Batch, c.Accum, c.LayerOrder, c.Stage, c.Prefetch, c.Precision, c.Auto, "|", c.Recompute, "|", c.Offload)
}

// measure plans a point and returns the lower bounds of its peaks. If the search plans only a few
// layers, a share of a class is not the same part of them as of all layers. A partly made move
// applies to the first layers. measure therefore divides the layers into segments within which each
// move is made completely or not at all. It measures each segment as a model whose layers are all
// alike, and weights the results by the segments' lengths.
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

// segments returns where each of a point's moves begins and ends, as a fraction of the layers. If a
// class is split over host and disk, no layer is split: its buffers are on the host if the boundary
// falls inside it.
func (s *searcher) segments(p *point) (from, to []float64) {
	from, to = make([]float64, len(p.x)), slices.Clone([]float64(p.x))
	n := float64(s.layers)
	var onHost [graph.NumClasses]int // 1 + the move of a class to the host, which is before that to disk
	for i := range p.set.moves {
		mv := &p.set.moves[i]
		switch {
		case mv.kind != placeMove || p.x[i] == 0:
		case mv.space == graph.Host:
			onHost[mv.class] = i + 1
		case onHost[mv.class] > 0:
			k := onHost[mv.class] - 1
			to[k] = math.Ceil(float64(p.x[k]*n)-1e-9) / n
			from[i], to[i] = to[k], max(to[k], math.Floor(float64((p.x[k]+p.x[i])*n)+1e-9)/n)
		}
	}
	return from, to
}

// memo caches the results of a job's configurations.
type memo struct {
	mu    sync.Mutex
	looks map[string]*look // by keyOf
}

// look is a configuration that is planned at most once.
type look struct {
	once sync.Once
	*measured
}

// measured returns the cached result of a configuration, and plans it if there is none.
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

// share uses the cache of another searcher if their configurations differ only in the choices of a
// search and in caps. Lower bounds do not depend on caps.
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

// ErrSpent is the error of a plan that was not evaluated because the Budget is used up.
var ErrSpent = errors.New("search: as many plans as were allowed have been evaluated")

// take counts a plan. It returns false if leave or fewer plans of the budget are left.
func (s *searcher) take(leave int) bool {
	if !s.budget.take(leave) {
		return false
	}
	s.tried++
	return true
}

// measured is measure without interpolation between moves.
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

// at plans a configuration for a model with the given number of layers; 0: its own number.
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

// margins are subtracted from the caps, in bytes, because complete plans exceeded their lower
// bounds. They are negative where plans needed less than the extrapolation from few layers.
type margins [graph.NumSpaces]int64

// room returns the bytes that a space may use; 0: no limit.
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

// over returns the bytes by which a point exceeds the cap of each space. fits reports whether it
// exceeds none.
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

// hopeless reports whether no move makes a base fit. Moves do not reduce the bytes that live all
// the run, and these exceed all spaces together; or one operation alone needs more device memory
// than there is.
func (s *searcher) hopeless(plain *measured) bool {
	if limit := s.spec.Capacity[graph.Device]; limit > 0 && plain.err == nil && plain.atOnce > limit {
		return true
	}
	return plain.err == nil && plain.rests > s.allRoom()
}

// allRoom returns the bytes that all spaces together may use; math.MaxInt64: no limit.
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

// refused records the point that came nearest to the caps.
func (s *searcher) refused(p *point, m *measured) {
	worst := s.worst(m)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.smallest == nil || worst < s.excess || worst == s.excess && p.less(s.smallest) {
		s.smallest, s.excess = p, worst
	}
}

// worst returns the largest ratio of a point's memory to a cap.
func (s *searcher) worst(m *measured) (worst float64) {
	for sp := range graph.NumSpaces {
		if room := s.room(sp, margins{}); room > 0 {
			worst = max(worst, float64(m.need[sp])/float64(room))
		}
	}
	return worst
}

// expect sets the predicted time and memory of a point.
func (s *searcher) expect(p *point, m *measured) *point {
	p.perToken, p.device, p.expected = s.perToken(p, m.seconds), m.need[graph.Device], m
	return p
}

// moves returns the moves that a base allows.
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

// plain returns the point of a base without any move.
func (s *searcher) plain(b base, set *moveSet) *point {
	return &point{base: b, set: set, x: make(mix, len(set.moves))}
}

// priced returns the set with the bytes and seconds of placing each class, measured at a base.
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

// nearest plans the point that came nearest to the caps with all layers, for the error if nothing
// fits.
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
