package fsdp

import "github.com/spillway-ml/spillway/graph"

// Accumulate makes the gradients of a step's micro-steps add up, for each unit along the path in
// its graph.Gradient. If gradients are reduced once a step, the backward of later micro-steps adds
// to the result of the first one:
//
//	h.0.fc/dw: write grad/h.0    →    h.0.fc/dw: add to grad/h.0
//
// If gradients are reduced in every micro-step, the result of each reduction is added to Home,
// after the last operation that writes the gradient:
//
//	h.0.fc/dw: write grad/h.0    →    h.0.fc/dw: write grad/h.0
//	                                  h.0/accumulate: add grad/h.0 to accum/h.0
//
// A sum leaf by leaf (graph.Gradient) on one rank gets a separate operation:
//
//	h.0.fc/dw: write grad/h.0    →    h.0.fc/dw: write grad/h.0
//	                                  h.0/add_leaf: add grad/h.0 to accum/h.0
//
// Accumulate adds no collectives; Reduce does, including those that accumulate themselves.
func Accumulate(p *graph.Program) (*graph.Program, error) {
	q := p.Clone()
	eachMicroStep(q, func(ph *graph.Phase) {
		w := graph.NewEditor(ph)
		for _, g := range gradSpans(q, w) {
			way := q.Units[g.unit].Grad
			if way.Leaves() {
				if way.Axis < 0 {
					for _, op := range addLeaf(q, g.unit, g.micro, ph.First && g.micro == 0) {
						w.After(g.last, op)
					}
				}
				continue
			}
			if !way.Each {
				if !ph.First {
					adding(q, w, way.Whole)
				}
				continue
			}
			if from, add := way.Lands(); add {
				w.After(g.last, addPart(q, g.unit, from, way.Home, ph.First))
			}
		}
		w.Commit()
	})
	return q, nil
}

// eachMicroStep calls visit for the micro-step phases of every step section.
func eachMicroStep(p *graph.Program, visit func(ph *graph.Phase)) {
	for sec, ph := range p.Phases() {
		if sec.Kind == graph.SectionStep && ph.Kind == graph.MicroPhase {
			visit(ph)
		}
	}
}

// addPart adds the result of a reduction to the sum over micro-steps, or starts the sum with it.
func addPart(p *graph.Program, unit int, from, home graph.BufID, first bool) graph.Op {
	out := graph.Out{Buf: home, Mode: graph.Accum}
	if first {
		out.Mode = graph.Write
	}
	kind, attr := graph.Cast, any(nil)
	if p.Buf(from).DType == p.Buf(home).DType {
		kind, attr = graph.Scale, graph.ScaleAttr{Factor: 1}
	}
	return newOp(kind, p.Units[unit].Name+"/accumulate", graph.Comm, graph.Backward, unit, []graph.BufID{from}, []graph.Out{out}, attr)
}

// addLeaf adds a micro-batch's leaf to the sum on a single rank, or starts the sum with it. It
// uses the stream of collectives, as several ranks do, so that the backward can continue.
func addLeaf(p *graph.Program, unit, micro int, first bool) []graph.Op {
	way := p.Units[unit].Grad
	out := leafSum(way, first)
	if way.Int8 {
		return quantised{p, unit, graph.Backward, micro}.reduce(way.Whole, out, way.Axis, way.Order, squared(way)...)
	}
	op := newOp(graph.SumParts, graph.MicroName(p.Units[unit].Name+"/add_leaf", micro), graph.Comm, graph.Backward, unit, []graph.BufID{way.Whole}, append([]graph.Out{out}, squared(way)...),
		graph.SumPartsAttr{Order: way.Order})
	op.Micro = micro
	return []graph.Op{op}
}

// leafSum returns the output for leaves: the first leaf of a step is written, later ones are added.
func leafSum(way *graph.Gradient, first bool) graph.Out {
	if first {
		return graph.Out{Buf: way.Home}
	}
	return graph.Out{Buf: way.Home, Mode: graph.Accum}
}

// squared returns the output that sums the leaves' squares; none if no squares are summed.
func squared(way *graph.Gradient) []graph.Out {
	if way.Squares == graph.NoBuf {
		return nil
	}
	return []graph.Out{{Buf: way.Squares, Mode: graph.Accum}}
}

// adding changes the writes into the gradient buffer to accumulation.
func adding(p *graph.Program, w *graph.Editor, grad graph.BufID) {
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
