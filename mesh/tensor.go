package mesh

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// Options of the tensor rewrite.
type Options struct {
	Axis   int // mesh axis of the ranks; −1: one rank has all slices
	Slices int // a power of two, at least 2, that the axis's size divides
}

// Tensor divides a program of whole parameters over the ranks of an axis (Shoeybi et al. 2019,
// Megatron-LM). A dimension is cut into slices; a rank computes each of its slices by operations
// of its own, which have the same shapes on any number of ranks:
//
//	x → fc (C,F) → act → proj (F,C) → y         becomes, for slices s = 0, 1 …
//	x → fc.s (C,F/S) → act.s → proj.s (F/S,C) → y.s;   y = Σ y.s
//
// The sum is a binary tree over the slices: a rank adds its own, which are neighbours, and an
// all-reduce in the order SumTree goes on with one addend from each rank. So the bits depend on
// the slices and not on the ranks. There is one such sum behind
//
//   - a product whose input is cut: by columns the weights of the product before, by rows its own
//   - the gradient of an input of products whose outputs are cut
//   - an embedding, whose table is cut by tokens; all but one addend are 0
//   - gradients of whole parameters that slices share (norms of heads)
//
// The head's table is cut by tokens too: each slice has statistics of its logits, all slices'
// are gathered, and every rank combines them in the same order. Everything else is whole: each
// rank computes it, with the same bits.
//
// Which weights are cut follows from the data flow: products whose results reach, through
// operations on single elements or heads, other products only. An error names a product for
// which that does not hold. p must be differentiated, and have its mesh.
func Tensor(p *graph.Program, o Options) (*graph.Program, error) {
	t := newTensor(p, o)
	if err := t.layouts(); err != nil {
		return nil, err
	}
	t.params()
	for i := range t.p.Sections {
		for j := range t.p.Sections[i].Phases {
			if err := t.phase(&t.p.Sections[i].Phases[j], t.operation); err != nil {
				return nil, fmt.Errorf("section %s: %w", t.p.Sections[i].Name, err)
			}
		}
	}
	for id := range graph.BufID(len(t.p.Buffers)) {
		t.part(id, 0) // a view that no operation uses is to fit what it is of
	}
	if l := t.p.Logits; l != graph.NoBuf && t.isColumns(l) {
		return nil, fmt.Errorf("the logits of a generation would be cut by tokens; plan it without slices")
	}
	return t.p, nil
}

func newTensor(p *graph.Program, o Options) *tensor {
	t := &tensor{
		p: p.Clone(), o: o, per: o.Slices, cut: map[graph.BufID]*layout{},
		columns: map[graph.BufID]*columnar{}, parts: map[graph.BufID][]graph.BufID{},
	}
	if o.Axis >= 0 {
		t.per = o.Slices / t.p.Mesh[o.Axis].Size
	}
	return t
}

// tensor rewrites one program.
type tensor struct {
	p       *graph.Program
	o       Options
	per     int                           // slices of a rank
	cut     map[graph.BufID]*layout       // by value and gradient of a parameter that is cut
	columns map[graph.BufID]*columnar     // by root of an activation that is cut
	parts   map[graph.BufID][]graph.BufID // by buffer of a cut parameter or activation: the slices'
	sums    map[graph.BufID]*sum          // by root: addends in the current phase that are not summed yet
	names   map[string]int                // of the phase's new operations
	ops     []graph.Op                    // of the phase so far
}

// sum is a value of which each slice has an addend.
type sum struct {
	id      graph.BufID   // the buffer that is to have it
	addends []graph.BufID // by slice of the rank
	besides bool          // id has a whole value already, to which the sum is added
	op      graph.Op      // whose results they are
}

func (t *tensor) root(id graph.BufID) graph.BufID {
	r, _ := t.p.Resolve(id, nil)
	return r
}

func (t *tensor) isColumns(id graph.BufID) bool { return t.columns[t.root(id)] != nil }

// phase rewrites the operations of a phase, each by itself.
func (t *tensor) phase(ph *graph.Phase, operation func(graph.Op) error) error {
	t.sums, t.names, t.ops = map[graph.BufID]*sum{}, map[string]int{}, nil
	for i := range ph.Ops {
		if err := operation(ph.Ops[i]); err != nil {
			return fmt.Errorf("%s (%s): %w", ph.Ops[i].Name, ph.Ops[i].Kind, err)
		}
	}
	for _, root := range slices.Sorted(func(yield func(graph.BufID) bool) {
		for root := range t.sums {
			if !yield(root) {
				return
			}
		}
	}) {
		t.whole(root)
	}
	ph.Ops = t.ops
	return nil
}

func (t *tensor) operation(op graph.Op) error {
	param := func(id graph.BufID) *layout {
		if id == graph.NoBuf {
			return nil
		}
		return t.cut[id]
	}
	weight := graph.NoBuf
	switch op.Kind {
	case graph.Linear, graph.LinearGradX:
		weight = op.In[1]
	case graph.LinearGradW:
		weight = op.Out[0].Buf
	case graph.HeadLoss, graph.HeadLossGrad:
		if param(op.In[1]) != nil {
			return t.head(op)
		}
	case graph.Embed:
		if param(op.In[1]) != nil {
			return t.each(op, t.vocabulary(op.In[1]), addends, 0)
		}
	case graph.EmbedGrad:
		if param(op.Out[0].Buf) != nil {
			t.whole(op.In[1])
			return t.each(op, t.vocabulary(op.Out[0].Buf), whole, 0)
		}
	}
	if l := param(weight); l != nil {
		outputs := l.dim == 1
		if op.Attr.(graph.LinearAttr).TransW {
			outputs = l.dim == 0
		}
		return t.product(op, outputs)
	}
	for _, id := range op.In {
		if param(id) != nil {
			return fmt.Errorf("it reads %s, which is cut into slices, and has no form for them", t.p.Buf(id).Name)
		}
	}
	attr := local[op.Kind]
	if !slices.ContainsFunc(op.In, func(id graph.BufID) bool { return id != graph.NoBuf && t.isColumns(id) }) {
		for _, id := range op.In {
			t.whole(id)
		}
		for _, o := range op.Out {
			t.whole(o.Buf)
		}
		t.ops = append(t.ops, op)
		return nil
	}
	switch {
	case op.Kind == graph.BiasGrad:
		attr = same
	case attr == nil:
		return fmt.Errorf("it has no form for slices")
	}
	return t.each(op, func(int) any { return attr(op.Attr, int64(t.o.Slices)) }, columns, -1)
}

// result says what the slices' results are.
type result uint8

const (
	whole   result = iota // of a cut parameter: as they are
	columns               // cut like the inputs
	addends               // of a sum
)

// product rewrites a linear or one of its gradients. outputs says that the weight is cut by
// outputs, so that y and dy are cut; else x and dx are.
func (t *tensor) product(op graph.Op, outputs bool) error {
	attr := func(int) any { return op.Attr }
	cut := map[graph.Kind][]bool{graph.Linear: {!outputs}, graph.LinearGradX: {outputs}, graph.LinearGradW: {!outputs, outputs}}[op.Kind]
	for i, want := range cut { // activations before the weight
		if t.isColumns(op.In[i]) != want {
			return fmt.Errorf("its operand %s is cut by columns: %v, which its weight does not go with", t.p.Buf(op.In[i]).Name, !want)
		}
	}
	switch {
	case op.Kind == graph.LinearGradW:
		return t.each(op, attr, whole, 0)
	case (op.Kind == graph.Linear) == outputs:
		return t.each(op, attr, columns, 0)
	}
	bias := graph.NoBuf
	if op.Kind == graph.Linear && len(op.In) > 2 {
		bias = op.In[2]
		op.In = append(slices.Clone(op.In[:2]), graph.NoBuf)
	}
	if err := t.each(op, attr, addends, 0); err != nil || bias == graph.NoBuf {
		return err
	}
	y := op.Out[0].Buf
	t.whole(y)
	t.add(op, graph.AddPos, op.Name+"/bias", []graph.BufID{y, bias}, graph.Out{Buf: y, Mode: graph.ReadWrite}, graph.PosAttr{Seq: 1})
	return nil
}

// each repeats an operation for every slice of the rank. Output `to` is what as says; with −1 all
// outputs are cut, but for the gradients of whole parameters, which are sums.
func (t *tensor) each(op graph.Op, attr func(k int) any, as result, to int) error {
	for _, id := range op.In {
		t.whole(id)
	}
	outs := make([][]graph.Out, len(op.Out))
	for i, o := range op.Out {
		kind := whole
		switch {
		case o.Buf == graph.NoBuf || t.cut[o.Buf] != nil:
		case to < 0 && t.isGradient(o.Buf):
			kind = addends
		case i == to || to < 0:
			kind = as
		}
		for k := range t.per {
			switch kind {
			case columns:
				if t.cutColumns(op, o.Buf); k == 0 && t.sums[t.root(o.Buf)] != nil {
					return fmt.Errorf("its result %s is a sum over slices before", t.p.Buf(o.Buf).Name)
				}
			case addends:
				if k == 0 && o.Mode == graph.Write && t.sums[t.root(o.Buf)] != nil {
					return fmt.Errorf("its result %s is written over a sum over slices that nothing read", t.p.Buf(o.Buf).Name)
				}
				outs[i] = append(outs[i], t.addend(op, o, k))
				continue
			}
			outs[i] = append(outs[i], graph.Out{Buf: t.part(o.Buf, k), Mode: o.Mode})
		}
	}
	for k := range t.per {
		one := op
		one.Name, one.Attr = sliceName(op.Name, k), attr(k)
		one.In, one.Out = make([]graph.BufID, len(op.In)), make([]graph.Out, len(op.Out))
		for i, id := range op.In {
			one.In[i] = t.part(id, k)
		}
		for i := range op.Out {
			one.Out[i] = outs[i][k]
		}
		t.ops = append(t.ops, one)
	}
	for _, o := range op.Out { // other operations only accumulate into a parameter's gradient
		if to < 0 && o.Buf != graph.NoBuf && t.isGradient(o.Buf) {
			t.whole(o.Buf)
		}
	}
	return nil
}

// isGradient says whether a buffer is the gradient of a whole parameter.
func (t *tensor) isGradient(id graph.BufID) bool {
	b := t.p.Buf(t.root(id))
	return b.Class == graph.Gradients && t.cut[id] == nil
}

// addend returns the output for slice k's addend of a result.
func (t *tensor) addend(op graph.Op, o graph.Out, k int) graph.Out {
	root := t.root(o.Buf)
	s := t.sums[root]
	if s == nil {
		s = &sum{id: o.Buf, besides: o.Mode != graph.Write || t.isGradient(o.Buf), op: op}
		t.sums[root] = s
	}
	if k < len(s.addends) {
		return graph.Out{Buf: t.like(s.addends[k], o.Buf), Mode: o.Mode}
	}
	id := o.Buf
	if k > 0 || s.besides {
		b := *t.p.Buf(root)
		b.Name, b.Class, b.Life = t.unique(b.Name+"/addend"), graph.Activations, graph.LifePhase
		b.Shape = slices.Clone(t.p.Buf(o.Buf).Shape)
		id = t.p.AddBuffer(b)
	}
	s.addends = append(s.addends, id)
	return graph.Out{Buf: id}
}

// like returns a buffer in the shape of another with as many elements.
func (t *tensor) like(id, shape graph.BufID) graph.BufID {
	b := *t.p.Buf(id)
	if slices.Equal(b.Shape, t.p.Buf(shape).Shape) {
		return id
	}
	b.Name, b.Shape, b.View = t.unique(b.Name+"/as"), slices.Clone(t.p.Buf(shape).Shape), &graph.View{Base: id}
	return t.p.AddBuffer(b)
}

// whole sums what slices have of a buffer's value, if they have addends of it.
func (t *tensor) whole(id graph.BufID) {
	if id == graph.NoBuf {
		return
	}
	root := t.root(id)
	s := t.sums[root]
	if s == nil {
		return
	}
	delete(t.sums, root)
	name := t.p.Buf(s.id).Name
	for step := 1; step < len(s.addends); step *= 2 {
		for k := 0; k+step < len(s.addends); k += 2 * step {
			t.add(s.op, graph.Add, fmt.Sprintf("%s/sum.%d-%d", name, k, k+2*step-1), []graph.BufID{s.addends[k], s.addends[k+step]}, graph.Out{Buf: s.addends[k], Mode: graph.ReadWrite}, nil)
		}
	}
	if t.o.Axis >= 0 {
		t.add(s.op, graph.AllReduce, name+"/sum", nil, graph.Out{Buf: s.addends[0], Mode: graph.ReadWrite}, graph.GroupAttr{Axis: t.o.Axis})
	}
	if !s.besides {
		return
	}
	// The first gradient of a parameter in a micro-step is written, others accumulate.
	mode := graph.Accum
	for _, o := range s.op.Out {
		if o.Buf == s.id {
			mode = o.Mode
		}
	}
	t.add(s.op, graph.Scale, name+"/add", []graph.BufID{s.addends[0]}, graph.Out{Buf: s.id, Mode: mode}, graph.ScaleAttr{Factor: 1})
}

// add appends an operation that goes with another one.
func (t *tensor) add(with graph.Op, kind graph.Kind, name string, in []graph.BufID, out graph.Out, attr any) {
	op := graph.NewOp(kind, t.unique(name), in, []graph.Out{out}, attr)
	op.Pass, op.Unit, op.Micro, op.Source = with.Pass, with.Unit, with.Micro, with.Name
	t.ops = append(t.ops, op)
}

// unique returns a name that no other new operation or buffer of the phase has.
func (t *tensor) unique(name string) string {
	t.names[name]++
	if n := t.names[name]; n > 1 {
		return fmt.Sprintf("%s.%d", name, n)
	}
	return name
}
