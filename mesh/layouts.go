package mesh

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// layout says how a parameter is cut.
type layout struct{ param, dim, groups int }

// local has the operations that work on each element, or each head, by itself, with their
// attributes for one of s slices.
var local = map[graph.Kind]func(attr any, s int64) any{
	graph.Activation: same, graph.ActivationGrad: same, graph.SwiGLU: same, graph.SwiGLUGrad: same, graph.SoftCap: same, graph.SoftCapGrad: same,
	graph.Add: same, graph.Mul: same, graph.Scale: same, graph.RMSNorm: same, graph.RMSNormGrad: same,
	graph.Rope: func(attr any, s int64) any {
		a := attr.(graph.RopeAttr)
		a.Heads /= s
		return a
	},
	graph.Attention: heads, graph.AttentionGrad: heads,
}

func same(attr any, _ int64) any { return attr }

func heads(attr any, s int64) any {
	a := attr.(graph.AttentionAttr)
	a.Heads, a.KVHeads = a.Heads/s, a.KVHeads/s
	return a
}

// params makes each slice of the cut parameters a parameter.
func (t *tensor) params() {
	for i := range t.p.Tensors() {
		l := t.cut[t.p.Params[i].Value]
		if l == nil {
			continue
		}
		t.p.Params[i].Split = &graph.Split{Dim: l.dim, Axis: t.o.Axis, Slices: t.o.Slices, Groups: l.groups, Of: i}
		shape := t.p.LocalShape(&t.p.Params[i])
		for k := range t.per {
			q := t.p.Params[i]
			split := *q.Split
			split.Slice, q.Split = k, &split
			for _, id := range []*graph.BufID{&q.Value, &q.Grad} {
				if *id != graph.NoBuf {
					t.parts[*id] = append(t.parts[*id], t.slice(*id, k, shape))
					*id = t.parts[*id][k]
				}
			}
			if k > 0 {
				q.Name = sliceName(q.Name, k)
				t.p.Params = append(t.p.Params, q)
			}
		}
	}
}

func sliceName(name string, k int) string {
	if k == 0 {
		return name
	}
	return fmt.Sprintf("%s/slice.%d", name, k)
}

// slice returns the buffer of a rank's k-th slice: the buffer itself for the first.
func (t *tensor) slice(id graph.BufID, k int, shape []int64) graph.BufID {
	if k == 0 {
		t.p.Buf(id).Shape = slices.Clone(shape)
		return id
	}
	b := *t.p.Buf(id)
	b.Name, b.Shape = sliceName(b.Name, k), slices.Clone(shape)
	if v := b.View; v != nil {
		b.View = &graph.View{Base: t.parts[v.Base][k], Offset: v.Offset}
	}
	return t.p.AddBuffer(b)
}

// part returns a rank's k-th slice of a buffer: the buffer itself where it is whole.
func (t *tensor) part(id graph.BufID, k int) graph.BufID {
	if id == graph.NoBuf {
		return id
	}
	if list := t.parts[id]; list != nil {
		return list[k]
	}
	if !t.isColumns(id) {
		return id
	}
	if b := t.p.Buf(id); b.View != nil {
		t.part(b.View.Base, 0)
	}
	shape, dim := slices.Clone(t.p.Buf(id).Shape), 0
	if !t.byRows(id) {
		dim = len(shape) - 1
	}
	shape[dim] /= int64(t.o.Slices)
	var list []graph.BufID
	for k := range t.per {
		list = append(list, t.slice(id, k, shape))
	}
	t.parts[id] = list
	return list[k]
}

// columnar is how an activation is cut: in its last dimension, or by rows where these are heads.
type columnar struct {
	rows bool
	last int64 // its last dimension before
}

// byRows says whether a buffer that is cut is cut in its first dimension. A view in which heads
// are rows, of a buffer in which they are columns, is cut in the other one.
func (t *tensor) byRows(id graph.BufID) bool {
	c, shape := t.columns[t.root(id)], t.p.Buf(id).Shape
	if t.root(id) == id || shape[len(shape)-1] == c.last {
		return c.rows
	}
	return !c.rows
}

// cutColumns notes that a result of an operation is cut, as its first input that is.
func (t *tensor) cutColumns(op graph.Op, id graph.BufID) {
	root := t.root(id)
	if t.columns[root] != nil {
		return
	}
	last := func(id graph.BufID) int64 { s := t.p.Buf(id).Shape; return s[len(s)-1] }
	c := &columnar{last: last(root)}
	for _, in := range op.In {
		if in != graph.NoBuf && t.isColumns(in) {
			c.rows = local[op.Kind] != nil && t.byRows(in) && last(in) == last(id)
			break
		}
	}
	t.columns[root] = c
}

// vocabulary returns the attribute of an operation on each slice of a table.
func (t *tensor) vocabulary(table graph.BufID) func(k int) any {
	q := &t.p.Params[t.cut[table].param]
	each := t.p.LocalShape(q)[0]
	return func(k int) any {
		return graph.SliceAttr{Axis: t.o.Axis, PerRank: int64(t.per), Index: int64(k), Each: each, Total: q.Shape[0]}
	}
}

// head rewrites the loss of a head, and its gradients, for a table that is cut by tokens:
//
//	stats.s = head_stats(x, w.s) ─ all_gather → stats ─ head_lse → loss, lse ─ head_slice_grad → dx.s, dw.s
func (t *tensor) head(op graph.Op) error {
	if graph.HeadCap(&op) != 0 {
		return fmt.Errorf("a soft cap of logits has no form for slices")
	}
	x, w, targets, loss := op.In[0], op.In[1], op.In[2], op.Out[0]
	t.whole(x)
	attr, rows := t.vocabulary(w), t.p.Buf(targets).Elems()
	buffer := func(what string, view *graph.View, shape ...int64) graph.BufID {
		return t.p.AddBuffer(graph.Buffer{Name: t.unique(op.Name + "/" + what), DType: graph.F32, Shape: shape, Class: graph.Activations, Unit: op.Unit, View: view})
	}
	const width = graph.HeadStatistics
	all := buffer("stats", nil, int64(t.o.Slices)*rows, width)
	own, slice := all, rows*width*graph.F32.Size()
	if t.o.Axis >= 0 {
		own = buffer("stats/own", &graph.View{Base: all, RankStride: int64(t.per) * slice, Axis: t.o.Axis}, int64(t.per)*rows, width)
	}
	forward := op
	forward.Pass = graph.Forward
	for k := range t.per {
		to := buffer("stats/slice", &graph.View{Base: own, Offset: int64(k) * slice}, rows, width)
		t.add(forward, graph.HeadStats, sliceName(op.Name+"/stats", k), []graph.BufID{x, t.part(w, k), targets}, graph.Out{Buf: to}, attr(k))
	}
	if t.o.Axis >= 0 {
		t.add(forward, graph.AllGather, op.Name+"/stats/all_gather", []graph.BufID{own}, graph.Out{Buf: all}, graph.GroupAttr{Axis: t.o.Axis})
	}
	lse := buffer("lse", nil, rows)
	t.add(forward, graph.HeadLSE, op.Name, []graph.BufID{all, targets}, loss, attr(0))
	last := &t.ops[len(t.ops)-1]
	last.Out = append(last.Out, graph.Out{Buf: lse})
	if dx, dw := graph.HeadGradients(&op); op.Kind == graph.HeadLoss || dx == graph.NoBuf && dw == graph.NoBuf {
		return nil
	}
	grad := op
	grad.Kind, grad.Name = graph.HeadSliceGrad, op.Name+"/grad"
	grad.In, grad.Out = []graph.BufID{x, w, targets, lse, op.In[3]}, op.Out[1:]
	return t.each(grad, attr, addends, 0)
}

// layouts decides how parameters are cut, by the forward operations of the section that trains,
// or of the first one.
func (t *tensor) layouts() error {
	sec := t.p.SectionOf(graph.SectionTrain, graph.FormWhole)
	if sec == nil {
		sec = &t.p.Sections[0]
	}
	f := &flow{t: t, writes: map[graph.BufID][]*graph.Op{}, reads: map[graph.BufID][]*graph.Op{}, params: map[graph.BufID]int{}}
	for i := range t.p.Params {
		f.params[t.p.Params[i].Value] = i
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
				f.reads[t.root(id)] = append(f.reads[t.root(id)], op)
			}
		}
		for _, o := range op.Out {
			if o.Buf != graph.NoBuf && !head {
				f.writes[t.root(o.Buf)] = append(f.writes[t.root(o.Buf)], op)
			}
		}
	}
	for _, op := range ops {
		var err error
		switch op.Kind {
		case graph.Embed, graph.HeadLoss, graph.HeadLossGrad:
			err = f.cut(op.In[1], 0, 1)
		case graph.Linear:
			if t.cut[op.In[1]] == nil && !f.beside(op) {
				err = f.group(op)
			}
		}
		if err != nil {
			return fmt.Errorf("%s (%s) cannot be cut into %d slices: %w", op.Name, op.Kind, t.o.Slices, err)
		}
	}
	return nil
}

// flow is the data flow of a forward program.
type flow struct {
	t             *tensor
	writes, reads map[graph.BufID][]*graph.Op // by root
	params        map[graph.BufID]int
}

// cut notes the layout of a parameter, with its gradient's.
func (f *flow) cut(value graph.BufID, dim, groups int) error {
	i, ok := f.params[value]
	if !ok {
		return fmt.Errorf("%s is no parameter", f.t.p.Buf(value).Name)
	}
	l, q := &layout{i, dim, groups}, &f.t.p.Params[i]
	if have := f.t.cut[value]; have != nil && *have != *l {
		return fmt.Errorf("%s is used in two ways", q.Name)
	}
	n, s := q.Shape[dim]/int64(groups), int64(f.t.o.Slices)
	if n%s != 0 && (len(q.Shape) < 2 || dim > 0 || (s-1)*((n+s-1)/s) >= n) {
		return fmt.Errorf("dimension %d of %s %v has %d elements, which as many slices do not divide", dim, q.Name, q.Shape, n)
	}
	f.t.cut[value] = l
	if q.Grad != graph.NoBuf {
		f.t.cut[q.Grad] = l
	}
	return nil
}

// group cuts a product's outputs, the products beside it, and the inputs of those behind.
func (f *flow) group(first *graph.Op) error {
	in, packed := map[graph.BufID]bool{}, map[graph.BufID]int{}
	var before, behind []*graph.Op
	work := []graph.BufID{f.t.root(first.Out[0].Buf)}
	for len(work) > 0 {
		root := work[0]
		if work = work[1:]; in[root] {
			continue
		}
		in[root] = true
		for _, op := range f.writes[root] {
			if _, weight := f.params[root]; op.Kind == graph.Linear && !weight {
				before = append(before, op)
				continue
			}
			more, err := f.through(op, packed)
			if err != nil {
				return err
			}
			work = append(work, more...)
		}
		for _, op := range f.reads[root] {
			if op.Kind == graph.Linear {
				behind = append(behind, op)
				continue
			}
			more, err := f.through(op, packed)
			if err != nil {
				return err
			}
			work = append(work, more...)
		}
	}
	for _, op := range behind {
		if slices.Contains(before, op) {
			return fmt.Errorf("%s would be cut by inputs and outputs", op.Name)
		}
		if err := f.cut(op.In[1], side(op, false), 1); err != nil {
			return err
		}
	}
	if len(behind) == 0 {
		return fmt.Errorf("no product follows it, through operations on single elements or heads, whose inputs could be cut")
	}
	for _, op := range before {
		groups := f.groups(op, packed)
		if err := f.cut(op.In[1], side(op, true), groups); err != nil {
			return err
		}
		if len(op.In) > 2 && op.In[2] != graph.NoBuf {
			if err := f.cut(op.In[2], 0, groups); err != nil {
				return err
			}
		}
	}
	return nil
}

// groups returns the number of equal groups of a product's outputs: those of what they are added
// to as well.
func (f *flow) groups(op *graph.Op, packed map[graph.BufID]int) int {
	root := f.t.root(op.Out[0].Buf)
	n := max(packed[root], 1)
	for _, r := range f.reads[root] {
		if r.Kind == graph.Add {
			n = max(n, packed[f.t.root(r.Out[0].Buf)])
		}
	}
	return n
}

// beside says whether a product is one of a pair beside a product that is cut, as a low-rank
// adapter is, and has the side of that pair that stays whole: its result goes into products only
// that are cut by outputs, or is added to that of a product that is cut by inputs.
func (f *flow) beside(op *graph.Op) bool {
	isCut := func(op *graph.Op, outputs bool) bool {
		l := f.t.cut[op.In[1]]
		return l != nil && l.dim == side(op, outputs)
	}
	root := f.t.root(op.Out[0].Buf)
	readers := slices.DeleteFunc(slices.Clone(f.reads[root]), func(r *graph.Op) bool { return r.Kind == graph.Scale && f.t.root(r.Out[0].Buf) == root })
	into := func(r *graph.Op) bool { return r.Kind == graph.Linear && isCut(r, true) }
	to := func(r *graph.Op) bool {
		return r.Kind == graph.Add && slices.ContainsFunc(f.writes[f.t.root(r.Out[0].Buf)], func(w *graph.Op) bool { return w.Kind == graph.Linear && isCut(w, false) })
	}
	return len(readers) > 0 && (!slices.ContainsFunc(readers, not(into)) || !slices.ContainsFunc(readers, not(to)))
}

func not(is func(*graph.Op) bool) func(*graph.Op) bool {
	return func(op *graph.Op) bool { return !is(op) }
}

// side is the dimension of a product's weight that its outputs or inputs are.
func side(op *graph.Op, outputs bool) int {
	if op.Attr.(graph.LinearAttr).TransW == outputs {
		return 0
	}
	return 1
}

// through returns the activations of an operation between two products, if it works on each
// slice by itself.
func (f *flow) through(op *graph.Op, packed map[graph.BufID]int) (roots []graph.BufID, err error) {
	s := int64(f.t.o.Slices)
	if local[op.Kind] == nil {
		return nil, fmt.Errorf("its result goes through %s (%s), which works on neither single elements nor heads", op.Name, op.Kind)
	}
	switch a := op.Attr.(type) {
	case graph.AttentionAttr:
		if a.Heads%s != 0 || a.KVHeads%s != 0 {
			return nil, fmt.Errorf("%s has %d heads and %d of keys and values, which as many slices do not divide", op.Name, a.Heads, a.KVHeads)
		}
		if a.Packed {
			if a.Heads != a.KVHeads {
				return nil, fmt.Errorf("%s packs %d heads beside %d of keys and values, which are no equal groups", op.Name, a.Heads, a.KVHeads)
			}
			packed[f.t.root(op.In[0])] = 3
		}
	case graph.NormAttr:
		x := f.t.p.Buf(op.In[0])
		whole := f.t.p.Buf(f.t.root(op.In[0])).Shape
		width, head := whole[len(whole)-1], x.Shape[len(x.Shape)-1]
		if width%(head*s) != 0 {
			return nil, fmt.Errorf("its result goes through %s (%s), whose rows of %d of %d elements are of several slices", op.Name, op.Kind, head, width)
		}
	}
	for _, id := range op.In {
		if _, weight := f.params[id]; id != graph.NoBuf && !weight && f.t.p.Buf(id).Class == graph.Activations {
			roots = append(roots, f.t.root(id))
		}
	}
	for _, o := range op.Out {
		if o.Buf != graph.NoBuf {
			roots = append(roots, f.t.root(o.Buf))
		}
	}
	return roots, nil
}
