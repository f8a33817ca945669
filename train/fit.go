package train

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// Fitted is the outcome of a search for the fastest configuration that fits.
type Fitted struct {
	*Forecast
	Flags   string   // what was chosen: added to the flags of the request, they plan it again
	Reasons []string // what bounds it, why not what would have been faster, and the runners-up, a line each
	Tried   int      // configurations that were planned
	// Caps are those that the machine's memory adds to the request, by space; 0: none.
	Caps [graph.NumSpaces]int64
}

// NothingFits is the error of a search that found no configuration within the
// caps.
type NothingFits struct {
	Tried    int
	Smallest *Forecast // of what was tried, the nearest to the caps; nil: nothing could be planned
	Flags    string    // its choices
	What     string    // what was allowed to change
	// HostShare is the cap on host memory where it was assumed; 0: it was not.
	HostShare int64
	// Machine is what a rank's device and host memory come out of together, where that
	// bound them; "": it did not.
	Machine string
}

func (e *NothingFits) Error() string {
	if e.Smallest == nil {
		return fmt.Sprintf("no configuration of %d could be planned", e.Tried)
	}
	text := fmt.Sprintf("nothing of %d configurations fits (%s); the nearest, %s, %s", e.Tried, e.What, e.Flags, Shortfall(e.Smallest))
	if caches := smallerCaches(&e.Smallest.Config, e.Smallest.Plan); caches != "" {
		text += "; it fits with " + caches
	}
	if e.Machine != "" {
		text += "; device and host memory come out of one, " + e.Machine
	}
	if e.HostShare > 0 {
		text += fmt.Sprintf("; %s of host memory a rank are assumed, as usual for the GPU (--node-memory says what a server has)", plan.Bytes(e.HostShare))
	}
	return text
}

// WithWays adds to the error what makes the configuration fit that the search
// was not free to change, as a refusal without a search does: smaller
// micro-batches, other precisions, more ranks. What --fit knows is never less.
func (e *NothingFits) WithWays(cfg Config, hw Hardware) error {
	asked, err := Predict(cfg, hw.Machine(cfg.Ranks))
	if err != nil || asked.Fits {
		return e
	}
	ways, no := WaysOut(asked, hw)
	if len(ways) == 0 {
		return e
	}
	return refusal(e, ways, no)
}

func (e *NothingFits) Unwrap() error {
	if e.Smallest == nil {
		return nil
	}
	return e.Smallest.Plan.Fit()
}

// Shortfall says what a plan that does not fit needs of every capped space, and
// what is the most of it.
func Shortfall(f *Forecast) string {
	var parts []string
	for sp := range graph.NumSpaces {
		limit, use := f.Plan.Config.Capacity[sp], &f.Plan.Layout.Spaces[sp]
		if limit == 0 {
			continue
		}
		outside := ""
		if n := f.Plan.Config.Outside[sp]; n > 0 {
			outside = " and " + plan.Bytes(n) + " outside its arena"
		}
		text := fmt.Sprintf("needs %s of %s memory%s of the cap of %s", plan.Bytes(use.Peak), sp, outside, plan.Bytes(limit))
		if use.Peak+f.Plan.Config.Outside[sp] > limit {
			by := most(use.ByClass[:]) + " at " + use.PeakAt
			if n := f.Plan.Config.Outside[sp]; n > use.Peak {
				by = f.Config.mostOutside(sp, n)
			}
			text += fmt.Sprintf(" (bound by %s)", by)
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ", ")
}

// most names the class with the most bytes.
func most(byClass []int64) string {
	best := 0
	for c, n := range byClass {
		if n > byClass[best] {
			best = c
		}
	}
	return fmt.Sprintf("%s of %s", plan.Bytes(byClass[best]), graph.Class(best))
}

// fitDomain is what a search may choose from, beside the moves.
type fitDomain struct {
	rows       int      // of a rank and step, to make of batch and accum; 0: both are given
	batches    [][2]int // batch, accum
	zeros      []int
	prefetches []int
	precisions []string
	preferred  bool   // the precision is the hardware's choice
	orders     []bool // in layer order or not
	sharded    bool   // over several ranks
	moves      bool   // something may rest off the device
}

// mostLayered is the most micro-batches that a search puts in layer order: the program
// has all of them, and what is saved grows little beyond.
const mostLayered = 32

// inOrders lists the orders of accum micro-batches that are worth a look at a stage.
// Without anything that each micro-batch gathers, reduces or fetches for itself, layer
// order wins nothing.
func (d *fitDomain) inOrders(accum, zero int) []bool {
	if len(d.orders) < 2 {
		return d.orders
	}
	if accum == 1 || accum > mostLayered || !d.moves && !(d.sharded && zero >= 2) {
		return []bool{false}
	}
	return d.orders
}

// freeOrders are the orders of micro-batches that may be chosen for a configuration.
func (c *Config) freeOrders(given bool) []bool {
	if given {
		return []bool{c.asksLayers()}
	}
	return []bool{false, true}
}

// saysPrecision: what was chosen is a precision too.
func (d fitDomain) saysPrecision() bool { return d.preferred || len(d.precisions) > 1 }

// bases are all combinations of a domain.
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

// Fit chooses what is not in given (names of flags: zero, prefetch, recompute,
// offload) so that cfg is fastest by prediction on hw and fits. Activations are
// computed again or parked one kind and layer at a time, and units' states leave
// the device by shares, those first that free the most bytes for a second; disk
// is used where cfg has a folder for it. cfg.Allow adds precisions to choose from.
// With globalBatch, the rows of a step over all ranks, it chooses batch and accum
// too, where not given. It is deterministic. Where nothing fits, the error is a
// *NothingFits.
func Fit(cfg Config, given func(flag string) bool, globalBatch int, hw Hardware) (*Fitted, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	preferred := hw.Prefer != "" && !given("precision") && strings.EqualFold(cfg.precision(), "fp32")
	if preferred {
		cfg.Precision = hw.Prefer
	}
	assumed := hw.assumed(&cfg)
	d, err := newFitDomain(&cfg, given, globalBatch)
	if err != nil {
		return nil, err
	}
	d.preferred = preferred
	drop := !given("recompute") || cfg.recomputeAuto()
	if cfg.recomputeAuto() {
		cfg.Recompute = "none"
	}
	var spaces []graph.Space
	if !given("offload") {
		spaces = tiersOf(&cfg)
	}
	s, err := newSearcher(cfg, hw.Machine(cfg.Ranks), drop, spaces)
	if err != nil {
		return nil, err
	}
	cfg = s.cfg
	trial := cfg // what is wrong with all of them
	if s.folded {
		trial.layers = foldedLayers[0]
	}
	if _, err := predict(trial, s.machine, bounds); err != nil {
		return nil, err
	}
	all := s.search(d.bases())
	best, at, err := s.confirm(all)
	if best == nil {
		var refused *plan.DoesNotFit
		if err != nil && !errors.As(err, &refused) {
			return nil, err
		}
		e := &NothingFits{Tried: s.tried, Smallest: s.nearest(), What: d.what(drop, spaces)}
		if assumed {
			e.HostShare = cfg.HostMemory
		}
		if e.Smallest != nil {
			if e.Smallest.Fits { // its lower bound was over the folded line
				return s.fitted(d, without(assumed, e.Smallest), s.smallest, all), nil
			}
			e.Flags = flagsOf(&e.Smallest.Config, globalBatch > 0, d.saysPrecision())
		}
		return nil, e
	}
	return s.fitted(d, without(assumed, best), at, all), nil
}

// tiersOf are the places that buffers may leave the device for.
func tiersOf(cfg *Config) []graph.Space {
	if cfg.Disk != "" {
		return []graph.Space{graph.Host, graph.Disk}
	}
	return []graph.Space{graph.Host}
}

// fitted says what was found, and why.
func (s *searcher) fitted(d fitDomain, best *Forecast, at *point, all []*point) *Fitted {
	batches, precisions := d.rows > 0, d.saysPrecision()
	out := &Fitted{Forecast: best, Flags: flagsOf(&best.Config, batches, precisions), Tried: s.tried}
	out.Reasons = Reasons(best)
	if d.preferred {
		m := s.machine.Matrix
		out.Reasons = append(out.Reasons, fmt.Sprintf("in %s, for whose products the device has units (%.3g × the rate of fp32); other numbers than fp32's, which --precision fp32 plans",
			best.Config.Precision, m[halfType(best.Config.Precision)]/m[graph.F32]))
	}
	if why := OtherBits(&s.cfg, &best.Config); why != "" {
		out.Reasons = append(out.Reasons, why)
	}
	if order := best.AccumOrder(); order != "" && best.Config.orderChosen {
		out.Reasons = append(out.Reasons, order)
	}
	type kind struct {
		base
		tier tiering
	}
	seen, kinds := map[string]bool{out.Flags: true}, map[kind]bool{{at.base, at.tier}: true}
	speed := 1 / best.TokensPerSecond()
	for _, p := range all {
		c := s.whole(p)
		flags := flagsOf(&c, batches, precisions)
		if k := (kind{p.base, p.tier}); kinds[k] || seen[flags] {
			continue
		} else {
			kinds[k] = true
		}
		if seen[flags] = true; len(seen) > 4 {
			break
		}
		out.Reasons = append(out.Reasons, fmt.Sprintf("%s fits too, at %.2f × the time a token and %s of device memory", flags, p.perToken/speed, plan.Bytes(p.device)))
	}
	tried := map[int]bool{}
	for _, p := range all {
		tried[p.zero] = true
	}
	for _, z := range d.zeros {
		b := at.base
		b.zero = z
		if tried[z] || b.zero == best.Config.Zero {
			continue
		}
		set, err := s.moves(b)
		if err != nil {
			continue
		}
		if m := s.measure(s.plain(b, set)); m.err == nil {
			why := fmt.Sprintf("would take %.2f × the time a token even with memory for everything", s.perToken(&point{base: b}, m.seconds)/speed)
			if s.perToken(&point{base: b}, m.seconds) < speed {
				why = "was not found to fit with anything that takes no more time"
			}
			out.Reasons = append(out.Reasons, fmt.Sprintf("--zero %d %s", z, why))
		}
	}
	return out
}

// halfType is the type of a 16-bit precision.
func halfType(precision string) graph.DType {
	if strings.EqualFold(precision, "fp16") {
		return graph.F16
	}
	return graph.BF16
}

// Reasons say what bounds a plan and what it computes again and moves, a line
// each.
func Reasons(f *Forecast) []string { return append([]string{bound(f)}, Explain(f).Lines()...) }

// OtherBits says that two configurations of one job differ in the last bits of
// their results, as stages below 2 and from 2 on do with accumulation: the first, and
// all in layer order, add up a step's micro-batches before they reduce, the others
// after. "" where they do not.
func OtherBits(asked, chosen *Config) string {
	once := func(c *Config) bool { return c.Zero < 2 || c.inLayers() }
	if chosen.Ranks == 1 || chosen.Accum == 1 || chosen.Reproducible || once(asked) == once(chosen) {
		return ""
	}
	order := func(c *Config) string {
		if chosen.inLayers() == asked.inLayers() {
			return ""
		}
		return " in " + base{layers: c.inLayers()}.order() + " order"
	}
	return fmt.Sprintf("with accumulation, stage %d%s differs from stage %d%s in the last bits; --reproducible makes them equal", chosen.Zero, order(chosen), asked.Zero, order(asked))
}

// bound says what a plan's time goes into, and which memory is fullest.
func bound(f *Forecast) string {
	text := fmt.Sprintf("%.1f %% of the step is computing, %.1f %% waiting for copies and communication", 100*(1-f.Step.Exposed/f.Step.Seconds), 100*f.Step.Exposed/f.Step.Seconds)
	worst, at := 0.0, graph.Device
	for sp := range graph.NumSpaces {
		if limit := f.Plan.Config.Capacity[sp]; limit > 0 {
			if share := float64(f.Plan.Layout.Spaces[sp].Peak+f.Plan.Config.Outside[sp]) / float64(limit); share > worst {
				worst, at = share, sp
			}
		}
	}
	if worst > 0 {
		text += fmt.Sprintf("; %s memory is %.1f %% full, at %s", at, 100*worst, f.Plan.Layout.Spaces[at].PeakAt)
	}
	if host := f.Plan.Layout.Spaces[graph.Host].Peak; host > 1<<30 && f.Plan.Config.Capacity[graph.Host] == 0 {
		text += fmt.Sprintf("; it takes %s of host memory a rank", plan.Bytes(host+f.Plan.Config.Outside[graph.Host]))
		if n := f.Config.LocalRanks; n > 1 {
			text += fmt.Sprintf(", %s a server of %d", plan.Bytes(int64(n)*(host+f.Plan.Config.Outside[graph.Host])), n)
		}
		text += " (--host-memory and --node-memory cap it)"
	}
	return text
}

func newFitDomain(cfg *Config, given func(string) bool, globalBatch int) (fitDomain, error) {
	d := fitDomain{zeros: []int{3, 2, 1, 0}, prefetches: []int{1, 0, 2}, batches: [][2]int{{cfg.Batch, cfg.Accum}}, precisions: []string{cfg.precision()},
		orders: cfg.freeOrders(given("accum-order")), sharded: cfg.Ranks > 1, moves: !given("offload") || cfg.Offload != ""}
	if given("zero") || cfg.Ranks == 1 {
		d.zeros = []int{cfg.Zero} // every stage is the same on one rank
	}
	if given("prefetch") {
		d.prefetches = []int{cfg.Prefetch}
	}
	for _, p := range cfg.Allow {
		if p = strings.ToLower(p); !slices.Contains(d.precisions, p) {
			d.precisions = append(d.precisions, p)
		}
	}
	if globalBatch == 0 {
		return d, nil
	}
	if globalBatch%cfg.Ranks != 0 {
		below := globalBatch / cfg.Ranks * cfg.Ranks
		right := fmt.Sprintf("%d is", below+cfg.Ranks)
		if below > 0 {
			right = fmt.Sprintf("%d and %d are", below, below+cfg.Ranks)
		}
		return d, fmt.Errorf("--global-batch %d is not a multiple of %d ranks; %s", globalBatch, cfg.Ranks, right)
	}
	rows := globalBatch / cfg.Ranks
	d.rows, d.batches = rows, nil
	for b := rows; b >= 1; b-- { // the largest micro-batch first
		if rows%b != 0 || (given("batch") || cfg.Reproducible) && b != cfg.Batch || given("accum") && rows/b != cfg.Accum {
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

// what says what a search could change, for a person.
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

// flagsOf writes what a search chose as a person would type it. A flag that
// means "without" is written too: what was asked for may have been with.
func flagsOf(c *Config, batches, precisions bool) string {
	parts := []string{fmt.Sprintf("--zero %d", c.Zero)}
	if batches {
		parts = append(parts, fmt.Sprintf("--batch %d --accum %d", c.Batch, c.Accum))
	}
	if precisions {
		parts = append(parts, "--precision "+c.precision())
	}
	if c.inLayers() || c.orderChosen {
		parts = append(parts, "--accum-order "+strings.ToLower(c.AccumOrder))
	}
	parts = append(parts, fmt.Sprintf("--prefetch %d", c.Prefetch), "--recompute "+quote(orNone(c.Recompute)), "--offload "+quote(orNone(c.Offload)))
	return strings.Join(parts, " ")
}

func orNone(v string) string {
	if v == "" {
		return "none"
	}
	return v
}
