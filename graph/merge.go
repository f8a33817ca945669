package graph

import (
	"fmt"
	"slices"
)

// Merge returns p with the only section of other added as one of the given kind.
// Both are programs of the same model: parameters are matched by name, inputs
// and the loss by role (an input of other that is smaller than p's becomes a
// view of its start), what generation keeps (Builder.Cache) by name; everything
// else of other is added. The section keeps its form.
func Merge(p, other *Program, kind SectionKind) (*Program, error) {
	name := kind.String()
	if len(other.Sections) != 1 {
		return nil, fmt.Errorf("graph: merge %q: the other program has %d sections, 1 is needed", name, len(other.Sections))
	}
	if p.SectionOf(kind, other.Sections[0].Form) != nil {
		return nil, fmt.Errorf("graph: merge %q: the program has that section already", name)
	}
	q := p.Clone()
	to := make([]BufID, len(other.Buffers))
	for i := range to {
		to[i] = NoBuf
	}
	byName := map[string]int{}
	for i := range q.Params {
		byName[q.Params[i].Name] = i
	}
	for i := range other.Params {
		o := &other.Params[i]
		k, ok := byName[o.Name]
		if !ok || q.Params[k].Elems() != o.Elems() {
			return nil, fmt.Errorf("graph: merge %q: parameter %q is not in the program with %d elements", name, o.Name, o.Elems())
		}
		to[o.Value] = q.Params[k].Value
	}
	role := func(from BufID, into *BufID) error {
		if from == NoBuf {
			return nil
		}
		if *into == NoBuf {
			return nil // other's own buffer takes the role below
		}
		a, b := other.Buf(from), q.Buf(*into)
		switch {
		case a.DType == b.DType && a.Bytes() == b.Bytes():
			to[from] = *into
		case a.DType == b.DType && a.Bytes() < b.Bytes():
			v := *a
			v.View = &View{Base: *into}
			to[from] = q.AddBuffer(v)
		default:
			return fmt.Errorf("graph: merge %q: input %q is larger than the program's %q", name, a.Name, b.Name)
		}
		return nil
	}
	roles := []struct {
		from BufID
		into *BufID
	}{{other.Tokens, &q.Tokens}, {other.Targets, &q.Targets}, {other.Hyper, &q.Hyper}, {other.Key, &q.Key}, {other.Loss, &q.Loss}, {other.Logits, &q.Logits}}
	for _, r := range roles {
		if err := role(r.from, r.into); err != nil {
			return nil, err
		}
	}
	kept := map[string]BufID{}
	for i := range q.Buffers {
		if b := &q.Buffers[i]; b.Class == Activations && b.Life == LifeRun && b.View == nil {
			kept[b.Name] = BufID(i)
		}
	}
	for i := range other.Buffers {
		if to[i] != NoBuf {
			continue
		}
		b := other.Buffers[i]
		if have, ok := kept[b.Name]; ok && b.Life == LifeRun {
			if h := q.Buf(have); h.DType != b.DType || !slices.Equal(h.Shape, b.Shape) {
				return nil, fmt.Errorf("graph: merge %q: %q is %v %v here and %v %v there", name, b.Name, h.DType, h.Shape, b.DType, b.Shape)
			}
			to[i] = have
			continue
		}
		b.Shape = append([]int64(nil), b.Shape...)
		to[i] = q.AddBuffer(b)
	}
	for i := range other.Buffers {
		if v := other.Buffers[i].View; v != nil && q.Buf(to[i]).View == v {
			w := *v
			w.Base = to[v.Base]
			q.Buf(to[i]).View = &w
		}
		if s := other.Buffers[i].Scale; s.Block > 0 {
			q.Buf(to[i]).Scale.Of = to[s.Of]
		}
	}
	for _, r := range roles {
		if r.from != NoBuf && *r.into == NoBuf {
			*r.into = to[r.from]
		}
	}
	units := map[string]int{}
	for i := range q.Units {
		units[q.Units[i].Name] = i
	}
	sec := other.Sections[0]
	sec.Become(kind)
	sec.Phases = append([]Phase(nil), sec.Phases...)
	ref := func(id BufID) BufID {
		if id == NoBuf {
			return NoBuf
		}
		return to[id]
	}
	for i := range sec.Phases {
		ops := CloneOps(sec.Phases[i].Ops)
		for k := range ops {
			o := &ops[k]
			for a := range o.In {
				o.In[a] = ref(o.In[a])
			}
			for a := range o.Out {
				o.Out[a].Buf = ref(o.Out[a].Buf)
			}
			o.Work, o.Skip = ref(o.Work), ref(o.Skip)
			if o.Unit >= 0 {
				u, ok := units[other.Units[o.Unit].Name]
				if !ok {
					return nil, fmt.Errorf("graph: merge %q: unit %q is not in the program", name, other.Units[o.Unit].Name)
				}
				o.Unit = u
			}
		}
		sec.Phases[i].Ops = ops
	}
	q.Sections = append(q.Sections, sec)
	return q, nil
}
