package cpu

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/attn"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// bindRopeAt is bindRope with a position for each row instead of consecutive positions.
func bindRopeAt(b *binding) func() error {
	a := attr[graph.RopeAttr](b)
	positions := in[int32](b, 1)
	work := slab(b.work(workspace(b.Program, b.Op)))
	n, heads, d := int(a.Seq), int(a.Heads), int(a.HeadDim)
	t := &vec.RopeTable[float32]{
		Seq: n, At: positions, D: d, Theta: a.Theta, Table: take[float32](&work, a.Seq*a.HeadDim),
		Factor: a.ScaleFactor, LowFreq: a.LowFreq, HighFreq: a.HighFreq, Original: float64(a.OriginalPositions),
	}
	var k runner
	if as := b.asIn(0); as != vec.NoHalf {
		k = vec.HalfRope(as, heads, d, n, a.Inverse, in[uint16](b, 0), out[uint16](b, 0), t.Table, nil)
	} else {
		k = &vec.Rope[float32]{N: n, Heads: heads, D: d, Seq: n, Inverse: a.Inverse, X: in[float32](b, 0), Y: out[float32](b, 0), Table: t.Table}
	}
	pool, name := b.pool, b.Op.Name
	return func() error {
		for n, at := range positions {
			if at < 0 {
				return fmt.Errorf("%s (%s): the position of row %d is %d, want at least 0", name, graph.RopeAt, n, at)
			}
		}
		if err := t.Run(pool); err != nil {
			return err
		}
		return k.Run(pool)
	}
}

// cachedShape returns the shape of an operation's attention over full key/value caches, the
// largest one.
func cachedShape(p *graph.Program, op *graph.Op) attn.Shape {
	s := attnShape(op.Attr.(graph.AttentionAttr))
	s.Tk = int(p.Buf(op.Out[1].Buf).Shape[1])
	return s
}

func bindAttentionCached(b *binding) func() error {
	if b.asIn(0) != vec.NoHalf {
		return cached(b, func(f *attn.Forward[float32], q, k, v, y []uint16) { f.Q16, f.K16, f.V16, f.Y16 = q, k, v, y })
	}
	return cached(b, func(f *attn.Forward[float32], q, k, v, y []float32) { f.Q, f.K, f.V, f.Y = q, k, v, y })
}

// cached appends the rows' keys and values to each sequence's slot of the caches, and computes
// attention over all keys in the slot. give sets the operands of an attn.Forward.
func cached[E float32 | uint16](b *binding, give func(f *attn.Forward[float32], q, k, v, y []E)) func() error {
	a := attr[graph.AttentionAttr](b)
	h := attnHeads(a, func(i int) []E { return in[E](b, i) })
	positions, key := in[int32](b, h.operands), in[int64](b, h.operands+1)
	y, keys, values := out[E](b, 0), out[E](b, 1), out[E](b, 2)
	full, slots := cachedShape(b.Program, b.Op), int(b.Program.Buf(b.Op.Out[1].Buf).Shape[0])
	work := slab(b.work(workspace(b.Program, b.Op)))
	e := &attn.Each[float32]{Of: make([]attn.Forward[float32], full.B), Work: take[float32](&work, int64(attn.ForwardWorkspace(full)))}
	for i := range e.Of {
		f := &e.Of[i]
		f.Shape, f.Scale, f.Cap, f.As, f.LdQ, f.KVRows = full, float32(a.Scale), float32(a.Cap), b.asIn(0), h.ldq, full.Tk
		f.B = 1
	}
	pool, name, width := b.pool, b.Op.Name, full.KV*full.D
	c := &appended[E]{from: [2][]E{h.k, h.v}, to: make([][2][]E, full.B), rows: full.Tq, width: width, ld: h.ldkv}
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
			slot := (int(first) + i) * full.Tk * width
			k, v := keys[slot:slot+full.Tk*width], values[slot:slot+full.Tk*width]
			e.Of[i].Tk = start + full.Tq
			row := i * full.Tq
			c.to[i] = [2][]E{k[start*width : e.Of[i].Tk*width], v[start*width : e.Of[i].Tk*width]}
			give(&e.Of[i], h.q[row*h.ldq:], k, v, y[row*full.H*full.D:(row+full.Tq)*full.H*full.D])
		}
		pool.Run(full.B, c)
		return e.Run(pool)
	}
}

// appended copies the new rows of keys and values of each sequence behind those in its slot.
type appended[E float32 | uint16] struct {
	from            [2][]E   // (sequences·rows, ld)
	to              [][2][]E // by sequence, (rows, width)
	rows, width, ld int
}

// RunIndex copies those of a sequence; for the pool.
func (a *appended[E]) RunIndex(sequence int) {
	for i, to := range a.to[sequence] {
		for n := range a.rows {
			copy(to[n*a.width:(n+1)*a.width], a.from[i][(sequence*a.rows+n)*a.ld:])
		}
	}
}
