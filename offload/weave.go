package offload

import "github.com/spillway-ml/spillway/graph"

// weave inserts operations into a phase while its own keep their indices, and
// collects throttles by operation.
type weave struct {
	base          []*node
	before, after [][]*node // by base index
	throttles     [][2]*node
	names         map[string]int
}

type node struct {
	op graph.Op
	at int // index in the woven phase
}

func newWeave(ops []graph.Op) *weave {
	w := &weave{before: make([][]*node, len(ops)), after: make([][]*node, len(ops)), names: map[string]int{}}
	for _, op := range graph.CloneOps(ops) {
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

func (w *weave) throttle(before, after *node) {
	w.throttles = append(w.throttles, [2]*node{before, after})
}

// into puts the woven operations into the phase. A throttle whose operations
// came to stand the other way round bounds nothing and is dropped.
func (w *weave) into(ph *graph.Phase) {
	ph.Ops = nil
	put := func(ns ...*node) {
		for _, n := range ns {
			n.at = len(ph.Ops)
			ph.Ops = append(ph.Ops, n.op)
		}
	}
	for i, n := range w.base {
		put(w.before[i]...)
		put(n)
		put(w.after[i]...)
	}
	for _, t := range w.throttles {
		if t[0].at < t[1].at {
			ph.Throttles = append(ph.Throttles, graph.Throttle{Before: t[0].op.Name, After: t[1].op.Name})
		}
	}
}
