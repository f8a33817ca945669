package graph

// Editor inserts operations into one phase while the phase's own operations keep their
// indices. An inserted operation is placed before or after one of them, or at the end, in
// the order of insertion. A throttle names its operations by Node, not by index.
//
//	e := NewEditor(ph)
//	gather := e.Before(3, op)          … 2  gather  3 …
//	e.Throttle(e.Base[1], gather)      gather starts when 1 has finished
//	e.Split(5, parts)                  … 4  parts[0]  parts[1]  6 …
//	e.Commit()
//
// Base's operations may be changed in place until Commit; their names may not.
type Editor struct {
	Base []*Node // the phase's own operations

	ph            *Phase
	before, after [][]*Node // by base index; nil: none
	split         map[int][]*Node
	tail          []*Node
	throttles     [][2]*Node
}

// Node is an operation of a phase under edit.
type Node struct {
	Op Op
	at int // index in the phase, set by Commit
}

// NewEditor returns an editor of a phase, whose operations it copies.
func NewEditor(ph *Phase) *Editor {
	e := NewInserter(ph)
	ownOperands(len(e.Base), func(i int) *Op { return &e.Base[i].Op })
	return e
}

// NewInserter returns an editor of a phase that only inserts and splits. Base shares its operands
// with the phase, and perhaps with other phases, so the caller must not change it.
func NewInserter(ph *Phase) *Editor {
	e := &Editor{ph: ph}
	nodes := make([]Node, len(ph.Ops))
	e.Base = make([]*Node, len(ph.Ops))
	for i := range nodes {
		nodes[i].Op = ph.Ops[i]
		e.Base[i] = &nodes[i]
	}
	return e
}

// insert adds a node to the list of index i. It allocates the lists on first use, since most phases
// have insertions only before or only after their operations.
func (e *Editor) insert(lists *[][]*Node, i int, op Op) *Node {
	if *lists == nil {
		*lists = make([][]*Node, len(e.Base))
	}
	n := &Node{Op: op}
	(*lists)[i] = append((*lists)[i], n)
	return n
}

// Before inserts an operation before the phase's operation i and after those already inserted at i.
// i may be one past the last operation.
func (e *Editor) Before(i int, op Op) *Node {
	if i == len(e.Base) {
		return e.Append(op)
	}
	return e.insert(&e.before, i, op)
}

// After inserts an operation after the phase's operation i and after those already inserted at i.
func (e *Editor) After(i int, op Op) *Node {
	return e.insert(&e.after, i, op)
}

// Append inserts an operation at the end.
func (e *Editor) Append(op Op) *Node {
	n := &Node{Op: op}
	e.tail = append(e.tail, n)
	return n
}

// Split replaces the phase's operation i by several. A throttle whose Before was operation i then
// names the last of them; one whose After was operation i names the first.
func (e *Editor) Split(i int, ops []Op) []*Node {
	nodes := make([]*Node, len(ops))
	for k, op := range ops {
		nodes[k] = &Node{Op: op}
	}
	if e.split == nil {
		e.split = map[int][]*Node{}
	}
	e.split[i] = nodes
	return nodes
}

// Throttle makes operation after start only when before has finished. If Commit places after ahead
// of before, the throttle has no effect and is dropped.
func (e *Editor) Throttle(before, after *Node) {
	e.throttles = append(e.throttles, [2]*Node{before, after})
}

// Nodes returns all operations in the order in which Commit will place them.
func (e *Editor) Nodes() []*Node {
	all := make([]*Node, 0, len(e.Base)+len(e.Base)/8+len(e.tail))
	for i, n := range e.Base {
		if e.before != nil {
			all = append(all, e.before[i]...)
		}
		if parts, ok := e.split[i]; ok {
			all = append(all, parts...)
		} else {
			all = append(all, n)
		}
		if e.after != nil {
			all = append(all, e.after[i]...)
		}
	}
	return append(all, e.tail...)
}

// Commit writes the edited operations and throttles into the phase.
func (e *Editor) Commit() {
	nodes := e.Nodes()
	e.ph.Ops = make([]Op, len(nodes), len(nodes)+1) // Schedule joins phases
	for i, n := range nodes {
		n.at = i
		e.ph.Ops[i] = n.Op
	}
	if len(e.split) > 0 {
		ends := map[string][2]string{} // by the name of a split operation: names of its first and last part
		for i, parts := range e.split {
			ends[e.Base[i].Op.Name] = [2]string{parts[0].Op.Name, parts[len(parts)-1].Op.Name}
		}
		for i := range e.ph.Throttles {
			t := &e.ph.Throttles[i]
			if names, ok := ends[t.Before]; ok {
				t.Before = names[1]
			}
			if names, ok := ends[t.After]; ok {
				t.After = names[0]
			}
		}
	}
	for _, t := range e.throttles {
		if t[0].at < t[1].at {
			e.ph.Throttles = append(e.ph.Throttles, Throttle{Before: t[0].Op.Name, After: t[1].Op.Name})
		}
	}
}

// Replace replaces buffer old by buffer with in all operands.
func Replace(ops []Op, old, with BufID) {
	for i := range ops {
		o := &ops[i]
		for k, id := range o.In {
			if id == old {
				o.In[k] = with
			}
		}
		for k := range o.Out {
			if o.Out[k].Buf == old {
				o.Out[k].Buf = with
			}
		}
	}
}

// Sweep returns the program without unused buffers. A buffer is used if an operation, parameter,
// unit, port or well-known field refers to it, directly or through a view. The scales of a unit's
// quantised value and states are also kept: if the states rest off the device, only the host uses
// the scales, to save and load. The remaining buffers keep their order.
func Sweep(p *Program) *Program {
	used, unused := p.used()
	if unused == 0 {
		return p
	}
	q, _ := p.keeping(used, (len(p.Buffers)-unused)/2)
	return q
}

// keeping returns a clone with only the used buffers, and room for the given number of additional
// ones. The second result is the new ID of each buffer, NoBuf for a dropped one.
func (p *Program) keeping(used []bool, room int) (*Program, []BufID) {
	to, n := make([]BufID, len(p.Buffers)), 0
	for id := range to {
		to[id] = NoBuf
		if used[id] {
			to[id] = BufID(n)
			n++
		}
	}
	few := *p
	few.Buffers = make([]Buffer, 0, n+room)
	for id := range p.Buffers {
		if used[id] {
			few.Buffers = append(few.Buffers, p.Buffers[id])
		}
	}
	q := few.clone(room)
	for id := range q.Buffers {
		if v := q.Buffers[id].View; v != nil {
			v.Base = to[v.Base]
		}
		if s := &q.Buffers[id].Scale; s.Block > 0 {
			s.Of = to[s.Of]
		}
	}
	q.references(func(id *BufID) {
		if *id != NoBuf {
			*id = to[*id]
		}
	})
	return q, to
}

// Unused counts the buffers that Sweep would remove.
func (p *Program) Unused() int {
	_, n := p.used()
	return n
}

// used says for each buffer whether anything uses it, and counts the unused ones.
func (p *Program) used() (used []bool, unused int) {
	used, unused = make([]bool, len(p.Buffers)), len(p.Buffers)
	one := func(id BufID) bool {
		if used[id] {
			return false
		}
		used[id] = true
		unused--
		return true
	}
	mark := func(id BufID) {
		for id != NoBuf && one(id) {
			if s := p.Buffers[id].Scale; s.Block > 0 {
				one(s.Of) // values and scales are views of one buffer, which is marked next
			}
			if v := p.Buffers[id].View; v != nil {
				id = v.Base
			} else {
				id = NoBuf
			}
		}
	}
	p.references(func(id *BufID) { mark(*id) })
	scales := p.Scales()
	for i := range p.Units {
		for _, s := range append([]State{p.Units[i].Value}, p.Units[i].States...) {
			if id, ok := scales[s.Buf]; ok {
				mark(id)
			}
		}
	}
	for id := range p.Buffers {
		if p.Buffers[id].Port != NoPort {
			mark(BufID(id))
		}
	}
	return used, unused
}

// references calls visit for every buffer ID in the program, except for the bases of views.
func (p *Program) references(visit func(*BufID)) {
	for _, w := range p.wellKnown() {
		visit(w.id)
	}
	for i := range p.Scalars {
		for _, id := range p.Scalars[i].buffers() {
			visit(id)
		}
	}
	for i := range p.Params {
		visit(&p.Params[i].Value)
		visit(&p.Params[i].Grad)
	}
	for i := range p.Units {
		u := &p.Units[i]
		if u.FlatLen == 0 {
			continue // not laid out yet
		}
		visit(&u.Value.Buf)
		visit(&u.Compute.Buf)
		if u.Grad != nil {
			for _, id := range u.Grad.buffers() {
				visit(id)
			}
		}
		for k := range u.States {
			visit(&u.States[k].Buf)
		}
	}
	for _, ph := range p.Phases() {
		for k := range ph.Ops {
			ph.Ops[k].Buffers(visit)
		}
	}
}
