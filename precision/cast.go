package precision

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// caster rewrites one program. It decides by root buffer: all views of a root have its type.
type caster struct {
	p       *graph.Program
	half    graph.DType
	grads32 bool

	root  []graph.BufID // by buffer of the original program: its root
	kept  []bool        // by root: an f32 buffer that stays f32
	twins map[graph.BufID]graph.BufID
}

// operand is one use of a buffer by an operation.
type operand struct {
	sig    graph.Operand
	buf    *graph.BufID // the field of the operation that names the buffer
	reads  bool
	writes bool
}

// operands lists an operation's uses of buffers, with their signatures in the kind table.
func operands(op *graph.Op) (list []operand) {
	info, _ := op.Info()
	ins, outs := info.Operands(op.Attr)
	for i := range op.In {
		if op.In[i] != graph.NoBuf {
			list = append(list, operand{ins[i], &op.In[i], true, false})
		}
	}
	for i := range op.Out {
		if o := &op.Out[i]; o.Buf != graph.NoBuf {
			list = append(list, operand{outs[i], &o.Buf, o.Mode != graph.Write, true})
		}
	}
	return list
}

// strict says whether the operand must be f32 and cannot have 16 bits.
func (o *operand) strict() bool {
	return slices.Contains(o.sig.Types, graph.F32) && !slices.Contains(o.sig.Types, graph.BF16)
}

// classify finds the f32 buffers that stay f32: those that the host reads or fills, those that only
// strict operands use, and with Grads32 the gradients.
func (c *caster) classify() error {
	p := c.p
	n := len(p.Buffers)
	c.root, c.kept = make([]graph.BufID, n), make([]bool, n)
	flexible, strict := make([]bool, n), make([]bool, n)
	for i := range c.root {
		c.root[i], _ = p.Resolve(graph.BufID(i), nil)
	}
	for _, ph := range p.Phases() {
		for k := range ph.Ops {
			for _, o := range operands(&ph.Ops[k]) {
				if o.strict() {
					strict[c.root[*o.buf]] = true
				} else if slices.Contains(o.sig.Types, graph.F32) {
					flexible[c.root[*o.buf]] = true
				}
			}
		}
	}
	for i := range c.kept {
		c.kept[i] = strict[i] && !flexible[i] || p.Buffers[i].Class == graph.Inputs
	}
	if p.Logits != graph.NoBuf {
		c.kept[c.root[p.Logits]] = true
	}
	for i := range p.Params {
		prm := &p.Params[i]
		if v := c.root[prm.Value]; strict[v] && !flexible[v] {
			return fmt.Errorf("precision: parameter %q is used in f32 alone; no kind that does so may have parameters", prm.Name)
		}
		if prm.Grad != graph.NoBuf {
			c.kept[c.root[prm.Grad]] = c.grads32
		}
	}
	return nil
}

// convert changes all buffers that are not kept to 16 bits.
func (c *caster) convert() {
	for i := range c.p.Buffers {
		b := &c.p.Buffers[i]
		if b.DType != graph.F32 || c.kept[c.root[i]] {
			continue
		}
		b.DType = c.half
		if b.View != nil {
			b.View.Offset = b.View.Offset / graph.F32.Size() * c.half.Size()
			b.View.RankStride = b.View.RankStride / graph.F32.Size() * c.half.Size()
		}
	}
}

// copies says whether a root and its twin (its copy in the other type) hold the current value.
type copies struct{ root, twin bool }

// phase replaces an operand by the twin of its buffer if it needs the other type. It inserts a cast
// if the needed buffer does not hold the current value.
func (c *caster) phase(ph *graph.Phase) {
	state := map[graph.BufID]*copies{}
	touched := []graph.BufID{} // roots that have twins, in order of use
	of := func(root graph.BufID) *copies {
		if state[root] == nil {
			state[root] = &copies{root: true}
			touched = append(touched, root)
		}
		return state[root]
	}
	names := map[string]bool{}
	for i := range ph.Ops {
		names[ph.Ops[i].Name] = true
	}
	w := graph.NewEditor(ph)
	cast := func(near *graph.Op, root graph.BufID, toTwin bool) graph.Op {
		from, to := c.twin(root), root
		if toTwin {
			from, to = to, from
		}
		name := fmt.Sprintf("%s/%v", c.p.Buf(root).Name, c.p.Buf(to).DType)
		for k := 2; names[name]; k++ {
			name = fmt.Sprintf("%s/%v.%d", c.p.Buf(root).Name, c.p.Buf(to).DType, k)
		}
		names[name] = true
		op := graph.NewOp(graph.Cast, name, []graph.BufID{from}, []graph.Out{{Buf: to}}, nil)
		op.Stream, op.Pass, op.Unit, op.Micro = near.Stream, near.Pass, near.Unit, near.Micro
		return op
	}
	for i, n := range w.Base {
		for _, o := range operands(&n.Op) {
			root := c.root[*o.buf]
			wantTwin := c.wantsTwin(&o, root)
			if state[root] == nil && !wantTwin {
				continue
			}
			s := of(root)
			if wantTwin {
				if o.reads && !s.twin {
					w.Before(i, cast(&n.Op, root, true))
					s.twin = true
				}
				*o.buf = c.twinOf(*o.buf, root)
			} else if o.reads && !s.root {
				w.Before(i, cast(&n.Op, root, false))
				s.root = true
			}
			if o.writes {
				*s = copies{root: !wantTwin, twin: wantTwin}
			}
			if o.writes && wantTwin && c.p.Buf(root).Class == graph.Gradients { // the next operation is its unit's reduction
				w.After(i, cast(&n.Op, root, false))
				s.root = true
			}
		}
	}
	for _, root := range touched {
		lasts := c.p.Buf(root).Life != graph.LifePhase || c.p.Logits != graph.NoBuf && root == c.root[c.p.Logits]
		if lasts && !state[root].root {
			w.Append(cast(&w.Base[len(w.Base)-1].Op, root, false))
		}
	}
	w.Commit()
}

// wantsTwin says whether an operand cannot have the type of its buffer.
func (c *caster) wantsTwin(o *operand, root graph.BufID) bool {
	switch dt := c.p.Buf(root).DType; {
	case o.strict():
		return dt == c.half
	case dt == graph.F32:
		return o.sig.Float == graph.ComputeFloat
	}
	return false
}

// twin returns the buffer that holds a root's value in the other type.
func (c *caster) twin(root graph.BufID) graph.BufID {
	id, ok := c.twins[root]
	if !ok {
		b := *c.p.Buf(root)
		if b.DType == c.half {
			b.DType = graph.F32
		} else {
			b.DType = c.half
		}
		b.Name += "." + b.DType.String()
		b.Shape, b.Global, b.Place = slices.Clone(b.Shape), slices.Clone(b.Global), slices.Clone(b.Place)
		b.Life = graph.LifePhase
		if b.Class == graph.Inputs || b.Class == graph.Gradients { // micro-batches add up in the root
			b.Class = graph.Activations
		}
		id = c.p.AddBuffer(b)
		c.twins[root] = id
	}
	return id
}

// twinOf returns the twin of a buffer that is root or a view of it.
func (c *caster) twinOf(id, root graph.BufID) graph.BufID {
	t := c.twin(root)
	if id == root {
		return t
	}
	view, ok := c.twins[id]
	if !ok {
		b := *c.p.Buf(id)
		_, off := c.p.Resolve(id, nil)
		dt := c.p.Buf(t).DType
		b.View = &graph.View{Base: t, Offset: off / b.DType.Size() * dt.Size()}
		b.DType, b.Life, b.Class = dt, graph.LifePhase, c.p.Buf(t).Class
		b.Name += "." + dt.String()
		b.Shape = slices.Clone(b.Shape)
		view = c.p.AddBuffer(b)
		c.twins[id] = view
	}
	return view
}
