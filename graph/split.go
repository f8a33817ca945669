package graph

import (
	"fmt"
	"slices"
)

// ranksOf returns the number of ranks over which the slices are distributed.
func (p *Program) ranksOf(s *Split) int {
	if s.Axis < 0 {
		return 1
	}
	return p.Mesh[s.Axis].Size
}

// slicesOf returns the number of slices of a split parameter.
func (p *Program) slicesOf(s *Split) int {
	if s.Slices == 0 {
		return p.ranksOf(s)
	}
	return s.Slices
}

// Run is a run of elements of a parameter that are contiguous in one slice.
type Run struct {
	Rank  int   // index along Split.Axis of the rank that has it; −1: all ranks have it
	Param int   // index into Program.Params of the slice on that rank
	At    int64 // its first element of the parameter
	From  int64 // its first element of the slice
	Len   int64
}

// Runs calls visit for the runs of elements [start, start+n) of a parameter, in order.
func (p *Program) Runs(param int, start, n int64, visit func(Run) error) error {
	q := &p.Params[param]
	s := q.Split
	if s == nil {
		return visit(Run{Rank: -1, Param: param, At: start, From: start, Len: n})
	}
	inner := elemsOf(q.Shape[s.Dim+1:])
	slices := int64(p.slicesOf(s))
	group, part := s.extents(q.Shape[s.Dim], slices)
	perRank := slices / int64(p.ranksOf(s))
	for at, end := start, start+n; at < end; {
		row, k := at/inner, at%inner
		outer, in := row/group, row%group // outer counts groups of all outer rows
		slice, first := in/part, in%part
		last := min((slice+1)*part, group) // element of the group after the slice's last one
		r := Run{Rank: int(slice / perRank), Param: param, At: at, From: (outer*part+first)*inner + k, Len: min((last-in)*inner-k, end-at)}
		if s.Axis < 0 {
			r.Rank = -1
		}
		if local := int(slice % perRank); local > 0 {
			r.Param = p.slice(param, local)
		}
		if err := visit(r); err != nil {
			return err
		}
		at += r.Len
	}
	return nil
}

// Slices returns, for each slice of a parameter in order, a run of all its elements, with At 0. A
// parameter that is not split is one run.
func (p *Program) Slices(param int) (list []Run) {
	_ = p.Runs(param, 0, p.Params[param].Elems(), func(r Run) error {
		at := slices.IndexFunc(list, func(s Run) bool { return s.Rank == r.Rank && s.Param == r.Param })
		if at < 0 {
			at, list = len(list), append(list, Run{Rank: r.Rank, Param: r.Param})
		}
		list[at].Len += r.Len
		return nil
	})
	return list
}

// slice returns the index into Params of one of a rank's slices of a parameter.
func (p *Program) slice(param, local int) int {
	for i := len(p.Tensors()); i < len(p.Params); i++ {
		if s := p.Params[i].Split; s != nil && p.Params[i].TiedTo == 0 && s.Of == param && s.Slice == local {
			return i
		}
	}
	panic(fmt.Sprintf("graph: parameter %s has no slice %d", p.Params[param].Name, local))
}

// Tensors returns the parameters of the model. It leaves out a rank's further slices, and copies of
// parameters that another pipeline stage has.
func (p *Program) Tensors() []Param {
	n := len(p.Params)
	for n > 0 && (p.Params[n-1].TiedTo > 0 || p.Params[n-1].Split != nil && p.Params[n-1].Split.Slice > 0) {
		n--
	}
	return p.Params[:n]
}

// ParamElems returns the number of elements of all parameters; a tied parameter counts once.
func (p *Program) ParamElems() int64 {
	var n int64
	for i := range p.Tensors() {
		n += p.Params[i].Elems()
	}
	return n
}

// LocalShape returns the shape of a rank's part of a parameter.
func (p *Program) LocalShape(q *Param) []int64 {
	shape := append([]int64(nil), q.Shape...)
	if s := q.Split; s != nil {
		group, part := s.extents(shape[s.Dim], int64(p.slicesOf(s)))
		shape[s.Dim] = shape[s.Dim] / max(group, 1) * part
	}
	return shape
}

// LocalElems returns the number of elements of a rank's part of a parameter.
func (p *Program) LocalElems(q *Param) int64 { return elemsOf(p.LocalShape(q)) }

// checkSplit checks a parameter's division against its shape and the mesh.
func (p *Program) checkSplit(q *Param) error {
	s := q.Split
	switch {
	case s == nil:
		return nil
	case s.Axis < 0 && s.Slices == 0 || s.Axis >= len(p.Mesh):
		return fmt.Errorf("is split along mesh axis %d, want 0 to %d", s.Axis, len(p.Mesh)-1)
	case s.Dim < 0 || s.Dim >= len(q.Shape):
		return fmt.Errorf("is split in dimension %d, want one of the %d of %v", s.Dim, len(q.Shape), q.Shape)
	}
	slices, ranks := p.slicesOf(s), p.ranksOf(s)
	group, part := s.extents(q.Shape[s.Dim], int64(slices))
	switch equal := q.Shape[s.Dim]%int64(max(s.Groups, 1)) == 0 && group%int64(slices) == 0; {
	case !equal && s.Slices == 0:
		return fmt.Errorf("is split in dimension %d of %v over %d ranks, want equal parts", s.Dim, q.Shape, ranks)
	case !equal && (s.Dim > 0 || s.Groups > 1 || part*int64(slices-1) >= group):
		return fmt.Errorf("is split in dimension %d of %v into %d slices of %d groups, want equal parts, or of dimension 0 as a whole none that is empty", s.Dim, q.Shape, slices, max(s.Groups, 1))
	case slices%ranks != 0 || s.Slice < 0 || s.Slice >= slices/ranks:
		return fmt.Errorf("is slice %d of %d on each of %d ranks, want as many slices on each rank", s.Slice, slices, ranks)
	case s.Of < 0 || s.Of >= len(p.Tensors()) || s.Slice > 0 && q.TiedTo == 0 && !p.Params[s.Of].sliced(q):
		return fmt.Errorf("is slice %d of parameter %d of %d, want one that is split in the same way", s.Slice, s.Of, len(p.Tensors()))
	}
	for _, st := range append([]State{p.Units[q.Unit].Value, p.Units[q.Unit].Compute}, p.Units[q.Unit].States...) {
		if p.Units[q.Unit].FlatLen > 0 && st.Axis >= 0 && st.Axis == s.Axis {
			return fmt.Errorf("is split along mesh axis %d, along which state %s of unit %s is in shards, want another axis", s.Axis, st.Name, p.Units[q.Unit].Name)
		}
	}
	return nil
}

// tied says whether a parameter may be a copy of another one on another stage.
func (q *Param) tied(of *Param) bool {
	same := q.Split == nil && of.Split == nil || q.Split != nil && of.Split != nil && *q.Split == *of.Split
	return same && of.TiedTo == 0 && slices.Equal(q.Shape, of.Shape) && q.Unit != of.Unit
}

// sliced says whether other is a slice of the same parameter.
func (q *Param) sliced(other *Param) bool {
	if q.Split == nil {
		return false
	}
	a, b := *q.Split, *other.Split
	a.Slice, b.Slice, a.Of, b.Of = 0, 0, 0, 0
	return a == b && slices.Equal(q.Shape, other.Shape) && q.Unit == other.Unit
}
