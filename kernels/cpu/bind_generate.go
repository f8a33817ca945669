package cpu

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/attn"
)

// cachedShape returns the shape of an operation's attention over full key/value caches, the largest
// possible one.
func cachedShape(p *graph.Program, op *graph.Op) attn.Shape {
	s := attnShape(op.Attr.(graph.AttentionAttr))
	s.Tk = int(p.Buf(op.Out[1].Buf).Shape[1])
	return s
}

// bindAttentionCached appends the rows' keys and values to each sequence's slot of the caches, and
// computes attention over all keys in the slot.
func bindAttentionCached(b *binding) func() error {
	a := attr[graph.AttentionAttr](b)
	h := attnHeads(a, b.inMatrix)
	positions, key := in[int32](b, h.operands), in[int64](b, h.operands+1)
	y, keys, values := b.outMatrix(0), b.outMatrix(1), b.outMatrix(2)
	full, slots := cachedShape(b.Program, b.Op), int(b.Program.Buf(b.Op.Out[1].Buf).Shape[0])
	work := b.work()
	e := &attn.Each[float32]{Of: make([]attn.Forward[float32], full.B), Work: take[float32](&work, int64(attn.ForwardWorkspace(full)))}
	for i := range e.Of {
		f := &e.Of[i]
		f.Shape, f.Scale, f.Cap, f.As, f.LdQ, f.KVRows = full, float32(a.Scale), float32(a.Cap), b.asIn(0), h.ldq, full.Tk
		f.B = 1
	}
	pool, name, width := b.pool, b.Op.Name, full.KV*full.D
	c := &appended{from: [2]matrix{h.k, h.v}, to: make([][2]matrix, full.B), rows: full.Tq, width: width, ld: h.ldkv}
	return func() error {
		first := key[graph.KeySlot]
		if first < 0 || first > int64(slots-full.B) {
			return fmt.Errorf("%s (%s): sequence 0 is in slot %d, want 0 to %d, so that %d fit into caches of %d", name, graph.AttentionCached, first, slots-full.B, full.B, slots)
		}
		for i := range e.Of {
			start := int(positions[i*full.Tq])
			if start < 0 || start > full.Tk-full.Tq {
				return fmt.Errorf("%s (%s): row 0 of sequence %d is at position %d, want 0 to %d, so that %d rows fit into caches of %d", name, graph.AttentionCached, i, start, full.Tk-full.Tq, full.Tq, full.Tk)
			}
			f, slot, row := &e.Of[i], int(first)+i, i*full.Tq
			f.Tk = start + full.Tq
			k, v := keys.rows(slot, slot+1, full.Tk*width), values.rows(slot, slot+1, full.Tk*width)
			c.to[i] = [2]matrix{k.rows(start, f.Tk, width), v.rows(start, f.Tk, width)}
			q, to := h.q.from(row*h.ldq), y.rows(row, row+full.Tq, full.H*full.D)
			f.Q, f.K, f.V, f.Y = q.f32, k.f32, v.f32, to.f32
			f.Q16, f.K16, f.V16, f.Y16 = q.u16, k.u16, v.u16, to.u16
		}
		pool.Run(full.B, c)
		return e.Run(pool)
	}
}

// appended copies the new rows of keys and values of each sequence after those in its slot.
type appended struct {
	from            [2]matrix   // (sequences·rows, ld)
	to              [][2]matrix // by sequence, (rows, width)
	rows, width, ld int
}

// RunIndex copies the rows of one sequence; for the pool.
func (a *appended) RunIndex(sequence int) {
	for i, to := range a.to[sequence] {
		for n := range a.rows {
			to.rows(n, n+1, a.width).copy(a.from[i].from((sequence*a.rows + n) * a.ld))
		}
	}
}
