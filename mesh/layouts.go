package mesh

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// layout describes how a parameter is cut.
type layout struct{ param, dim, groups int }

// params makes each slice of the cut parameters a parameter.
func (v *values) params() {
	for i := range v.p.Tensors() {
		l := v.cut[v.p.Params[i].Value]
		if l == nil {
			continue
		}
		split := graph.Split{Dim: l.dim, Axis: v.o.Axis, Slices: v.o.Slices, Groups: l.groups, Of: i}
		v.p.Params[i].Split = &split
		shape := v.p.LocalShape(&v.p.Params[i])
		for k := range v.per {
			q, own := v.p.Params[i], split
			own.Slice, q.Split = k, &own
			for _, id := range []*graph.BufID{&q.Value, &q.Grad} {
				if *id != graph.NoBuf {
					*id = v.slice(*id, k, shape)
					v.cut[*id] = l
				}
			}
			if k > 0 {
				q.Name = sliceName(q.Name, k)
				v.p.Params = append(v.p.Params, q)
			}
		}
	}
}

// local has the operations that work on each element, or each head, separately.
var local = []graph.Kind{
	graph.Activation, graph.ActivationGrad, graph.SwiGLU, graph.SwiGLUGrad, graph.SoftCap, graph.SoftCapGrad,
	graph.Add, graph.Mul, graph.Scale, graph.BiasGrad, graph.RMSNorm, graph.RMSNormGrad,
	graph.Rope, graph.Attention, graph.AttentionGrad,
}

// localAttr returns the attribute of an operation in local for one of s slices.
func localAttr(attr any, s int64) any {
	switch a := attr.(type) {
	case graph.RopeAttr:
		a.Heads /= s
		return a
	case graph.AttentionAttr:
		a.Heads, a.KVHeads = a.Heads/s, a.KVHeads/s
		return a
	}
	return attr
}

// flow is the data flow of a forward program. It determines how parameters are cut.
type flow struct {
	*values
	writes, reads map[graph.BufID][]*graph.Op // by root
	params        map[graph.BufID]int         // by value
	packed        map[graph.BufID]int         // by root: the number of equal groups of its columns, if there are several
}

// layouts decides how parameters are cut. It uses the forward operations of the training section,
// or of the first section if there is none.
func (v *values) layouts() error {
	sec := v.p.SectionOf(graph.SectionTrain, graph.FormWhole)
	if sec == nil {
		sec = &v.p.Sections[0]
	}
	byRoot := func() map[graph.BufID][]*graph.Op { return map[graph.BufID][]*graph.Op{} }
	f := &flow{v, byRoot(), byRoot(), map[graph.BufID]int{}, map[graph.BufID]int{}}
	for i := range v.p.Params {
		f.params[v.p.Params[i].Value] = i
	}
	var ops []*graph.Op
	for i := range sec.Phases[0].Ops {
		op := &sec.Phases[0].Ops[i]
		head := op.Kind == graph.HeadLossGrad
		if op.Pass != graph.Forward && !head {
			continue
		}
		ops = append(ops, op)
		for _, id := range op.In {
			if id != graph.NoBuf {
				f.reads[v.root(id)] = append(f.reads[v.root(id)], op)
			}
		}
		for _, o := range op.Out {
			if o.Buf != graph.NoBuf && !head {
				f.writes[v.root(o.Buf)] = append(f.writes[v.root(o.Buf)], op)
			}
		}
	}
	for _, op := range ops {
		var err error
		switch op.Kind {
		case graph.HeadLoss, graph.HeadLossGrad:
			if graph.HeadCap(op) != 0 {
				return fmt.Errorf("a soft cap of logits cannot be divided")
			}
			err = f.divide(op.In[1], 0, 1)
		case graph.Embed:
			err = f.divide(op.In[1], 0, 1)
		case graph.Linear:
			if v.cut[op.In[1]] == nil && !f.beside(op) {
				err = f.group(op)
			}
		}
		if err != nil {
			return fmt.Errorf("%s cannot be divided by %d: %w", op.Name, v.o.Slices, err)
		}
	}
	return nil
}

// divide records the layout of a parameter and of its gradient.
func (f *flow) divide(value graph.BufID, dim, groups int) error {
	i, ok := f.params[value]
	if !ok {
		return fmt.Errorf("%s is no parameter", f.p.Buf(value).Name)
	}
	l, q := &layout{i, dim, groups}, &f.p.Params[i]
	if have := f.cut[value]; have != nil && *have != *l {
		return fmt.Errorf("%s is used in two ways", q.Name)
	}
	n, s := q.Shape[dim]/int64(groups), int64(f.o.Slices)
	if n%s != 0 && (len(q.Shape) < 2 || dim > 0 || (s-1)*((n+s-1)/s) >= n) {
		return fmt.Errorf("dimension %d of %s %v has %d elements", dim, q.Name, q.Shape, n)
	}
	if f.cut[value] = l; q.Grad != graph.NoBuf {
		f.cut[q.Grad] = l
	}
	return nil
}

// group cuts the outputs of first and of the products parallel to it, and the inputs of the
// products that follow.
func (f *flow) group(first *graph.Op) error {
	in := map[graph.BufID]bool{}
	var before, behind []*graph.Op
	work := []graph.BufID{f.root(first.Out[0].Buf)}
	follow := func(ops []*graph.Op, products *[]*graph.Op) error {
		for _, op := range ops {
			if op.Kind == graph.Linear {
				*products = append(*products, op)
				continue
			}
			more, err := f.through(op)
			if err != nil {
				return err
			}
			work = append(work, more...)
		}
		return nil
	}
	for len(work) > 0 {
		root := work[0]
		if work = work[1:]; in[root] {
			continue
		}
		in[root] = true
		if err := cmp.Or(follow(f.writes[root], &before), follow(f.reads[root], &behind)); err != nil {
			return err
		}
	}
	for _, op := range behind {
		if slices.Contains(before, op) {
			return fmt.Errorf("%s would be cut by inputs and outputs", op.Name)
		}
		if err := f.divide(op.In[1], side(op, false), 1); err != nil {
			return err
		}
	}
	if len(behind) == 0 {
		return fmt.Errorf("no product follows it, through operations on single elements or heads, whose inputs could be cut")
	}
	for _, op := range before {
		groups := f.groups(op)
		if err := f.divide(op.In[1], side(op, true), groups); err != nil {
			return err
		}
		if len(op.In) > 2 && op.In[2] != graph.NoBuf {
			if err := f.divide(op.In[2], 0, groups); err != nil {
				return err
			}
		}
	}
	return nil
}

// groups returns the number of equal groups of a product's outputs. If they are added to another
// value, that value's groups count as well.
func (f *flow) groups(op *graph.Op) int {
	root := f.root(op.Out[0].Buf)
	n := max(f.packed[root], 1)
	for _, r := range f.reads[root] {
		if r.Kind == graph.Add {
			n = max(n, f.packed[f.root(r.Out[0].Buf)])
		}
	}
	return n
}

// beside says whether a product stays complete because it belongs to a pair parallel to a cut
// product, as in a low-rank adapter. It does if its result is read only by products cut by outputs,
// or is only added to the result of a product cut by inputs.
func (f *flow) beside(op *graph.Op) bool {
	isCut := func(op *graph.Op, outputs bool) bool {
		return op.Kind == graph.Linear && f.cut[op.In[1]] != nil && f.cut[op.In[1]].dim == side(op, outputs)
	}
	root, readers, into, to := f.root(op.Out[0].Buf), 0, 0, 0
	for _, r := range f.reads[root] {
		result := f.root(r.Out[0].Buf)
		switch {
		case r.Kind == graph.Scale && result == root:
			continue
		case isCut(r, true):
			into++
		case r.Kind == graph.Add && slices.ContainsFunc(f.writes[result], func(w *graph.Op) bool { return isCut(w, false) }):
			to++
		}
		readers++
	}
	return readers > 0 && (into == readers || to == readers)
}

// side returns the dimension of a product's weight that holds its outputs or its inputs.
func side(op *graph.Op, outputs bool) int {
	if op.Attr.(graph.LinearAttr).TransW == outputs {
		return 0
	}
	return 1
}

// through checks an operation between the two matrix products of a tensor-parallel pair: it must
// work on each slice of the activations separately. It returns the activations' root buffers.
func (f *flow) through(op *graph.Op) (roots []graph.BufID, err error) {
	s := int64(f.o.Slices)
	if !slices.Contains(local, op.Kind) {
		return nil, fmt.Errorf("its result goes through %s (%s), which works on neither single elements nor heads",
			op.Name, op.Kind)
	}
	switch a := op.Attr.(type) {
	case graph.AttentionAttr:
		if a.Heads%s != 0 || a.KVHeads%s != 0 {
			return nil, fmt.Errorf("%s has %d heads and %d of keys and values", op.Name, a.Heads, a.KVHeads)
		}
		if a.Packed && a.Heads != a.KVHeads {
			return nil, fmt.Errorf("%s packs %d heads beside %d of keys and values, which are no equal groups",
				op.Name, a.Heads, a.KVHeads)
		} else if a.Packed {
			f.packed[f.root(op.In[0])] = 3
		}
	case graph.NormAttr:
		x, whole := f.p.Buf(op.In[0]).Shape, f.p.Buf(f.root(op.In[0])).Shape
		width, head := whole[len(whole)-1], x[len(x)-1]
		if width%(head*s) != 0 {
			return nil, fmt.Errorf("its result goes through %s (%s), whose rows of %d elements are of several heads", op.Name, op.Kind, head)
		}
	}
	graph.Effects(op, func(e graph.Effect) {
		if _, weight := f.params[e.Buf]; !weight && f.p.Buf(e.Buf).Class == graph.Activations {
			roots = append(roots, f.root(e.Buf))
		}
	})
	return roots, nil
}
