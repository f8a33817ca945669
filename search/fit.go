package search

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
)

// Given lists the choices that Fit must not change.
type Given struct {
	Stage, Prefetch, Batch, Accum, LayerOrder, Precision, Recompute, Offload bool
	// SameBatch keeps Batch, where the bits depend on it.
	SameBatch bool
}

// Fitted is the outcome of a search for the fastest configuration that fits.
type Fitted struct {
	*Forecast
	Tried int // number of configurations planned
	// Batches and Precisions are set if Batch and Accum, and Precision, were chosen.
	Batches, Precisions bool
	// Preferred is the rate of products in the precision that the hardware prefers, divided by that
	// of fp32, if the precision was chosen for it; 0: it was not.
	Preferred float64
	RunnersUp []RunnerUp
	Others    []OtherStage
}

// RunnerUp is another configuration that fits.
type RunnerUp struct {
	Spec Spec
	// Slower is its predicted time per token divided by that of the best, whose plan is complete.
	// It is at least 1, however the program that is folded to a layer rounds.
	Slower float64
	Device int64 // bytes of device memory
}

// OtherStage is a stage at which nothing was found to fit.
type OtherStage struct {
	Stage  int
	Slower float64 // the time of a token with memory for everything, over the best one's
}

// NothingFits is the error of a search that found no configuration within the caps.
type NothingFits struct {
	Tried    int
	Smallest *Forecast // the tried plan nearest to the caps; nil: nothing could be planned
	// Batches and Precisions are as in Fitted.
	Batches, Precisions bool
	What                string // the fields that the search could change
	// HostShare is the assumed cap on host memory; 0: none was assumed.
	HostShare int64
	// Spent is set if the Budget ended the search.
	Spent bool
}

func (e *NothingFits) Error() string {
	if e.Smallest == nil {
		return fmt.Sprintf("no configuration of %d could be planned", e.Tried)
	}
	return fmt.Sprintf("nothing of %d configurations fits (%s): %v", e.Tried, e.What, e.Unwrap())
}

// Unwrap returns the *plan.DoesNotFit errors of the nearest.
func (e *NothingFits) Unwrap() error {
	if e.Smallest == nil {
		return nil
	}
	return e.Smallest.Plan.Fit()
}

// RowsError is the error for rows of a step over all ranks that no choice divides.
type RowsError struct {
	Rows, Ranks  int
	Batch, Accum int // as given: they do not give those rows; 0: the ranks do not divide them
}

func (e *RowsError) Error() string {
	if e.Batch > 0 {
		return fmt.Sprintf("%d rows over %d ranks are %d a rank, which a batch of %d and an accumulation of %d do not give", e.Rows, e.Ranks, e.Rows/e.Ranks, e.Batch, e.Accum)
	}
	return fmt.Sprintf("%d rows are not a multiple of %d ranks", e.Rows, e.Ranks)
}

// fitDomain lists the values from which a search may choose, apart from the moves.
type fitDomain struct {
	rows       int      // of a rank and step, to make of batch and accum; 0: both are given
	batches    [][2]int // batch, accum
	zeros      []int
	prefetches []int
	precisions []precision.Precision
	preferred  bool   // the precision is the hardware's choice
	orders     []bool // in layer order or not
	sharded    bool   // over several ranks
	moves      bool   // something may rest off the device
}

// mostLayered is the largest number of micro-batches that a search puts in layer order: the program
// has all of them, and more save little.
const mostLayered = 32

// inOrders lists the orders of accum micro-batches that may be useful at a stage. If micro-batches
// do not each gather, reduce or fetch anything, layer order has no advantage.
func (d *fitDomain) inOrders(accum, zero int) []bool {
	if len(d.orders) < 2 {
		return d.orders
	}
	if accum == 1 || accum > mostLayered || !d.moves && !(d.sharded && zero >= 2) {
		return []bool{false}
	}
	return d.orders
}

// freeOrders returns the orders of micro-batches that may be chosen for a configuration.
func (s *Spec) freeOrders(given bool) []bool {
	if given || s.Shapes != nil || s.Pipeline > 1 {
		return []bool{s.LayerOrder}
	}
	return []bool{false, true}
}

// saysPrecision: what was chosen is a precision too.
func (d fitDomain) saysPrecision() bool { return d.preferred || len(d.precisions) > 1 }

// bases returns all combinations of a domain.
func (d fitDomain) bases() (list []base) {
	for _, p := range d.precisions {
		for _, b := range d.batches {
			for _, z := range d.zeros {
				for _, ahead := range d.prefetches {
					if ahead == 2 && z < 3 && len(d.prefetches) > 1 {
						continue // further ahead is for gathers
					}
					for _, layers := range d.inOrders(b[1], z) {
						list = append(list, base{b[0], b[1], z, ahead, p, layers && b[1] > 1})
					}
				}
			}
		}
	}
	return list
}

// Fit chooses the fields that are not given so that s fits and is predicted to be fastest on hw. It
// is deterministic. If nothing fits, the error is a *NothingFits.
//
// allowed adds precisions to choose from. With rows, those of a step over all ranks, it also
// chooses batch and accum, unless they are given; the error is a *RowsError if they do not divide.
// Disk is used only if there is a tier.
//
// Activations are recomputed or parked by kind and layer, and units' states leave the device in
// shares. Those that free the most bytes per second lost go first.
func Fit(ctx context.Context, s Spec, given Given, allowed []precision.Precision, rows int, hw Hardware) (*Fitted, error) {
	preferred := hw.prefer(&s, given)
	assumed := hw.assumed(&s)
	d, err := newFitDomain(&s, given, allowed, rows)
	if err != nil {
		return nil, err
	}
	d.preferred = preferred
	drop := !given.Recompute || s.Auto
	if s.Auto {
		s.Recompute, s.Auto = recompute.Options{}, false
	}
	var spaces []graph.Space
	if !given.Offload {
		spaces = s.tiers()
	}
	w := newSearcher(ctx, s, hw.Machine(s.Ranks), drop, spaces)
	if err := w.allow(&hw); err != nil {
		return nil, err
	}
	layers := 0
	if w.folded {
		layers = foldedLayers[0]
	}
	w.take(0)
	if m := w.at(w.spec, layers); m.err != nil { // what is wrong with all of them
		return nil, m.err
	}
	best, at, all, err := w.fastest(d.bases())
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if best == nil {
		var refused *plan.DoesNotFit
		if err != nil && !errors.As(err, &refused) {
			return nil, err
		}
		e := &NothingFits{Tried: w.tried, Smallest: w.nearest(), What: d.what(drop, spaces),
			Batches: rows > 0, Precisions: d.saysPrecision(),
			Spent: w.budget.refused || w.tried == 0} // of a Budget with nothing left, no plan is even asked for
		if assumed {
			e.HostShare = s.Capacity[graph.Host]
		}
		if e.Smallest != nil && e.Smallest.Fits() { // its lower bound was over the folded line
			return w.fitted(d, without(assumed, e.Smallest), w.smallest, all), nil
		}
		return nil, e
	}
	best, at = w.plainest(best, at, all)
	return w.fitted(d, without(assumed, best), at, all), nil
}

// worthWords is the largest ratio to the fastest time at which shorter flags are preferred.
const worthWords = 1.01

// mostPlainer is the largest number of complete plans made to find shorter flags.
const mostPlainer = 2

// roomy is the part of the device's memory within which a plan should stay: within worthWords of
// the fastest, such a plan is preferred.
const roomy = 0.95

// short is a point with the length of its flags.
type short struct {
	*point
	spec  Spec
	words int
	roomy bool // it takes at most that part of the device
}

func (s *searcher) short(p *point, need int64) short {
	c := s.whole(p)
	limit := float64(s.spec.Capacity[graph.Device])
	return short{p, c, c.words(), limit == 0 || float64(need) <= roomy*limit}
}

// shorter orders points: first those that leave room on the device, then by the length of their
// flags.
func shorter(a, b short) int {
	return cmp.Or(compareOrders(a.roomy, b.roomy), cmp.Compare(a.words, b.words))
}

// plainest returns a plan with best's precision and rows that takes at most worthWords of its time:
// one that leaves room on the device and has the shortest flags. Its order is that of best or micro
// order, because layer order changes the bits of a tied head's sums.
func (s *searcher) plainest(best *Forecast, at *point, all []*point) (*Forecast, *point) {
	bound := worthWords / best.TokensPerSecond()
	now := s.short(at, best.Plan.Layout.Spaces[graph.Device].Peak+best.Plan.Config.Outside[graph.Device])
	if q := s.withRoom(at); !now.roomy && q != nil {
		all = append(slices.Clone(all), q)
	}
	var list []short
	for _, p := range all {
		same := p.precision == at.precision && p.batch == at.batch && p.accum == at.accum && (p.base.layers == at.base.layers || at.base.layers)
		if c := s.short(p, p.device); same && shorter(c, now) < 0 && p.perToken <= bound {
			list = append(list, c)
		}
	}
	slices.SortStableFunc(list, shorter)
	for _, c := range list[:min(len(list), mostPlainer)] {
		if at.isLarge() || !s.take(0) {
			break
		}
		f, err := predict(s.ctx, c.spec, s.machine, 0, early)
		if err == nil && f.Plan.Fit() == nil && 1/f.TokensPerSecond() <= bound {
			return f, c.point
		}
	}
	return best, at
}

// withRoom fills a point's recipe again, to leave room on the device; nil: it does not fit.
func (s *searcher) withRoom(at *point) *point {
	if len(at.how) == 0 {
		return nil
	}
	f := s.newFiller(at.base, at.set, s.measure(s.plain(at.base, at.set)))
	f.mg[graph.Device] = s.room(graph.Device, margins{}) - int64(roomy*float64(s.spec.Capacity[graph.Device]))
	return f.fill(at.how, false)
}

// layerOrderWords is how much longer a command with layer order is, in characters.
const layerOrderWords = 19

// words returns the length, in characters, of the options in which plans differ.
func (s *Spec) words() int {
	n := len(s.Recompute.String()) + len(s.Offload.String())
	if s.LayerOrder {
		n += layerOrderWords
	}
	return n
}

// tiers returns the memory spaces to which buffers may move from the device.
func (s *Spec) tiers() []graph.Space {
	if s.Disk {
		return []graph.Space{graph.Host, graph.Disk}
	}
	return []graph.Space{graph.Host}
}

// mostRunnersUp is the largest number of runners-up that are reported.
const mostRunnersUp = 3

// overCaps reports whether an estimate exceeds a cap. A search of few layers also accepts a small
// excess, and must then make the complete plan.
func (s *searcher) overCaps(m *measured) bool {
	for sp, limit := range s.spec.Capacity {
		if limit > 0 && m.need[sp] > limit {
			return true
		}
	}
	return false
}

// fitted returns the result of a search, with the runners-up.
func (s *searcher) fitted(d fitDomain, best *Forecast, at *point, all []*point) *Fitted {
	out := &Fitted{Forecast: best, Tried: s.tried, Batches: d.rows > 0, Precisions: d.saysPrecision()}
	if d.preferred {
		m := s.machine.Matrix
		out.Preferred = m[best.Spec.Precision.DType()] / m[graph.F32]
	}
	seen, kinds := map[string]bool{keyOf(&best.Spec): true}, map[kind]bool{at.kind(): true}
	speed := 1 / best.TokensPerSecond()
	for _, p := range all {
		if s.overCaps(p.expected) {
			continue
		}
		c := s.whole(p)
		key := keyOf(&c)
		k := p.kind()
		if kinds[k] || seen[key] {
			continue
		}
		kinds[k] = true
		if len(out.RunnersUp) == mostRunnersUp {
			break
		}
		seen[key] = true
		out.RunnersUp = append(out.RunnersUp, RunnerUp{c, max(1, p.perToken/speed), p.device})
	}
	tried := map[int]bool{}
	for _, p := range all {
		tried[p.zero] = true
	}
	for _, z := range d.zeros {
		b := at.base
		b.zero = z
		if tried[z] || b.zero == best.Spec.Stage {
			continue
		}
		set, err := s.moves(b)
		if err != nil {
			continue
		}
		if m := s.measure(s.plain(b, set)); m.err == nil {
			out.Others = append(out.Others, OtherStage{z, s.perToken(&point{base: b}, m.seconds) / speed})
		}
	}
	return out
}

func newFitDomain(s *Spec, given Given, allowed []precision.Precision, globalBatch int) (fitDomain, error) {
	d := fitDomain{zeros: []int{3, 2, 1, 0}[3-s.highest():], prefetches: []int{1, 0, 2}, batches: [][2]int{{s.Batch, s.Accum}}, precisions: []precision.Precision{s.Precision},
		orders: s.freeOrders(given.LayerOrder), sharded: s.dataRanks() > 1, moves: !given.Offload || s.Offload.Active()}
	if given.Stage || s.dataRanks() == 1 {
		d.zeros = []int{s.Stage} // every stage is the same on one rank
	}
	if given.Prefetch {
		d.prefetches = []int{s.Prefetch}
	}
	for _, p := range allowed {
		if !slices.Contains(d.precisions, p) {
			d.precisions = append(d.precisions, p)
		}
	}
	if globalBatch == 0 {
		return d, nil
	}
	ranks := s.dataRanks()
	if globalBatch%ranks != 0 {
		return d, &RowsError{Rows: globalBatch, Ranks: ranks}
	}
	rows := globalBatch / ranks
	d.rows, d.batches = rows, nil
	for b := rows; b >= 1; b-- { // the largest micro-batch first
		if rows%b != 0 || (given.Batch || given.SameBatch) && b != s.Batch || given.Accum && rows/b != s.Accum {
			continue
		}
		d.batches = append(d.batches, [2]int{b, rows / b})
	}
	if len(d.batches) == 0 {
		return d, &RowsError{Rows: globalBatch, Ranks: ranks, Batch: s.Batch, Accum: s.Accum}
	}
	s.Batch, s.Accum = d.batches[len(d.batches)-1][0], d.batches[len(d.batches)-1][1]
	return d, nil
}

// what describes the fields that a search could change.
func (d fitDomain) what(drop bool, spaces []graph.Space) string {
	var parts []string
	add := func(on bool, text string) {
		if on {
			parts = append(parts, text)
		}
	}
	add(len(d.zeros) > 1, "stage")
	add(len(d.batches) > 1, "micro-batch")
	add(len(d.precisions) > 1, "precision")
	add(len(d.prefetches) > 1, "prefetch")
	add(len(d.orders) > 1 && slices.ContainsFunc(d.batches, func(b [2]int) bool { return b[1] > 1 }), "order of micro-batches")
	add(drop, "recomputation")
	for _, s := range spaces {
		add(true, "offload to "+s.String())
	}
	if len(parts) == 0 {
		return "nothing was free to choose"
	}
	return "free to choose: " + strings.Join(parts, ", ")
}

// prefer sets the hardware's precision if none was given, and reports whether it did.
func (hw *Hardware) prefer(s *Spec, given Given) bool {
	if hw.Prefer == precision.FP32 || given.Precision || s.Precision != precision.FP32 {
		return false
	}
	s.Precision = hw.Prefer
	return true
}

// without removes the cap on host memory from a forecast if the search assumed it.
func without(assumed bool, f *Forecast) *Forecast {
	if assumed && f != nil {
		f.Spec.Capacity[graph.Host], f.Plan.Config.Capacity[graph.Host] = 0, 0
	}
	return f
}
