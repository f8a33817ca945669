package graph

import "slices"

// Stages returns the number of stages of the program's pipeline, 1 if it has none.
func (p *Program) Stages() int {
	if a := p.AxisOf(PipelineAxis); a >= 0 {
		return p.Mesh[a].Size
	}
	return 1
}

// runs says whether ranks of a stage run an operation: those of no unit run on all.
func (p *Program) runs(op *Op, stage int) bool {
	return op.Unit < 0 || p.Units[op.Unit].Stage == stage
}

// Role returns what the ranks of one stage of a pipeline run: the operations of the stage's
// units and those of no unit, but for copies of tokens, targets and keys that the stage does not
// read. Buffers keep their IDs. Those of other stages are used by nothing, and their units are
// empty. p must not have its events yet.
func (p *Program) Role(stage int) *Program {
	q := p.Clone()
	read := make([]bool, len(q.Buffers))
	q.eachOps(func(ops []Op) []Op {
		ops = slices.DeleteFunc(ops, func(op Op) bool { return !p.runs(&op, stage) })
		for i := range ops {
			Effects(&ops[i], func(e Effect) {
				if e.Read {
					root, _ := q.Resolve(e.Buf, nil)
					read[root] = true
				}
			})
		}
		return ops
	})
	q.eachOps(func(ops []Op) []Op {
		return slices.DeleteFunc(ops, func(op Op) bool {
			if op.Unit >= 0 || op.Kind != Copy || !q.Buf(op.In[0]).Port.In() || q.Buf(op.In[0]).Port == PortInput {
				return false
			}
			root, _ := q.Resolve(op.Out[0].Buf, nil)
			if !read[root] {
				q.Buf(op.In[0]).Port = NoPort
			}
			return !read[root]
		})
	})
	for i := range q.Sections {
		for j := range q.Sections[i].Phases {
			ph := &q.Sections[i].Phases[j]
			names := map[string]bool{}
			for k := range ph.Ops {
				names[ph.Ops[k].Name] = true
			}
			ph.Throttles = slices.DeleteFunc(ph.Throttles, func(t Throttle) bool { return !names[t.Before] || !names[t.After] })
		}
	}
	for u := range q.Units {
		if was := q.Units[u]; was.Stage != stage {
			q.Units[u] = Unit{Name: was.Name, Frozen: was.Frozen, Block: was.Block, Stage: was.Stage}
		}
	}
	return q
}

// eachOps replaces the operations of each phase.
func (p *Program) eachOps(by func(ops []Op) []Op) {
	for i := range p.Sections {
		for j := range p.Sections[i].Phases {
			ph := &p.Sections[i].Phases[j]
			ph.Ops = by(ph.Ops)
		}
	}
}
