package search

import (
	"cmp"
	"context"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
)

// Costs of a way out besides time.
const (
	sameJob      = iota // the same steps, the same numbers, the same ranks
	moreDisk            // a folder for the disk tier
	otherNumbers        // another precision
	moreHardware        // more ranks, or larger ones
	smallerJob          // shorter rows
)

// Way is a change of a configuration that makes it fit.
type Way struct {
	Forecast *Forecast
	Changes  []Change // changes of the configuration that was asked for
	// Slowdown is the predicted time per token, summed over ranks, divided by that of the
	// configuration as asked, if it had fitted.
	Slowdown float64
	Cost     string // "", "a disk", "other numbers", "more host memory", "more ranks", "a larger GPU", "a smaller job"

	order int
}

// NoWay describes a search that found no change that makes a configuration fit.
type NoWay struct {
	Nearest *Forecast // the plan nearest to the caps, of the same job on the same ranks
	// Batches is set if Nearest has another Batch than the one asked for.
	Batches bool
	Tried   int      // configurations planned
	Beyond  []string // names of the other changes tried
	Spent   bool     // the effort was used up before all was tried
}

// mostWays is the largest number of ways that keep the job. A single change is left out if it takes
// more than slowWay times as long as another way.
const (
	mostWays = 3
	slowWay  = 1.5
)

// wayFinder looks for changes of a configuration.
type wayFinder struct {
	ctx      context.Context
	spec     Spec // as asked
	typed    Spec // the same, with Auto as the user set it
	hw       Hardware
	perToken float64 // seconds per token, summed over ranks, as asked
	rests    int64   // bytes that live all the run, as asked; see measured
	ways     []Way
	late     lateSingles
	main     *searcher // same ranks, same device
	last     *searcher // the latest searcher other than main
	budget   *Budget   // of all searches; main has a half of it
	tried    int
	assumed  bool // the cap on host memory is the hardware's share
}

// WaysOut looks for changes that make a configuration fit. It tries single ones (stage, shard size,
// prefetch, recomputation, placement, micro-batch) and the fastest of their combinations. If it
// then has no way, or one way of more than two changes, it tries a disk, other numbers, more or
// larger devices, and shorter rows.
//
// Each way was planned and fits. Ways that keep the job come first, then the fastest. If there are
// none, the second result has the nearest plan. Once ctx is canceled, no more ways are found. If hw
// has no Machine, asked's machine predicts all times, whatever the number of ranks.
func WaysOut(ctx context.Context, asked *Forecast, hw Hardware) ([]Way, *NoWay) {
	if hw.Machine == nil {
		hw.Machine = func(int) *cost.Machine { return asked.on }
	}
	spec := asked.Spec
	assumed := hw.assumed(&spec)
	typed := spec
	typed.Auto = asked.Chosen != nil
	w := &wayFinder{ctx: ctx, spec: spec, typed: typed, hw: hw, perToken: float64(spec.Ranks) / asked.TokensPerSecond(), assumed: assumed}
	for sp := range graph.NumSpaces {
		w.rests += asked.Plan.Layout.Spaces[sp].Resident + asked.Plan.Config.Outside[sp]
	}
	w.main = newSearcher(w.ctx, spec, hw.Machine(spec.Ranks), true, spec.tiers())
	if err := w.main.allow(&hw); err != nil {
		return nil, &NoWay{}
	}
	w.budget = w.main.budget
	if s := spec; hw.Budget != nil && hw.prefer(&s, Given{}) { // its Fit follows
		w.budget.kept = w.budget.left() / preferredEffort
		defer func() { w.budget.kept = 0 }()
	}
	w.main.effort = min(w.main.effort, w.budget.left()) / 2
	w.spec.Plans, w.spec.measurer = w.main.spec.Plans, w.main
	w.singles()
	w.combined()
	if !w.addLate() && (len(w.ways) == 0 || len(w.ways) == 1 && len(w.ways[0].Changes) > 2) {
		w.beyond()
	}
	slices.SortStableFunc(w.ways, func(a, b Way) int {
		return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(a.Slowdown, b.Slowdown))
	})
	w.tried += w.main.tried
	if len(w.ways) > 0 {
		return w.ways, nil
	}
	no := &NoWay{Nearest: w.main.nearest(), Tried: w.tried}
	if no.Nearest != nil {
		no.Batches = no.Nearest.Spec.Batch != spec.Batch
	}
	no.Beyond, no.Spent = w.beyondNames(), w.budget.refused
	return nil, no
}

// searcher returns a searcher for another configuration.
func (w *wayFinder) searcher(c Spec, m *cost.Machine, drop bool, spaces []graph.Space) *searcher {
	s := newSearcher(w.ctx, c, m, drop, spaces)
	s.budget, s.effort = w.budget, w.budget.left()/besideEffort
	if w.last != nil {
		s.share(w.last)
	}
	s.share(w.main)
	w.last = s
	return s
}

// add plans a changed configuration completely and adds it to the ways if it fits.
func (w *wayFinder) add(c Spec, m *cost.Machine, order int, costs string, device string) bool {
	list := changes(&w.typed, &c, w.hw.NodeSize, device)
	if len(list) == 0 || w.has(list) || !w.budget.take(0) {
		return false
	}
	w.tried++
	f, err := predict(w.ctx, c, m, 0, early)
	if err != nil || !f.Fits() || w.idleDisk(f) {
		return false
	}
	w.keep(f, list, order, costs)
	return true
}

// has reports whether a way with these changes is known.
func (w *wayFinder) has(list []Change) bool {
	return slices.ContainsFunc(w.ways, func(o Way) bool { return slices.Equal(o.Changes, list) })
}

// idleDisk reports whether a configuration was given a disk but does not use it: another way then
// has one change fewer.
func (w *wayFinder) idleDisk(f *Forecast) bool {
	return f.Spec.Disk != w.spec.Disk && f.Plan.Layout.Spaces[graph.Disk].Peak == 0
}

func (w *wayFinder) keep(f *Forecast, list []Change, order int, costs string) {
	without(w.assumed, f)
	w.ways = append(w.ways, Way{Changes: list, Forecast: f, order: order, Cost: costs,
		Slowdown: float64(f.Spec.Ranks) / f.TokensPerSecond() / w.perToken})
}

// asPoint returns the configuration as a point of the search.
func (s *Spec) asPoint() point {
	return point{base: s.asBase(), again: s.Recompute, auto: s.Auto, away: s.Offload}
}

// singles tries one change at a time. Of each kind, only the two fastest that fit by their lower
// bounds are candidates for a complete plan.
func (w *wayFinder) singles() {
	s := w.searcher(w.spec, w.main.machine, false, nil)
	defer func() {
		w.tried += s.tried
		if n := s.smallest; n != nil && (w.main.smallest == nil || s.excess < w.main.excess) {
			w.main.smallest, w.main.excess = n, s.excess
		}
	}()
	if s.allLayers() && w.spec.Stage == w.spec.highest() && w.rests > s.allRoom() {
		w.moreShards(s.machine) // no other change reduces the resident bytes
		return
	}
	kinds := w.changesOfOne(w.spec.asPoint())
	// The lower bounds of all of them, at the same time.
	var all []*point
	for _, k := range kinds {
		all = append(all, k...)
	}
	plan.Parallel(len(all), func(i int) { s.bound(all[i]) })
	if w.budget.refused { // which point was refused depends on timing
		return
	}
	var best []*point
	for _, k := range kinds {
		k = slices.DeleteFunc(slices.Clone(k), func(p *point) bool { return p.perToken == 0 })
		slices.SortStableFunc(k, comparePoints)
		best = append(best, k[:min(len(k), 2)]...)
	}
	slices.SortStableFunc(best, comparePoints)
	done := map[Field]bool{}
	for i, p := range best {
		if p.isLarge() {
			w.late = lateSingles{s, best[i:], done}
			break
		}
		if w.isSlow(s, p) {
			break
		}
		w.single(s, p, done)
	}
	w.moreShards(s.machine)
}

// isSlow reports whether a single change takes more than slowWay times as long as a way.
func (w *wayFinder) isSlow(s *searcher, p *point) bool {
	slow := p.perToken * float64(s.spec.Ranks) / w.perToken
	return slices.ContainsFunc(w.ways, func(o Way) bool { return slow > slowWay*o.Slowdown })
}

// single plans a single change completely and reports whether it is a new way. done has the fields
// of the single changes that are ways.
func (w *wayFinder) single(s *searcher, p *point, done map[Field]bool) bool {
	c := s.whole(p)
	list := changes(&w.typed, &c, 0, "")
	if len(list) == 0 || done[list[0].Field] || len(done) >= mostWays-1 || !w.add(c, s.machine, sameJob, "", "") {
		return false
	}
	done[list[0].Field] = true
	return true
}

// bound sets a point's time per token and memory by its lower bounds; the time is 0 if it does not
// fit.
func (s *searcher) bound(at *point) {
	p := *at
	if p.auto { // everything dropped: the least that it can need
		p.auto, p.again = false, policyOf(recompute.Full)
	}
	m := s.measure(&p)
	at.perToken = 0
	if m.err != nil {
		return
	}
	if _, ok := s.over(m, margins{}); ok {
		s.expect(at, m)
	} else {
		s.refused(&p, m)
	}
}

// moreShards tries larger shard sizes and adds the smallest that fits.
func (w *wayFinder) moreShards(m *cost.Machine) {
	if w.spec.ShardSize == 0 || len(w.ways) >= mostWays {
		return
	}
	for n := w.spec.ShardSize + 1; n <= w.spec.dataRanks(); n++ {
		if w.spec.dataRanks()%n != 0 || n%w.spec.ShardSize != 0 {
			continue
		}
		c := w.spec
		c.ShardSize = n
		if w.fitsQuickly(c, m) && w.add(c, m, sameJob, "", "") {
			return
		}
	}
}

// wholePlacements lists sets of classes that leave the device, mostly in growing order.
var wholePlacements = [][]graph.Class{nil, {graph.Optimizer}, {graph.Activations}, {graph.Optimizer, graph.Activations}, {graph.Optimizer, graph.Parameters, graph.Activations},
	{graph.Optimizer, graph.Parameters, graph.Gradients, graph.Activations}}

// changesOfOne returns the points that differ from one point in one choice, by kind of change.
func (w *wayFinder) changesOfOne(from point) (kinds [][]*point) {
	kind := func(list ...*point) {
		if len(list) > 0 {
			kinds = append(kinds, list)
		}
	}
	change := func(f func(*point)) *point {
		p := from
		f(&p)
		return &p
	}
	var list []*point
	for z := w.spec.Stage + 1; z <= w.spec.highest() && w.spec.dataRanks() > 1; z++ {
		list = append(list, change(func(p *point) { p.zero = z }))
	}
	kind(list...)
	if w.spec.Prefetch > 0 {
		kind(change(func(p *point) { p.prefetch = 0 }))
	}
	if !isFull(w.spec.Recompute) && !w.typed.Auto {
		kind(change(func(p *point) { p.again, p.auto = recompute.Options{}, true }))
	}
	if from.layers {
		kind(change(func(p *point) { p.layers = false }))
	}
	list = nil
	other := func(away offload.Options) {
		if away.String() != w.spec.Offload.String() {
			list = append(list, change(func(p *point) { p.away = away }))
		}
	}
	for _, classes := range wholePlacements {
		other(resting(classes, graph.Host))
		if len(classes) > 0 && w.spec.Disk {
			other(resting(classes, graph.Disk))
		}
	}
	kind(list...)
	list = nil
	for _, b := range w.spec.splits() {
		list = append(list, change(func(p *point) { p.batch, p.accum = b[0], b[1] }))
	}
	kind(list...)
	return kinds
}

// fitsQuickly reports whether a configuration fits by its lower bounds.
func (w *wayFinder) fitsQuickly(c Spec, m *cost.Machine) bool {
	s := w.searcher(c, m, false, nil)
	p := c.asPoint()
	got := s.measure(&p)
	w.tried += s.tried
	_, ok := s.over(got, margins{})
	return got.err == nil && ok
}

// moveTo changes the number of ranks of a job. It returns false if they do not divide its rows,
// there are too few micro-batches, the shares are given, or the number of micro-batches differs
// between steps.
func (s *Spec) moveTo(ranks int) bool {
	if s.Shapes != nil {
		return ranks == s.Ranks
	}
	data := ranks / max(s.Tensor, 1) / max(s.Pipeline, 1)
	switch rows := s.Batch * s.Accum * s.dataRanks(); {
	case s.Rows > 0:
		leaves := (s.Rows + s.Batch - 1) / s.Batch
		if leaves < data || !slices.Equal(s.Shares, graph.EvenShares(leaves, s.dataRanks())) {
			return false
		}
		s.Accum, s.Shares = (leaves+data-1)/data, graph.EvenShares(leaves, data)
	case s.SameRows && rows%data != 0:
		return false
	case s.SameRows:
		for rows /= data; rows%s.Batch != 0; {
			s.Batch--
		}
		s.Accum = rows / s.Batch
	}
	s.Ranks = ranks
	return true
}

// splits returns smaller micro-batches with as many rows per step. There are none if ranks share a
// step unevenly, because sums then depend on the rows of a micro-batch.
func (s *Spec) splits() (list [][2]int) {
	for b := s.Batch - 1; b >= 1 && s.Rows == 0 && s.Shapes == nil; b-- {
		if s.Batch%b == 0 {
			list = append(list, [2]int{b, s.Accum * (s.Batch / b)})
		}
	}
	return list
}

// domain returns all choices that keep the job: the rows of a rank stay the same.
func (w *wayFinder) domain(split bool) fitDomain {
	c := &w.spec
	d := fitDomain{prefetches: []int{c.Prefetch}, batches: [][2]int{{c.Batch, c.Accum}}, precisions: []precision.Precision{c.Precision},
		orders: c.freeOrders(false), sharded: c.dataRanks() > 1, moves: true}
	for z := c.highest(); z >= c.Stage; z-- {
		if z == c.Stage || c.dataRanks() > 1 {
			d.zeros = append(d.zeros, z)
		}
	}
	if c.Prefetch > 0 {
		d.prefetches = append(d.prefetches, 0)
	}
	if split {
		d.batches = append(d.batches, c.splits()...)
	}
	return d
}

// worthMore is the largest ratio of a combination's time to a single change's at which the
// combination is worth keeping.
const worthMore = 0.98

// combined looks for the fastest combination of changes. If shards are over fewer ranks than all,
// it first tries shards over all.
func (w *wayFinder) combined() {
	try := func(s *searcher, split bool) bool {
		f, _, _, _ := s.fastest(w.domain(split).bases())
		if f == nil {
			return false
		}
		list := changes(&w.typed, &f.Spec, 0, "")
		slow := float64(f.Spec.Ranks) / f.TokensPerSecond() / w.perToken
		if !w.has(list) && !slices.ContainsFunc(w.ways, func(o Way) bool { return slow > worthMore*o.Slowdown }) {
			w.keep(f, list, sameJob, "")
		}
		return true
	}
	list := []*searcher{w.main}
	if n := w.spec.ShardSize; n > 0 && n < w.spec.dataRanks() {
		c := w.spec
		c.ShardSize = c.dataRanks()
		list = []*searcher{w.searcher(c, w.main.machine, true, w.main.spaces), w.main}
	}
	for _, s := range list {
		found := try(s, false) || w.spec.Batch > 1 && try(s, true)
		if s != w.main {
			w.tried += s.tried
		}
		if found {
			// If that way needs host memory, look for one that does not.
			if last := &w.ways[len(w.ways)-1]; len(w.ways) < mostWays && last.Forecast.Spec.Offload.String() != w.spec.Offload.String() {
				c := s.spec
				c.Offload = offload.Options{}
				t := w.searcher(c, s.machine, true, nil)
				try(t, false)
				w.tried += t.tried
			}
			return
		}
	}
}
