package exec

import "github.com/spillway-ml/spillway/graph"

// gateOf finds the gate of a section.
func gateOf(p *graph.Program, s *graph.Section) gate {
	none := gate{phase: -1}
	if p.Scaler != nil {
		return none
	}
	resident := residents(p)
	for i := range s.Phases {
		ph := &s.Phases[i]
		if ph.Repeat != 1 {
			continue
		}
		for k := range ph.Ops {
			op := &ph.Ops[k]
			switch _, rule := op.Attr.(graph.UpdateAttr); {
			case ph.Kind == graph.UpdatePhase && writesAny(p, op, resident):
				return gate{phase: i, op: k, norm: true}
			case ph.Kind != graph.UpdatePhase && rule && op.Skip == graph.NoBuf:
				return gate{phase: i, op: k, hoisted: observers(p, ph.Ops, k)}
			}
		}
	}
	return none
}

// observers lists the operations, starting with index first, that sum the loss and copy it to the
// host.
func observers(p *graph.Program, ops []graph.Op, first int) (list []hoisted) {
	loss := map[graph.BufID]bool{}
	for _, id := range []graph.BufID{p.Loss, p.Port(graph.PortLoss)} {
		if id != graph.NoBuf {
			r, _ := p.Resolve(id, nil)
			loss[r] = true
		}
	}
	for k := first; k < len(ops); k++ {
		if writesAny(p, &ops[k], loss) {
			list = append(list, hoisted{at: k})
		}
	}
	return list
}

// bindGate prepares the hoisted operations, after the section is bound.
func (s *section) bindGate() {
	for i := range s.gate.hoisted {
		h := &s.gate.hoisted[i]
		early, place := s.phases[s.gate.phase].ops[h.at], s.phases[s.gate.phase].ops[h.at]
		early.wait, early.record, early.release = nil, nil, nil // at the gate all streams are idle
		place.kernel = nil
		h.early, h.place = []operation{early}, []operation{place}
	}
}

// residents returns the roots of the units' values and optimizer states.
func residents(p *graph.Program) map[graph.BufID]bool {
	roots := map[graph.BufID]bool{}
	add := func(id graph.BufID) {
		if id != graph.NoBuf {
			r, _ := p.Resolve(id, nil)
			roots[r] = true
		}
	}
	for i := range p.Units {
		if u := &p.Units[i]; u.FlatLen > 0 {
			add(u.Value.Buf)
			for _, s := range u.States {
				add(s.Buf)
			}
		}
	}
	return roots
}

func writesAny(p *graph.Program, op *graph.Op, roots map[graph.BufID]bool) bool {
	for _, o := range op.Out {
		if o.Buf == graph.NoBuf {
			continue
		}
		if r, _ := p.Resolve(o.Buf, nil); roots[r] {
			return true
		}
	}
	return false
}
