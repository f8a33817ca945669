package graph

import "fmt"

// Schedule gives the operations of a finished program their events. Within a phase the events
// follow from the data and the throttles (see Synchronize). Between the phases of a section it adds
// joins, so that the next phase can use a phase's memory:
//
//	first:  compute: a ── b ──── join ●          last:  compute:        c
//	        comm:    ── r ●──────┘              →       comm:  ─●(join)── r
//
// Schedule is the last pass, since operations that are inserted later have no events. It
// removes the throttles. It fails if a throttle names no operation, or names two in the
// wrong order.
func Schedule(p *Program) (*Program, error) {
	q := p.Clone()
	for i := range q.Sections {
		sec := &q.Sections[i]
		for j := range sec.Phases {
			ph := &sec.Phases[j]
			orders, err := ph.orders()
			if err != nil {
				return nil, fmt.Errorf("graph: schedule %s/%s: %w", sec.Name, ph.Name, err)
			}
			Synchronize(q, ph.Ops, orders)
			ph.Throttles = nil
		}
		joinPhases(q, sec)
	}
	return q, nil
}

func (ph *Phase) orders() ([]Order, error) {
	if len(ph.Throttles) == 0 {
		return nil, nil
	}
	at := make(map[string]int, len(ph.Ops))
	for i := range ph.Ops {
		at[ph.Ops[i].Name] = i
	}
	orders := make([]Order, 0, len(ph.Throttles))
	for _, t := range ph.Throttles {
		b, ok := at[t.Before]
		a, ok2 := at[t.After]
		switch {
		case !ok || !ok2:
			return nil, fmt.Errorf("a throttle orders %q before %q; both must be operations of the phase", t.Before, t.After)
		case b >= a:
			return nil, fmt.Errorf("a throttle orders %q before %q, which comes before it in the phase", t.Before, t.After)
		}
		orders = append(orders, Order{Before: b, After: a})
	}
	return orders, nil
}

// joinPhases ends every phase of a section with a join in which the compute stream waits for all
// others. It starts every later phase by making all others wait for the compute stream.
func joinPhases(p *Program, s *Section) {
	executions := 0
	for _, ph := range s.Phases {
		executions += ph.Repeat
	}
	if executions < 2 {
		return // sections are synchronised with each other by definition
	}
	joined := p.NewEvent()
	for i := range s.Phases {
		ph := &s.Phases[i]
		var first, last [NumStreams]int
		for t := range first {
			first[t], last[t] = -1, -1
		}
		for k := range ph.Ops {
			t := ph.Ops[k].Stream
			if first[t] < 0 {
				first[t] = k
			}
			last[t] = k
		}
		join := Op{Kind: Join, Name: "join", Work: NoBuf, Skip: NoBuf, Unit: -1, Stream: Compute, Record: joined}
		for t := range last {
			if t == int(Compute) || last[t] < 0 {
				continue
			}
			tail := &ph.Ops[last[t]]
			if tail.Record == 0 {
				tail.Record = p.NewEvent()
			}
			join.Wait = append(join.Wait, tail.Record)
			if i > 0 {
				head := &ph.Ops[first[t]]
				head.Wait = append(head.Wait, joined)
			}
		}
		ph.Ops = append(ph.Ops, join)
	}
}
