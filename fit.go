package spillway

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// Fitted is the outcome of a search for the fastest configuration that fits.
type Fitted struct {
	*Forecast
	Flags   string   // what was chosen, as flags
	Reasons []string // why not what would have been faster, and the runners-up, a line each
	Tried   int      // configurations that were planned
}

// levels of what the search chooses, each slower and smaller than the one before.
var (
	fitPrefetch  = []int{1, 0}
	fitRecompute = []string{"none", "selective", "full"}
	fitOffload   = []string{"", "optimizer=host", "optimizer=host,activations=host", "optimizer=host,parameters=host,activations=host",
		"optimizer=host,parameters=host,gradients=host,activations=host"}
)

// fitPoint is a candidate: indices into the levels.
type fitPoint struct {
	batch, accum, zero           int
	prefetch, recompute, offload int
}

// below says that a uses no less memory than b in any choice and is not b: where
// a fits, b is only slower.
func (a fitPoint) below(b fitPoint) bool {
	return a.batch == b.batch && a.zero == b.zero && a != b && a.prefetch <= b.prefetch && a.recompute <= b.recompute && a.offload <= b.offload
}

// fitDomain is what the search may choose from.
type fitDomain struct {
	batches                                [][2]int // batch, accum
	zeros, prefetches, recomputes, offload []int
}

// Fit chooses what is not in given (names of flags: zero, prefetch, recompute,
// offload) so that cfg is fastest by prediction on hw and fits. With globalBatch,
// the rows of a step over all ranks, it chooses batch and accum too, where not
// given. It is deterministic. Where nothing fits, the error wraps the
// *plan.DoesNotFit of the smallest plan that was tried.
func Fit(cfg Config, given func(flag string) bool, globalBatch int, hw Hardware) (*Fitted, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	d, err := newFitDomain(&cfg, given, globalBatch)
	if err != nil {
		return nil, err
	}
	h, err := modelConfig(cfg.Model)
	if err != nil {
		return nil, err
	}
	s := &fitSearch{cfg: cfg, hw: hw, layers: h.Layers, folded: h.Layers > foldedFrom && len(cfg.Freeze) == 0}
	if s.folded {
		cfg.layers = foldedLayers[0]
	}
	base, err := Predict(cfg, hw.Machine(cfg.Ranks)) // what is wrong with all of them
	if err != nil {
		return nil, err
	}
	s.cfg.Seq = base.Config.Seq
	type branch struct{ batch, accum, zero int }
	var branches []branch
	for _, b := range d.batches {
		for _, z := range d.zeros {
			branches = append(branches, branch{b[0], b[1], z})
		}
	}
	results := make([][]fitted, len(branches))
	plan.Parallel(len(branches), func(i int) {
		b := branches[i]
		results[i] = s.branch(d, fitPoint{batch: b.batch, accum: b.accum, zero: b.zero})
	})
	var all []fitted
	for _, r := range results {
		all = append(all, r...)
	}
	if len(all) == 0 {
		if s.refused == nil {
			return nil, errors.New("--fit: no configuration could be planned")
		}
		return nil, fmt.Errorf("--fit: nothing of %d configurations fits; the smallest: %w", s.tried, s.refused)
	}
	slices.SortStableFunc(all, func(a, b fitted) int { return cmp.Compare(a.perToken, b.perToken) })
	if s.folded {
		if all = s.confirm(all); len(all) == 0 {
			return nil, fmt.Errorf("--fit: nothing of %d configurations fits; the smallest: %w", s.tried, s.refused)
		}
	}
	best := all[0]
	if c := best.f.Config; !given("prefetch") && c.Zero == 3 && c.Prefetch > 0 {
		// Further ahead costs a unit of memory: only where it is worth one.
		c.Prefetch = 2
		if f, err := predict(c, hw.Machine(c.Ranks), true); err == nil && f.Fits && 1/f.TokensPerSecond() < 0.99*best.perToken {
			best = fitted{best.at, f, 1 / f.TokensPerSecond(), f.Plan.Layout.Spaces[graph.Device].Peak}
		}
	}
	out := &Fitted{Forecast: best.f, Flags: d.flags(best.at), Tried: s.tried}
	if best.f.Config.Prefetch == 2 {
		out.Flags = strings.Replace(out.Flags, "--prefetch 1", "--prefetch 2", 1)
	}
	for _, r := range all[1:min(len(all), 4)] {
		out.Reasons = append(out.Reasons, fmt.Sprintf("%s fits too, at %.2f × the time a token and %s of device memory", d.flags(r.at), r.perToken/best.perToken, plan.Bytes(r.device)))
	}
	slices.SortStableFunc(s.over, func(a, b overCap) int { return cmp.Compare(a.by, b.by) })
	for _, o := range s.over[:min(len(s.over), 2)] {
		out.Reasons = append(out.Reasons, fmt.Sprintf("%s does not fit, by %s", d.flags(o.at), plan.Bytes(o.by)))
	}
	return out, nil
}

func newFitDomain(cfg *Config, given func(string) bool, globalBatch int) (fitDomain, error) {
	index := func(flag string, n int, current func(i int) bool) []int {
		var all []int
		for i := range n {
			if given(flag) && current(i) {
				return []int{i}
			}
			all = append(all, i)
		}
		if given(flag) {
			return []int{-1} // a value outside of the levels stays as it is
		}
		return all
	}
	d := fitDomain{
		zeros:      index("zero", 4, func(i int) bool { return i == cfg.Zero }),
		prefetches: index("prefetch", len(fitPrefetch), func(i int) bool { return fitPrefetch[i] == cfg.Prefetch }),
		recomputes: index("recompute", len(fitRecompute), func(i int) bool { return strings.EqualFold(fitRecompute[i], cfg.Recompute) }),
		offload:    index("offload", len(fitOffload), func(i int) bool { return strings.EqualFold(fitOffload[i], cfg.Offload) }),
		batches:    [][2]int{{cfg.Batch, cfg.Accum}},
	}
	if shards := cfg.Ranks; shards == 1 && !given("zero") {
		d.zeros = []int{cfg.Zero} // every stage is the same on one rank
	}
	if globalBatch == 0 {
		return d, nil
	}
	if globalBatch%cfg.Ranks != 0 {
		return d, fmt.Errorf("--global-batch %d is not a multiple of %d ranks; %d and %d are", globalBatch, cfg.Ranks, max(1, globalBatch/cfg.Ranks)*cfg.Ranks, (globalBatch/cfg.Ranks+1)*cfg.Ranks)
	}
	rows := globalBatch / cfg.Ranks
	d.batches = nil
	for b := rows; b >= 1; b-- { // the largest micro-batch first
		if rows%b != 0 || given("batch") && b != cfg.Batch || given("accum") && rows/b != cfg.Accum {
			continue
		}
		d.batches = append(d.batches, [2]int{b, rows / b})
	}
	if len(d.batches) == 0 {
		return d, fmt.Errorf("--global-batch %d over %d ranks is %d rows a rank, which --batch %d and --accum %d do not give; leave one of them out", globalBatch, cfg.Ranks, rows, cfg.Batch, cfg.Accum)
	}
	cfg.Batch, cfg.Accum = d.batches[len(d.batches)-1][0], d.batches[len(d.batches)-1][1]
	return d, nil
}

// flags writes a choice as a person would type it.
func (d fitDomain) flags(at fitPoint) string {
	parts := []string{fmt.Sprintf("--zero %d", at.zero)}
	if len(d.batches) > 1 {
		parts = append(parts, fmt.Sprintf("--batch %d --accum %d", at.batch, at.accum))
	}
	if at.prefetch >= 0 {
		parts = append(parts, fmt.Sprintf("--prefetch %d", fitPrefetch[at.prefetch]))
	}
	if at.recompute >= 0 {
		parts = append(parts, "--recompute "+fitRecompute[at.recompute])
	}
	if at.offload > 0 {
		parts = append(parts, "--offload "+fitOffload[at.offload])
	}
	return strings.Join(parts, " ")
}

type fitted struct {
	at       fitPoint
	f        *Forecast // nil: extrapolated from fewer layers
	perToken float64
	device   int64 // bytes
}

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

// extrapolate plans a choice at few layers and extends both lines.
func (s *fitSearch) extrapolate(c Config) (perToken float64, need [graph.NumSpaces]int64, err error) {
	var seconds [2]float64
	var peaks [2][graph.NumSpaces]int64
	for i, n := range foldedLayers {
		c.layers = n
		f, err := predict(c, s.hw.Machine(c.Ranks), false)
		if err != nil {
			return 0, need, err
		}
		seconds[i] = f.Step.Seconds
		for sp := range need {
			peaks[i][sp] = f.Plan.Layout.Spaces[sp].LowerBound
		}
	}
	more := float64(s.layers-foldedLayers[1]) / float64(foldedLayers[1]-foldedLayers[0])
	for sp := range need {
		need[sp] = peaks[1][sp] + int64(more*float64(peaks[1][sp]-peaks[0][sp]))
	}
	step := seconds[1] + more*(seconds[1]-seconds[0])
	return step / (float64(c.Ranks) * float64(c.Batch) * float64(c.Accum) * float64(c.Seq)), need, nil
}

// tryFolded is try at few layers.
func (s *fitSearch) tryFolded(at fitPoint, c Config) *fitted {
	perToken, need, err := s.extrapolate(c)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tried++
	if err != nil {
		return nil
	}
	caps := [graph.NumSpaces]int64{graph.Device: c.DeviceMemory, graph.Host: c.HostMemory, graph.Disk: c.DiskMemory}
	for sp, limit := range caps {
		by := need[sp] + c.Outside[sp] - limit
		if limit == 0 || float64(need[sp]+c.Outside[sp]) <= foldedSlack*float64(limit) {
			continue
		}
		s.over = append(s.over, overCap{at, by})
		if r := s.refused; r == nil || by < r.Peak+r.Outside-r.Capacity {
			s.refused = &plan.DoesNotFit{Space: graph.Space(sp), Peak: need[sp], Outside: c.Outside[sp], Capacity: limit, At: "its highest point", Largest: "extrapolated from fewer layers"}
		}
		return nil
	}
	return &fitted{at: at, perToken: perToken, device: need[graph.Device]}
}

// confirm plans extrapolated choices whole, the fastest first, until one fits,
// and drops those before it.
func (s *fitSearch) confirm(all []fitted) []fitted {
	for i, r := range all {
		c := s.config(r.at)
		f, err := predict(c, s.hw.Machine(c.Ranks), true)
		if err == nil {
			err = f.Plan.Fit()
		}
		if err == nil {
			all[i].f, all[i].perToken, all[i].device = f, 1/f.TokensPerSecond(), f.Plan.Layout.Spaces[graph.Device].Peak
			return all[i:]
		}
		var refused *plan.DoesNotFit
		if errors.As(err, &refused) {
			s.refused = refused
			s.over = append(s.over, overCap{r.at, refused.Peak + refused.Outside - refused.Capacity})
		}
	}
	return nil
}

type overCap struct {
	at fitPoint
	by int64 // bytes
}

type fitSearch struct {
	cfg    Config
	hw     Hardware
	layers int  // of the model
	folded bool // few of them are planned

	mu      sync.Mutex
	tried   int
	refused *plan.DoesNotFit // of the least excess
	over    []overCap
}

func (s *fitSearch) config(at fitPoint) Config {
	c := s.cfg
	c.Batch, c.Accum, c.Zero = at.batch, at.accum, at.zero
	if at.prefetch >= 0 {
		c.Prefetch = fitPrefetch[at.prefetch]
	}
	if at.recompute >= 0 {
		c.Recompute = fitRecompute[at.recompute]
	}
	if at.offload >= 0 {
		c.Offload = fitOffload[at.offload]
	}
	return c
}

// try plans one choice; nil where it does not fit or cannot be planned.
func (s *fitSearch) try(at fitPoint) *fitted {
	c := s.config(at)
	if s.folded {
		return s.tryFolded(at, c)
	}
	f, err := predict(c, s.hw.Machine(c.Ranks), true)
	if err == nil {
		err = f.Plan.Fit()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tried++
	var refused *plan.DoesNotFit
	if errors.As(err, &refused) {
		by := refused.Peak + refused.Outside - refused.Capacity
		s.over = append(s.over, overCap{at, by})
		if r := s.refused; r == nil || by < r.Peak+r.Outside-r.Capacity {
			s.refused = refused
		}
	}
	if err != nil {
		return nil
	}
	return &fitted{at, f, 1 / f.TokensPerSecond(), f.Plan.Layout.Spaces[graph.Device].Peak}
}

// branch looks for what fits of one micro-batch and stage. The smallest choice
// goes first: where it does not fit, nothing does. Then choices go from the
// largest and fastest on, and what a fitting one is below of is left out.
func (s *fitSearch) branch(d fitDomain, at fitPoint) []fitted {
	last := func(list []int) int { return list[len(list)-1] }
	at.prefetch, at.recompute, at.offload = last(d.prefetches), last(d.recomputes), last(d.offload)
	smallest := s.try(at)
	if smallest == nil {
		return nil
	}
	var points []fitPoint
	for _, o := range d.offload {
		for _, r := range d.recomputes {
			for _, p := range d.prefetches {
				q := at
				q.offload, q.recompute, q.prefetch = o, r, p
				points = append(points, q)
			}
		}
	}
	slices.SortStableFunc(points, func(a, b fitPoint) int {
		return cmp.Compare(a.offload+a.recompute+a.prefetch, b.offload+b.recompute+b.prefetch)
	})
	var found []fitted
	for _, q := range points {
		if slices.ContainsFunc(found, func(f fitted) bool { return f.at.below(q) }) {
			continue
		}
		if q == at {
			found = append(found, *smallest)
			continue
		}
		if f := s.try(q); f != nil {
			found = append(found, *f)
		}
	}
	return found
}
