package plan

import "github.com/spillway-ml/spillway/graph"

// schedule gives operations their events. With Config.Serial it first moves the collectives
// to the compute stream, in program order, so that nothing overlaps them:
//
//	compute: a ─ b ─ c          compute: a ─ gather ─ b ─ c ─ reduce
//	comm:    gather  reduce  →  comm:
//
// The results are the same.
func schedule(p *graph.Program, s *Spec) (*graph.Program, error) {
	if s.Serial {
		p = p.Clone()
		for i := range p.Sections {
			for j := range p.Sections[i].Phases {
				ops := p.Sections[i].Phases[j].Ops
				for k := range ops {
					if ops[k].Stream == graph.Comm {
						ops[k].Stream = graph.Compute
					}
				}
			}
		}
	}
	return graph.Schedule(p)
}
