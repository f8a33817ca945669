package graph

import (
	"fmt"
	"slices"
)

// Merge returns p with the only section of other added as a section of the given kind.
// Both must be programs of the same model. Parameters are matched by name. Inputs and the
// loss are matched by role: the smaller buffer becomes a view of the start of the larger.
// Float inputs and caches (Builder.Cache) are matched by name. All other buffers of other
// are added. The section keeps its Form.
func Merge(p, other *Program, kind SectionKind) (*Program, error) {
	if len(other.Sections) != 1 {
		return nil, fmt.Errorf("graph: merge %q: the other program has %d sections, 1 is needed", kind, len(other.Sections))
	}
	if p.SectionOf(kind, other.Sections[0].Form) != nil {
		return nil, fmt.Errorf("graph: merge %q: the program has that section already", kind)
	}
	m := &merger{p: p.Clone(), other: other, to: make([]BufID, len(other.Buffers))}
	for i := range m.to {
		m.to[i] = NoBuf
	}
	for _, step := range []func() error{m.params, m.inputs, m.buffers, func() error { return m.section(kind) }} {
		if err := step(); err != nil {
			return nil, fmt.Errorf("graph: merge %q: %w", kind, err)
		}
	}
	return m.p, nil
}

// merger adds the program other to p.
type merger struct {
	p, other *Program
	to       []BufID // by buffer of other: its counterpart in p, NoBuf until it has one
}

// params maps other's parameters to p's parameters of the same names.
func (m *merger) params() error {
	byName := map[string]int{}
	for i := range m.p.Params {
		byName[m.p.Params[i].Name] = i
	}
	for i := range m.other.Params {
		o := &m.other.Params[i]
		k, ok := byName[o.Name]
		if !ok || m.p.Params[k].Elems() != o.Elems() {
			return fmt.Errorf("parameter %q is not in the program with %d elements", o.Name, o.Elems())
		}
		m.to[o.Value] = m.p.Params[k].Value
	}
	return nil
}

// shared pairs the well-known buffers of the two programs: all sections use the same buffer for
// each.
func (m *merger) shared() [][2]*BufID {
	p, o := m.p, m.other
	return [][2]*BufID{{&p.Tokens, &o.Tokens}, {&p.Targets, &o.Targets}, {&p.Positions, &o.Positions}, {&p.Hyper, &o.Hyper}, {&p.Key, &o.Key}, {&p.Loss, &o.Loss}, {&p.Logits, &o.Logits}}
}

// inputs maps other's well-known buffers to p's, completely or as a view of the start. If p lacks
// one, buffers adds other's later.
func (m *merger) inputs() error {
	for _, r := range m.shared() {
		into, from := *r[0], *r[1]
		if into == NoBuf || from == NoBuf {
			continue
		}
		a, b := m.other.Buf(from), m.p.Buf(into)
		switch {
		case a.DType == b.DType && a.Bytes() == b.Bytes():
			m.to[from] = into
		case a.DType == b.DType && a.Bytes() < b.Bytes():
			v := *a
			v.View = &View{Base: into}
			m.to[from] = m.p.AddBuffer(v)
		case a.DType == b.DType: // other's is larger: p's becomes a view of its start
			larger := *a
			larger.Shape = slices.Clone(a.Shape)
			m.to[from] = m.p.AddBuffer(larger)
			m.p.Buf(into).View = &View{Base: m.to[from]}
			*r[0] = m.to[from]
		default:
			return fmt.Errorf("input %q is %v and the program's %q %v", a.Name, a.DType, b.Name, b.DType)
		}
	}
	return nil
}

// buffers adds other's remaining buffers to p, except caches and float inputs that p has.
func (m *merger) buffers() error {
	kept := map[string]BufID{}
	for i := range m.p.Buffers {
		if b := &m.p.Buffers[i]; b.View == nil && (b.Class == Activations && b.Life == LifeRun || b.IsFloatInput()) {
			kept[b.Name] = BufID(i)
		}
	}
	for i := range m.other.Buffers {
		if m.to[i] != NoBuf {
			continue
		}
		b := m.other.Buffers[i]
		if have, ok := kept[b.Name]; ok && (b.Life == LifeRun || b.IsFloatInput()) {
			if h := m.p.Buf(have); h.DType != b.DType || !slices.Equal(h.Shape, b.Shape) {
				return fmt.Errorf("%q is %v %v in the program and %v %v in the one to merge; want the same type and shape", b.Name, h.DType, h.Shape, b.DType, b.Shape)
			}
			m.to[i] = have
			continue
		}
		b.Shape = slices.Clone(b.Shape)
		b.Global, b.Place = slices.Clone(b.Global), slices.Clone(b.Place)
		m.to[i] = m.p.AddBuffer(b)
	}
	for i := range m.other.Buffers {
		if v := m.other.Buffers[i].View; v != nil && m.p.Buf(m.to[i]).View == v {
			w := *v
			w.Base = m.to[v.Base]
			m.p.Buf(m.to[i]).View = &w
		}
		if s := m.other.Buffers[i].Scale; s.Block > 0 {
			m.p.Buf(m.to[i]).Scale.Of = m.to[s.Of]
		}
	}
	for _, r := range m.shared() {
		if *r[1] != NoBuf && *r[0] == NoBuf {
			*r[0] = m.to[*r[1]]
		}
	}
	return nil
}

// section adds other's section, with its operations mapped to p's buffers and units.
func (m *merger) section(kind SectionKind) error {
	units := map[string]int{}
	for i := range m.p.Units {
		units[m.p.Units[i].Name] = i
	}
	sec := m.other.Sections[0]
	sec.Become(kind)
	sec.Phases = slices.Clone(sec.Phases)
	here := func(id *BufID) {
		if *id != NoBuf {
			*id = m.to[*id]
		}
	}
	for i := range sec.Phases {
		ops := CloneOps(sec.Phases[i].Ops)
		for k := range ops {
			o := &ops[k]
			o.Buffers(here)
			if o.Unit < 0 {
				continue
			}
			u, ok := units[m.other.Units[o.Unit].Name]
			if !ok {
				return fmt.Errorf("unit %q is not in the program", m.other.Units[o.Unit].Name)
			}
			o.Unit = u
		}
		sec.Phases[i].Ops = ops
		sec.Phases[i].Throttles = slices.Clone(sec.Phases[i].Throttles)
	}
	m.p.Sections = append(m.p.Sections, sec)
	return nil
}
