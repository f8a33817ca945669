package mesh

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// Sequence divides by rows what Tensor leaves whole: norms and the residual stream (Korthikanti et
// al. 2022, Reducing Activation Recomputation in Large Transformer Models, section 4.2.2). The rows
// of a micro-batch are cut into as many slices as the layers, and a rank has its slices in one
// buffer:
//
//	x → fc → act → proj → all_reduce y → norm                    becomes
//	x → all_gather → fc → act → proj → reduce_scatter y → norm   where x, y and norm are a rank's rows
//
// Four rules give the program:
//
//   - The sum of addends along the axis leaves each rank its rows, added in the same order.
//   - What works on each row by itself runs on the rank's rows.
//   - Everything else reads all rows. They are gathered before it, once forward and once backward,
//     so that what the backward needs of the forward is a rank's rows.
//   - A sum over rows is the gradient of a whole parameter. Each slice of rows has an addend, and
//     these add up as Tensor's do, so that the bits are the same on any number of ranks.
//
// A phase whose rows the slices do not divide stays as it is. p must be Tensor's result.
func Sequence(p *graph.Program, o Options) (*graph.Program, error) {
	s := &sequence{tensor: newTensor(p, o), rows: map[graph.BufID]bool{}}
	for i := range s.p.Params {
		if q := &s.p.Params[i]; q.Split != nil {
			l := &layout{i, q.Split.Dim, q.Split.Groups}
			if s.cut[q.Value] = l; q.Grad != graph.NoBuf {
				s.cut[q.Grad] = l
			}
		}
	}
	for _, visit := range []func(*graph.Phase) error{s.find, s.rewrite} {
		for i := range s.p.Sections {
			for j := range s.p.Sections[i].Phases {
				ph := &s.p.Sections[i].Phases[j]
				if s.total = tokens(s.p, ph); s.total == 0 || s.total%int64(o.Slices) != 0 {
					continue
				}
				if err := visit(ph); err != nil {
					return nil, fmt.Errorf("section %s: %w", s.p.Sections[i].Name, err)
				}
			}
		}
	}
	return s.p, nil
}

// tokens returns the number of a phase's tokens, which are the rows of its activations.
func tokens(p *graph.Program, ph *graph.Phase) int64 {
	for i := range ph.Ops {
		if op := &ph.Ops[i]; op.Kind == graph.Embed {
			return p.Buf(op.In[0]).Elems()
		}
	}
	return 0
}

// sequence rewrites one program. tensor has the sums over slices.
type sequence struct {
	*tensor
	rows map[graph.BufID]bool // the buffers of which a rank has its rows; none of them is a view

	// Of the current phase: its rows; by divided buffer where all rows are, while ranks have
	// addends of it, and while operations of a unit read it.
	total             int64
	partial, gathered map[graph.BufID]graph.BufID
	unit              int
}

// byRow has the operations that work on each row by itself, but for the gradients of parameters,
// which are sums over rows. Products are here for weights that are whole, as one of an adapter's.
var byRow = []graph.Kind{
	graph.Add, graph.Mul, graph.Scale, graph.Dropout, graph.AddPos, graph.AddPosGrad, graph.BiasGrad,
	graph.LayerNorm, graph.LayerNormGrad, graph.RMSNorm, graph.RMSNormGrad,
	graph.Linear, graph.LinearGradX, graph.LinearGradW,
}

// works says whether an operation works on each row of what is divided by itself.
func (s *sequence) works(op *graph.Op) bool {
	divided := func(id graph.BufID) bool { return s.rows[id] }
	cut := func(id graph.BufID) bool { return s.cut[id] != nil }
	return slices.Contains(byRow, op.Kind) && slices.ContainsFunc(op.In, divided) && !slices.ContainsFunc(op.In, cut) &&
		!slices.ContainsFunc(op.Out, func(o graph.Out) bool { return cut(o.Buf) })
}

// sums says whether an operation adds rows to the gradient of a whole parameter. A scale adds what
// is a sum over slices already.
func (s *sequence) sums(op *graph.Op) bool {
	return slices.Contains(byRow, op.Kind) && op.Kind != graph.Scale &&
		slices.ContainsFunc(op.Out, func(o graph.Out) bool { return o.Buf != graph.NoBuf && s.isGradient(o.Buf) })
}

// adds returns the buffer in which an operation leaves a slice's addend of a value of all rows.
func (s *sequence) adds(op *graph.Op) graph.BufID {
	is := false
	switch op.Kind {
	case graph.Embed, graph.HeadSliceGrad:
		is = op.Attr != nil
	case graph.Linear, graph.LinearGradX:
		l := s.cut[op.In[1]]
		is = l != nil && l.dim == side(op, op.Kind == graph.LinearGradX)
	}
	if !is {
		return graph.NoBuf
	}
	return op.Out[0].Buf
}

// find leaves a rank its rows of a phase's sums along the axis, and of what is made of them row by
// row.
func (s *sequence) find(ph *graph.Phase) error {
	addends := map[graph.BufID]bool{}
	var err error
	divide := func(id graph.BufID) {
		switch b := s.p.Buf(id); {
		case s.rows[id]:
		case b.View != nil || b.Shape[0] != s.total:
			err = fmt.Errorf("%s %v is no buffer of %d rows, which ranks could divide", b.Name, b.Shape, s.total)
		default:
			b.Shape = slices.Clone(b.Shape)
			b.Shape[0], s.rows[id] = s.total/s.ranks(), true
		}
	}
	for i := range ph.Ops {
		op := &ph.Ops[i]
		if id := s.adds(op); id != graph.NoBuf {
			addends[id] = true
		} else if op.Kind == graph.AllReduce && addends[op.Out[0].Buf] {
			divide(op.Out[0].Buf)
			delete(addends, op.Out[0].Buf)
		} else if s.works(op) {
			for _, o := range op.Out {
				if o.Buf != graph.NoBuf && s.p.Buf(o.Buf).Class == graph.Activations {
					divide(o.Buf)
				}
			}
		}
	}
	return err
}

func (s *sequence) ranks() int64 { return int64(s.o.Slices / s.per) }

func (s *sequence) rewrite(ph *graph.Phase) error {
	s.partial, s.gathered = map[graph.BufID]graph.BufID{}, map[graph.BufID]graph.BufID{}
	return s.phase(ph, s.operation)
}

func (s *sequence) operation(op graph.Op) error {
	if op.Unit != s.unit {
		s.unit = op.Unit
		clear(s.gathered)
	}
	op.In, op.Out = slices.Clone(op.In), slices.Clone(op.Out)
	switch {
	case s.sums(&op):
		return s.sumRows(op)
	case op.Kind == graph.AllReduce && s.rows[op.Out[0].Buf]:
		y := op.Out[0].Buf
		op.Kind, op.In, op.Out[0].Mode = graph.ReduceScatter, []graph.BufID{s.partial[y]}, graph.Write
		delete(s.partial, y)
	case s.works(&op) && !slices.ContainsFunc(op.In, s.summing):
		for i, id := range op.In {
			if id != graph.NoBuf && s.p.Buf(id).IsFloatInput() { // where documents start
				n := s.total / s.ranks()
				op.In[i] = s.view(id, "rows", []int64{n}, 0, n)
			}
		}
		op.Attr = s.part(&op, 1, 0)
	default:
		for i, id := range op.In {
			if all, summing := s.partial[id]; summing {
				op.In[i] = all
			} else if s.rows[id] {
				op.In[i] = s.gather(op, id)
			}
		}
		for i, o := range op.Out {
			switch {
			case !s.rows[o.Buf]:
			case s.summing(o.Buf) || i == 0 && s.adds(&op) == o.Buf:
				op.Out[i].Buf = s.all(s.partial, o.Buf, "/partial")
			default:
				return fmt.Errorf("its result %s is divided by rows, and its operands are not", s.p.Buf(o.Buf).Name)
			}
		}
	}
	for _, o := range op.Out {
		delete(s.gathered, o.Buf)
	}
	s.ops = append(s.ops, op)
	return nil
}

// summing says whether ranks have addends of a divided buffer.
func (s *sequence) summing(id graph.BufID) bool { return s.partial[id] != 0 }

// all returns the buffer of all rows of a divided one in a table, which gets it.
func (s *sequence) all(in map[graph.BufID]graph.BufID, id graph.BufID, name string) graph.BufID {
	if _, ok := in[id]; !ok {
		b := *s.p.Buf(id)
		b.Name, b.Shape = s.unique(b.Name+name), slices.Clone(b.Shape)
		b.Shape[0] *= s.ranks()
		in[id] = s.p.AddBuffer(b)
	}
	return in[id]
}

// gather returns a buffer with all rows of a divided one, for the operation and those of its unit
// that come next.
func (s *sequence) gather(with graph.Op, id graph.BufID) graph.BufID {
	if all, ok := s.gathered[id]; ok {
		return all
	}
	all := s.all(s.gathered, id, "/all")
	s.p.Buf(all).Unit = with.Unit
	name, group := s.p.Buf(id).Name+"/all_gather", graph.GroupAttr{Axis: s.o.Axis}
	s.add(with, graph.AllGather, name, []graph.BufID{id}, graph.Out{Buf: all}, group)
	return all
}

// sumRows repeats an operation for every slice of a rank's rows. What it adds over rows are addends
// of the parameters' gradients.
func (s *sequence) sumRows(op graph.Op) error {
	if s.o.Axis >= 0 && !s.works(&op) {
		return fmt.Errorf("it sums rows that no rank has a part of")
	}
	for _, id := range op.In {
		if id != graph.NoBuf && (s.p.Buf(id).Class == graph.Activations || s.p.Buf(id).IsFloatInput()) {
			s.slices(id)
		}
	}
	for _, o := range op.Out {
		if delete(s.gathered, o.Buf); o.Buf != graph.NoBuf && !s.isGradient(o.Buf) {
			s.slices(o.Buf)
		}
	}
	return s.each(op, func(k int) any { return s.part(&op, s.per, k) }, whole, -1)
}

// slices makes the rank's slices of a buffer's rows views, of what it has of them or of all.
func (s *sequence) slices(id graph.BufID) {
	b, stride := s.p.Buf(id), int64(0)
	n := b.Elems() / int64(s.per)
	if !s.rows[id] && s.o.Axis >= 0 {
		n = b.Elems() / int64(s.o.Slices)
		stride = int64(s.per) * n
	}
	if s.parts[id] != nil || n == b.Elems() {
		return
	}
	shape := []int64{s.total / int64(s.o.Slices)}
	if !b.IsFloatInput() {
		shape = append(shape, b.Shape[1:]...)
	}
	var list []graph.BufID
	for k := range s.per {
		list = append(list, s.view(id, fmt.Sprint("rows.", k), shape, int64(k)*n, stride))
	}
	s.parts[id] = list
}

// view returns a view of elements of a buffer.
func (s *sequence) view(id graph.BufID, name string, shape []int64, from, stride int64) graph.BufID {
	b := *s.p.Buf(id)
	size := b.DType.Size()
	b.View = &graph.View{Base: id, Offset: from * size, RankStride: stride * size, Axis: max(s.o.Axis, 0)}
	b.Name, b.Shape = s.unique(b.Name+"/"+name), shape
	return s.p.AddBuffer(b)
}

// part returns an operation's attribute for the k-th of perRank equal parts of a rank's rows.
func (s *sequence) part(op *graph.Op, perRank, k int) any {
	rows := graph.SliceAttr{Axis: s.o.Axis, PerRank: int64(perRank), Index: int64(k), Total: s.total}
	rows.Each = s.total / s.ranks() / rows.PerRank
	switch a := op.Attr.(type) {
	case graph.PosAttr:
		if a.Seq > 1 {
			a.Rows = rows
		}
		return a
	case graph.DropoutAttr:
		x := s.p.Buf(op.In[0])
		width := x.Elems() / x.Shape[0]
		rows.Each, rows.Total = rows.Each*width, rows.Total*width
		a.Part = rows
		return a
	}
	return op.Attr
}
