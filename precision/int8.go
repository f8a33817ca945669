package precision

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// Int8 says which values are in int8, as codes with one scale for each row.
type Int8 struct {
	Activations bool // activations that the forward saves for products and activation gradients
	Matmul      bool // both factors in the products of linears and of their inputs' gradients
}

// Quantise returns the program that computes and saves in int8 according to o. It runs after
// fusion, because it saves the pre-activations of fused products. It runs before recomputation, so
// that recomputed values are quantised again and the backward reads the same values.
func Quantise(p *graph.Program, o Int8) (*graph.Program, error) {
	if o == (Int8{}) {
		return p, nil
	}
	q := p.Clone()
	if o.Matmul {
		if err := products(q); err != nil {
			return nil, err
		}
	}
	if o.Activations {
		saveInt8(q, q.SectionOf(graph.SectionTrain, graph.FormWhole).Micro())
	}
	return q, nil
}

// products changes the 16-bit products of linears, and of the gradients of their inputs, to
// products of int8, in every section:
//
//	y = linear(x, w)    →    y = linear(x, w){Int8}    x by row, w by output
//	dx = dy·wᵀ          →    dx = dy·wᵀ {Int8}         dy by row, w by input
//
// The gradients of weights do not change. The head does not change either, since its operations are
// of other kinds.
func products(p *graph.Program) error {
	for _, ph := range p.Phases() {
		for k := range ph.Ops {
			op := &ph.Ops[k]
			if op.Kind != graph.Linear && op.Kind != graph.LinearGradX {
				continue
			}
			x := p.Buf(op.In[0])
			if x.DType == graph.F32 {
				return fmt.Errorf("precision: product %s is of f32; int8 products stand for 16-bit ones", op.Name)
			}
			if n := x.Shape[len(x.Shape)-1]; n > graph.Int8Depth {
				return fmt.Errorf("precision: product %s sums %d products of int8, whose sum fits 32 bits up to %d", op.Name, n, graph.Int8Depth)
			}
			a := op.Attr.(graph.LinearAttr)
			a.Int8 = true
			op.Attr = a
		}
	}
	return nil
}

// saveInt8 stores activations in int8, with a scale for each row, between forward and backward. It
// does so only if all their readers in the backward are products or gradients of activations:
//
//	forward   y = linear(x)         y = linear(x)
//	                                q = quantize(x)        behind x's last use
//	backward  dw = xᵀ·dy            x′ = dequantize(q)     before the first
//	                                dw = x′ᵀ·dy
//
// Activations that the gradient of a norm or of attention reads are not changed, because these
// gradients also use statistics of the unrounded values.
func saveInt8(p *graph.Program, ph *graph.Phase) {
	w := graph.NewEditor(ph)
	for _, s := range findSaved(p, w) {
		b := *p.Buf(s.buf)
		cols := b.Shape[len(b.Shape)-1]
		attr := graph.QuantAttr{Block: cols, Parts: 1}
		packed := graph.Buffer{Name: b.Name + ".int8", DType: graph.U8, Shape: []int64{attr.Bytes(b.Elems())},
			Class: b.Class, Life: b.Life, Unit: b.Unit, Micro: b.Micro}
		q := p.AddBuffer(packed)
		b.Name += ".read"
		b.Shape = slices.Clone(b.Shape)
		read := p.AddBuffer(b)
		op := func(near *graph.Op, kind graph.Kind, name string, in, out graph.BufID) graph.Op {
			o := graph.NewOp(kind, name, []graph.BufID{in}, []graph.Out{{Buf: out}}, attr)
			o.Stream, o.Pass, o.Unit, o.Micro = near.Stream, near.Pass, near.Unit, near.Micro
			return o
		}
		last, first := &w.Base[s.forward].Op, &w.Base[s.backward[0]].Op
		w.After(s.forward, op(last, graph.Quantize, packed.Name, s.buf, q))
		w.Before(s.backward[0], op(first, graph.Dequantize, b.Name, q, read))
		for _, i := range s.backward {
			for a, id := range w.Base[i].Op.In {
				if id == s.buf {
					w.Base[i].Op.In[a] = read
				}
			}
		}
	}
	w.Commit()
}

// saved is an activation that can be stored in int8, with the index of its last use in the forward
// and the indices of its uses in the backward.
type saved struct {
	buf      graph.BufID
	forward  int
	backward []int
}

// ReadsQuantised says whether input i of an operation may be an activation that was saved in int8:
// a factor of a weight's gradient, or the argument of an activation's gradient.
func ReadsQuantised(op *graph.Op, i int) bool {
	switch op.Kind {
	case graph.LinearGradW, graph.LinearGradWB:
		return i == 0
	case graph.ActivationGrad:
		return i == 1
	case graph.LinearGradAct:
		return i == 2
	case graph.SwiGLUGrad:
		return i == 1 || i == 2
	}
	return false
}

// findSaved lists these activations in the order of their last use in the forward.
func findSaved(p *graph.Program, w *graph.Editor) []saved {
	type state struct {
		saved
		writes int
		unfit  bool
	}
	all := map[graph.BufID]*state{} // by root
	var order []graph.BufID
	for i, n := range w.Base {
		op := &n.Op
		forward := op.Pass == graph.Forward
		use := func(id graph.BufID, fits bool) {
			if id == graph.NoBuf {
				return
			}
			root, _ := p.Resolve(id, nil)
			s := all[root]
			if s == nil {
				s = &state{saved: saved{buf: root}}
				all[root], order = s, append(order, root)
			}
			b := p.Buf(root)
			if !fits || id != root || b.Class != graph.Activations || b.Life != graph.LifePhase || len(b.Shape) < 2 {
				s.unfit = true
			}
			if forward {
				s.forward = i
			} else if len(s.backward) == 0 || s.backward[len(s.backward)-1] != i {
				s.backward = append(s.backward, i)
			}
		}
		for k, id := range op.In {
			use(id, forward || ReadsQuantised(op, k))
		}
		for _, o := range op.Out {
			use(o.Buf, forward && o.Mode == graph.Write)
			if o.Buf != graph.NoBuf {
				root, _ := p.Resolve(o.Buf, nil)
				all[root].writes++
			}
		}
		use(op.Skip, false)
	}
	var list []saved
	for _, root := range order {
		if s := all[root]; !s.unfit && s.writes == 1 && len(s.backward) > 0 {
			list = append(list, s.saved)
		}
	}
	slices.SortStableFunc(list, func(a, b saved) int { return a.forward - b.forward })
	return list
}

// CheckSaved checks that only products and gradients of activations read activations that were
// saved in int8.
func CheckSaved(p *graph.Program) error {
	for _, ph := range p.Phases() {
		read := map[graph.BufID]string{} // names of dequantised activations, by root
		for k := range ph.Ops {
			op := &ph.Ops[k]
			for a, id := range op.In {
				if id == graph.NoBuf {
					continue
				}
				root, _ := p.Resolve(id, nil)
				if name, ok := read[root]; ok && !ReadsQuantised(op, a) {
					return fmt.Errorf("%s (%s) reads %s, which was saved in int8", op.Name, op.Kind, name)
				}
			}
			for _, o := range op.Out {
				if o.Buf == graph.NoBuf {
					continue
				}
				root, _ := p.Resolve(o.Buf, nil)
				if delete(read, root); op.Kind == graph.Dequantize && p.Buf(root).Class == graph.Activations {
					read[root] = p.Buf(root).Name
				}
			}
		}
	}
	return nil
}
