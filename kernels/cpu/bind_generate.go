package cpu

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/attn"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// bindRopeAt is bindRope of a table of one position, which the Key buffer says.
func bindRopeAt(b *binding) func() error {
	a := attr[graph.RopeAttr](b)
	key := in[int64](b, 1)
	work := slab(b.work(workspace(b.Program, b.Op)))
	t := &vec.RopeTable[float32]{
		Seq: 1, D: int(a.HeadDim), Theta: a.Theta, Table: take[float32](&work, a.HeadDim),
		Factor: a.ScaleFactor, LowFreq: a.LowFreq, HighFreq: a.HighFreq, Original: float64(a.OriginalPositions),
	}
	k := &vec.Rope[float32]{
		N: 1, Heads: int(a.Heads), D: int(a.HeadDim), Seq: 1, Inverse: a.Inverse,
		X: in[float32](b, 0), Y: out[float32](b, 0), Table: t.Table,
	}
	pool, name := b.pool, b.Op.Name
	return func() error {
		if key[graph.KeyStart] < 0 {
			return fmt.Errorf("%s (%s): position is %d, want at least 0", name, graph.RopeAt, key[graph.KeyStart])
		}
		t.First = int(key[graph.KeyStart])
		if err := t.Run(pool); err != nil {
			return err
		}
		return k.Run(pool)
	}
}

// cachedShape is the largest attention of an operation: over full caches.
func cachedShape(p *graph.Program, op *graph.Op) attn.Shape {
	s := attnShape(op.Attr.(graph.AttentionAttr))
	s.Tk = int(p.Buf(op.Out[1].Buf).Shape[0])
	return s
}

// bindAttentionCached copies the rows' keys and values to where the caches end,
// and attends over all of these.
func bindAttentionCached(b *binding) func() error {
	a := attr[graph.AttentionAttr](b)
	h := attnHeads(a, func(i int) []float32 { return in[float32](b, i) })
	key := in[int64](b, h.operands)
	keys, values := out[float32](b, 1), out[float32](b, 2)
	full := cachedShape(b.Program, b.Op)
	f := &attn.Forward[float32]{
		Shape: full, Scale: float32(a.Scale), Cap: float32(a.Cap), Q: h.q, K: keys, V: values, Y: out[float32](b, 0), LdQ: h.ldq, KVRows: full.Tk,
	}
	work := slab(b.work(workspace(b.Program, b.Op)))
	f.Work = take[float32](&work, int64(attn.ForwardWorkspace(full)))
	pool, name, width := b.pool, b.Op.Name, full.KV*full.D
	return func() error {
		start := key[graph.KeyStart]
		if start < 0 || start > int64(full.Tk-full.Tq) {
			return fmt.Errorf("%s (%s): row 0 is at position %d, want 0 to %d, so that %d rows fit into caches of %d", name, graph.AttentionCached, start, full.Tk-full.Tq, full.Tq, full.Tk)
		}
		for n := range full.Tq {
			at := (int(start) + n) * width
			copy(keys[at:at+width], h.k[n*h.ldkv:])
			copy(values[at:at+width], h.v[n*h.ldkv:])
		}
		f.Tk = int(start) + full.Tq
		return f.Run(pool)
	}
}
