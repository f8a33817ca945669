package graph

import "fmt"

// tables checks everything except operations, sizes and views.
func (v *verifier) tables() error {
	p := v.p
	axes := map[string]bool{}
	for i, a := range p.Mesh {
		if a.Size < 1 {
			return fmt.Errorf("mesh axis %d (%s) has size %d, want at least 1", i, a.Name, a.Size)
		}
		if axes[a.Name] {
			return fmt.Errorf("mesh axis %d is named %q as one before it", i, a.Name)
		}
		axes[a.Name] = true
	}
	unit := func(i int) error {
		if i < -1 || i >= len(p.Units) {
			return fmt.Errorf("belongs to unit %d, want one of the program's %d or -1", i, len(p.Units))
		}
		return nil
	}
	if err := v.ports(unit); err != nil {
		return err
	}
	ref := func(what string, id BufID) error {
		if id != NoBuf && (id < 0 || int(id) >= len(p.Buffers)) {
			return fmt.Errorf("%s is buffer %d, want one of the program's %d or none", what, id, len(p.Buffers))
		}
		return nil
	}
	for _, w := range p.wellKnown() {
		if err := ref(w.name, *w.id); err != nil {
			return err
		}
		if *w.id != NoBuf && w.typed && p.Buf(*w.id).DType != w.dtype {
			return fmt.Errorf("%s (%s) is %v, want %v", w.name, p.bufName(*w.id), p.Buf(*w.id).DType, w.dtype)
		}
	}
	if err := v.params(ref); err != nil {
		return err
	}
	for i := range p.Units {
		if err := v.unit(&p.Units[i]); err != nil {
			return fmt.Errorf("unit %d (%s): %w", i, p.Units[i].Name, err)
		}
	}
	for i := range p.Scalars {
		if err := p.Scalars[i].check(p); err != nil {
			return fmt.Errorf("scalars %d: %w", i, err)
		}
	}
	return v.sectionTables(unit)
}

// ports checks the buffers' units, micro-batches and ports.
func (v *verifier) ports(unit func(int) error) error {
	p := v.p
	type portKey struct {
		port  Port
		micro int
		input string // of float inputs
	}
	ported := map[portKey]BufID{}
	for id := range p.Buffers {
		b := &p.Buffers[id]
		if err := unit(b.Unit); err != nil {
			return fmt.Errorf("buffer %s: %w", p.bufName(BufID(id)), err)
		}
		if b.Micro < 0 {
			return fmt.Errorf("buffer %s: belongs to micro-batch %d, want 0 or more", p.bufName(BufID(id)), b.Micro)
		}
		if b.Port != NoPort && !b.Port.EachMicro() && b.Micro > 0 {
			return fmt.Errorf("buffer %s: is the port %v of micro-batch %d; the step has one for all", p.bufName(BufID(id)), b.Port, b.Micro)
		}
		if b.Port == NoPort {
			continue
		}
		key := portKey{port: b.Port, micro: b.Micro}
		if b.Port == PortInput {
			key.input = b.InputName()
		}
		other, twice := ported[key]
		switch {
		case b.Port >= NumPorts:
			return fmt.Errorf("buffer %s: %v is not a port", p.bufName(BufID(id)), b.Port)
		case twice:
			return fmt.Errorf("buffers %s and %s are both the port %v of micro-batch %d, want one", p.bufName(other), p.bufName(BufID(id)), b.Port, b.Micro)
		case b.Space != Host:
			return fmt.Errorf("buffer %s is the port %v and lies in %v memory, want host: the host uses it", p.bufName(BufID(id)), b.Port, b.Space)
		case ports[b.Port].typed && b.DType != ports[b.Port].dtype:
			return fmt.Errorf("buffer %s is the port %v and %v, want %v", p.bufName(BufID(id)), b.Port, b.DType, ports[b.Port].dtype)
		}
		ported[key] = BufID(id)
	}
	return nil
}

// params checks the parameters, and the buffers of their values and gradients.
func (v *verifier) params(ref func(what string, id BufID) error) error {
	p := v.p
	names := make(map[string]bool, len(p.Params))
	for i := range p.Params {
		q := &p.Params[i]
		if names[q.Name] {
			return fmt.Errorf("two parameters are named %q", q.Name)
		}
		names[q.Name] = true
		if q.Unit < 0 || q.Unit >= len(p.Units) {
			return fmt.Errorf("parameter %s: belongs to unit %d, want one of the program's %d", q.Name, q.Unit, len(p.Units))
		}
		if q.TiedTo < 0 || q.TiedTo > i || q.TiedTo > 0 && !q.tied(&p.Params[q.TiedTo-1]) {
			return fmt.Errorf("parameter %s: is tied to parameter %d, want one before it with the same shape and slices, in another unit", q.Name, q.TiedTo-1)
		}
		if err := p.checkSplit(q); err != nil {
			return fmt.Errorf("parameter %s: %w", q.Name, err)
		}
		for _, b := range [...]struct {
			what string
			id   BufID
		}{{"value", q.Value}, {"gradient", q.Grad}} {
			if err := ref("its "+b.what, b.id); err != nil {
				return fmt.Errorf("parameter %s: %w", q.Name, err)
			}
			if b.id != NoBuf && p.Buf(b.id).Elems() != p.LocalElems(q) {
				return fmt.Errorf("parameter %s: its %s %s has shape %v, want the %d elements of %v",
					q.Name, b.what, p.bufName(b.id), p.Buf(b.id).Shape, p.LocalElems(q), p.LocalShape(q))
			}
		}
		if q.Frozen && q.Grad != NoBuf {
			return fmt.Errorf("parameter %s: is frozen and has the gradient %s", q.Name, p.bufName(q.Grad))
		}
	}
	return nil
}

// sectionTables checks the names of sections, phases and operations.
func (v *verifier) sectionTables(unit func(int) error) error {
	p := v.p
	sections := map[string]bool{}
	for i := range p.Sections {
		s := &p.Sections[i]
		if s.Name == "" || sections[s.Name] {
			return fmt.Errorf("section %d is named %q; a section needs a name of its own", i, s.Name)
		}
		sections[s.Name] = true
		phases := map[string]bool{}
		for j := range s.Phases {
			ph := &s.Phases[j]
			if ph.Name == "" || phases[ph.Name] {
				return fmt.Errorf("%s: phase %d is named %q; a phase needs a name of its own", s.Name, j, ph.Name)
			}
			phases[ph.Name] = true
			if ph.Repeat < 0 {
				return fmt.Errorf("%s/%s: runs %d times, want 0 or more", s.Name, ph.Name, ph.Repeat)
			}
			ops := make(map[string]bool, len(ph.Ops))
			for k := range ph.Ops {
				op := &ph.Ops[k]
				if op.Name == "" || ops[op.Name] {
					return fmt.Errorf("%s/%s: operation %d (%s) is named %q; an operation needs a name of its own in its phase", s.Name, ph.Name, k, op.Kind, op.Name)
				}
				ops[op.Name] = true
				if err := unit(op.Unit); err != nil {
					return fmt.Errorf("%s/%s/%s: %w", s.Name, ph.Name, op.Name, err)
				}
			}
		}
	}
	return nil
}

// segmentElems divides the starts of parameters in a flat parameter, and the starts of segments in
// a parameter.
const segmentElems = 256

func (v *verifier) unit(u *Unit) error {
	p := v.p
	end := int64(0)
	for i, s := range u.Segments {
		if s.Param < 0 || s.Param >= len(p.Params) {
			return fmt.Errorf("segment %d is of parameter %d, want one of the program's %d", i, s.Param, len(p.Params))
		}
		q := &p.Params[s.Param]
		switch {
		case s.Start < 0 || s.Len < 1 || s.Len > p.LocalElems(q) || s.Start > p.LocalElems(q)-s.Len:
			return fmt.Errorf("segment %d has elements %d to %d of %s, want a part of its %d", i, s.Start, s.Start+s.Len, q.Name, p.LocalElems(q))
		case s.Start%segmentElems != 0 || s.Flat%segmentElems != 0:
			return fmt.Errorf("segment %d of %s starts at element %d of it and %d of the unit, want multiples of %d", i, q.Name, s.Start, s.Flat, segmentElems)
		case s.Flat < end:
			return fmt.Errorf("segment %d of %s starts at element %d of the unit, inside the segment before it or out of order, want %d or more", i, q.Name, s.Flat, end)
		}
		end = s.Flat + s.Len
	}
	if u.FlatLen == 0 {
		return nil // not laid out yet
	}
	if u.FlatLen < end {
		return fmt.Errorf("flat length %d, want at least the %d elements of its segments", u.FlatLen, end)
	}
	if u.Grad != nil {
		if err := u.Grad.check(p, u); err != nil {
			return err
		}
	}
	for _, s := range append([]State{u.Value, u.Compute}, u.States...) {
		if s.Buf < 0 || int(s.Buf) >= len(p.Buffers) {
			return fmt.Errorf("state %s is buffer %d, want one of the program's %d", s.Name, s.Buf, len(p.Buffers))
		}
		if n := p.Buf(s.Buf).Elems(); n != s.Len {
			return fmt.Errorf("state %s (%s) has %d elements, want the %d that a rank holds", s.Name, p.bufName(s.Buf), n, s.Len)
		}
		if s.Axis < -1 || s.Axis >= len(p.Mesh) {
			return fmt.Errorf("state %s is split along mesh axis %d, want -1 to %d", s.Name, s.Axis, len(p.Mesh)-1)
		}
	}
	return nil
}

// check validates the gradient against the program's buffers and mesh.
func (g *Gradient) check(p *Program, u *Unit) error {
	for i, id := range g.buffers() {
		needed := i == 0 || i == 2 || i == 4
		if *id == NoBuf && !needed {
			continue
		}
		if *id < 0 || int(*id) >= len(p.Buffers) {
			return fmt.Errorf("its gradient's %s is buffer %d, want one of the program's %d", gradientBuffers[i], *id, len(p.Buffers))
		}
	}
	for _, a := range []int{g.Axis, g.Replicas} {
		if a < -1 || a >= len(p.Mesh) {
			return fmt.Errorf("its gradient goes over mesh axis %d, want -1 to %d", a, len(p.Mesh)-1)
		}
	}
	of := func(id BufID) *Buffer { return p.Buf(id) }
	switch {
	case of(g.Whole).Elems() != u.FlatLen || of(g.Whole).DType != g.Leaf:
		return fmt.Errorf("its gradient %s is %v of %d elements, want %v of the flat length %d",
			p.bufName(g.Whole), of(g.Whole).DType, of(g.Whole).Elems(), g.Leaf, u.FlatLen)
	case g.Order >= NumSumOrders:
		return fmt.Errorf("its gradient is summed in the order %v, want %v or %v", g.Order, SumTree, SumSequential)
	case g.Sent != NoBuf && of(g.Sent).DType != g.Wire:
		return fmt.Errorf("its gradient travels in %s of %v, want %v", p.bufName(g.Sent), of(g.Sent).DType, g.Wire)
	case g.Leaves() && (!g.Each || g.Replicas >= 0 || g.Sent != NoBuf || g.Part != NoBuf || of(g.Home).DType != F32):
		return fmt.Errorf("its gradient is a sum of leaves, one for each micro-batch, in %s of %v: want f32, "+
			"every micro-step reduced right into it, no copy in which it travels and no replicas", p.bufName(g.Home), of(g.Home).DType)
	case g.Squares != NoBuf && (!g.Leaves() || of(g.Squares).DType != I64):
		return fmt.Errorf("the squares of its gradient's sum of leaves go to %s of %v: want an accumulator of i64, "+
			"and a gradient that is a sum of leaves", p.bufName(g.Squares), of(g.Squares).DType)
	case g.Part != NoBuf && of(g.Part).Elems() != of(g.Home).Elems():
		return fmt.Errorf("a part %s of its gradient has %d elements, want the %d of %s", p.bufName(g.Part), of(g.Part).Elems(), of(g.Home).Elems(), p.bufName(g.Home))
	}
	return nil
}

// check validates a set against the program's buffers.
func (s *Scalars) check(p *Program) error {
	want := [...]struct {
		dtype DType
		elems int64
	}{{F64, NumHyper}, {F32, 1}, {I32, 1}}
	for i, id := range s.buffers() {
		if *id == NoBuf && i == 2 {
			continue
		}
		if *id < 0 || int(*id) >= len(p.Buffers) {
			return fmt.Errorf("%s is buffer %d, want one of the program's %d", scalarNames[i], *id, len(p.Buffers))
		}
		if b := p.Buf(*id); b.DType != want[i].dtype || b.Elems() != want[i].elems {
			return fmt.Errorf("%s is %s, %v of %d elements, want %v of %d", scalarNames[i], p.bufName(*id), b.DType, b.Elems(), want[i].dtype, want[i].elems)
		}
	}
	return nil
}
