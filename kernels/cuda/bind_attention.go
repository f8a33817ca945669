package cuda

import (
	"fmt"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// attentionTile is the tile size that attention.cuh uses for heads of at most width
// elements: queries and keys per tile, in the forward (queries, keys) and in the backward
// (gradQueries, gradKeys).
type attentionTile struct{ width, queries, keys, gradQueries, gradKeys int64 }

var attentionTiles = []attentionTile{
	{32, 64, 64, 64, 64},
	{64, 64, 64, 64, 64},
	{128, 64, 64, 32, 32},
	{256, 32, 32, 16, 16},
}

// rowPad is the padding of each row of a tile in shared memory, in floats; it avoids bank
// conflicts.
const rowPad = 4

// shared and gradShared are the bytes of shared memory of a block. The forward has a tile
// of queries, a tile of keys, which the values reuse, and a tile of scores; the backward has
// separate tiles for the values and for the gradient of y as well.
func (t attentionTile) shared() int {
	return int(4 * ((t.queries+t.keys)*(t.width+rowPad) + t.keys*(t.queries+rowPad)))
}

func (t attentionTile) gradShared() int {
	return int(4 * (2*(t.gradQueries+t.gradKeys)*(t.width+rowPad) + max(t.gradKeys*(t.gradQueries+rowPad), t.gradQueries*(t.gradKeys+rowPad))))
}

// attentionThreads is the number of threads of a block of attention.cuh.
const attentionThreads = 256

// boundAttention is an attention operation with the tile, the source file and the read
// width that its kernels use.
type boundAttention struct {
	graph.AttentionAttr
	tile   attentionTile
	source string
	typ    graph.DType
	wide   int32
}

// attentionOf checks the shape of an attention operation and chooses its tile. places are
// the addresses of all operands of elements; if they are aligned to four elements, the
// kernels read four at a time (wide).
func (b *binding) attentionOf(places ...driver.Address) *boundAttention {
	a := &boundAttention{AttentionAttr: attr[graph.AttentionAttr](b), typ: b.inBuf(0).DType}
	limit := attentionTiles[len(attentionTiles)-1].width
	if a.HeadDim > limit {
		b.failf("heads have %d elements, the kernel takes %d at most", a.HeadDim, limit)
		return a
	}
	for _, a.tile = range attentionTiles {
		if a.HeadDim <= a.tile.width {
			break
		}
	}
	const most = 1<<31 - 1
	if n := a.Batch * a.Seq; n > most/a.Heads || n*a.Heads > most {
		b.failf("%d rows of %d heads are more than the kernel counts", n, a.Heads)
		return a
	}
	a.source = fmt.Sprintf("attention_%d.cu", a.tile.width)
	// Strides are multiples of HeadDim.
	a.wide = flag(a.HeadDim%4 == 0 && aligned(driver.Address(4*a.typ.Size()), places...))
	return a
}

// shape adds the attention's shape to a kernel's parameters.
func (a *boundAttention) shape(args *driver.Args) *driver.Args {
	return args.Int32(int32(a.Batch)).Int32(int32(a.Seq)).Int32(int32(a.Heads)).Int32(int32(a.Heads / a.KVHeads)).
		Int32(int32(a.HeadDim)).Float32(float32(a.Scale)).Int32(flag(a.Causal)).Int32(a.wide)
}

// tiles adds the launch of a kernel that has one block for each tile of each head.
func (b *binding) tiles(a *boundAttention, name string, heads, tile int64, shared int, args *driver.Args) {
	b.rows(a.source, name+"_"+b.float(b.inBuf(0)), a.Batch*heads*((a.Seq+tile-1)/tile), attentionThreads, shared, a.shape(args))
}

func bindAttention(b *binding) {
	h := b.attentionHeads(b.in)
	a := b.attentionOf(h.q, h.k, h.v, b.out(0))
	if b.err != nil {
		return
	}
	if b.flash(a.AttentionAttr, h.q, h.k, h.v, b.out(0)) {
		b.bindFlash(a.AttentionAttr, h)
		return
	}
	b.tiles(a, "attention", a.Heads, a.tile.queries, a.tile.shared(),
		b.args().Pointer(h.q).Pointer(h.k).Pointer(h.v).Int64(h.ldq).Int64(h.ldkv).Pointer(b.out(0)).Pointer(b.out(1)))
}

func bindAttentionGrad(b *binding) {
	h, d := b.attentionHeads(b.in), b.attentionHeads(b.out)
	n := h.operands
	y, lse, dy := b.in(n), b.in(n+1), b.in(n+2)
	a := b.attentionOf(h.q, h.k, h.v, d.q, d.k, d.v, dy)
	if b.err != nil {
		return
	}
	if b.flash(a.AttentionAttr, h.q, h.k, h.v, d.q, d.k, d.v, y, dy) {
		b.bindFlashGrad(a.AttentionAttr, h, d, y, lse, dy)
		return
	}
	queries := a.Batch * a.Heads * a.Seq
	delta := b.work(4 * queries)
	if b.err != nil {
		return
	}
	const warps = attentionThreads / 32
	b.rows(a.source, "attention_delta_"+b.float(b.inBuf(0)), (queries+warps-1)/warps, attentionThreads, 0,
		a.shape(b.args().Pointer(y).Pointer(dy).Pointer(delta)))
	operands := func() *driver.Args {
		return b.args().Pointer(h.q).Pointer(h.k).Pointer(h.v).Int64(h.ldq).Int64(h.ldkv).Pointer(dy).Pointer(lse).Pointer(delta)
	}
	b.tiles(a, "attention_dq", a.Heads, a.tile.gradQueries, a.tile.gradShared(), operands().Pointer(d.q).Int64(d.ldq))
	b.tiles(a, "attention_dkv", a.KVHeads, a.tile.gradKeys, a.tile.gradShared(), operands().Pointer(d.k).Pointer(d.v).Int64(d.ldkv))
}
