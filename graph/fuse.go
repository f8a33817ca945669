package graph

import "slices"

// Fuse joins each linear with the activation that follows it, for kernels that do both:
//
//	before:  pre = x·w + bias          after:  y, pre = act(x·w + bias)
//	         y = act(pre)
//
// It does so only if nothing but the activation's derivative reads pre. If there is no derivative
// either (in evaluation, or if nothing below is trained), pre disappears. The fused operation keeps
// the linear's name and place. The result has the same bits, except for activations in unrounded,
// since the epilogue applies the same activation to the same sums. Run it after Differentiate and
// before recomputation, so that clones are fused too.
//
// For activations in unrounded and values of 16 bits the fused operation is a LinearAct. Its
// epilogue applies the activation before the sum is rounded, which gives other bits. pre is then
// always written, so that training, evaluation and frozen layers use the same product. If nothing
// reads pre, it lives only during the operation. The choice depends only on types and on uses in
// the forward, which are the same at every stage and placement. No later pass may compute y from a
// kept pre.
func Fuse(p *Program, unrounded ...ActKind) *Program {
	p = p.Clone()
	for _, ph := range p.Phases() {
		fuse(p, ph, unrounded)
	}
	return p
}

// use is one operation's access to a root buffer.
type use struct {
	op    int
	write bool
}

// usesOf lists the uses of each root buffer in a phase, in program order.
func usesOf(p *Program, ph *Phase) map[BufID][]use {
	uses := map[BufID][]use{}
	for i := range ph.Ops {
		Effects(&ph.Ops[i], func(e Effect) {
			root, _ := p.Resolve(e.Buf, nil)
			uses[root] = append(uses[root], use{i, e.Write})
		})
	}
	return uses
}

// drop removes the marked operations from a phase.
func (ph *Phase) drop(gone []bool) {
	ops := ph.Ops[:0]
	for i := range ph.Ops {
		if !gone[i] {
			ops = append(ops, ph.Ops[i])
		}
	}
	ph.Ops = ops
}

func fuse(p *Program, ph *Phase, unrounded []ActKind) {
	uses := usesOf(p, ph)
	gone := make([]bool, len(ph.Ops))
	for i := range ph.Ops {
		lin := &ph.Ops[i]
		a, ok := lin.Attr.(LinearAttr)
		if lin.Kind != Linear || !ok || a.Act != ActNone || lin.Out[0].Mode != Write {
			continue
		}
		pre := lin.Out[0].Buf
		at, kept := activationOf(p, ph.Ops, i, uses[pre])
		if at < 0 {
			continue
		}
		act := &ph.Ops[at]
		root, _ := p.Resolve(act.Out[0].Buf, nil)
		if root != act.Out[0].Buf || uses[root][0].op != at {
			continue // y's memory is used between the linear and the activation
		}
		a.Act = act.Attr.(ActAttr).Act
		lin.Attr = a
		lin.Out = []Out{act.Out[0], {NoBuf, Write}}
		of16 := half(p, pre) && slices.Contains(unrounded, a.Act)
		if of16 {
			lin.Kind = LinearAct
		}
		if kept || of16 {
			lin.Out[1].Buf = pre
		}
		gone[at] = true
	}
	ph.drop(gone)
}

// activationOf returns the index of the only activation that reads the result of linear i.
// It returns −1 if anything else uses the result, except derivatives of that activation;
// kept says whether there are such derivatives.
func activationOf(p *Program, ops []Op, i int, uses []use) (at int, kept bool) {
	at = -1
	pre := ops[i].Out[0].Buf
	if b := &p.Buffers[pre]; b.View != nil || b.Life != LifePhase || len(uses) == 0 || uses[0].op != i {
		return -1, false
	}
	for _, u := range uses[1:] {
		op := &ops[u.op]
		switch {
		case u.write:
			return -1, false
		case op.Kind == Activation && op.In[0] == pre && at < 0:
			at = u.op
		case op.Kind == ActivationGrad && op.In[1] == pre && op.In[0] != pre:
			kept = true
		default:
			return -1, false
		}
	}
	if at < 0 {
		return -1, false
	}
	lin, act := &ops[i], &ops[at]
	if act.Out[0].Mode != Write || act.Stream != lin.Stream || act.Pass != lin.Pass || act.Skip != lin.Skip || len(act.Wait) > 0 || act.Record != 0 {
		return -1, false
	}
	return at, kept
}

// FuseGradients joins the gradient of a linear's input with the derivative of the
// activation that made the input, in 16 bits, for the given activations:
//
//	before:  dx = dy·wᵀ                after:  dpre = (dy·wᵀ)·act'(pre)
//	         dpre = dx·act'(pre)
//
// It does so only if nothing else reads dx. The bits differ from those of two operations, because
// the product is rounded once, after the derivative. Therefore all plans of a model must do it or
// none: the choice depends only on types and uses, which are the same at every stage. Run it after
// Fuse, which does not know LinearGradAct.
func FuseGradients(p *Program, acts ...ActKind) *Program {
	p = p.Clone()
	for _, ph := range p.Phases() {
		fuseGradients(p, ph, acts)
	}
	return p
}

func fuseGradients(p *Program, ph *Phase, acts []ActKind) {
	uses := usesOf(p, ph)
	gone := make([]bool, len(ph.Ops))
	for i := range ph.Ops {
		lin := &ph.Ops[i]
		at := derivativeOf(p, ph.Ops, i, uses)
		if at < 0 {
			continue
		}
		grad := &ph.Ops[at]
		a, act := lin.Attr.(LinearAttr), grad.Attr.(ActAttr).Act
		if !slices.Contains(acts, act) {
			continue
		}
		a.Act = act
		lin.Kind, lin.Attr = LinearGradAct, a
		lin.In = []BufID{lin.In[0], lin.In[1], grad.In[1]}
		lin.Out = []Out{{grad.Out[0].Buf, Write}}
		gone[at] = true
	}
	ph.drop(gone)
}

// derivativeOf returns the index of the activation's derivative that is the only reader of
// operation i's result. It returns −1 if i is not the gradient of a linear's input in 16
// bits, or cannot be fused. The derivative's other operand must be written before i.
func derivativeOf(p *Program, ops []Op, i int, uses map[BufID][]use) int {
	lin := &ops[i]
	a, ok := lin.Attr.(LinearAttr)
	if lin.Kind != LinearGradX || !ok || a.Int8 || lin.Out[0].Mode != Write {
		return -1
	}
	dx := lin.Out[0].Buf
	b := p.Buf(dx)
	of := uses[dx]
	if b.View != nil || b.Life != LifePhase || b.DType == F32 || len(of) < 2 || of[0].op != i || of[1].op == i {
		return -1
	}
	at := of[1].op
	grad := &ops[at]
	if grad.Kind != ActivationGrad || grad.In[0] != dx || grad.In[1] == dx || p.Buf(grad.In[1]).DType != b.DType || !slices.Equal(p.Buf(grad.In[1]).Shape, b.Shape) ||
		grad.Stream != lin.Stream || grad.Pass != lin.Pass || grad.Skip != lin.Skip || len(grad.Wait) > 0 || grad.Record != 0 {
		return -1
	}
	to := grad.Out[0]
	if to.Buf == dx { // in place: a later reader of dx reads dpre
		if to.Mode == Accum {
			return -1
		}
	} else if first := uses[to.Buf]; to.Mode != Write || len(of) > 2 || p.Buf(to.Buf).View != nil || len(first) == 0 || first[0].op != at {
		return -1
	}
	pre, _ := p.Resolve(grad.In[1], nil)
	for _, u := range uses[pre] {
		if u.write && u.op >= i && u.op <= at {
			return -1
		}
	}
	return at
}

// FuseBiasGradients joins the gradients of a linear's bias and weight, in 16 bits, into one
// operation. It replaces the weight's gradient:
//
//	before:  db = Σ over rows of dy    after:  dw, db = xᵀ·dy, Σ over rows of dy
//	         dw = xᵀ·dy
//
// The bits differ from those of two operations, because the product chooses the order in which db
// is summed. Therefore all plans of a model must do it or none: the choice depends only on types
// and uses, which are the same at every stage. Run it after Fuse, which does not know LinearGradWB.
func FuseBiasGradients(p *Program) *Program {
	p = p.Clone()
	for _, ph := range p.Phases() {
		fuseBiasGradients(p, ph)
	}
	return p
}

func fuseBiasGradients(p *Program, ph *Phase) {
	uses := usesOf(p, ph)
	gone := make([]bool, len(ph.Ops))
	biases := map[BufID][]int{} // by dy: bias gradients that are not fused yet
	for i := range ph.Ops {
		switch op := &ph.Ops[i]; op.Kind {
		case BiasGrad:
			biases[op.In[0]] = append(biases[op.In[0]], i)
		case LinearGradW:
			of := biases[op.In[1]]
			at := slices.IndexFunc(of, func(b int) bool { return biasOf(p, ph.Ops, b, i, uses) })
			if at < 0 {
				continue
			}
			op.Kind, op.Out = LinearGradWB, []Out{op.Out[0], ph.Ops[of[at]].Out[0]}
			gone[of[at]] = true
			biases[op.In[1]] = slices.Delete(of, at, at+1)
		}
	}
	ph.drop(gone)
}

// biasOf says whether bias gradient b and the later weight gradient i can be fused into one
// 16-bit operation at i's place. Both must read the same dy.
func biasOf(p *Program, ops []Op, b, i int, uses map[BufID][]use) bool {
	bias, lin := &ops[b], &ops[i]
	db, dw := bias.Out[0].Buf, lin.Out[0].Buf
	dy, _ := p.Resolve(lin.In[1], nil)
	sum, _ := p.Resolve(db, nil)
	weight, _ := p.Resolve(dw, nil)
	if a, ok := lin.Attr.(LinearAttr); !ok || a.Int8 || p.Buf(lin.In[1]).DType == F32 || p.Buf(db).DType != p.Buf(dw).DType || sum == weight ||
		bias.Stream != lin.Stream || bias.Pass != lin.Pass || bias.Skip != lin.Skip || bias.Unit != lin.Unit || len(bias.Wait) > 0 || bias.Record != 0 {
		return false
	}
	between := func(u use) bool { return u.op > b && u.op < i }
	return !slices.ContainsFunc(uses[sum], between) &&
		!slices.ContainsFunc(uses[dy], func(u use) bool { return u.write && between(u) })
}
