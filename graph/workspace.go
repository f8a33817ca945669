package graph

// Workspace returns the bytes of scratch that an operation needs on the target, a multiple of
// Align; 0 for none. It depends only on shapes and attribute, never on the number of threads. The
// operation must pass Check.
func (t Target) Workspace(p *Program, op *Op) int64 {
	info, _ := op.Info()
	if info == nil {
		return 0
	}
	work := info.work
	if t.CUDA.ProductBytes > 0 && op.Stream != HostWork {
		work = info.cudaWork
	}
	if work == nil {
		return 0
	}
	return work(t, p, op)
}

// AddWorkspace returns the program with a workspace for every operation that needs one on
// the target: a new buffer in the operation's memory space, alive while it runs.
//
//	y = linear(x, w)   →   y = linear(x, w) work h.0.attn.c_fc/work
//
// Operations that already have enough workspace are not changed. If ranks have uneven shares, the
// same operation in all micro-steps of a section shares one workspace. A rank that is idle in one
// micro-step then touches no more memory than is planned for another.
func AddWorkspace(p *Program, t Target) *Program {
	q := p.Clone()
	for si := range q.Sections {
		made := map[string]BufID{} // by operation name; only for shared workspaces
		for pi := range q.Sections[si].Phases {
			ops := q.Sections[si].Phases[pi].Ops
			share := q.Sections[si].Shares != nil && q.Sections[si].Phases[pi].Kind == MicroPhase
			for i := range ops {
				op := &ops[i]
				n := t.Workspace(q, op)
				if n == 0 || op.Work != NoBuf && q.Buffers[op.Work].Bytes() >= n {
					continue
				}
				space := Device
				if op.Stream == HostWork {
					space = Host
				}
				if share {
					if id, ok := made[op.Name]; ok && q.Buffers[id].Bytes() >= n {
						op.Work = id
						continue
					}
				}
				op.Work = q.AddBuffer(Buffer{
					Name: op.Name + "/work", DType: U8, Shape: []int64{n},
					Space: space, Class: Workspace, Life: LifePhase, Unit: op.Unit, Micro: op.Micro,
				})
				if q.Sections[si].Shares != nil {
					made[op.Name] = op.Work
				}
			}
		}
	}
	return q
}

// Lacks names the feature of an operation for which the target has no kernel; "" if there is a
// kernel for every feature.
func (t Target) Lacks(op *Op) string {
	if t.CUDA.ProductBytes == 0 || op.Stream == HostWork {
		return ""
	}
	if op.hasStarts() {
		return "rows of several documents"
	}
	switch a := op.Attr.(type) {
	case SliceAttr:
		return "slices of a vocabulary"
	case PosAttr:
		if a.Rows != (SliceAttr{}) {
			return "positions of a part of the rows"
		}
	case DropoutAttr:
		if a.Part != (SliceAttr{}) {
			return "dropout of a part of the rows"
		}
	case CapAttr:
		if a.Cap != 0 {
			return "a soft cap of logits"
		}
	case AttentionAttr:
		switch {
		case a.Cap != 0:
			return "attention with a soft cap"
		case a.Window != 0:
			return "attention with a sliding window"
		}
	case NormAttr:
		if a.PlusOne {
			return "an RMS norm with the gain 1 + weight"
		}
	}
	return ""
}

// hasStarts says whether the operation's rows hold several documents (Builder.Documents).
func (o *Op) hasStarts() bool {
	info, ok := o.Info()
	if !ok || len(o.In) == 0 {
		return false
	}
	ins, _ := info.Operands(o.Attr)
	n := len(o.In)
	return n == len(ins) && ins[n-1].Name == startsIn().Name && o.In[n-1] != NoBuf
}
