package mesh

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// Options of the tensor rewrite.
type Options struct {
	Axis   int  // mesh axis of the ranks; −1: one rank has all slices
	Slices int  // a power of two, at least 2, that the axis's size divides
	Rows   bool // also divide by rows the values that are not cut into slices
}

// Tensor divides an undivided program over the ranks of an axis (Shoeybi et al. 2019, Megatron-LM).
// A dimension is cut into slices. A rank computes each of its slices with separate operations,
// which have the same shapes on any number of ranks:
//
//	x → fc (C,F) → act → proj (F,C) → y         becomes, for slices s = 0, 1 …
//	x → fc.s (C,F/S) → act.s → proj.s (F/S,C) → y.s;   y = Σ y.s
//
// The sum is a binary tree over the slices. A rank adds its own slices, which are neighbours; an
// all-reduce in the order SumTree then adds one value from each rank. So the bits depend on the
// slices and not on the ranks. There is one such sum for each of
//
//   - the result of a product whose input is cut: the weights of the product before it are cut by
//     columns, its own by rows
//   - the gradient of an input of products whose outputs are cut
//   - an embedding, whose table is cut by tokens; all addends except one are 0
//   - gradients of complete parameters that slices share (norms of heads)
//
// The head's table is cut by tokens too. Each slice has statistics of its logits; all slices'
// statistics are gathered, and every rank combines them in the same order. All other values are not
// cut: each rank computes them completely, with the same bits.
//
// The data flow determines which weights are cut: products whose results reach only other products,
// through operations on single elements or heads. An error names a product for which this is false.
// p must be differentiated and have its mesh.
//
// Options.Rows divides by rows the values that are not cut: norms and the residual stream
// (Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, section
// 4.2.2). The rows of a micro-batch are cut into as many slices as the layers, and a rank has its
// slices in one buffer:
//
//	x → fc → act → proj → all_reduce y → norm                    becomes
//	x → all_gather → fc → act → proj → reduce_scatter y → norm   where x, y and norm are a rank's rows
//
// Four rules define the result:
//
//   - The sum of addends along the axis gives each rank its rows, added in the same order.
//   - Operations that work on each row separately run on the rank's rows.
//   - All other operations read all rows. The rows are gathered before, once in the forward and
//     once in the backward, so a rank keeps only its own rows from the forward for the backward.
//   - A sum over rows is the gradient of a complete parameter. Each slice of rows has an addend.
//     These are added like all sums over slices, so the bits are the same on any number of ranks.
//
// If the slices do not divide the rows of a phase, the phase is not divided by rows.
func Tensor(p *graph.Program, o Options) (*graph.Program, error) {
	t := &tensor{values: newValues(p.Clone(), o)}
	if err := t.layouts(); err != nil {
		return nil, err
	}
	t.params()
	if err := t.phases(func(ph *graph.Phase) error { return t.phase(ph, t.operation) }); err != nil {
		return nil, err
	}
	for id := range graph.BufID(len(t.p.Buffers)) {
		t.part(id, 0) // a view that no operation uses must also match its base
	}
	if t.isColumns(t.p.Logits) {
		return nil, fmt.Errorf("the logits of a generation would be cut by tokens; plan it without slices")
	}
	if !o.Rows {
		return t.p, nil
	}
	clear(t.columns)
	clear(t.parts) // the slices have separate operations now
	return t.p, t.phases(t.divide)
}

// tensor rewrites one program.
type tensor struct {
	*values

	// For the current phase, by divided buffer: the buffer with all rows. partial: while ranks have
	// addends of it; gathered: while operations of a unit read it.
	partial, gathered map[graph.BufID]graph.BufID
	unit              int
}

// operation repeats an operation for each slice if it works on slices.
func (t *tensor) operation(op graph.Op) error {
	weight, table := graph.NoBuf, graph.NoBuf
	switch op.Kind {
	case graph.Linear, graph.LinearGradX:
		weight = op.In[1]
	case graph.LinearGradW:
		weight = op.Out[0].Buf
	case graph.Embed, graph.HeadLoss, graph.HeadLossGrad:
		table = op.In[1]
	case graph.EmbedGrad:
		table = op.Out[0].Buf
	}
	switch l := t.cut[weight]; {
	case l != nil:
		return t.product(op, l.dim == side(&op, true))
	case t.cut[table] == nil:
	case op.Kind == graph.HeadLoss || op.Kind == graph.HeadLossGrad:
		return t.head(op)
	default:
		return t.each(op, addends, t.vocabulary(table))
	}
	for _, id := range op.In {
		if t.cut[id] != nil {
			return fmt.Errorf("it reads %s, which is cut into slices, and has no form for them", t.p.Buf(id).Name)
		}
	}
	switch {
	case !slices.ContainsFunc(op.In, t.isColumns):
		for _, id := range op.In {
			t.whole(id)
		}
		for _, o := range op.Out {
			t.whole(o.Buf)
		}
		t.ops = append(t.ops, op)
		return nil
	case !slices.Contains(local, op.Kind):
		return fmt.Errorf("it has no form for slices")
	}
	op.Attr = localAttr(op.Attr, int64(t.o.Slices))
	return t.each(op, columns, nil)
}

// product rewrites a linear or one of its gradients. If outputs is set, the weight is cut by
// outputs, so y and dy are cut; otherwise x and dx are cut.
func (t *tensor) product(op graph.Op, outputs bool) error {
	cut := []bool{outputs != (op.Kind == graph.Linear)} // of the inputs before the weight
	if op.Kind == graph.LinearGradW {
		cut = []bool{!outputs, outputs}
	}
	for i, want := range cut {
		if t.isColumns(op.In[i]) != want {
			return fmt.Errorf("its operand %s is cut by columns: %v, which its weight does not go with",
				t.p.Buf(op.In[i]).Name, !want)
		}
	}
	if (op.Kind == graph.Linear) == outputs {
		return t.each(op, columns, nil)
	}
	y, bias := op.Out[0].Buf, graph.NoBuf
	if op.Kind == graph.Linear && len(op.In) > 2 {
		bias, op.In = op.In[2], append(slices.Clone(op.In[:2]), graph.NoBuf)
	}
	if err := t.each(op, addends, nil); err != nil || bias == graph.NoBuf {
		return err
	}
	t.whole(y)
	to := graph.Out{Buf: y, Mode: graph.ReadWrite}
	t.add(op, graph.AddPos, op.Name+"/bias", []graph.BufID{y, bias}, to, graph.PosAttr{Seq: 1})
	return nil
}

// vocabulary returns a function that returns the attribute of an operation on slice k of a table.
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
	x, w, targets := op.In[0], op.In[1], op.In[2]
	t.whole(x)
	attr, rows := t.vocabulary(w), t.p.Buf(targets).Elems()
	buffer := func(what string, view *graph.View, shape ...int64) graph.BufID {
		return t.p.AddBuffer(graph.Buffer{Name: t.unique(op.Name + "/" + what), DType: graph.F32, Shape: shape,
			Class: graph.Activations, Unit: op.Unit, View: view})
	}
	const width = graph.HeadStatistics
	all := buffer("stats", nil, int64(t.o.Slices)*rows, width)
	own, slice := all, rows*width*graph.F32.Size()
	if t.o.Axis >= 0 {
		at := &graph.View{Base: all, RankStride: int64(t.per) * slice, Axis: t.o.Axis}
		own = buffer("stats/own", at, int64(t.per)*rows, width)
	}
	forward := op
	forward.Pass = graph.Forward
	for k := range t.per {
		to := graph.Out{Buf: buffer("stats/slice", &graph.View{Base: own, Offset: int64(k) * slice}, rows, width)}
		in := []graph.BufID{x, t.part(w, k), targets}
		t.add(forward, graph.HeadStats, sliceName(op.Name+"/stats", k), in, to, attr(k))
	}
	if t.o.Axis >= 0 {
		t.add(forward, graph.AllGather, op.Name+"/stats/all_gather", []graph.BufID{own}, graph.Out{Buf: all},
			graph.GroupAttr{Axis: t.o.Axis})
	}
	lse := buffer("lse", nil, rows)
	t.add(forward, graph.HeadLSE, op.Name, []graph.BufID{all, targets}, op.Out[0], attr(0))
	last := &t.ops[len(t.ops)-1]
	last.Out = append(last.Out, graph.Out{Buf: lse})
	if dx, dw := graph.HeadGradients(&op); op.Kind == graph.HeadLoss || dx == graph.NoBuf && dw == graph.NoBuf {
		return nil
	}
	grad := op
	grad.Kind, grad.Name = graph.HeadSliceGrad, op.Name+"/grad"
	grad.In, grad.Out = []graph.BufID{x, w, targets, lse, op.In[3]}, op.Out[1:]
	return t.each(grad, addends, attr)
}

// byRow has the operations that work on each row separately, except for gradients of parameters,
// which are sums over rows. It includes products with a weight that is not cut, such as one of an
// adapter's.
var byRow = []graph.Kind{
	graph.Add, graph.Mul, graph.Scale, graph.Dropout, graph.AddPos, graph.AddPosGrad, graph.BiasGrad,
	graph.LayerNorm, graph.LayerNormGrad, graph.RMSNorm, graph.RMSNormGrad,
	graph.Linear, graph.LinearGradX, graph.LinearGradW,
}

// divide divides the rows of a phase.
func (t *tensor) divide(ph *graph.Phase) error {
	t.total = 0
	for i := range ph.Ops { // the rows of activations are tokens
		if op := &ph.Ops[i]; op.Kind == graph.Embed {
			t.total = t.p.Buf(op.In[0]).Elems()
			break
		}
	}
	if t.total == 0 || t.total%int64(t.o.Slices) != 0 {
		return nil
	}
	t.partial, t.gathered = map[graph.BufID]graph.BufID{}, map[graph.BufID]graph.BufID{}
	return t.phase(ph, t.rowOperation)
}

// onRows says whether an operation works on each row of divided values separately.
func (t *tensor) onRows(op *graph.Op) bool {
	isCut := func(id graph.BufID) bool { return t.cut[id] != nil }
	summing := func(id graph.BufID) bool { return t.partial[id] != 0 }
	divided := func(id graph.BufID) bool { return t.rows[id] }
	return slices.Contains(byRow, op.Kind) && slices.ContainsFunc(op.In, divided) &&
		!slices.ContainsFunc(op.In, summing) && !slices.ContainsFunc(op.In, isCut) &&
		!slices.ContainsFunc(op.Out, func(o graph.Out) bool { return isCut(o.Buf) })
}

// rowOperation rewrites an operation of a sliced program for the rank's rows.
func (t *tensor) rowOperation(op graph.Op) error {
	if op.Unit != t.unit {
		t.unit = op.Unit
		clear(t.gathered)
	}
	op.In, op.Out = slices.Clone(op.In), slices.Clone(op.Out)
	rows, sums := t.onRows(&op), false
	for _, o := range op.Out {
		switch {
		case o.Buf == graph.NoBuf:
		case t.isGradient(o.Buf):
			sums = sums || slices.Contains(byRow, op.Kind) && op.Kind != graph.Scale // a Scale here adds a sum over slices
		case rows && t.p.Buf(o.Buf).Class == graph.Activations:
			if err := t.divideRows(o.Buf); err != nil {
				return err
			}
		}
	}
	switch y := op.Out[0].Buf; {
	case sums && !rows && t.o.Axis >= 0:
		return fmt.Errorf("it sums rows that no rank has a part of")
	case sums:
		return t.sumRows(op)
	case op.Kind == graph.AllReduce && t.partial[y] != 0:
		op.Kind, op.In, op.Out[0].Mode = graph.ReduceScatter, []graph.BufID{t.partial[y]}, graph.Write
		delete(t.partial, y)
	case rows:
		for i, id := range op.In {
			if id != graph.NoBuf && t.p.Buf(id).IsFloatInput() { // where documents start
				n := t.total / t.ranks()
				op.In[i] = t.view(id, "rows", []int64{n}, 0, n)
			}
		}
		op.Attr = t.rowAttr(&op, 1, 0)
	default:
		if err := t.onAll(&op); err != nil {
			return err
		}
	}
	for _, o := range op.Out {
		delete(t.gathered, o.Buf)
	}
	t.ops = append(t.ops, op)
	return nil
}

// onAll gives an operation operands with all rows, also for addends of a sum.
func (t *tensor) onAll(op *graph.Op) error {
	for i, id := range op.In {
		if all, summing := t.partial[id]; summing {
			op.In[i] = all
		} else if t.rows[id] {
			op.In[i] = t.gather(*op, id)
		}
	}
	for i, o := range op.Out {
		switch _, summing := t.partial[o.Buf]; {
		case summing || t.summed[o.Buf] && o.Mode == graph.Write:
			if err := t.divideRows(o.Buf); err != nil {
				return err
			}
			op.Out[i].Buf = t.allRows(t.partial, o.Buf, "/partial")
		case t.rows[o.Buf]:
			return fmt.Errorf("its result %s is divided by rows, and its operands are not", t.p.Buf(o.Buf).Name)
		}
	}
	return nil
}

// gather returns a buffer with all rows of a divided one, for this operation and the next ones of
// its unit.
func (t *tensor) gather(with graph.Op, id graph.BufID) graph.BufID {
	if all, ok := t.gathered[id]; ok {
		return all
	}
	all := t.allRows(t.gathered, id, "/all")
	t.p.Buf(all).Unit = with.Unit
	name, group := t.p.Buf(id).Name+"/all_gather", graph.GroupAttr{Axis: t.o.Axis}
	t.add(with, graph.AllGather, name, []graph.BufID{id}, graph.Out{Buf: all}, group)
	return all
}

// sumRows repeats an operation for every slice of a rank's rows. Its sums over rows are addends of
// the parameters' gradients.
func (t *tensor) sumRows(op graph.Op) error {
	for _, id := range op.In {
		if id != graph.NoBuf && (t.p.Buf(id).Class == graph.Activations || t.p.Buf(id).IsFloatInput()) {
			t.cutRows(id)
		}
	}
	for _, o := range op.Out {
		if delete(t.gathered, o.Buf); o.Buf != graph.NoBuf && !t.isGradient(o.Buf) {
			t.cutRows(o.Buf)
		}
	}
	return t.each(op, asIs, func(k int) any { return t.rowAttr(&op, t.per, k) })
}

// rowAttr returns an operation's attribute for the k-th of perRank equal parts of a rank's rows.
func (t *tensor) rowAttr(op *graph.Op, perRank, k int) any {
	rows := graph.SliceAttr{Axis: t.o.Axis, PerRank: int64(perRank), Index: int64(k), Total: t.total}
	rows.Each = t.total / t.ranks() / rows.PerRank
	switch a := op.Attr.(type) {
	case graph.PosAttr:
		if a.Seq > 1 {
			a.Rows = rows
		}
		return a
	case graph.DropoutAttr:
		x := t.p.Buf(op.In[0])
		width := x.Elems() / x.Shape[0]
		rows.Each, rows.Total = rows.Each*width, rows.Total*width
		a.Part = rows
		return a
	}
	return op.Attr
}
