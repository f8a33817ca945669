package fsdp

import (
	"sort"

	"github.com/spillway-ml/spillway/graph"
)

// gradSpan is where a unit's gradient is written in a phase, as base indices.
type gradSpan struct{ unit, first, last int }

func (s *sharder) gradSpans(w *graph.Editor) []gradSpan {
	byRoot := map[graph.BufID]int{}
	for u, b := range s.units {
		if b.grad != graph.NoBuf {
			byRoot[b.grad] = u
		}
	}
	at := map[int]*gradSpan{}
	for i, n := range w.Base {
		for _, o := range n.Op.Out {
			if o.Buf == graph.NoBuf {
				continue
			}
			root, _ := s.p.Resolve(o.Buf, nil)
			u, ok := byRoot[root]
			if !ok {
				continue
			}
			if at[u] == nil {
				at[u] = &gradSpan{u, i, i}
			}
			at[u].last = i
		}
	}
	var spans []gradSpan
	for _, g := range at {
		spans = append(spans, *g)
	}
	sort.Slice(spans, func(i, j int) bool {
		a, b := spans[i], spans[j]
		if a.last != b.last {
			return a.last < b.last
		}
		return a.unit < b.unit
	})
	return spans
}

// reduceGrads makes the gradients of a micro-step accumulate over micro-steps
// and over ranks, as the stage has it (see Shard). Reductions run on the comm
// stream as soon as a unit's last gradient is written; at stages 2 and 3 at
// most Prefetch+1 units' whole gradients are alive beside those still written.
func (s *sharder) reduceGrads(w *graph.Editor, first, last bool) {
	spans := s.gradSpans(w)
	o := s.o
	every := o.Stage.ShardsGrads() || s.everyMicroStep()
	var reduces []*graph.Node
	for _, g := range spans {
		b := &s.units[g.unit]
		name := s.p.Units[g.unit].Name
		comm := func(kind graph.Kind, in, out graph.BufID, mode graph.Mode) *graph.Node {
			var ins []graph.BufID
			if in != graph.NoBuf {
				ins = []graph.BufID{in}
			}
			return w.After(g.last, newOp(kind, name+"/"+string(kind), graph.Comm, graph.Backward, g.unit, ins, []graph.Out{{Buf: out, Mode: mode}}, s.group()))
		}
		switch {
		case s.halves(g.unit):
			reduces = append(reduces, s.reduceHalves(w, g, first, last)...)
		case o.Stage.ShardsGrads():
			mode := graph.Accum
			if first {
				mode = graph.Write
			}
			reduces = append(reduces, comm(graph.ReduceScatter, b.grad, b.reduced, mode))
			s.reduceReplicas(w, g, last)
		case !every || first:
			if !first {
				accumulate(w, s.p, b.grad)
			}
			if last || every {
				s.reduceWhole(w, g, b.grad, b.gradShard, last)
			}
		default: // a later micro-step of a reproducible run: reduce apart, then add
			whole, part := s.extraGrad(g.unit)
			s.redirect(w, b.grad, whole)
			if o.Stage.ShardsStates() {
				reduces = append(reduces, comm(graph.ReduceScatter, whole, part, graph.Write))
			} else {
				reduces = append(reduces, comm(graph.AllReduce, graph.NoBuf, whole, graph.ReadWrite))
			}
			w.After(g.last, newOp(graph.Scale, name+"/accumulate", graph.Compute, graph.Backward, g.unit,
				[]graph.BufID{part}, []graph.Out{{Buf: b.gradShard, Mode: graph.Accum}}, graph.ScaleAttr{Factor: 1}))
			s.reduceReplicas(w, g, last)
		}
	}
	if len(reduces) == 0 {
		return
	}
	for i := range reduces {
		if next := i + 1 + o.Prefetch; next < len(spans) {
			w.Throttle(reduces[i], w.Base[spans[next].first])
		}
	}
}

// accumulate makes writes into the gradient buffer additions.
func accumulate(w *graph.Editor, p *graph.Program, grad graph.BufID) {
	for _, n := range w.Base {
		for k, o := range n.Op.Out {
			if o.Buf == graph.NoBuf || o.Mode != graph.Write {
				continue
			}
			if root, _ := p.Resolve(o.Buf, nil); root == grad {
				n.Op.Out[k].Mode = graph.Accum
			}
		}
	}
}

// extraGrad returns a whole gradient buffer of unit u for one micro-step, and
// the part of it that the rank adds to its accumulated gradient.
func (s *sharder) extraGrad(u int) (whole, part graph.BufID) {
	b := &s.units[u]
	if b.extra == graph.NoBuf {
		unit := &s.p.Units[u]
		b.extra = s.p.AddBuffer(flatBuffer("micrograd/"+unit.Name, s.p.Buf(b.grad).DType, graph.Unsharded, graph.LifePhase, u, unit.FlatLen, usedElems(unit)))
	}
	if s.o.Stage.ShardsStates() {
		return b.extra, s.own(b.extra, u)
	}
	return b.extra, b.extra
}

// redirect points the writes into the gradient buffer at the same places of
// another one.
func (s *sharder) redirect(w *graph.Editor, grad, to graph.BufID) {
	if s.extra == nil {
		s.extra = map[graph.BufID]graph.BufID{}
	}
	for _, n := range w.Base {
		for k, o := range n.Op.Out {
			if o.Buf == graph.NoBuf {
				continue
			}
			root, off := s.p.Resolve(o.Buf, nil)
			if root != grad {
				continue
			}
			twin, ok := s.extra[o.Buf]
			if !ok {
				v := *s.p.Buf(o.Buf)
				v.View = &graph.View{Base: to, Offset: off}
				v.Class, v.Life = graph.Unsharded, graph.LifePhase
				twin = s.p.AddBuffer(v)
				s.extra[o.Buf] = twin
			}
			n.Op.Out[k].Buf = twin
		}
	}
}
