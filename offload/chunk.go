package offload

import (
	"slices"
	"strconv"

	"github.com/spillway-ml/spillway/graph"
)

// split divides the operations of a phase that run on the host, element by element over a unit's
// flat buffers, into chunks:
//
//	adamw u(g, v, m)   →   adamw u[0](g[0], v[0], m[0])   adamw u[1](g[1], v[1], m[1]) …
//
// Then the mirrors (copies in host memory) of a large unit, such as an embedding, need not hold all
// of it. Each element is computed as before, and sums of squares are exact, so the bits are the
// same. If several elements share one element of an operand (the scales of blocks), the operand is
// divided in the same ratio, and its parts are tied to the matching parts of the values. An
// operation is not divided if an operand has one number a parameter. The kind table has these
// ratios (graph.Operand.Per).
//
// It returns each operation's chunk number; −1 for operations without chunks.
func (r *rewriter) split(ph *graph.Phase) (slot []int) {
	var e *graph.Editor // editor of a phase that is divided
	slot = make([]int, 0, len(ph.Ops))
	for i := range ph.Ops {
		parts := r.chunksOf(&ph.Ops[i])
		if parts == nil {
			slot = append(slot, -1)
			continue
		}
		if e == nil {
			e = graph.NewInserter(ph)
		}
		e.Split(i, parts)
		for k := range parts {
			slot = append(slot, k)
		}
	}
	if e != nil {
		e.Commit()
	}
	return slot
}

// elementsOf returns the number of elements that an operation on the host processes separately, and
// its operands; 0 if the operation cannot be divided.
func (r *rewriter) elementsOf(op *graph.Op) (n int64, in, out []graph.Operand) {
	switch a := op.Attr.(type) {
	case graph.ShardAttr:
		if a.Part == 0 {
			n = a.Len
		}
	case graph.UpdateAttr:
		if a.Shard.Part == 0 {
			n = a.Shard.Len
		}
	case graph.FillAttr:
		return r.p.Buf(op.Out[0].Buf).Elems(), nil, []graph.Operand{{Per: 1}}
	}
	info, ok := op.Info()
	if n == 0 || !ok {
		return 0, nil, nil
	}
	in, out = info.Operands(op.Attr)
	for _, o := range append(append([]graph.Operand(nil), in...), out...) {
		if o.Per == graph.PerParam || o.Per > 1 && r.chunk%o.Per != 0 {
			return 0, nil, nil
		}
	}
	return n, in, out
}

// chunksOf returns the chunks of an operation, nil if it is not divided.
func (r *rewriter) chunksOf(op *graph.Op) (parts []graph.Op) {
	if !r.onHost(op) {
		return nil
	}
	n, in, out := r.elementsOf(op)
	if n <= r.chunk {
		return nil
	}
	for at := int64(0); at < n; at += r.chunk {
		size := min(r.chunk, n-at)
		c := *op
		c.In, c.Out, c.Wait = slices.Clone(op.In), slices.Clone(op.Out), slices.Clone(op.Wait)
		c.Name = op.Name + "." + strconv.Itoa(len(parts))
		part := func(id graph.BufID, o graph.Operand) graph.BufID {
			if id == graph.NoBuf || o.Per == 0 {
				return id
			}
			return r.piece(id, at/o.Per, size/o.Per)
		}
		for i, id := range c.In {
			c.In[i] = part(id, in[i])
		}
		for i, o := range c.Out {
			c.Out[i].Buf = part(o.Buf, out[i])
		}
		switch a := c.Attr.(type) {
		case graph.ShardAttr:
			a.Part, a.Start, a.Len = n, at, size
			c.Attr = a
		case graph.UpdateAttr:
			a.Shard.Part, a.Shard.Start, a.Shard.Len = n, at, size
			c.Attr = a
		}
		parts = append(parts, c)
	}
	return parts
}

// piece returns the view of elements [at, at+size) of a flat buffer.
func (r *rewriter) piece(id graph.BufID, at, size int64) graph.BufID {
	key := pieceKey{id, at, size}
	v, ok := r.pieces[key]
	if !ok {
		b := *r.p.Buf(id)
		b.Name += "[" + strconv.FormatInt(at, 10) + ":" + strconv.FormatInt(at+size, 10) + "]"
		b.Shape, b.Pad, b.Global, b.Place = []int64{size}, 0, nil, nil
		b.View = &graph.View{Base: id, Offset: at * b.DType.Size()}
		if s := &b.Scale; s.Block > 0 {
			s.Of = r.piece(s.Of, at*s.Block, size*s.Block)
		}
		v = r.p.AddBuffer(b)
		r.pieces[key] = v
	}
	return v
}

// chunks returns the parts of a flat buffer that pass through the host in sequence, or only the
// buffer itself if it has at most chunk elements.
func (r *rewriter) chunks(id graph.BufID) []graph.BufID {
	n, chunk := r.p.Buf(id).Elems(), r.chunk
	if n <= chunk {
		return []graph.BufID{id}
	}
	var list []graph.BufID
	for at := int64(0); at < n; at += chunk {
		list = append(list, r.piece(id, at, min(chunk, n-at)))
	}
	return list
}
