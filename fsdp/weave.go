package fsdp

import "github.com/spillway-ml/spillway/graph"

// weave inserts operations into a phase while its own keep their indices, and
// collects orders between operations by identity.
type weave struct {
	base          []*node
	before, after [][]*node // by base index
	tail          []*node
	orders        [][2]*node
}

type node struct {
	op graph.Op
	at int // index in the woven phase
}

func newWeave(ops []graph.Op) *weave {
	w := &weave{before: make([][]*node, len(ops)), after: make([][]*node, len(ops))}
	for _, op := range ops {
		w.base = append(w.base, &node{op: op})
	}
	return w
}

func (w *weave) insertBefore(i int, op graph.Op) *node {
	n := &node{op: op}
	w.before[i] = append(w.before[i], n)
	return n
}

func (w *weave) insertAfter(i int, op graph.Op) *node {
	n := &node{op: op}
	w.after[i] = append(w.after[i], n)
	return n
}

func (w *weave) append(op graph.Op) *node {
	n := &node{op: op}
	w.tail = append(w.tail, n)
	return n
}

func (w *weave) order(before, after *node) { w.orders = append(w.orders, [2]*node{before, after}) }

// phase returns the woven operations, synchronized.
func (w *weave) phase(p *graph.Program) []graph.Op {
	var ops []graph.Op
	put := func(ns ...*node) {
		for _, n := range ns {
			n.at = len(ops)
			ops = append(ops, n.op)
		}
	}
	for i, n := range w.base {
		put(w.before[i]...)
		put(n)
		put(w.after[i]...)
	}
	put(w.tail...)
	var orders []graph.Order
	for _, o := range w.orders {
		if o[0].at < o[1].at {
			orders = append(orders, graph.Order{Before: o[0].at, After: o[1].at})
		}
	}
	graph.Synchronize(p, ops, orders)
	return ops
}

// joinPhases ends every phase of a section by making the compute stream wait
// for all others, and starts every later one by making all others wait for it.
// A phase's memory is then free for the next one.
func joinPhases(p *graph.Program, s *graph.Section) {
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
		var first, last [graph.NumStreams]int
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
		join := graph.Op{Kind: graph.Join, Name: "join", Work: graph.NoBuf, Skip: graph.NoBuf, Unit: -1, Stream: graph.Compute, Record: joined}
		for t := range last {
			if t == int(graph.Compute) || last[t] < 0 {
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
