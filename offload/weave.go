package offload

import "github.com/spillway-ml/spillway/graph"

// weave inserts operations into a phase while its own keep their indices, and
// collects throttles by operation.
type weave struct {
	base          []*node
	before, after [][]*node // by base index
	throttles     [][2]*node
	bounces       map[*node]*node // the copy into a bounce buffer → the one out of it
	names         map[string]int
}

type node struct {
	op graph.Op
	at int // index in the woven phase
}

func newWeave(ops []graph.Op) *weave {
	w := &weave{before: make([][]*node, len(ops)), after: make([][]*node, len(ops)), names: map[string]int{}, bounces: map[*node]*node{}}
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
//
// At most so many bounce buffers a direction are full at a time: with two, the
// disk works on one while the link to the device empties or fills the other.
func (w *weave) into(ph *graph.Phase, buffers int) {
	ph.Ops = nil
	drains := map[graph.StreamID][]*node{} // by the stream that fills
	put := func(ns ...*node) {
		for _, n := range ns {
			n.at = len(ph.Ops)
			ph.Ops = append(ph.Ops, n.op)
			if out := w.bounces[n]; out != nil {
				d := drains[n.op.Stream]
				if k := len(d) - buffers; k >= 0 {
					w.throttle(d[k], n)
				}
				drains[n.op.Stream] = append(d, out)
			}
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
