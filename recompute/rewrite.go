package recompute

import (
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// Rewrite returns the program whose section "train" recomputes activations according to opt. The
// section must have one phase: the differentiated step of a micro-batch.
//
// It tracks values, not buffers, since an operation in place gives a buffer a new value. For each
// stretch of backward operations of one unit it recomputes the forward values that they read and
// that the policy drops. It clones the forward operations. The clones read values that are still in
// their buffers, and are placed as late as their first reader allows. Clones have Pass Recompute
// and their original as Source. Only the operations that a backward needs are cloned. An output is
// no longer written if only the dropped reads needed it (a linear's pre-activation).
//
// Every policy keeps some values: inputs and outputs of the loss operation (its gradient comes
// next), other outputs of an operation that has a kept output, and values that depend on a sum that
// the step accumulates.
//
// It fails if a rule matches no unit, and if a pattern of Drop matches no buffer that the policies
// would keep and that can be recomputed.
func Rewrite(p *graph.Program, opt Options) (*graph.Program, error) {
	q := p.Clone()
	if !opt.Active() {
		return q, nil
	}
	train := q.SectionOf(graph.SectionTrain, graph.FormWhole)
	policies, units := make([]Policy, len(q.Units)), make([]string, len(q.Units))
	for u := range q.Units {
		units[u] = q.Units[u].Name
		policies[u] = opt.policy(units[u])
	}
	for _, rule := range opt.Rules {
		if rule.Unit != "*" && !slices.ContainsFunc(units, func(unit string) bool { return matches(rule.Unit, unit) }) {
			return nil, fmt.Errorf("recompute: no unit matches %.80q; units are %s", rule.Unit, strings.Join(units, ", "))
		}
	}
	r := &rewriter{p: q, ops: train.Phases[0].Ops, policy: policies, drop: opt.Drop, made: map[graph.BufID]bool{}}
	r.number()
	r.w = graph.NewEditor(&train.Phases[0])
	names := map[string]int{}
	for s := range r.stretches() {
		r.rewriteStretch(s, names)
	}
	r.w.Commit()
	if err := r.checkDrops(p); err != nil {
		return nil, err
	}
	dropOutputs(q, train.Phases[0].Ops)
	return q, nil
}

// value is the contents of a root buffer between two writes.
type value struct {
	root  graph.BufID
	by    int // index of the operation that makes it; −1: it exists before the phase
	prev  int // the value that was changed in place to make it; −1: none
	until int // index of the operation that replaces it; len(ops) if none does
	read  []int
	keep  bool
}

type rewriter struct {
	p      *graph.Program
	ops    []graph.Op // the phase's operations before the rewrite
	w      *graph.Editor
	policy []Policy
	vals   []value
	ins    [][]int // value by operation and input
	outs   [][]int // value by operation and output

	drop    []string
	dropped []bool               // by value: a pattern of Drop names it
	made    map[graph.BufID]bool // buffers that are recomputed
}

// number gives every value a number, and marks those that every policy keeps.
func (r *rewriter) number() {
	current := map[graph.BufID]int{}
	get := func(root graph.BufID) int {
		v, ok := current[root]
		if !ok {
			r.vals = append(r.vals, value{root: root, by: -1, prev: -1, until: len(r.ops), keep: true})
			v = len(r.vals) - 1
			current[root] = v
		}
		return v
	}
	for i := range r.ops {
		op := &r.ops[i]
		ins, outs := make([]int, len(op.In)), make([]int, len(op.Out))
		for a, id := range op.In {
			ins[a] = -1
			if id != graph.NoBuf {
				root, _ := r.p.Resolve(id, nil)
				ins[a] = get(root)
				r.vals[ins[a]].read = append(r.vals[ins[a]].read, i)
			}
		}
		made := map[graph.BufID]int{}
		for a, o := range op.Out {
			outs[a] = -1
			if o.Buf == graph.NoBuf {
				continue
			}
			root, lo, hi := graph.Span(r.p, o.Buf)
			if v, ok := made[root]; ok { // two parts of one buffer
				outs[a] = v
				continue
			}
			v := value{root: root, by: i, prev: -1, until: len(r.ops)}
			if old, ok := current[root]; ok {
				r.vals[old].until = i
				if o.Mode != graph.Write || lo > 0 || hi < r.p.Buf(root).Bytes() {
					v.prev = old
				}
			} else if o.Mode != graph.Write {
				v.prev = get(root)
				r.vals[v.prev].until = i
			}
			_, passing := r.p.MicroOf(root) // values that micro-batches share are not recomputed for one
			v.keep = o.Mode == graph.Accum || !passing || op.Pass != graph.Forward || op.Skip != graph.NoBuf
			r.vals = append(r.vals, v)
			outs[a] = len(r.vals) - 1
			made[root] = outs[a]
			current[root] = outs[a]
		}
		r.ins, r.outs = append(r.ins, ins), append(r.outs, outs)
	}
	r.keepLoss()
	r.markDropped()
	r.keepAcross()
}

// keepLoss keeps the inputs and outputs of the operations that add to the loss.
func (r *rewriter) keepLoss() {
	for i := range r.ops {
		if r.p.Loss == graph.NoBuf || !slices.ContainsFunc(r.ops[i].Out, func(o graph.Out) bool { return o.Buf == r.p.Loss }) {
			continue
		}
		for _, v := range slices.Concat(r.ins[i], r.outs[i]) {
			if v >= 0 {
				r.vals[v].keep = true
			}
		}
	}
}

// keepAcross keeps values that the forward of other units reads, under policy Full and for values
// dropped by name. It also keeps all results of an operation if it keeps one of them.
func (r *rewriter) keepAcross() {
	for i := range r.vals {
		v := &r.vals[i]
		if v.by < 0 || r.policyOf(v.by) != Full && !r.dropped[i] {
			continue
		}
		for _, j := range v.read {
			if r.ops[j].Pass == graph.Forward && r.ops[j].Unit != r.ops[v.by].Unit {
				v.keep = true
			}
		}
	}
	for i := range r.ops {
		if !slices.ContainsFunc(r.outs[i], func(v int) bool { return v >= 0 && r.vals[v].keep }) {
			continue
		}
		for _, v := range r.outs[i] {
			if v >= 0 {
				r.vals[v].keep = true
			}
		}
	}
}

func (r *rewriter) policyOf(op int) Policy {
	if u := r.ops[op].Unit; u >= 0 {
		return r.policy[u]
	}
	return None
}

// cheap says whether selective recomputation recomputes an operation.
func cheap(op *graph.Op) bool {
	info, ok := op.Info()
	return ok && info.Cheap
}

// activationOf returns the pre-activation that a fused linear writes, if v is its activation. A
// LinearAct has no usable pre-activation: its y is the activation of the unrounded sum, so only the
// product can recompute it.
func (r *rewriter) activationOf(v int) (pre int, ok bool) {
	by := r.vals[v].by
	op := &r.ops[by]
	a, _ := op.Attr.(graph.LinearAttr)
	if op.Kind != graph.Linear || a.Act == graph.ActNone || len(op.Out) < 2 || op.Out[1].Buf == graph.NoBuf || r.outs[by][0] != v {
		return -1, false
	}
	return r.outs[by][1], true
}

// stretch is a run of backward operations of one unit, [first, last].
type stretch struct{ first, last int }

// stretches goes through the stretches of the phase, in order.
func (r *rewriter) stretches() iter.Seq[stretch] {
	return func(yield func(stretch) bool) {
		for i := 0; i < len(r.ops); i++ {
			if r.ops[i].Pass != graph.Backward {
				continue
			}
			first := i
			for i+1 < len(r.ops) && r.ops[i+1].Pass == graph.Backward && r.ops[i+1].Unit == r.ops[first].Unit {
				i++
			}
			if !yield(stretch{first, i}) {
				return
			}
		}
	}
}

// clone is an operation to repeat in a stretch: ops[op] or, with act, only the activation that is
// fused into ops[op].
type clone struct {
	op      int
	act     bool
	ins     []int // values read
	outs    []int // values made
	emitted bool
}

// available says whether a value stays in its buffer until the end of a stretch.
func (r *rewriter) available(v int, s stretch) bool { return r.vals[v].until > s.last }

// planner finds the clones that a stretch needs.
type planner struct {
	r     *rewriter
	s     stretch
	order []*clone       // by forward position
	make  map[int]*clone // by value: the clone that makes it
	state map[int]int8   // by value: 1: can be recomputed, 2: cannot
}

// want says whether v must be recomputed for stretch s.
func (r *rewriter) want(v int, s stretch) bool {
	val := &r.vals[v]
	return val.by >= 0 && !val.keep && (r.dropped[v] || r.policyOf(val.by) != None) && val.by < s.first
}

// plan finds the clones that recompute value v, and says whether that is possible.
func (pl *planner) plan(v int) bool {
	if st := pl.state[v]; st != 0 {
		return st == 1
	}
	pl.state[v] = 2 // a value never depends on itself; this ends the search early
	r := pl.r
	val := &r.vals[v]
	if val.by < 0 || r.ops[val.by].Pass != graph.Forward || r.ops[val.by].Skip != graph.NoBuf {
		return false
	}
	c := &clone{op: val.by}
	op := &r.ops[val.by]
	if pre, ok := r.activationOf(v); ok && !r.dropped[pre] && (r.policyOf(val.by) == Selective || r.dropped[v] && r.policyOf(val.by) != Full) {
		c.act, c.ins, c.outs = true, []int{pre}, []int{v}
	} else {
		if r.policyOf(val.by) == Selective && !cheap(op) && !r.dropped[v] {
			return false
		}
		for _, o := range op.Out {
			if o.Buf != graph.NoBuf && o.Mode == graph.Accum {
				return false
			}
		}
		c.ins, c.outs = r.ins[val.by], r.outs[val.by]
	}
	need := append([]int(nil), c.ins...)
	for a, o := range c.outs {
		if o < 0 || r.vals[o].prev < 0 {
			continue
		}
		// A write of a part needs the rest of the buffer, which no clone provides.
		if op.Out[a].Mode == graph.Write || !slices.Contains(c.ins, r.vals[o].prev) {
			return false
		}
		need = append(need, r.vals[o].prev)
	}
	for _, in := range need {
		if in < 0 || pl.state[in] == 1 {
			continue
		}
		if r.want(in, pl.s) && pl.plan(in) {
			continue
		}
		switch {
		case r.available(in, pl.s) && !r.idle(in):
		case pl.plan(in), r.available(in, pl.s):
		default:
			return false
		}
	}
	for _, o := range c.outs {
		if o >= 0 {
			pl.state[o] = 1
			pl.make[o] = c
		}
	}
	pl.order = append(pl.order, c)
	return true
}

func (r *rewriter) rewriteStretch(s stretch, names map[string]int) {
	pl := &planner{r: r, s: s, make: map[int]*clone{}, state: map[int]int8{}}
	wanted := map[int]bool{}
	for i := s.first; i <= s.last; i++ {
		for _, v := range r.ins[i] {
			if v >= 0 && r.want(v, s) && pl.plan(v) {
				wanted[v] = true
				r.made[r.vals[v].root] = true
			}
		}
	}
	if len(wanted) == 0 {
		return
	}
	e := &emitter{r: r, pl: pl, live: map[int]graph.BufID{}, names: names, wanted: wanted}
	e.needed()
	for i := s.first; i <= s.last; i++ {
		e.at = i
		op := &r.w.Base[i].Op
		for a, v := range r.ins[i] {
			if v >= 0 && wanted[v] {
				e.emit(pl.make[v])
				op.In[a] = e.mapped(op.In[a], e.live[v])
			}
		}
	}
}

// emitter inserts the clones of one stretch.
type emitter struct {
	views  map[[2]graph.BufID]graph.BufID // by buffer and new root: the corresponding view of that root
	r      *rewriter
	pl     *planner
	wanted map[int]bool
	use    map[*clone]bool
	live   map[int]graph.BufID // value → root buffer of its clone
	at     int                 // index of the operation that reads the values; clones are put before it
	names  map[string]int
}

// needed marks the planned clones that a wanted value depends on.
func (e *emitter) needed() {
	e.use = map[*clone]bool{}
	var mark func(v int)
	mark = func(v int) {
		c := e.pl.make[v]
		if c == nil || e.use[c] {
			return
		}
		e.use[c] = true
		for _, in := range e.reads(c) {
			mark(in)
		}
	}
	for v := range e.wanted {
		mark(v)
	}
}

// reads lists the values that a clone reads, including those that it changes in place.
func (e *emitter) reads(c *clone) []int {
	var list []int
	for _, v := range c.ins {
		if v >= 0 {
			list = append(list, v)
		}
	}
	for _, v := range c.outs {
		if v >= 0 && e.r.vals[v].prev >= 0 {
			list = append(list, e.r.vals[v].prev)
		}
	}
	return list
}

// emit inserts c after the clones whose results it reads. A clone that works in place comes after
// all others that read the value that it overwrites.
func (e *emitter) emit(c *clone) {
	if c.emitted {
		return
	}
	c.emitted = true
	r := e.r
	for _, v := range e.reads(c) {
		if from := e.pl.make[v]; from != nil {
			e.emit(from)
		}
	}
	for _, o := range c.outs {
		if o < 0 || r.vals[o].prev < 0 {
			continue
		}
		for _, other := range e.pl.order {
			if other == c || !e.use[other] || other.emitted {
				continue
			}
			if slices.Contains(e.reads(other), r.vals[o].prev) {
				e.emit(other)
			}
		}
	}
	src := &r.ops[c.op]
	op := *src
	op.Pass, op.Source, op.Wait, op.Record, op.Work = graph.Recompute, src.Name, nil, 0, graph.NoBuf
	if c.act {
		op.Kind, op.Attr = graph.Activation, graph.ActAttr{Act: src.Attr.(graph.LinearAttr).Act}
		op.In = []graph.BufID{src.Out[1].Buf}
		op.Out = []graph.Out{src.Out[0]}
	} else {
		op.In, op.Out = append([]graph.BufID(nil), src.In...), append([]graph.Out(nil), src.Out...)
	}
	suffix := "/recompute"
	if n := e.names[src.Name]; n > 0 {
		suffix = fmt.Sprintf("/recompute.%d", n)
	}
	e.names[src.Name]++
	op.Name = src.Name + suffix
	for a, v := range c.ins {
		if v < 0 {
			continue
		}
		if root, ok := e.live[v]; ok {
			op.In[a] = e.mapped(op.In[a], root)
		}
	}
	for a, v := range c.outs {
		if v < 0 {
			continue
		}
		root, ok := e.live[v]
		prev := r.vals[v].prev
		if !ok && prev >= 0 {
			// In place: the buffer of the old value's clone becomes that of the new value. It
			// always exists: the forward has overwritten the old value, so plan has cloned it.
			root, ok = e.live[prev]
		}
		if !ok {
			b := *r.p.Buf(r.vals[v].root)
			b.Name, b.Class, b.Life = b.Name+suffix, graph.Activations, graph.LifePhase
			root = r.p.AddBuffer(b)
		}
		e.live[v] = root
		op.Out[a].Buf = e.mapped(op.Out[a].Buf, root)
	}
	r.w.Before(e.at, op)
}

// mapped returns the buffer or view in root that corresponds to id in its own root.
func (e *emitter) mapped(id, root graph.BufID) graph.BufID {
	p := e.r.p
	b := *p.Buf(id)
	if b.View == nil {
		return root
	}
	key := [2]graph.BufID{id, root}
	if view, ok := e.views[key]; ok {
		return view
	}
	_, off := p.Resolve(id, nil)
	b.View = &graph.View{Base: root, Offset: off}
	b.Class, b.Life = graph.Activations, graph.LifePhase
	if e.views == nil {
		e.views = map[[2]graph.BufID]graph.BufID{}
	}
	e.views[key] = p.AddBuffer(b)
	return e.views[key]
}

// dropOutputs removes outputs of linears that no operation reads any more.
func dropOutputs(p *graph.Program, ops []graph.Op) {
	used := map[graph.BufID]int{}
	for i := range ops {
		graph.Effects(&ops[i], func(e graph.Effect) {
			root, _ := p.Resolve(e.Buf, nil)
			used[root]++
		})
	}
	for i := range ops {
		op := &ops[i]
		if op.Kind != graph.Linear || len(op.Out) < 2 || op.Out[1].Buf == graph.NoBuf {
			continue
		}
		if root, _ := p.Resolve(op.Out[1].Buf, nil); used[root] == 1 {
			op.Out[1].Buf = graph.NoBuf
		}
	}
}
