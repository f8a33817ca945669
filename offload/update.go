package offload

import (
	"cmp"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// placeUpdate moves the phases of the update (zero.Optimizer.Section) into every form of the step
// (graph.Form). Updates on the device follow the last micro-step, as phase "update". Updates on
// the host would run there with nothing to overlap, so they are moved:
//
//	nothing needs the global norm                 clipping or loss scaling, Ahead ≥ 1
//	compute:  bwd u ● │ bwd u−1 …                 compute:  fwd u−1 … │ ●fwd u …
//	host:            ●update u                    host:      update u ●       (of the step before)
//
// Without clipping and loss scaling, the update of a unit is in the last micro-step, after the
// last use of its parameters and after its gradient is reduced.
//
// With either, the step's section begins with the update of the previous step. Each unit's update
// is placed Ahead units before the unit's first use, which waits for it. The gradients of the last
// micro-step wait in host memory; they are copied there as soon as they are reduced (or stay in the
// space of Options.Gradients). The rules are skipped until a step has left gradients. Section
// "flush" runs the remaining updates, before states are read or written.
//
// A pipeline uses the second form too. With the first, a stage could update its parameters before
// all stages know the loss of the step, which may end the step.
//
// In both cases a gradient's squares are summed in the memory space of its reduction. The bits do
// not change: the sums are exact, and the rules read the same values.
//
// Every form of a step (with or without the cache of frozen layers) gets the same updates, so
// that one form can run the updates that another one has deferred.
func (r *rewriter) placeUpdate() {
	at := slices.IndexFunc(r.p.Sections, func(s graph.Section) bool { return s.Kind == graph.SectionUpdate })
	if at < 0 {
		return // nothing is trained
	}
	parts := r.p.Sections[at].Phases
	r.p.Sections = slices.Delete(r.p.Sections, at, at+1)
	d := &deferral{idle: graph.NoBuf, coef: graph.NoBuf, pending: map[int]graph.BufID{}}
	for i := range r.p.Sections {
		if sec := &r.p.Sections[i]; sec.Kind == graph.SectionStep {
			r.placeIn(sec, parts, d)
		}
	}
	if d.flush.Ops != nil {
		r.p.Sections = append(r.p.Sections, graph.NewSection(graph.SectionFlush, graph.FormWhole, d.flush))
	}
}

// deferral has the buffers of deferred updates, which all forms of a step share.
type deferral struct {
	idle, coef graph.BufID
	hyper      graph.BufID         // copy of Hyper for the step whose update is deferred, in host memory
	pending    map[int]graph.BufID // by unit: its gradient in host memory
	flush      graph.Phase
}

// placeIn places the phases of the update in one form of the step.
func (r *rewriter) placeIn(sec *graph.Section, parts []graph.Phase, d *deferral) {
	needsNorm := r.p.Scaler != nil || r.p.Stages() > 1
	for i := range parts {
		for k := range parts[i].Ops {
			if op := &parts[i].Ops[k]; op.Kind == graph.ClipCoef {
				needsNorm = needsNorm || op.Attr.(graph.ClipAttr).Max > 0
			}
		}
	}
	onHost := len(r.hostUnits) > 0 && !(needsNorm && r.o.Ahead == 0) // Ahead 0: copies and computation alternate
	groups := map[int]*group{}
	var order []*group
	of := func(unit int) *group {
		g := groups[unit]
		if g == nil {
			g = &group{unit: unit, grad: r.p.Units[unit].Grad.Update, at: -1, reduced: -1}
			groups[unit] = g
			order = append(order, g)
		}
		return g
	}
	var rest, start []graph.Op
	for i := range parts {
		ops := graph.CloneOps(parts[i].Ops)
		away := onHost && len(ops) > 0 && r.hostUnits[ops[0].Unit]
		switch kind := parts[i].Kind; {
		case kind == graph.UpdateSum && away:
			for k := range ops {
				ops[k].Pass = graph.Backward
			}
			of(ops[0].Unit).sums = ops
		case kind == graph.UpdateRule && away:
			of(ops[0].Unit).rule = ops
		case kind == graph.UpdateStart && onHost:
			start = ops
		default:
			rest = append(rest, ops...)
		}
	}
	sec.Phases = append(sec.Phases, graph.Phase{Name: "update", Kind: graph.UpdatePhase, Repeat: 1, Ops: rest})
	switch {
	case !onHost:
	case needsNorm:
		r.deferred(sec, order, start, d)
	default:
		r.early(sec, order, start)
	}
}

// group is the update of one unit.
type group struct {
	unit       int
	sums, rule []graph.Op
	grad       graph.BufID
	at         int // index in the phase that receives it: early puts the rule after it, deferred before
	reduced    int // index of the last operation on its gradient
}

// touches calls visit for every operation of ops that uses a buffer of a group: its gradient, or a
// resident buffer.
func (r *rewriter) touches(ops []graph.Op, groups []*group, visit func(g *group, i int, grad bool)) {
	type use struct {
		g    *group
		grad bool
	}
	users := map[graph.BufID]use{}
	for _, g := range groups {
		for i := range g.rule {
			effects(&g.rule[i], r.root, func(root graph.BufID, _ graph.Effect) {
				if m, ok := r.member(root); ok && m.unit == g.unit {
					users[root] = use{g, root == r.root(g.grad)}
				}
			})
		}
	}
	for i := range ops {
		effects(&ops[i], r.root, func(root graph.BufID, _ graph.Effect) {
			if u, ok := users[root]; ok {
				visit(u.g, i, u.grad)
			}
		})
	}
}

// early moves each unit's update into the last micro-step.
func (r *rewriter) early(sec *graph.Section, groups []*group, start []graph.Op) {
	ph := &sec.Phases[len(sec.Phases)-2]
	r.touches(ph.Ops, groups, func(g *group, i int, grad bool) {
		g.at = max(g.at, i)
		if grad {
			g.reduced = max(g.reduced, i)
		}
	})
	// Without clipping and scaling the coefficient of every update is 1.
	coef := r.p.AddBuffer(graph.Buffer{Name: "update_coef", DType: graph.F32, Shape: []int64{1}, Class: graph.Workspace, Life: graph.LifeStep, Unit: -1})
	set := r.p.Scalars[0]
	old := set.Coef
	set.Coef = coef
	r.p.Scalars = append(r.p.Scalars, set)
	w, begin := graph.NewInserter(ph), r.inputsEnd(ph.Ops)
	for _, op := range append(start, fillOp("update_coef", coef, 1)) {
		w.Before(begin, op)
	}
	for _, g := range groups {
		for _, op := range g.sums {
			w.After(g.reduced, op)
		}
	}
	for _, g := range groups {
		graph.Replace(g.rule, old, coef)
		for _, op := range g.rule {
			w.After(g.at, op)
		}
	}
	r.settleGrads(ph, groups) // uses the groups' indices before the insertions
	w.Commit()
}

// settleGrads keeps gradients on the device if the micro-step that makes them also runs their
// update: they would be copied home and immediately copied back. A gradient that waits while other
// units' gradients are made (a tied head's) is not kept.
func (r *rewriter) settleGrads(ph *graph.Phase, groups []*group) {
	if !ph.First || !ph.Last {
		return
	}
	starts := map[graph.BufID]int{}            // by gradient: index of the first operation on it
	firsts := make([]graph.BufID, len(ph.Ops)) // by operation: the gradient whose first operation it is
	for i := range ph.Ops {
		firsts[i] = graph.NoBuf
		effects(&ph.Ops[i], r.root, func(root graph.BufID, e graph.Effect) {
			if m, ok := r.member(root); !ok || m.kind != grads {
				return
			}
			if _, ok := starts[root]; !ok {
				starts[root] = i
			}
			if e.Write {
				firsts[i] = root
			}
		})
	}
	for _, g := range groups {
		root := r.root(g.grad)
		first, ok := starts[root]
		if !ok || r.members[root].kind != grads || r.homes[grads][g.unit] == graph.Device {
			continue
		}
		alone := true
		for i := first; i <= g.reduced; i++ {
			alone = alone && (firsts[i] == graph.NoBuf || firsts[i] == root)
		}
		before, seen := r.stays[root]
		r.stays[root] = alone && (before || !seen) // must hold in every form of the step
	}
	// A unit's gradients are made only after the update of the unit Ahead + 1 before it. This
	// bounds the number of units whose gradients the device holds.
	var list []*group
	for _, g := range groups {
		if r.stays[r.root(g.grad)] {
			list = append(list, g)
		}
	}
	slices.SortFunc(list, func(a, b *group) int { return cmp.Compare(starts[r.root(a.grad)], starts[r.root(b.grad)]) })
	for k := range list {
		if j := k - r.o.Ahead - 1; j >= 0 && list[j].at < starts[r.root(list[k].grad)] {
			done := list[j].rule[len(list[j].rule)-1].Name
			ph.Throttles = append(ph.Throttles, graph.Throttle{Before: done, After: ph.Ops[starts[r.root(list[k].grad)]].Name})
		}
	}
}

// deferred moves each unit's update into the next step's first micro-step.
func (r *rewriter) deferred(sec *graph.Section, groups []*group, start []graph.Op, d *deferral) {
	up := &sec.Phases[len(sec.Phases)-1]
	flag := func(name string, v float64) graph.Op { return fillOp(name, d.idle, v) }
	firstForm := d.idle == graph.NoBuf
	if firstForm {
		if s := r.p.Scaler; s != nil {
			d.idle = s.Overflow
		} else {
			d.idle = r.p.AddBuffer(graph.Buffer{Name: "update_idle", DType: graph.I32, Shape: []int64{1}, Class: graph.Workspace, Life: graph.LifeRun, Unit: -1})
		}
		b := *r.p.Buf(r.p.Hyper)
		b.Name, b.Space, b.Class, b.Life, b.View = "update_hyper", graph.Host, graph.Workspace, graph.LifeRun, nil
		d.hyper = r.p.AddBuffer(b)
		d.coef = r.p.Scalars[0].Coef
		r.p.Scalars = append(r.p.Scalars, graph.Scalars{Hyper: d.hyper, Coef: d.coef, Skip: d.idle})
		r.keep(d.idle)
		r.keep(d.coef)
		if init := r.p.SectionOf(graph.SectionInit, graph.FormWhole); init != nil {
			init.Phases[0].Ops = append(init.Phases[0].Ops, flag("update_idle", 1))
		}
	}
	if r.p.Scaler == nil {
		up.Ops = append(up.Ops, flag("update_idle/pending", 0))
	}
	up.Ops = append(up.Ops, graph.NewCopy("update_hyper/park", r.p.Hyper, d.hyper, graph.CopyOut, graph.Update, -1))
	last := &sec.Phases[len(sec.Phases)-2]
	r.touches(last.Ops, groups, func(g *group, i int, grad bool) {
		if grad {
			g.reduced = max(g.reduced, i)
		}
	})
	w, begin := graph.NewInserter(last), r.inputsEnd(last.Ops)
	for _, op := range start {
		w.Before(begin, op)
	}
	for _, g := range groups {
		for _, op := range g.sums {
			w.After(g.reduced, op)
		}
		if r.homes[grads][g.unit] == graph.Device {
			w.After(g.reduced, r.streamOut(g, d))
		} else {
			r.keep(g.grad)
		}
		graph.Replace(g.rule, r.p.Hyper, d.hyper)
		for i := range g.rule {
			if op := &g.rule[i]; isRule(op) {
				op.Skip = d.idle
			}
		}
	}
	w.Commit()

	first := &sec.Phases[0]
	r.inputsFirst(first)
	for _, g := range groups {
		g.at = len(first.Ops)
	}
	r.touches(first.Ops, groups, func(g *group, i int, grad bool) { g.at = min(g.at, i) })
	slices.SortStableFunc(groups, func(a, b *group) int { return cmp.Compare(a.at, b.at) })
	w = graph.NewInserter(first)
	from := r.inputsEnd(first.Ops)
	flush := graph.Phase{Name: "flush", Repeat: 1}
	for k, g := range groups {
		at := from
		if j := k - r.o.Ahead; j >= 0 {
			at = max(at, groups[j].at)
		}
		at = min(at, g.at)
		for _, op := range graph.CloneOps(g.rule) {
			w.Before(at, op)
		}
		flush.Ops = append(flush.Ops, graph.CloneOps(g.rule)...)
	}
	w.Commit()
	if firstForm {
		d.flush = flush
		d.flush.Ops = append(d.flush.Ops, flag("update_idle", 1))
	}
}

// keep changes the lifetime of a buffer and its views to LifeRun.
func (r *rewriter) keep(id graph.BufID) {
	root := r.root(id)
	for i := range r.p.Buffers {
		if r.root(graph.BufID(i)) == root {
			r.p.Buffers[i].Life = graph.LifeRun
		}
	}
}

// streamOut returns the copy of a unit's reduced gradient to host memory, from which the update
// then reads it.
func (r *rewriter) streamOut(g *group, d *deferral) graph.Op {
	pending, ok := d.pending[g.unit]
	if !ok {
		b := *r.p.Buf(g.grad)
		b.Name, b.Space, b.Class, b.Life, b.View = "pending/"+r.p.Units[g.unit].Name, graph.Host, graph.Gradients, graph.LifeRun, nil
		pending = r.p.AddBuffer(b)
		d.pending[g.unit] = pending
	}
	graph.Replace(g.rule, g.grad, pending)
	return graph.NewCopy(r.p.Buf(pending).Name+"/park", g.grad, pending, graph.CopyOut, graph.Backward, g.unit)
}

// fillOp returns an operation that sets a scalar of the update.
func fillOp(name string, buf graph.BufID, v float64) graph.Op {
	op := graph.NewOp(graph.Fill, name, nil, []graph.Out{{Buf: buf}}, graph.FillAttr{Value: v})
	op.Pass = graph.Update
	return op
}

func (r *rewriter) copiesInput(op *graph.Op) bool {
	if op.Kind != graph.Copy {
		return false
	}
	b := r.p.Buf(op.Out[0].Buf)
	return b.Class == graph.Inputs && b.Space == graph.Device
}

// inputsFirst moves the copies of the inputs to the front of a phase, so that the forward does
// not wait for the gathers and updates there.
func (r *rewriter) inputsFirst(ph *graph.Phase) {
	ops := make([]graph.Op, 0, len(ph.Ops)+1) // Schedule joins phases
	for _, copies := range []bool{true, false} {
		for i := range ph.Ops {
			if r.copiesInput(&ph.Ops[i]) == copies {
				ops = append(ops, ph.Ops[i])
			}
		}
	}
	ph.Ops = ops
}

// inputsEnd returns the index after the last copy of an input, near the start of a phase.
func (r *rewriter) inputsEnd(ops []graph.Op) int {
	end := 0
	for i := range ops {
		if r.copiesInput(&ops[i]) {
			end = i + 1
		}
	}
	return end
}
