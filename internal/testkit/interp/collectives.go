package interp

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// collectives are the kinds that involve every rank of a group.
var collectives = map[graph.Kind]bool{graph.AllGather: true, graph.ReduceScatter: true, graph.AllReduce: true, graph.AllToAll: true}

// groups returns the ranks of each group along a mesh axis, in the order of
// their index along it; −1 is one group of all ranks.
func (w *World[T]) groups(axis int) [][]int {
	if axis < 0 {
		all := make([]int, len(w.ranks))
		for i := range all {
			all[i] = i
		}
		return [][]int{all}
	}
	stride := 1
	for a := len(w.prog.Mesh) - 1; a > axis; a-- {
		stride *= w.prog.Mesh[a].Size
	}
	var out [][]int
	for r := range w.ranks {
		if w.ranks[r].coord[axis] != 0 {
			continue
		}
		g := make([]int, w.prog.Mesh[axis].Size)
		for i := range g {
			g[i] = r + i*stride
		}
		out = append(out, g)
	}
	return out
}

func runCollective[T num.Float](w *World[T], op *graph.Op, present []int) error {
	a, ok := op.Attr.(graph.GroupAttr)
	if !ok || a.Axis < -1 || a.Axis >= len(w.prog.Mesh) {
		return fmt.Errorf("attribute is %v, want the axis of a group", op.Attr)
	}
	var in graph.BufID = graph.NoBuf
	if len(op.In) > 0 {
		in = op.In[0]
	}
	out := op.Out[0]
	for _, g := range w.groups(a.Axis) {
		var err error
		switch dt := w.prog.Buf(out.Buf).DType; dt {
		case graph.F32:
			if op.Kind == graph.ReduceScatter && a.Order == graph.SumSequential {
				if err = w.squareLeaves(g, op, a.Axis, present); err == nil {
					err = w.addLeaves(g, in, out, present)
				}
				break
			}
			err = collective(op.Kind, g, in, out, w.Floats)
		case graph.BF16, graph.F16:
			err = w.collectiveHalf(op.Kind, g, in, out)
		case graph.F64:
			err = collective(op.Kind, g, in, out, w.F64)
		case graph.I64:
			err = collective(op.Kind, g, in, out, w.I64)
		case graph.I32:
			err = collective(op.Kind, g, in, out, w.I32)
		case graph.U8:
			err = collective(op.Kind, g, in, out, w.U8)
		default:
			err = fmt.Errorf("no interpretation of %v buffers", dt)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

type number interface {
	float32 | float64 | int64 | int32 | uint8
}

// collective runs one group's collective. Inputs are copied first: a shard may
// be a view of the full buffer.
func collective[E number](kind graph.Kind, group []int, in graph.BufID, out graph.Out, get func(rank int, id graph.BufID) ([]E, error)) error {
	if kind == graph.AllReduce {
		in = out.Buf
	}
	srcs := make([][]E, len(group))
	dsts := make([][]E, len(group))
	for i, r := range group {
		s, err := get(r, in)
		if err != nil {
			return err
		}
		srcs[i] = append([]E(nil), s...)
		if dsts[i], err = get(r, out.Buf); err != nil {
			return err
		}
	}
	n := len(srcs[0])
	for i, d := range dsts {
		switch {
		case kind == graph.AllGather:
			if len(d) != n*len(group) {
				return fmt.Errorf("full has %d elements, want %d shards of %d", len(d), len(group), n)
			}
			for j, s := range srcs {
				copy(d[j*n:], s)
			}
		case kind == graph.AllToAll:
			part := n / len(group)
			for j, s := range srcs {
				copy(d[j*part:(j+1)*part], s[i*part:])
			}
		case kind == graph.ReduceScatter:
			if len(d)*len(group) != n {
				return fmt.Errorf("full has %d elements, want %d shards of %d", n, len(group), len(d))
			}
			reduce(d, srcs, i*len(d), out.Mode == graph.Accum)
		default:
			reduce(d, srcs, 0, false)
		}
	}
	return nil
}

// leavesOf returns the contents of a buffer on the present ranks of a group (nil: all).
func (w *World[T]) leavesOf(group []int, in graph.BufID, present []int) (srcs [][]T, err error) {
	if present == nil {
		present = group
	}
	for _, r := range present {
		var s []T
		if dt := w.prog.Buf(in).DType; dt == graph.F32 {
			s, err = w.Floats(r, in)
		} else {
			var bits []uint16
			bits, err = w.U16(r, in)
			for _, b := range bits {
				s = append(s, T(widenFrom(dt, b)))
			}
		}
		if err != nil {
			return nil, err
		}
		srcs = append(srcs, s)
	}
	return srcs, nil
}

// squareLeaves adds the squares of each rank's part of the leaves to its accumulator, if the
// operation has one.
func (w *World[T]) squareLeaves(group []int, op *graph.Op, axis int, present []int) error {
	if len(op.Out) < 2 {
		return nil
	}
	srcs, err := w.leavesOf(group, op.In[0], present)
	if err != nil {
		return err
	}
	n := w.prog.Buf(op.Out[0].Buf).Elems()
	for i, r := range group {
		c := &call[T]{w: w, rank: r, op: op}
		acc := c.outI64(1)
		for _, s := range srcs {
			c.squares(graph.ShardAttr{Unit: op.Unit, Axis: axis, Len: n}, s[int64(i)*n:][:n], func(int) []int64 { return acc })
		}
		if c.err != nil {
			return c.err
		}
	}
	return nil
}

// addLeaves adds each rank's part of the present ranks' buffers (nil: all), from left to right.
func (w *World[T]) addLeaves(group []int, in graph.BufID, out graph.Out, present []int) error {
	srcs, err := w.leavesOf(group, in, present)
	if err != nil {
		return err
	}
	for i, r := range group {
		sum, err := w.Floats(r, out.Buf)
		if err != nil {
			return err
		}
		if len(sum)*len(group) != len(srcs[0]) {
			return fmt.Errorf("full has %d elements, want %d shards of %d", len(srcs[0]), len(group), len(sum))
		}
		for j := range sum {
			for k, s := range srcs {
				if v := s[i*len(sum)+j]; k == 0 && out.Mode != graph.Accum {
					sum[j] = v
				} else {
					sum[j] += v
				}
			}
		}
	}
	return nil
}

// reduce sums elements [from, from+len(dst)) of the sources as a tree over the sources' indices.
func reduce[E number](dst []E, srcs [][]E, from int, accum bool) {
	for i := range dst {
		v := treeSum(srcs, from+i)
		if accum {
			v = dst[i] + v
		}
		dst[i] = v
	}
}

// treeSum splits at the largest power of two below the count.
func treeSum[E number](srcs [][]E, i int) E {
	if len(srcs) == 1 {
		return srcs[0][i]
	}
	p := 1
	for 2*p < len(srcs) {
		p *= 2
	}
	return treeSum(srcs[:p], i) + treeSum(srcs[p:], i)
}
