package graph

import "slices"

// Stages returns the number of stages of the program's pipeline, 1 if it has none.
func (p *Program) Stages() int {
	if a := p.AxisOf(PipelineAxis); a >= 0 {
		return p.Mesh[a].Size
	}
	return 1
}

// runs says whether ranks of a stage run an operation. Operations without a unit run on all ranks.
func (p *Program) runs(op *Op, stage int) bool {
	return op.Unit < 0 || p.Units[op.Unit].Stage == stage
}

// throttlesOf returns the throttles whose two operations are both in the list.
func (ph *Phase) throttlesOf(ops []Op) []Throttle {
	in := make(map[string]bool, 2*len(ph.Throttles)) // by name of a throttle's operation: whether it is in the list
	for _, t := range ph.Throttles {
		in[t.Before], in[t.After] = false, false
	}
	for k := range ops {
		if _, ok := in[ops[k].Name]; ok {
			in[ops[k].Name] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(ph.Throttles), func(t Throttle) bool { return !in[t.Before] || !in[t.After] })
}

// Role returns the program that the ranks of one pipeline stage run: the operations of the stage's
// units and those without a unit. It leaves out copies (of tokens, targets, keys and flags) that
// the stage does not read. Units of other stages are empty, and their parameters have no buffers.
// ids gives the role's ID of each of p's buffers, NoBuf for one that it does not use. p must not
// have events yet.
func (p *Program) Role(stage int) (q *Program, ids []BufID) {
	own := *p // clone only the parts that the stage runs: the program has the operations of all stages
	own.spare = false
	own.Sections, own.Units, own.Params = slices.Clone(p.Sections), slices.Clone(p.Units), slices.Clone(p.Params)
	for i := range own.Sections {
		own.Sections[i].Phases = slices.Clone(own.Sections[i].Phases)
	}
	read := make([]bool, len(p.Buffers))
	for _, ph := range own.Phases() {
		n := 0
		for i := range ph.Ops {
			if p.runs(&ph.Ops[i], stage) {
				n++
			}
		}
		list := make([]Op, 0, n)
		for i := range ph.Ops {
			op := &ph.Ops[i]
			if !p.runs(op, stage) {
				continue
			}
			list = append(list, *op)
			Effects(op, func(e Effect) {
				if e.Read {
					root, _ := p.Resolve(e.Buf, nil)
					read[root] = true
				}
			})
		}
		ph.Ops = list
	}
	var unread []BufID
	for _, ph := range own.Phases() {
		ph.Ops = slices.DeleteFunc(ph.Ops, func(op Op) bool {
			if op.Unit >= 0 || op.Kind != Copy || p.Buf(op.In[0]).Port == PortInput {
				return false
			}
			root, _ := p.Resolve(op.Out[0].Buf, nil)
			if read[root] || p.Buf(root).Port != NoPort || p.Buf(root).Life == LifeRun {
				return false
			}
			if p.Buf(op.In[0]).Port.In() {
				unread = append(unread, op.In[0])
			}
			return true
		})
		ph.Throttles = ph.throttlesOf(ph.Ops)
	}
	for u := range own.Units {
		if was := own.Units[u]; was.Stage != stage {
			own.Units[u] = Unit{Name: was.Name, Frozen: was.Frozen, Block: was.Block, Stage: was.Stage}
		}
	}
	for i := range own.Params {
		if prm := &own.Params[i]; p.Units[prm.Unit].Stage != stage {
			prm.Value, prm.Grad = NoBuf, NoBuf
		}
	}
	used, _ := own.used()
	for _, id := range unread {
		used[id] = false
	}
	return own.keeping(used, 0)
}
