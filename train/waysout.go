package train

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/recompute"
)

// Hardware is what a plan's time is predicted on.
type Hardware struct {
	// Machine gives the rates of one of so many ranks.
	Machine func(ranks int) *cost.Machine
	// NodeSize is the ranks of a node where ranks are counted in nodes; 0: they are
	// not.
	NodeSize int
	// HalfPrecision says that products of 16-bit operands have units of their own.
	HalfPrecision bool
	// Larger lists devices with more memory that could take the place of this one.
	Larger []LargerDevice
	// HostShare is what a rank may have of its server's memory in bytes where
	// Config.HostMemory caps nothing: neither a search nor a way out goes beyond
	// it, whatever would be faster. 0: anything goes.
	HostShare int64
	// Prefer is the precision that Fit takes where none was given: one that the
	// device has units for, as "bf16". "": that of the Config.
	Prefer string
}

// assumed caps the host memory of a configuration that has no cap of its own by
// the server's share, and says whether it did.
func (hw *Hardware) assumed(c *Config) bool {
	if c.HostMemory > 0 || hw.HostShare == 0 {
		return false
	}
	c.HostMemory = hw.HostShare
	return true
}

// without takes an assumed cap out of what was planned with it.
func without(assumed bool, f *Forecast) *Forecast {
	if assumed && f != nil {
		f.Config.HostMemory, f.Plan.Config.Capacity[graph.Host] = 0, 0
	}
	return f
}

// LargerDevice is a device that a plan could move to.
type LargerDevice struct {
	Name            string // as --gpu takes it
	Memory, Outside int64  // bytes
	HostShare       int64  // bytes; see Hardware
	Machine         func(ranks int) *cost.Machine
}

// CPUHardware is the CPU device of this process with so many threads, before it
// is calibrated.
func CPUHardware(threads int) Hardware {
	return Hardware{Machine: func(ranks int) *cost.Machine { return cost.CPU(threads, ranks) }}
}

// What a way out costs beside time.
const (
	sameJob      = iota // the same steps, the same numbers, the same ranks
	moreDisk            // a folder for the disk tier
	otherNumbers        // another precision
	moreHardware        // more ranks, or larger ones
	smallerJob          // shorter rows
)

// Way is a change of a configuration that makes it fit.
type Way struct {
	Text     string   // flags that replace those of the configuration, as a shell takes them
	Args     []string // the same, each word for itself
	Forecast *Forecast
	// Slowdown is the predicted time of a token over that of the configuration as
	// asked, if it had fitted; ranks together.
	Slowdown float64
	Cost     string // "", "a disk", "other numbers", "more ranks", "a larger GPU", "a smaller job"
	Note     string // what "auto" comes to

	order int
}

// NoWay says what was tried where nothing makes a configuration fit.
type NoWay struct {
	Nearest *Forecast // the plan nearest to the caps, of the same job on the same ranks
	Flags   string    // its choices
	Tried   int       // configurations planned
	Beyond  []string  // what else was tried
}

func (n *NoWay) String() string {
	text := fmt.Sprintf("Nothing of %d configurations tried makes it fit.", n.Tried)
	if n.Nearest != nil {
		text += fmt.Sprintf(" The nearest, %s, %s.", n.Flags, Shortfall(n.Nearest))
	}
	if len(n.Beyond) > 0 {
		text += " Tried in vain beside it: " + strings.Join(n.Beyond, ", ") + "."
	}
	return text
}

// mostWays are printed of the changes that keep the job as it is.
const mostWays = 3

// wayFinder looks for changes of a configuration.
type wayFinder struct {
	cfg      Config // as asked
	typed    Config // the same as it was written: auto stays auto
	hw       Hardware
	perToken float64 // s of a token of a rank, as asked
	ways     []Way
	main     *searcher // same ranks, same device
	tried    int
	assumed  bool // the cap on host memory is the hardware's share
}

// WaysOut looks for changes that make a configuration fit which does not: single
// ones (stage, shard size, prefetch, recomputation, placement, micro-batch), the
// fastest of their combinations, and where there are not two of those, ones that
// need a disk, other numbers, more or larger devices, or shorter rows. Each was
// planned, and fits; those that keep the job come first, then the fastest. Where
// there are none, the second result says what came nearest.
func WaysOut(asked *Forecast, hw Hardware) ([]Way, *NoWay) {
	cfg := asked.Config
	cfg.Auto = ""
	assumed := hw.assumed(&cfg)
	typed := cfg
	if asked.Config.Auto != "" {
		typed.Recompute = recompute.Auto
	}
	w := &wayFinder{cfg: cfg, typed: typed, hw: hw, perToken: float64(cfg.Ranks) / asked.TokensPerSecond(), assumed: assumed}
	var err error
	if w.main, err = newSearcher(cfg, hw.Machine(cfg.Ranks), true, tiersOf(&cfg)); err != nil {
		return nil, &NoWay{}
	}
	w.singles()
	w.combined()
	if len(w.ways) == 0 || len(w.ways) == 1 && len(w.ways[0].Args) > 4 {
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
		no.Flags = flagsOf(&no.Nearest.Config, no.Nearest.Config.Batch != cfg.Batch, false)
	}
	no.Beyond = w.beyondNames()
	return nil, no
}

// add plans a changed configuration whole and keeps it as a way where it fits.
func (w *wayFinder) add(c Config, m *cost.Machine, order int, costs string, device string) bool {
	args := changes(&w.typed, &c, w.hw.NodeSize, device)
	text := Shell(args)
	if len(args) == 0 || slices.ContainsFunc(w.ways, func(o Way) bool { return o.Text == text }) {
		return false
	}
	f, err := predict(c, m, early)
	if err != nil || f.Plan.Fit() != nil || w.idleDisk(f) {
		return false
	}
	w.keep(f, args, order, costs)
	return true
}

// idleDisk says that a configuration was given a disk and leaves it empty: it is
// another way with a flag too many.
func (w *wayFinder) idleDisk(f *Forecast) bool {
	return f.Config.Disk != w.cfg.Disk && f.Plan.Layout.Spaces[graph.Disk].Peak == 0
}

func (w *wayFinder) keep(f *Forecast, args []string, order int, costs string) {
	without(w.assumed, f)
	w.ways = append(w.ways, Way{Text: Shell(args), Args: args, Forecast: f, order: order, Cost: costs, Note: f.Config.Auto,
		Slowdown: float64(f.Config.Ranks) / f.TokensPerSecond() / w.perToken})
}

// asked is the configuration as a point of the search.
func (w *wayFinder) asked() point {
	c := &w.cfg
	return point{base: c.asBase(), again: c.Recompute, away: c.Offload, tier: presetTier}
}

// singles tries one change at a time. Of one kind, the fastest that fits by its
// lower bound is planned whole.
func (w *wayFinder) singles() {
	from := w.asked()
	s, err := newSearcher(w.cfg, w.main.machine, false, nil)
	if err != nil {
		return
	}
	defer func() {
		w.tried += s.tried
		if n := s.smallest; n != nil && (w.main.smallest == nil || s.excess < w.main.excess) {
			w.main.smallest, w.main.excess = n, s.excess
		}
	}()
	kinds := w.changesOfOne(from)
	// The lower bounds of all of them, at the same time.
	var all []*point
	for _, k := range kinds {
		all = append(all, k...)
	}
	plan.Parallel(len(all), func(i int) { s.bound(all[i]) })
	var best []*point
	for _, k := range kinds {
		k = slices.DeleteFunc(slices.Clone(k), func(p *point) bool { return p.perToken == 0 })
		slices.SortStableFunc(k, comparePoints)
		best = append(best, k[:min(len(k), 2)]...)
	}
	slices.SortStableFunc(best, comparePoints)
	done := map[string]bool{}
	for _, p := range best {
		c := s.whole(p)
		if what := strings.Join(changes(&w.typed, &c, 0, "")[:1], ""); !done[what] && len(w.ways) < mostWays-1 {
			done[what] = w.add(c, s.machine, sameJob, "", "")
		}
	}
	w.moreShards(s.machine)
}

// bound gives a point its time a token and its memory by its lower bounds; a time of 0
// where it does not fit.
func (s *searcher) bound(at *point) {
	p := *at
	if p.again == "auto" { // everything dropped: the least that it can need
		p.again = "full"
	}
	m := s.measure(&p)
	at.perToken = 0
	if m.err != nil {
		return
	}
	if _, ok := s.over(m, margins{}); ok {
		at.perToken, at.device = s.perToken(&p, m.seconds), m.need[graph.Device]
	} else {
		s.refused(&p, m)
	}
}

// moreShards shards over more ranks, the fewest that will do.
func (w *wayFinder) moreShards(m *cost.Machine) {
	if w.cfg.ShardSize == 0 || len(w.ways) >= mostWays {
		return
	}
	for n := w.cfg.ShardSize + 1; n <= w.cfg.Ranks; n++ {
		if w.cfg.Ranks%n != 0 || n%w.cfg.ShardSize != 0 {
			continue
		}
		c := w.cfg
		c.ShardSize = n
		if fitsQuickly(c, m) && w.add(c, m, sameJob, "", "") {
			return
		}
	}
}

// changesOfOne are the points that differ from one in one thing, by kind of change.
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
	for z := w.cfg.Zero + 1; z <= 3 && w.cfg.Ranks > 1; z++ {
		list = append(list, change(func(p *point) { p.zero = z }))
	}
	kind(list...)
	if w.cfg.Prefetch > 0 {
		kind(change(func(p *point) { p.prefetch = 0 }))
	}
	if !strings.EqualFold(w.cfg.Recompute, "full") && !w.typed.recomputeAuto() {
		kind(change(func(p *point) { p.again = "auto" }))
	}
	if from.layers {
		kind(change(func(p *point) { p.layers = false }))
	}
	list = nil
	for _, text := range wholePlacements {
		if text != w.cfg.Offload {
			list = append(list, change(func(p *point) { p.away = text }))
		}
		if disk := strings.ReplaceAll(text, "host", "disk"); text != "" && w.cfg.Disk != "" && disk != w.cfg.Offload {
			list = append(list, change(func(p *point) { p.away = disk }))
		}
	}
	kind(list...)
	list = nil
	for _, b := range splits(w.cfg.Batch, w.cfg.Accum) {
		list = append(list, change(func(p *point) { p.batch, p.accum = b[0], b[1] }))
	}
	kind(list...)
	return kinds
}

// fitsQuickly says whether a configuration fits by its lower bounds.
func fitsQuickly(c Config, m *cost.Machine) bool {
	s, err := newSearcher(c, m, false, nil)
	if err != nil {
		return false
	}
	p := &point{base: c.asBase(), again: c.Recompute, away: c.Offload, tier: presetTier}
	got := s.measure(p)
	_, ok := s.over(got, margins{})
	return got.err == nil && ok
}

// splits are smaller micro-batches with as many rows a step.
func splits(batch, accum int) (list [][2]int) {
	for b := batch - 1; b >= 1; b-- {
		if batch%b == 0 {
			list = append(list, [2]int{b, accum * (batch / b)})
		}
	}
	return list
}

// domain is everything that keeps the job: the rows of a rank stay the same.
func (w *wayFinder) domain(split bool) fitDomain {
	c := &w.cfg
	d := fitDomain{prefetches: []int{c.Prefetch}, batches: [][2]int{{c.Batch, c.Accum}}, precisions: []string{c.precision()},
		orders: c.freeOrders(false), sharded: c.Ranks > 1, moves: true}
	for z := 3; z >= c.Zero; z-- {
		if z == c.Zero || c.Ranks > 1 {
			d.zeros = append(d.zeros, z)
		}
	}
	if c.Prefetch > 0 {
		d.prefetches = append(d.prefetches, 0)
	}
	if split {
		d.batches = append(d.batches, splits(c.Batch, c.Accum)...)
	}
	return d
}

// worthMore is how much faster a combination must be than a single change.
const worthMore = 0.98

// combined looks for the fastest of all changes together: with shards over all
// ranks first, where they are over fewer.
func (w *wayFinder) combined() {
	try := func(s *searcher, split bool) bool {
		f, _, _ := s.confirm(s.search(w.domain(split).bases()))
		if f == nil {
			return false
		}
		c := f.Config
		args := changes(&w.typed, &c, 0, "")
		text := Shell(args)
		slow := float64(c.Ranks) / f.TokensPerSecond() / w.perToken
		if !slices.ContainsFunc(w.ways, func(o Way) bool { return o.Text == text || slow > worthMore*o.Slowdown }) {
			w.keep(f, args, sameJob, "")
		}
		return true
	}
	list := []*searcher{w.main}
	if n := w.cfg.ShardSize; n > 0 && n < w.cfg.Ranks {
		c := w.cfg
		c.ShardSize = c.Ranks
		if s, err := newSearcher(c, w.main.machine, true, w.main.spaces); err == nil {
			list = []*searcher{s, w.main}
		}
	}
	for _, s := range list {
		found := try(s, false) || w.cfg.Batch > 1 && try(s, true)
		if s != w.main {
			w.tried += s.tried
		}
		if found {
			// Beside one that needs host memory, one that does not.
			if last := &w.ways[len(w.ways)-1]; len(w.ways) < mostWays && last.Forecast.Config.Offload != w.cfg.Offload {
				c := s.cfg
				c.Offload = ""
				if t, err := newSearcher(c, s.machine, true, nil); err == nil {
					try(t, false)
					w.tried += t.tried
				}
			}
			return
		}
	}
}

// alternative is a row of changes of one kind beyond the job, each with more
// room than the one before.
type alternative struct {
	name    string
	order   int
	costs   string
	configs []Config
	machine func(i int) *cost.Machine
	device  func(i int) string
}

func (w *wayFinder) alternatives() (list []alternative) {
	same := func(int) *cost.Machine { return w.main.machine }
	none := func(int) string { return "" }
	if w.cfg.Disk == "" && w.cfg.HostMemory > 0 {
		c := w.cfg
		c.Disk = "spillway-disk"
		list = append(list, alternative{"a disk tier", moreDisk, "a disk", []Config{c}, same, none})
	}
	if p := w.cfg.precision(); strings.EqualFold(p, "fp32") && w.hw.HalfPrecision {
		c := w.cfg
		c.Precision = "bf16"
		list = append(list, alternative{"bf16", otherNumbers, "other numbers", []Config{c}, same, none})
	}
	a := alternative{order: moreHardware, costs: "more ranks", device: none}
	for ranks := w.cfg.Ranks * 2; ranks <= 64*w.cfg.Ranks && ranks <= 1<<15; ranks *= 2 {
		c := w.cfg
		c.Ranks = ranks
		if c.ShardSize > 0 {
			c.ShardSize = ranks // a larger shard is what more ranks are for
		}
		a.configs = append(a.configs, c)
	}
	if len(a.configs) > 0 {
		a.name = fmt.Sprintf("up to %d ranks", a.configs[len(a.configs)-1].Ranks)
		a.machine = func(i int) *cost.Machine { return w.hw.Machine(a.configs[i].Ranks) }
		list = append(list, a)
	}
	if len(w.hw.Larger) > 0 {
		g := alternative{name: "GPUs up to " + w.hw.Larger[len(w.hw.Larger)-1].Name, order: moreHardware, costs: "a larger GPU"}
		for _, d := range w.hw.Larger {
			c := w.cfg
			c.DeviceMemory, c.Outside[graph.Device] = d.Memory, d.Outside
			if w.assumed && d.HostShare > 0 {
				c.HostMemory = d.HostShare
			}
			g.configs = append(g.configs, c)
		}
		g.machine = func(i int) *cost.Machine { return w.hw.Larger[i].Machine(w.cfg.Ranks) }
		g.device = func(i int) string { return w.hw.Larger[i].Name }
		list = append(list, g)
	}
	q := alternative{order: smallerJob, costs: "a smaller job", machine: same, device: none}
	for seq := w.cfg.Seq / 2; seq >= 16; seq /= 2 {
		c := w.cfg
		c.Seq = seq
		q.configs = append(q.configs, c)
	}
	if len(q.configs) > 0 {
		q.name = fmt.Sprintf("rows down to %d tokens", q.configs[len(q.configs)-1].Seq)
		list = append(list, q)
	}
	return list
}

func (w *wayFinder) beyondNames() (names []string) {
	for _, a := range w.alternatives() {
		names = append(names, a.name)
	}
	return names
}

// beyond finds, of each alternative, the least that does alone; or where none
// does, the least that does with everything that keeps the job beside it.
func (w *wayFinder) beyond() {
	for _, a := range w.alternatives() {
		alone := 0
		for alone < len(a.configs) && !fitsQuickly(a.configs[alone], a.machine(alone)) {
			alone++
		}
		if alone < len(a.configs) && w.add(a.configs[alone], a.machine(alone), a.order, a.costs, a.device(alone)) {
			continue
		}
		lo, hi := 0, len(a.configs)
		for lo < hi {
			if mid := (lo + hi) / 2; w.feasible(a.configs[mid], a.machine(mid)) {
				hi = mid
			} else {
				lo = mid + 1
			}
		}
		if hi == len(a.configs) {
			continue
		}
		if best := w.fastest(a.configs[hi], a.machine(hi)); best != nil {
			c := best.Config
			if w.idleDisk(best) {
				if len(w.ways) == 0 {
					c.Disk = w.cfg.Disk
					w.add(c, w.main.machine, sameJob, "", "")
				}
				continue
			}
			w.keep(best, changes(&w.typed, &c, w.hw.NodeSize, a.device(hi)), a.order, a.costs)
		}
	}
}

// beside returns the search of everything that keeps the job, beside a change.
func (w *wayFinder) beside(c Config, m *cost.Machine) (*searcher, []base) {
	s, err := newSearcher(c, m, true, tiersOf(&c))
	if err != nil {
		return nil, nil
	}
	d := w.domain(true)
	d.precisions, d.orders = []string{c.precision()}, []bool{c.inLayers()}
	if c.Ranks > 1 {
		d.zeros = []int{3}
	}
	return s, d.bases()
}

// feasible says whether the smallest configurations that it knows fit by their
// lower bounds.
func (w *wayFinder) feasible(c Config, m *cost.Machine) bool {
	s, bases := w.beside(c, m)
	if s == nil {
		return false
	}
	b := bases[len(bases)-1] // the smallest micro-batch, without prefetch
	set, err := s.moves(b)
	if err != nil {
		return false
	}
	points := s.presets(b, set)
	slices.Reverse(points)
	for _, p := range points {
		m := s.measure(p)
		if _, ok := s.over(m, margins{}); ok && m.err == nil {
			w.tried += s.tried
			return true
		}
	}
	w.tried += s.tried
	return false
}

// fastest returns the fastest plan of a changed configuration with everything
// that keeps the job beside the change, of the micro-batch and prefetch distance
// asked for and of the smallest ones; nil: nothing fits. Those between cost
// seconds of search for each change and are seldom the best.
func (w *wayFinder) fastest(c Config, m *cost.Machine) *Forecast {
	s, bases := w.beside(c, m)
	if s == nil {
		return nil
	}
	if n := len(bases); n > 2 {
		bases = []base{bases[0], bases[n-1]}
	}
	f, _, _ := s.confirm(s.search(bases))
	w.tried += s.tried
	return f
}

// changes are the flags that turn one configuration into another. device is the
// name of another device.
func changes(from, to *Config, nodeSize int, device string) (args []string) {
	add := func(changed bool, words ...string) {
		if changed {
			args = append(args, words...)
		}
	}
	number := func(flag string, a, b int) { add(a != b, "--"+flag, fmt.Sprint(b)) }
	add(device != "", "--gpu", device)
	if to.Ranks != from.Ranks && nodeSize > 0 && to.Ranks%nodeSize == 0 {
		add(true, "--nodes", fmt.Sprint(to.Ranks/nodeSize), "--gpus-per-node", fmt.Sprint(nodeSize))
	} else {
		number("ranks", from.Ranks, to.Ranks)
	}
	number("shard-size", from.ShardSize, to.ShardSize)
	number("zero", from.Zero, to.Zero)
	add(from.Batch != to.Batch || from.Accum != to.Accum, "--batch", fmt.Sprint(to.Batch), "--accum", fmt.Sprint(to.Accum))
	add(to.Accum > 1 && from.asksLayers() != to.inLayers(), "--accum-order", base{layers: to.inLayers()}.order())
	number("seq", from.Seq, to.Seq)
	add(!strings.EqualFold(from.precision(), to.precision()), "--precision", to.precision())
	number("prefetch", from.Prefetch, to.Prefetch)
	add(!strings.EqualFold(orNone(from.Recompute), orNone(to.Recompute)), "--recompute", orNone(to.Recompute))
	add(from.Disk != to.Disk, "--disk", to.Disk)
	add(!strings.EqualFold(orNone(from.Offload), orNone(to.Offload)), "--offload", orNone(to.Offload))
	return args
}

// Shell joins words as a shell takes them.
func Shell(args []string) string {
	words := make([]string, len(args))
	for i, a := range args {
		words[i] = quote(a)
	}
	return strings.Join(words, " ")
}

// refusal adds to the refusal of a plan what would make it fit.
func refusal(err error, ways []Way, no *NoWay) error {
	if len(ways) == 0 {
		return fmt.Errorf("%w; %s", err, strings.TrimSuffix(strings.ToLower(no.String()[:1])+no.String()[1:], "."))
	}
	var texts []string
	for _, way := range ways {
		text := way.Text
		if way.Cost != "" {
			text += " (" + way.Cost + ")"
		}
		texts = append(texts, text)
	}
	return &Refusal{Cause: err, Ways: ways, text: fmt.Sprintf("%s; it fits with %s", err, strings.Join(texts, ", or with "))}
}

// Refusal is the error of a plan that does not fit where something else would.
type Refusal struct {
	Cause error // a *plan.DoesNotFit
	Ways  []Way // at least one
	text  string
}

func (r *Refusal) Error() string { return r.text }
func (r *Refusal) Unwrap() error { return r.Cause }

// fits returns nil if the plan is within its capacities, and otherwise the
// refusal with what would make it fit.
func fits(cfg Config, p *plan.Plan, hw Hardware) error {
	err := p.Fit()
	if err == nil {
		return nil
	}
	if caches := smallerCaches(&cfg, p); caches != "" {
		return fmt.Errorf("%w; it fits with %s", err, caches)
	}
	asked, simErr := Predict(cfg, hw.Machine(cfg.Ranks))
	if simErr != nil {
		return errors.Join(err, simErr)
	}
	ways, no := WaysOut(asked, hw)
	return refusal(err, ways, no)
}
