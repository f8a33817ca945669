package fsdp

import "github.com/spillway-ml/spillway/graph"

// Accumulate makes the gradients of a step's micro-steps add up, each unit's by its
// way (graph.Gradient). Where they are reduced once, the backward of later
// micro-steps adds to what the first one wrote:
//
//	h.0.fc/dw: write grad/h.0    →    h.0.fc/dw: add to grad/h.0
//
// Where every micro-step is reduced, what a reduction leaves is added to its home
// behind the last operation that writes the gradient; where the home is in the way,
// later micro-steps write elsewhere:
//
//	h.0.fc/dw: write grad/h.0    →    h.0.fc/dw: write micrograd/h.0
//	                                  h.0/accumulate: add micrograd/h.0 to grad/h.0
//
// Reductions that add by themselves are left to Reduce, as are all collectives.
func Accumulate(p *graph.Program) (*graph.Program, error) {
	q := p.Clone()
	twins := map[graph.BufID]graph.BufID{}
	eachMicroStep(q, func(ph *graph.Phase) {
		w := graph.NewEditor(ph)
		for _, g := range gradSpans(q, w, func(g *graph.Gradient) graph.BufID { return g.Whole }) {
			way := q.Units[g.unit].Grad
			if !way.Each {
				if !ph.First {
					adding(q, w, way.Whole)
				}
				continue
			}
			if !ph.First && way.Addend != graph.NoBuf {
				redirect(q, w, way.Whole, way.Addend, twins)
			}
			if from, add := way.Lands(ph.First); add {
				w.After(g.last, addPart(q, g.unit, from, way.Home, ph.First))
			}
		}
		w.Commit()
	})
	return q, nil
}

// eachMicroStep calls visit for the micro-step phases of every form of the step.
func eachMicroStep(p *graph.Program, visit func(ph *graph.Phase)) {
	for i := range p.Sections {
		if p.Sections[i].Kind != graph.SectionStep {
			continue
		}
		for j := range p.Sections[i].Phases {
			if ph := &p.Sections[i].Phases[j]; ph.Kind == graph.MicroPhase {
				visit(ph)
			}
		}
	}
}

// addPart adds what a reduction has left to the sum over micro-steps, or begins it.
func addPart(p *graph.Program, unit int, from, home graph.BufID, first bool) graph.Op {
	out := graph.Out{Buf: home, Mode: graph.Accum}
	if first {
		out.Mode = graph.Write
	}
	name := p.Units[unit].Name + "/accumulate"
	if p.Buf(from).DType != p.Buf(home).DType {
		return newOp(graph.Cast, name, graph.Comm, graph.Backward, unit, []graph.BufID{from}, []graph.Out{out}, nil)
	}
	return newOp(graph.Scale, name, graph.Compute, graph.Backward, unit, []graph.BufID{from}, []graph.Out{out}, graph.ScaleAttr{Factor: 1})
}

// adding makes writes into the gradient buffer additions.
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

// redirect points the writes into the gradient buffer at the same places of another
// one. twins has the places made so far, for all phases.
func redirect(p *graph.Program, w *graph.Editor, grad, to graph.BufID, twins map[graph.BufID]graph.BufID) {
	for _, n := range w.Base {
		for k, o := range n.Op.Out {
			if o.Buf == graph.NoBuf {
				continue
			}
			root, off := p.Resolve(o.Buf, nil)
			if root != grad {
				continue
			}
			twin, ok := twins[o.Buf]
			if !ok {
				v := *p.Buf(o.Buf)
				v.View = &graph.View{Base: to, Offset: off}
				v.Class, v.Life = graph.Unsharded, graph.LifePhase
				twin = p.AddBuffer(v)
				twins[o.Buf] = twin
			}
			n.Op.Out[k].Buf = twin
		}
	}
}
