package mesh

import (
	"fmt"
	"maps"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// rewriter holds the copy of a program that a pass rewrites.
type rewriter struct{ p *graph.Program }

func (r rewriter) root(id graph.BufID) graph.BufID {
	root, _ := r.p.Resolve(id, nil)
	return root
}

// phases calls visit for every phase.
func (r rewriter) phases(visit func(ph *graph.Phase) error) error {
	for sec, ph := range r.p.Phases() {
		if err := visit(ph); err != nil {
			return fmt.Errorf("section %s: %w", sec.Name, err)
		}
	}
	return nil
}

// like adds a copy of a buffer with another name, view and shape.
func (r rewriter) like(id graph.BufID, name string, view *graph.View, shape ...int64) graph.BufID {
	b := *r.p.Buf(id)
	b.Name, b.View, b.Shape = name, view, slices.Clone(shape)
	return r.p.AddBuffer(b)
}

// values records a rank's part of each value of a program that is cut into slices. A rank has the
// complete value, its slices (of a parameter, of an activation's columns or of its rows), or one
// addend for each slice.
type values struct {
	rewriter
	o       Options
	per     int                           // slices on each rank
	cut     map[graph.BufID]*layout       // by value and gradient buffer of a cut parameter
	columns map[graph.BufID]*columnar     // by root of an activation that is cut by columns
	parts   map[graph.BufID][]graph.BufID // by cut buffer: the buffers of its slices
	sums    map[graph.BufID]*sum          // by root: values whose addends the current phase has not summed yet
	summed  map[graph.BufID]bool          // activations that an all-reduce sums
	rows    map[graph.BufID]bool          // activations of which a rank has only its rows; none is a view
	total   int64                         // rows of the current phase
	names   map[string]int                // use count of the names of the phase's new operations and buffers
	ops     []graph.Op                    // of the phase so far
}

func newValues(p *graph.Program, o Options) *values {
	v := &values{
		rewriter: rewriter{p}, o: o, per: o.Slices, cut: map[graph.BufID]*layout{},
		columns: map[graph.BufID]*columnar{}, parts: map[graph.BufID][]graph.BufID{},
		summed: map[graph.BufID]bool{}, rows: map[graph.BufID]bool{},
	}
	if o.Axis >= 0 {
		v.per = o.Slices / p.Mesh[o.Axis].Size
	}
	return v
}

// ranks returns the number of ranks over which the slices are distributed.
func (v *values) ranks() int64 { return int64(v.o.Slices / v.per) }

func (v *values) isColumns(id graph.BufID) bool {
	return id != graph.NoBuf && v.columns[v.root(id)] != nil
}

// isGradient says whether a buffer is the gradient of a parameter that is not cut.
func (v *values) isGradient(id graph.BufID) bool {
	return id != graph.NoBuf && v.cut[id] == nil && v.p.Buf(v.root(id)).Class == graph.Gradients
}

// phase rewrites each operation of a phase.
func (v *values) phase(ph *graph.Phase, operation func(graph.Op) error) error {
	v.sums, v.names, v.ops = map[graph.BufID]*sum{}, map[string]int{}, nil
	for _, op := range ph.Ops {
		if err := operation(op); err != nil {
			return fmt.Errorf("%s (%s): %w", op.Name, op.Kind, err)
		}
	}
	for _, root := range slices.Sorted(maps.Keys(v.sums)) {
		v.whole(root)
	}
	ph.Ops = v.ops
	return nil
}

// add appends an operation with the pass, unit and micro-batch of another one.
func (v *values) add(with graph.Op, kind graph.Kind, name string, in []graph.BufID, out graph.Out, attr any) {
	op := graph.NewOp(kind, v.unique(name), in, []graph.Out{out}, attr)
	op.Pass, op.Unit, op.Micro, op.Source = with.Pass, with.Unit, with.Micro, with.Name
	v.ops = append(v.ops, op)
}

// unique returns a name that no other new operation or buffer of the phase has.
func (v *values) unique(name string) string {
	v.names[name]++
	if n := v.names[name]; n > 1 {
		return fmt.Sprintf("%s.%d", name, n)
	}
	return name
}

func sliceName(name string, k int) string {
	if k == 0 {
		return name
	}
	return fmt.Sprintf("%s/slice.%d", name, k)
}

// result describes the slices' results of an operation. It does not apply to gradients: those of a
// cut parameter are cut, those of other parameters are addends.
type result uint8

const (
	asIs    result = iota // the slices in parts, or the complete buffer
	columns               // cut like the inputs
	addends               // of a sum
)

// each repeats an operation for every slice of the rank. attr returns each slice's attribute; nil:
// all have the operation's attribute.
func (v *values) each(op graph.Op, as result, attr func(k int) any) error {
	for _, id := range op.In {
		v.whole(id)
	}
	outs := make([][]graph.Out, len(op.Out))
	for i, o := range op.Out {
		var err error
		if outs[i], err = v.results(op, o, as); err != nil {
			return err
		}
	}
	for k := range v.per {
		one := op
		if one.Name = sliceName(op.Name, k); attr != nil {
			one.Attr = attr(k)
		}
		one.In, one.Out = make([]graph.BufID, len(op.In)), make([]graph.Out, len(op.Out))
		for i, id := range op.In {
			one.In[i] = v.part(id, k)
		}
		for i := range op.Out {
			one.Out[i] = outs[i][k]
		}
		v.ops = append(v.ops, one)
	}
	for _, o := range op.Out { // other operations only accumulate into a parameter's gradient
		if v.isGradient(o.Buf) {
			v.whole(o.Buf)
		}
	}
	return nil
}

// results returns the outputs of the slices' operations for one output of an operation.
func (v *values) results(op graph.Op, o graph.Out, as result) ([]graph.Out, error) {
	switch {
	case o.Buf == graph.NoBuf || v.cut[o.Buf] != nil:
		as = asIs
	case v.isGradient(o.Buf):
		as = addends
	}
	pending := as != asIs && v.sums[v.root(o.Buf)] != nil
	switch {
	case as == columns && pending:
		return nil, fmt.Errorf("its result %s is a sum over slices before", v.p.Buf(o.Buf).Name)
	case as == columns:
		v.cutColumns(op, o.Buf)
	case pending && o.Mode == graph.Write:
		return nil, fmt.Errorf("its result %s is written over a sum over slices that nothing read", v.p.Buf(o.Buf).Name)
	}
	list := make([]graph.Out, v.per)
	for k := range list {
		if as == addends {
			list[k] = v.addend(op, o, k)
		} else {
			list[k] = graph.Out{Buf: v.part(o.Buf, k), Mode: o.Mode}
		}
	}
	return list, nil
}

// sum is a value of which each slice computes an addend.
type sum struct {
	id      graph.BufID   // the buffer that receives the sum
	addends []graph.BufID // by slice of the rank
	besides bool          // id already has a complete value, to which the sum is added
	op      graph.Op      // the operation whose results are the addends
}

// addend returns the output that receives slice k's addend of a result.
func (v *values) addend(op graph.Op, o graph.Out, k int) graph.Out {
	root, shape := v.root(o.Buf), v.p.Buf(o.Buf).Shape
	s := v.sums[root]
	if s == nil {
		s = &sum{id: o.Buf, besides: o.Mode != graph.Write || v.isGradient(o.Buf), op: op}
		v.sums[root] = s
	}
	if k < len(s.addends) {
		id := s.addends[k]
		if have := v.p.Buf(id); !slices.Equal(have.Shape, shape) {
			id = v.like(id, v.unique(have.Name+"/as"), &graph.View{Base: id}, shape...)
		}
		return graph.Out{Buf: id, Mode: o.Mode}
	}
	id := o.Buf
	if k > 0 || s.besides {
		id = v.like(root, v.unique(v.p.Buf(root).Name+"/addend"), nil, shape...)
		b := v.p.Buf(id)
		b.Class, b.Life = graph.Activations, graph.LifePhase
	}
	s.addends = append(s.addends, id)
	return graph.Out{Buf: id}
}

// whole sums the slices' addends of a buffer's value, if it has addends.
func (v *values) whole(id graph.BufID) {
	if id == graph.NoBuf {
		return
	}
	root := v.root(id)
	s := v.sums[root]
	if s == nil {
		return
	}
	delete(v.sums, root)
	name, first := v.p.Buf(s.id).Name, graph.Out{Buf: s.addends[0], Mode: graph.ReadWrite}
	for step := 1; step < len(s.addends); step *= 2 {
		for k := 0; k+step < len(s.addends); k += 2 * step {
			to := graph.Out{Buf: s.addends[k], Mode: graph.ReadWrite}
			pair := []graph.BufID{to.Buf, s.addends[k+step]}
			v.add(s.op, graph.Add, fmt.Sprintf("%s/sum.%d-%d", name, k, k+2*step-1), pair, to, nil)
		}
	}
	if v.o.Axis >= 0 {
		v.add(s.op, graph.AllReduce, name+"/sum", nil, first, graph.GroupAttr{Axis: v.o.Axis})
		v.summed[first.Buf] = !v.isGradient(s.id)
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
	to := graph.Out{Buf: s.id, Mode: mode}
	v.add(s.op, graph.Scale, name+"/add", []graph.BufID{first.Buf}, to, graph.ScaleAttr{Factor: 1})
}

// part returns a rank's k-th slice of a buffer, or the buffer itself if it is not cut.
func (v *values) part(id graph.BufID, k int) graph.BufID {
	if list := v.parts[id]; list != nil {
		return list[k]
	}
	if !v.isColumns(id) {
		return id
	}
	if b := v.p.Buf(id); b.View != nil {
		v.part(b.View.Base, 0)
	}
	shape, dim := slices.Clone(v.p.Buf(id).Shape), 0
	if !v.headsAreRows(id) {
		dim = len(shape) - 1
	}
	shape[dim] /= int64(v.o.Slices)
	for k := range v.per {
		v.slice(id, k, shape)
	}
	return v.parts[id][k]
}

// slice adds a buffer for a rank's k-th slice with the given shape. For k = 0 it shrinks the buffer
// itself.
func (v *values) slice(id graph.BufID, k int, shape []int64) graph.BufID {
	to, b := id, v.p.Buf(id)
	if k == 0 {
		b.Shape = slices.Clone(shape)
	} else {
		view := b.View
		if view != nil {
			view = &graph.View{Base: v.parts[view.Base][k], Offset: view.Offset}
		}
		to = v.like(id, sliceName(b.Name, k), view, shape...)
	}
	v.parts[id] = append(v.parts[id], to)
	return to
}

// columnar describes how an activation is cut: in its last dimension, or in its first if the rows
// are heads.
type columnar struct {
	rows bool
	last int64 // last dimension before the cut
}

// headsAreRows says whether a cut buffer is cut in its first dimension. A view can have heads as
// rows while its buffer has them as columns; the view is then cut in the other dimension.
func (v *values) headsAreRows(id graph.BufID) bool {
	c, shape := v.columns[v.root(id)], v.p.Buf(id).Shape
	if v.root(id) == id || shape[len(shape)-1] == c.last {
		return c.rows
	}
	return !c.rows
}

// cutColumns records that a result of an operation is cut in the same way as its first cut input.
func (v *values) cutColumns(op graph.Op, id graph.BufID) {
	root := v.root(id)
	if v.columns[root] != nil {
		return
	}
	last := func(id graph.BufID) int64 { s := v.p.Buf(id).Shape; return s[len(s)-1] }
	c := &columnar{last: last(root)}
	if i := slices.IndexFunc(op.In, v.isColumns); i >= 0 {
		in := op.In[i]
		c.rows = slices.Contains(local, op.Kind) && v.headsAreRows(in) && last(in) == last(id)
	}
	v.columns[root] = c
}

// view adds a view of elements of a buffer. Its start moves by stride elements from one rank to the
// next.
func (v *values) view(id graph.BufID, name string, shape []int64, from, stride int64) graph.BufID {
	b := v.p.Buf(id)
	size := b.DType.Size()
	at := &graph.View{Base: id, Offset: from * size, RankStride: stride * size, Axis: max(v.o.Axis, 0)}
	return v.like(id, v.unique(b.Name+"/"+name), at, shape...)
}

// cutRows makes views for the rank's slices of a buffer's rows. The buffer has the rank's rows or
// all rows.
func (v *values) cutRows(id graph.BufID) {
	b, stride := v.p.Buf(id), int64(0)
	n := b.Elems() / int64(v.per)
	if !v.rows[id] && v.o.Axis >= 0 {
		n = b.Elems() / int64(v.o.Slices)
		stride = int64(v.per) * n
	}
	if v.parts[id] != nil || n == b.Elems() {
		return
	}
	shape := []int64{v.total / int64(v.o.Slices)}
	if !b.IsFloatInput() {
		shape = append(shape, b.Shape[1:]...)
	}
	var list []graph.BufID
	for k := range v.per {
		list = append(list, v.view(id, fmt.Sprint("rows.", k), shape, int64(k)*n, stride))
	}
	v.parts[id] = list
}

// divideRows reduces an activation to the rank's rows.
func (v *values) divideRows(id graph.BufID) error {
	b := v.p.Buf(id)
	switch {
	case v.rows[id]:
	case b.View != nil || b.Shape[0] != v.total:
		return fmt.Errorf("%s %v is no buffer of %d rows, which ranks could divide", b.Name, b.Shape, v.total)
	default:
		b.Shape[0], v.rows[id] = v.total/v.ranks(), true
	}
	return nil
}

// allRows returns the buffer in a table that holds all rows of a divided buffer. It adds the buffer
// if the table has none.
func (v *values) allRows(in map[graph.BufID]graph.BufID, id graph.BufID, name string) graph.BufID {
	if _, ok := in[id]; !ok {
		b := v.p.Buf(id)
		shape := slices.Clone(b.Shape)
		shape[0] *= v.ranks()
		in[id] = v.like(id, v.unique(b.Name+name), nil, shape...)
	}
	return in[id]
}
