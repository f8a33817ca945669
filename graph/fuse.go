package graph

// Fuse joins each linear with the activation of its result, as kernels can:
//
//	before:  pre = x·w + bias          after:  y, pre = act(x·w + bias)
//	         y = act(pre)
//
// where pre has no other use but the activation's derivative; if it has none of
// those either (evaluation, or nothing below is trained), pre disappears. The
// fused operation keeps the linear's name and place, and by definition its bits:
// the epilogue applies the same activation to the same sums. Run it after
// Differentiate and before recomputation, so that clones are fused too.
func Fuse(p *Program) *Program {
	p = p.Clone()
	for i := range p.Sections {
		for j := range p.Sections[i].Phases {
			fuse(p, &p.Sections[i].Phases[j])
		}
	}
	return p
}

// use is an operation's access to a root buffer.
type use struct {
	op    int
	write bool
}

func fuse(p *Program, ph *Phase) {
	uses := map[BufID][]use{}
	for i := range ph.Ops {
		eachBuf(p, &ph.Ops[i], func(root BufID, write bool) { uses[root] = append(uses[root], use{i, write}) })
	}
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
			continue // y's memory is in use before the activation
		}
		a.Act = act.Attr.(ActAttr).Act
		lin.Attr = a
		lin.Out = []Out{act.Out[0], {NoBuf, Write}}
		if kept {
			lin.Out[1].Buf = pre
		}
		gone[at] = true
	}
	ops := ph.Ops[:0]
	for i := range ph.Ops {
		if !gone[i] {
			ops = append(ops, ph.Ops[i])
		}
	}
	ph.Ops = ops
}

// activationOf returns the one activation that reads the result of linear i, or
// −1 where it has other uses than that and derivatives of that activation; kept
// says whether there are such derivatives.
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

// eachBuf calls f with the root of every buffer that op uses.
func eachBuf(p *Program, op *Op, f func(root BufID, write bool)) {
	one := func(id BufID, write bool) {
		if id != NoBuf {
			root, _ := p.Resolve(id, nil)
			f(root, write)
		}
	}
	for _, id := range op.In {
		one(id, false)
	}
	one(op.Skip, false)
	one(op.Work, true)
	for _, o := range op.Out {
		one(o.Buf, true)
	}
}
