package graph

import "slices"

// Helpers of the derivative rules.

// dy returns the gradient of output k, with the output's shape.
func (d *differ) dy(k int) BufID {
	v := d.outs[d.i][k]
	if d.vals[v].root == d.p.Loss {
		return d.seed()
	}
	return d.as(d.vals[v].grad, d.out(k))
}

// seed returns a buffer with the derivative of the step's mean loss with respect to the program's
// Loss, times the loss scale. Loss itself is a sum.
func (d *differ) seed() BufID {
	if d.seedBuf == NoBuf {
		loss := d.p.Buffers[d.p.Loss]
		d.seedBuf = d.buffer(loss.Name+".grad", Buffer{DType: loss.DType, Shape: loss.Shape, Class: Activations, Unit: d.op.Unit})
		d.emit("seed", LossSeed, nil, []BufID{d.hyper()}, Out{d.seedBuf, Write})
	}
	return d.seedBuf
}

// emit appends a backward operation.
func (d *differ) emit(suffix string, kind Kind, attr any, ins []BufID, outs ...Out) {
	d.emitOp(Op{Kind: kind, Attr: attr}, suffix, ins, outs)
}

// emitOp does the same as emit for an operation that may come from Define.
func (d *differ) emitOp(op Op, suffix string, ins []BufID, outs []Out) {
	if d.err != nil {
		return
	}
	op.Name, op.In, op.Out, op.Work, op.Skip = d.unique(d.op.Name+"/"+suffix, "op "), ins, outs, NoBuf, NoBuf
	op.Stream, op.Pass, op.Unit, op.Source = Compute, Backward, d.op.Unit, d.op.Name
	d.readsIntact(ins)
	if err := Check(d.p, &op); err != nil && d.err == nil {
		d.err = err
	}
	d.bwd = append(d.bwd, op)
}

// readsIntact rejects a derivative that reads a forward buffer that was overwritten in
// place since, or that the kind table does not list in Saves.
func (d *differ) readsIntact(ins []BufID) {
	if d.inPlace {
		return
	}
	for _, id := range ins {
		if id == NoBuf || id >= d.nFwd || id == d.p.Hyper {
			continue
		}
		root, _ := d.p.Resolve(id, nil)
		if _, isGrad := d.grads[root]; isGrad {
			continue // the logits' buffer, which holds their gradient now
		}
		saved, intact := d.saves(d.i, func(v int) bool { return d.vals[v].root == root }),
			d.saves(d.i, func(v int) bool { return d.current[root] == v })
		if !saved {
			d.failf("its derivative reads %s, which the kind table does not list among what it saves", d.p.Buffers[id].Name)
		} else if !intact {
			d.failf("its derivative reads %s, which is overwritten in place; the operation that does so must not", d.p.Buffers[id].Name)
		}
	}
}

// saves says whether forward operation i saves for its derivative an operand whose value number
// satisfies is.
func (d *differ) saves(i int, is func(v int) bool) bool {
	info, _ := d.fwd[i].Info()
	ins, outs := info.Operands(d.fwd[i].Attr)
	for k, v := range d.ins[i] {
		if v >= 0 && is(v) && slices.Contains(info.Saves, ins[k].Name) {
			return true
		}
	}
	for k, v := range d.outs[i] {
		if v >= 0 && is(v) && slices.Contains(info.Saves, outs[k].Name) {
			return true
		}
	}
	return false
}

// slot describes the buffer for one contribution to the gradient of a value.
type slot struct {
	v    int
	like BufID // operand whose shape the contribution has
	out  Out
	own  bool // out is a new buffer, which close adds to the value's gradient
}

// none says that the gradient is not needed.
func (s slot) none() bool { return s.v < 0 }

// open, openWrite and openInto return the slot for a contribution to input j's gradient.
// open is for an output that can accumulate, openWrite for one that can only write, and
// openInto for one that writes into the buffer over where possible (NoBuf: no such buffer).
//
// A parameter's gradient buffer takes only outputs that can accumulate, because it accumulates over
// several micro-steps.
func (d *differ) open(j int) slot { return d.slot(j, true, NoBuf) }

func (d *differ) openWrite(j int) slot { return d.slot(j, false, NoBuf) }

func (d *differ) openInto(j int, over BufID) slot { return d.slot(j, false, over) }

func (d *differ) slot(j int, accum bool, over BufID) slot {
	if !d.needs(j) {
		return slot{v: -1, out: Out{NoBuf, Write}}
	}
	n := d.ins[d.i][j]
	v := &d.vals[n]
	s := slot{v: n, like: d.in(j)}
	mode := Write
	if over != NoBuf {
		mode = ReadWrite
	}
	switch {
	case v.param >= 0 && v.open == 0 && accum && !v.begun:
		s.out = Out{d.as(d.p.Params[v.param].Grad, s.like), Write}
		v.begun = true
	case v.param >= 0 && v.open == 0 && accum:
		s.out = Out{d.as(d.p.Params[v.param].Grad, s.like), Accum}
	case v.param < 0 && v.open == 0 && v.grad != NoBuf && accum && d.grads[v.grad] == 1:
		s.out = Out{d.as(v.grad, s.like), Accum}
	default:
		s.own = v.param >= 0 || v.open > 0 || v.grad != NoBuf
		if over == NoBuf {
			over = d.gradBuffer(n, s.like)
		}
		s.out = Out{over, mode}
		if !s.own {
			root, _ := d.p.Resolve(over, nil)
			d.hold(n, root)
		}
	}
	d.vals[n].open++
	return s
}

// close adds a contribution that was written to a new buffer to the value's gradient.
func (d *differ) close(suffix string, s slot) {
	if s.none() || d.err != nil {
		return
	}
	d.vals[s.v].open--
	if s.own {
		d.join(suffix+"+", s.v, s.out.Buf, true)
	}
}

// join adds g, a gradient of the value's shape, to the gradient of value n. last says that
// g is read later only as n's gradient, so that the sum may overwrite it.
func (d *differ) join(suffix string, n int, g BufID, last bool) {
	v := &d.vals[n]
	root, _ := d.p.Resolve(g, nil)
	if v.param >= 0 {
		mode := Accum
		if !v.begun {
			mode = Write
		}
		v.begun = true
		d.emit(suffix, Scale, ScaleAttr{1}, []BufID{g}, Out{d.as(d.p.Params[v.param].Grad, g), mode})
		return
	}
	if v.grad == NoBuf {
		d.hold(n, root)
		return
	}
	have := d.as(v.grad, g)
	switch {
	case d.grads[v.grad] == 1:
		d.emit(suffix, Add, nil, []BufID{have, g}, Out{have, ReadWrite})
	case last && d.sole(root):
		d.emit(suffix, Add, nil, []BufID{g, have}, Out{g, ReadWrite})
		d.hold(n, root)
	default:
		sum := d.gradBuffer(n, g)
		d.emit(suffix, Add, nil, []BufID{have, g}, Out{sum, Write})
		d.hold(n, sum)
	}
}

// into adds a gradient operation whose only output contributes to input j.
func (d *differ) into(j int, suffix string, kind Kind, attr any, ins ...BufID) {
	d.contribute(d.open(j), suffix, kind, attr, ins)
}

// intoOver does the same as into for an elementwise kind, whose output can overwrite dy. It
// overwrites dy if no other value holds dy and there is no gradient to accumulate into.
func (d *differ) intoOver(j int, suffix string, dy BufID, kind Kind, attr any, ins ...BufID) {
	d.contribute(d.slot(j, true, d.overDy(j, dy)), suffix, kind, attr, ins)
}

// writeOver does the same as intoOver for an operation that overwrites its output and cannot add to
// it.
func (d *differ) writeOver(j int, suffix string, dy BufID, kind Kind, attr any, ins ...BufID) {
	d.contribute(d.slot(j, false, d.overDy(j, dy)), suffix, kind, attr, ins)
}

func (d *differ) contribute(s slot, suffix string, kind Kind, attr any, ins []BufID) {
	if s.none() {
		return
	}
	d.emit(suffix, kind, attr, ins, s.out)
	d.close(suffix, s)
}

func (d *differ) overDy(j int, dy BufID) BufID {
	root, _ := d.p.Resolve(dy, nil)
	if !d.sole(root) || !slices.Equal(d.p.Buffers[dy].Shape, d.p.Buffers[d.in(j)].Shape) {
		return NoBuf
	}
	return dy
}

// gradients collects the outputs of one gradient operation: output k is the gradient of input
// by[k].
type gradients struct {
	d     *differ
	op    Op
	sig   []Operand
	by    []int
	slots []slot
}

// gradients opens the slots of op's outputs. It returns nil if none of the gradients is needed.
func (d *differ) gradients(op Op, by ...int) *gradients {
	info, ok := op.Info()
	if !ok {
		d.failf("its derivative applies the unknown kind %q", op.Kind)
		return nil
	}
	_, sig := info.Operands(op.Attr)
	if len(by) > len(sig) || d.err != nil {
		d.failf("its derivative takes %d outputs of %s, which has %d", len(by), op.Kind, len(sig))
		return nil
	}
	g, wanted := &gradients{d, op, sig, by, make([]slot, len(by))}, false
	for k, i := range by {
		if i < 0 || i >= len(d.op.In) {
			d.failf("its derivative gives a gradient to input %d, want 0 to %d", i, len(d.op.In)-1)
			return nil
		}
		g.slots[k] = d.slot(i, slices.Contains(sig[k].Modes, Accum), NoBuf)
		wanted = wanted || !g.slots[k].none()
	}
	if !wanted {
		return nil
	}
	return g
}

// add adds the operation. If a gradient is not needed, its output is absent if it is optional, and
// scratch if not. prefix starts the names of operations that add an output to another gradient.
func (g *gradients) add(suffix, prefix string, ins []BufID) {
	outs := make([]Out, len(g.slots))
	for k, s := range g.slots {
		outs[k] = s.out
		if s.none() && !g.sig[k].Optional {
			outs[k] = g.d.scratch(g.d.in(g.by[k]), "unused", NoBuf)
		}
	}
	g.d.emitOp(g.op, suffix, ins, outs)
	for k, s := range g.slots {
		g.d.close(prefix+g.sig[k].Name, s)
	}
}

// identity contributes dy itself to input j. last says that the derivative rule does not read dy
// again.
func (d *differ) identity(j int, suffix string, dy BufID, last bool) {
	if d.needs(j) && d.err == nil {
		d.join(suffix, d.ins[d.i][j], d.as(dy, d.in(j)), last)
	}
}

// scratch returns an output shaped like a buffer, for an intermediate or unneeded gradient.
// It overwrites over if that is dy and no other value holds it.
func (d *differ) scratch(like BufID, suffix string, over BufID) Out {
	if over != NoBuf {
		if root, _ := d.p.Resolve(over, nil); d.sole(root) {
			return Out{over, ReadWrite}
		}
	}
	b := d.p.Buffers[like]
	id := d.buffer(d.op.Name+"."+suffix, Buffer{DType: b.DType, Shape: b.Shape, Space: b.Space, Class: Activations, Unit: d.op.Unit})
	return Out{id, Write}
}

// reusable returns input j's own buffer if its gradient may overwrite it: no later forward
// operation has overwritten the value, and no derivative still to be added reads it.
func (d *differ) reusable(j int) BufID {
	n := d.ins[d.i][j]
	v := &d.vals[n]
	root := &d.p.Buffers[v.root]
	if v.param >= 0 || d.current[v.root] != n || root.Class != Activations || root.Life != LifePhase {
		return NoBuf
	}
	for i := range d.i {
		if d.saves(i, func(v int) bool { return v == n }) {
			return NoBuf
		}
	}
	return d.in(j)
}
