package search

import (
	"errors"
	"math"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// confirm plans points with all layers, the fastest first, and returns the fastest that fits. If a
// plan exceeds a cap, its base is searched again with that much less room. If an estimate from few
// layers left memory unused, its recipe is filled again.
func (h *hunt) confirm() (best *Forecast, at *point, err error) {
	done := map[string]bool{}
	least := math.Inf(1) // of best
	h.kept, h.budget.refused = min(h.kept, mostPlans), false
	for plans := 0; plans < mostPlans || best == nil && plans < 3*mostPlans+roomyPlans; {
		p := h.next(done, least)
		if best == nil && (p == nil || plans >= 3*mostPlans || h.budget.left() <= roomyPlans) {
			p = h.roomiest(done)
		}
		if p == nil {
			break
		}
		c := h.whole(p)
		if done[keyOf(&c)] = true; !h.take(0) {
			break
		}
		plans++
		f, fail := predict(h.ctx, c, h.machine, 0, early)
		if fail == nil {
			fail = f.Plan.Fit()
		}
		var refused *plan.DoesNotFit
		if fail == nil {
			time := 1 / f.TokensPerSecond()
			if time < least {
				best, at, least = f, p, time
			}
			h.tries[p.base].slower = max(h.tries[p.base].slower, time/p.perToken)
			if p.isLarge() {
				break
			}
			if mg, ok := h.unused(p, f); ok {
				h.refill(p, mg)
			}
			continue
		}
		err = fail
		if errors.As(fail, &refused) {
			h.shrink(p, refused)
		}
	}
	if best != nil {
		err = nil
	}
	return best, at, err
}

// largePlan is the number of operations above which only one plan with all layers is made: it takes
// seconds.
const largePlan = 20_000

func (p *point) isLarge() bool { return p.expected.ops > largePlan }

// next returns the fastest point that is not done, takes less time than least and is expected to
// fit.
func (h *hunt) next(done map[string]bool, least float64) (first *point) {
	slices.SortStableFunc(h.found, comparePoints)
	least *= 1 - 1e-12
	for _, p := range h.found {
		t := h.tries[p.base]
		time := p.perToken * t.slower
		if time >= least {
			continue
		}
		var mg margins
		if t.filler != nil {
			mg = t.mg
		}
		c := h.whole(p)
		if _, fits := h.over(p.expected, mg); fits && !done[keyOf(&c)] {
			first, least = p, time
		}
	}
	return first
}

// roomiest returns the point that leaves the most room, of those not done, for when the fastest did
// not fit.
func (h *hunt) roomiest(done map[string]bool) (p *point) {
	for _, q := range h.found {
		c := h.whole(q)
		if !done[keyOf(&c)] && (p == nil || h.worst(q.expected) < h.worst(p.expected)) {
			p = q
		}
	}
	return p
}

// refill fills a point's recipe within other margins.
func (h *hunt) refill(p *point, mg margins) {
	t := h.tries[p.base]
	if t.filler == nil || len(p.how) == 0 {
		return
	}
	f := *t.filler
	f.mg = mg
	if q := f.fill(p.how, h.exact); q != nil {
		h.found = append(h.found, q)
	}
}

// shrink searches a base again if its point needs more memory than expected.
func (h *hunt) shrink(p *point, refused *plan.DoesNotFit) {
	t := h.tries[p.base]
	if t.filler == nil {
		return
	}
	sp := refused.Space
	mg := h.room(sp, margins{}) - refused.Capacity + max(refused.Peak+refused.Outside-p.expected.need[sp], 1)
	first := t.mg == margins{}
	t.mg[sp] = max(t.mg[sp], mg)
	h.refill(p, t.mg)
	if first && !h.exact {
		t.roomy = false
		t.best, t.seen = nil, map[string]bool{}
		h.limit = h.tried + h.kept + againEffort
		h.fill(t, t.candidates(t.anchors()), firstTried)
	}
}

// unused returns the difference between a plan's memory and its estimate from few layers. It is ok
// if the plan leaves enough device memory unused to move less.
func (s *searcher) unused(p *point, f *Forecast) (mg margins, ok bool) {
	for sp := range graph.NumSpaces {
		limit := s.spec.Capacity[sp]
		if limit == 0 || !s.folded {
			continue
		}
		need := f.Plan.Layout.Spaces[sp].Peak + f.Plan.Config.Outside[sp]
		mg[sp] = s.room(sp, margins{}) - limit + need - p.expected.need[sp]
		ok = ok || sp == graph.Device && float64(limit-need) > closeTo*float64(limit)
	}
	return mg, ok
}
