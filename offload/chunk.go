package offload

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
)

// split divides the operations of a phase that run on the host, element by
// element over a unit's flat buffers, into chunks:
//
//	adamw u(g, v, m)   →   adamw u[0](g[0], v[0], m[0])   adamw u[1](g[1], v[1], m[1]) …
//
// so that the mirrors of a large unit (an embedding) need not be whole in host
// memory. Each element sees the same arithmetic, and sums of squares are exact,
// so the bits are the same. NovoGrad is left whole: its second moment is one
// number a parameter.
//
// It returns each operation's chunk; −1 for those that have none.
func (r *rewriter) split(ph *graph.Phase) (slot []int) {
	var out []graph.Op
	chunk := r.chunk
	parts := map[string][2]string{} // by name: of the first and the last chunk
	for _, op := range ph.Ops {
		n, ok := int64(0), r.onHost(&op) && op.Kind != graph.NovoGrad
		if ok {
			switch a := op.Attr.(type) {
			case graph.ShardAttr:
				n, ok = a.Len, a.Part == 0
			case graph.UpdateAttr:
				n, ok = a.Shard.Len, a.Shard.Part == 0
			case graph.FillAttr:
				n = r.p.Buf(op.Out[0].Buf).Elems()
			default:
				ok = false
			}
		}
		if !ok || n <= chunk {
			out, slot = append(out, op), append(slot, -1)
			continue
		}
		for k, at := 0, int64(0); at < n; k, at = k+1, at+chunk {
			size := min(chunk, n-at)
			c := graph.CloneOps([]graph.Op{op})[0]
			c.Name = fmt.Sprintf("%s.%d", op.Name, k)
			part := func(id graph.BufID) graph.BufID {
				if id == graph.NoBuf || r.p.Buf(id).Elems() != n {
					return id
				}
				return r.piece(id, at, size)
			}
			for i, id := range c.In {
				c.In[i] = part(id)
			}
			for i, o := range c.Out {
				c.Out[i].Buf = part(o.Buf)
			}
			switch a := c.Attr.(type) {
			case graph.ShardAttr:
				a.Part, a.Start, a.Len = n, at, size
				c.Attr = a
			case graph.UpdateAttr:
				a.Shard.Part, a.Shard.Start, a.Shard.Len = n, at, size
				c.Attr = a
			}
			out, slot = append(out, c), append(slot, k)
			if k == 0 {
				parts[op.Name] = [2]string{c.Name, c.Name}
			}
			parts[op.Name] = [2]string{parts[op.Name][0], c.Name}
		}
	}
	ph.Ops = out
	for i := range ph.Throttles {
		t := &ph.Throttles[i]
		if names, ok := parts[t.Before]; ok {
			t.Before = names[1]
		}
		if names, ok := parts[t.After]; ok {
			t.After = names[0]
		}
	}
	return slot
}

type pieceKey struct {
	id       graph.BufID
	at, size int64
}

// piece returns the view of elements [at, at+size) of a flat buffer.
func (r *rewriter) piece(id graph.BufID, at, size int64) graph.BufID {
	key := pieceKey{id, at, size}
	v, ok := r.pieces[key]
	if !ok {
		b := *r.p.Buf(id)
		b.Name = fmt.Sprintf("%s[%d:%d]", b.Name, at, at+size)
		b.Shape, b.Pad, b.Global, b.Place = []int64{size}, 0, nil, nil
		b.View = &graph.View{Base: id, Offset: at * b.DType.Size()}
		v = r.p.AddBuffer(b)
		r.pieces[key] = v
	}
	return v
}

// chunks returns the pieces of a flat buffer that pass through the host one by
// one; the buffer itself where it is small.
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
