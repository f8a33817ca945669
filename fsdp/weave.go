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

// ops returns the woven operations, and what the orders say as throttles.
func (w *weave) ops() ([]graph.Op, []graph.Throttle) {
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
	var throttles []graph.Throttle
	for _, o := range w.orders {
		if o[0].at < o[1].at {
			throttles = append(throttles, graph.Throttle{Before: o[0].op.Name, After: o[1].op.Name})
		}
	}
	return ops, throttles
}

// phase returns the woven operations as a phase.
func (w *weave) phase(name string, repeat int) graph.Phase {
	ph := graph.Phase{Name: name, Repeat: repeat}
	ph.Ops, ph.Throttles = w.ops()
	return ph
}
