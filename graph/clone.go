package graph

// Clone returns a deep copy, so that a rewrite does not change its input. Copies are most of what
// the planning of a deep model allocates. Short slices therefore share one allocation (slab), with
// room for more buffers. If the caller gave p up with Yield, Clone does not copy but returns p's
// parts.
func (p *Program) Clone() *Program { return p.clone(len(p.Buffers) / 2) }

// clone does the same as Clone, with room for the given number of additional buffers.
func (p *Program) clone(room int) *Program {
	q := *p
	q.sole = true
	if p.spare {
		q.spare = false
		return &q
	}
	q.Mesh = append([]Axis(nil), p.Mesh...)
	if p.Scaler != nil {
		s := *p.Scaler
		q.Scaler = &s
	}
	q.Buffers = cloneBuffers(p.Buffers, room)
	q.Scalars = append([]Scalars(nil), p.Scalars...)
	q.Params = append([]Param(nil), p.Params...)
	var dims slab[int64]
	for i := range q.Params {
		dims.need(q.Params[i].Shape)
	}
	for i := range q.Params {
		q.Params[i].Shape = dims.copy(q.Params[i].Shape)
		if s := q.Params[i].Split; s != nil {
			split := *s
			q.Params[i].Split = &split
		}
	}
	q.Units = append([]Unit(nil), p.Units...)
	for i := range q.Units {
		q.Units[i].Segments = append([]Segment(nil), q.Units[i].Segments...)
		q.Units[i].States = append([]State(nil), q.Units[i].States...)
		if g := q.Units[i].Grad; g != nil {
			way := *g
			q.Units[i].Grad = &way
		}
	}
	q.Sections = append([]Section(nil), p.Sections...)
	for i := range q.Sections {
		s := &q.Sections[i]
		s.Shares = append([]int(nil), s.Shares...)
		s.Phases = append([]Phase(nil), s.Phases...)
		for j := range s.Phases {
			s.Phases[j].Ops = CloneOps(s.Phases[j].Ops)
			s.Phases[j].Throttles = append([]Throttle(nil), s.Phases[j].Throttles...)
		}
	}
	return &q
}

// Yield gives p up: the next rewrite changes p's parts instead of copying them. The caller must
// then not read p again unless it calls TakeBack. Yield does nothing if p was not made by Clone, or
// shares parts with another program.
func (p *Program) Yield() {
	if p.sole {
		p.spare = true
	}
}

// TakeBack undoes Yield, for a program that a rewrite returned unchanged.
func (p *Program) TakeBack() { p.spare = false }

// Keep marks p as shared by several users: Yield then does nothing.
func (p *Program) Keep() { p.sole, p.spare = false, false }

func cloneBuffers(bufs []Buffer, room int) []Buffer {
	out := append(make([]Buffer, 0, len(bufs)+room), bufs...)
	var dims slab[int64]
	var places slab[Placement]
	views := 0
	for i := range out {
		b := &out[i]
		dims.need(b.Shape)
		dims.need(b.Global)
		places.need(b.Place)
		if b.View != nil {
			views++
		}
	}
	copied := make([]View, 0, views)
	for i := range out {
		b := &out[i]
		b.Shape, b.Global, b.Place = dims.copy(b.Shape), dims.copy(b.Global), places.copy(b.Place)
		if b.View != nil {
			copied = append(copied, *b.View)
			b.View = &copied[len(copied)-1]
		}
	}
	return out
}

// CloneOps returns a deep copy of ops.
func CloneOps(ops []Op) []Op {
	out := append([]Op(nil), ops...)
	ownOperands(len(out), func(i int) *Op { return &out[i] })
	return out
}

// ownOperands replaces the operand and event slices of n operations by copies.
func ownOperands(n int, op func(i int) *Op) {
	var ins slab[BufID]
	var outs slab[Out]
	var waits slab[EventID]
	for i := range n {
		o := op(i)
		ins.need(o.In)
		outs.need(o.Out)
		waits.need(o.Wait)
	}
	for i := range n {
		o := op(i)
		o.In, o.Out, o.Wait = ins.copy(o.In), outs.copy(o.Out), waits.copy(o.Wait)
	}
}

// slab copies many short slices into one allocation; need must be called for each of them
// first. A copy has no spare capacity, so that appending to it cannot overwrite the next.
type slab[T any] struct {
	n    int
	free []T
}

func (s *slab[T]) need(list []T) { s.n += len(list) }

func (s *slab[T]) copy(list []T) []T {
	if len(list) == 0 {
		return nil
	}
	if s.free == nil {
		s.free = make([]T, s.n)
	}
	n := copy(s.free, list)
	list, s.free = s.free[:n:n], s.free[n:]
	return list
}
