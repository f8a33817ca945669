package search

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/precision"
)

// alternative is a series of changes of one kind beyond the job, each with more room than the one
// before.
type alternative struct {
	name    string
	order   int
	costs   string
	specs   []Spec
	machine func(i int) *cost.Machine
	device  func(i int) string
}

func (w *wayFinder) alternatives() (list []alternative) {
	same := func(int) *cost.Machine { return w.main.machine }
	none := func(int) string { return "" }
	if !w.spec.Disk && w.spec.Capacity[graph.Host] > 0 {
		c := w.spec
		c.Disk = true
		list = append(list, alternative{"a disk tier", moreDisk, "a disk", []Spec{c}, same, none})
	}
	if w.spec.Precision == precision.FP32 && w.hw.HalfPrecision {
		c := w.spec
		c.Precision = precision.BF16
		list = append(list, alternative{"bf16", otherNumbers, "other numbers", []Spec{c}, same, none})
	}
	for i := range w.hw.Variants {
		c := w.spec
		c.variant, c.Job = &w.hw.Variants[i], w.hw.Variants[i].Job
		list = append(list, alternative{c.variant.Changes[0].Text, otherNumbers, "other numbers", []Spec{c}, same, none})
	}
	if w.assumed {
		h := alternative{name: "servers of up to 8 times the memory", order: moreHardware, costs: "more host memory", machine: same, device: none}
		for times := int64(2); times <= 8; times *= 2 {
			c := w.spec
			c.Capacity[graph.Host] *= times
			c.moreHost = c.Capacity[graph.Host]
			h.specs = append(h.specs, c)
		}
		list = append(list, h)
	}
	a := alternative{order: moreHardware, costs: "more ranks", device: none}
	for ranks := w.spec.Ranks * 2; ranks <= 64*w.spec.Ranks && ranks <= 1<<15; ranks *= 2 {
		c := w.spec
		if !c.moveTo(ranks) {
			break
		}
		if c.ShardSize > 0 {
			c.ShardSize = c.dataRanks() // more ranks allow a larger shard
		}
		a.specs = append(a.specs, c)
	}
	if len(a.specs) > 0 {
		a.name = fmt.Sprintf("up to %d ranks", a.specs[len(a.specs)-1].Ranks)
		a.machine = func(i int) *cost.Machine { return w.hw.Machine(a.specs[i].Ranks) }
		list = append(list, a)
	}
	if len(w.hw.Larger) > 0 {
		g := alternative{name: "GPUs up to " + w.hw.Larger[len(w.hw.Larger)-1].Name, order: moreHardware, costs: "a larger GPU"}
		for _, d := range w.hw.Larger {
			c := w.spec
			c.Capacity[graph.Device], c.Outside[graph.Device] = d.Memory, d.Outside
			if w.assumed && d.HostShare > 0 {
				c.Capacity[graph.Host] = d.HostShare
			}
			g.specs = append(g.specs, c)
		}
		g.machine = func(i int) *cost.Machine { return w.hw.Larger[i].Machine(w.spec.Ranks) }
		g.device = func(i int) string { return w.hw.Larger[i].Name }
		list = append(list, g)
	}
	q := alternative{order: smallerJob, costs: "a smaller job", machine: same, device: none}
	for seq := w.spec.Seq / 2; seq >= 16; seq /= 2 {
		c := w.spec
		c.Seq = seq
		q.specs = append(q.specs, c)
	}
	if len(q.specs) > 0 {
		q.name = fmt.Sprintf("rows down to %d tokens", q.specs[len(q.specs)-1].Seq)
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

// beyond finds, for each alternative, the smallest change that fits alone. If none does, it finds
// the smallest that fits together with changes that keep the job.
func (w *wayFinder) beyond() {
	for _, a := range w.alternatives() {
		alone := w.firstOf(&a, w.fitsQuickly)
		// More ranks of a global batch may have a smaller micro-batch. The search that follows finds fewer ranks for that.
		if alone < len(a.specs) && a.specs[alone].Batch == w.spec.Batch &&
			w.add(a.specs[alone], a.machine(alone), a.order, a.costs, a.device(alone)) {
			continue
		}
		lo, hi := 0, len(a.specs)
		if last := hi - 1; w.main.allLayers() && !w.feasible(a.specs[last], a.machine(last)) {
			lo = hi
		}
		for lo < hi {
			if mid := (lo + hi) / 2; w.feasible(a.specs[mid], a.machine(mid)) {
				hi = mid
			} else {
				lo = mid + 1
			}
		}
		if hi == len(a.specs) {
			continue
		}
		if best := w.fastest(a.specs[hi], a.machine(hi)); best != nil {
			if same := w.needless(best); same != nil {
				w.addSame(same)
				continue
			}
			w.keep(best, changes(&w.typed, &best.Spec, w.hw.NodeSize, a.device(hi)), a.order, a.costs)
		}
	}
}

// needless returns the plan of f's configuration without the change beyond the job, if it fits: the
// change is then unnecessary. nil: it does not fit.
func (w *wayFinder) needless(f *Forecast) *Forecast {
	if f.Plan.Layout.Spaces[graph.Disk].Peak > 0 && !w.spec.Disk || !w.budget.take(0) {
		return nil
	}
	w.tried++
	same, err := predict(w.ctx, w.spec.keeping(&f.Spec), w.main.machine, 0, early)
	if err != nil || !same.Fits() {
		return nil
	}
	return same
}

// addSame keeps a way that changes nothing beyond the job, unless another one is faster by the
// factor slowWay and offloads no more.
func (w *wayFinder) addSame(f *Forecast) {
	list := changes(&w.typed, &f.Spec, 0, "")
	slow, asked := float64(f.Spec.Ranks)/f.TokensPerSecond()/w.perToken, w.spec.Offload.String()
	worse := func(o Way) bool {
		stays := o.Forecast.Spec.Offload.String() == asked || f.Spec.Offload.String() != asked
		return o.order == sameJob && slow > slowWay*o.Slowdown && stays
	}
	if len(list) > 0 && !w.has(list) && !slices.ContainsFunc(w.ways, worse) {
		w.keep(f, list, sameJob, "")
	}
}

// keeping returns the configuration s with the choices that a search made for of, which also
// changes the job.
func (s *Spec) keeping(of *Spec) Spec {
	c, b := *s, of.asBase()
	b.precision = s.Precision
	if b.accum = s.Batch * s.Accum / b.batch; s.Rows > 0 {
		b.batch, b.accum = s.Batch, s.Accum
	}
	if s.dataRanks() == 1 {
		b.zero = s.Stage
	}
	b.apply(&c, s)
	c.Recompute, c.Auto, c.Offload = of.Recompute, of.Auto, of.Offload
	return c
}

// preferredEffort is the divisor of the remaining effort that is kept for the search of the
// preferred precision.
const preferredEffort = 4

// besideEffort is the divisor of the remaining effort that each search beside the first may use.
const besideEffort = 4

// beside returns the search of all configurations that keep the job apart from the change c.
func (w *wayFinder) beside(c Spec, m *cost.Machine) (*searcher, []base) {
	d := w.domain(true)
	d.batches = append([][2]int{{c.Batch, c.Accum}}, c.splits()...)
	d.precisions, d.orders = []precision.Precision{c.Precision}, []bool{c.inLayers()}
	if c.dataRanks() > 1 {
		d.zeros = []int{c.highest()}
	}
	return w.searcher(c, m, true, c.tiers()), d.bases()
}

// feasible reports whether the smallest configuration that the search can make of c fits by the
// lower bound of its memory, with everything recomputed and moved off the device.
func (w *wayFinder) feasible(c Spec, m *cost.Machine) bool {
	s, bases := w.beside(c, m)
	b := bases[len(bases)-1] // the smallest micro-batch, without prefetch
	set, err := s.moves(b)
	if err != nil {
		return false
	}
	defer func() { w.tried += s.tried }()
	from := s.measure(s.plain(b, set))
	if s.hopeless(from) || s.allLayers() && s.needsMore(b, set) {
		return false
	}
	fit, _, _ := s.newFiller(b, set, from).leanest()
	return fit != nil
}

// fastest returns the fastest plan of a changed configuration, combined with changes that keep the
// job; nil: nothing fits. It tries the micro-batch and prefetch distance asked for and the smallest
// ones. Those between cost seconds of search per change and are seldom the best.
func (w *wayFinder) fastest(c Spec, m *cost.Machine) *Forecast {
	s, bases := w.beside(c, m)
	if n := len(bases); n > 2 {
		bases = []base{bases[0], bases[n-1]}
	}
	f, _, _, _ := s.fastest(bases)
	w.tried += s.tried
	return f
}
