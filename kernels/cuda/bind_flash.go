package cuda

import (
	"fmt"
	"math"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// Constants of flash.cuh: threads of a block in the forward and in the backward, and rows
// of delta that one block computes.
const (
	flashForward  = 128
	flashBackward = 128
	flashDeltas   = flashBackward / 16
)

// flashStages is the number of query tiles that the backward loads ahead, for heads of
// width elements. It is the second argument of the macro FLASH.
func flashStages(width int64) int64 {
	if width > 80 {
		return 1
	}
	return 2
}

// flashShared and flashGradShared are the bytes of shared memory of a block. The forward
// has one tile each of queries, keys and values. The backward has keys, values and scores,
// and for each stage queries, gradients of y, lse and delta. Each row of a tile is padded
// by 8 elements.
func flashShared(width int64) int { return int(3 * 2 * cut.AttentionTile * (width + 8)) }

func flashGradShared(width int64) int {
	tile, stages := cut.AttentionTile, flashStages(width)
	return int(2*((2+2*stages)*tile*(width+8)+tile*(tile+8)) + 2*4*tile*stages)
}

// flash says whether an attention runs on the tensor cores. The GPU needs compute
// capability 8.0 or newer, the kernels must support the shape, and all operands must be
// aligned to 16 bytes. Otherwise the fp32 kernels of attention.cuh run.
func (b *binding) flash(a graph.AttentionAttr, places ...driver.Address) bool {
	return b.lib.o.Device.Major >= 8 && cut.TensorAttention(a, b.inBuf(0).DType) && aligned(16, places...)
}

// bindFlash adds the launch of the forward of attention on tensor cores.
func (b *binding) bindFlash(a graph.AttentionAttr, h attentionHeads) {
	b.flashTiles(a, "flash_forward", a.Heads, flashForward, flashShared(a.HeadDim),
		b.args().Pointer(h.q).Pointer(h.k).Pointer(h.v).Int64(h.ldq).Int64(h.ldkv).Pointer(b.out(0)).Pointer(b.out(1)).Int32(flashAtOnce(a)))
}

// flashCache is the number of bytes of the GPU's L2 cache that concurrently running heads may use.
// Training GPUs have 40 to 60 MB of L2 cache.
var flashCache int64 = 32 << 20

// flashAtOnce returns the number of query heads that the forward processes together. The keys and
// values of these heads fit in half of flashCache.
func flashAtOnce(a graph.AttentionAttr) int32 {
	group := a.Heads / a.KVHeads
	return int32(max(flashCache/2/(2*2*a.Seq*a.HeadDim), 1) * group)
}

// flashOrder returns struct Order of flash.cuh: the distance between one head's tiles of keys in
// the order in which blocks process tiles. Tiles of keys add to dq in turn. A tile never waits for
// its turn if it starts at least two steps after the previous tile, because it starts at the next
// tile of queries; flashOrder uses 2.25 steps. A step is the work on one tile of queries. If
// queries, gradients and sums of all heads fit in flashCache, the first tiles of all heads come
// first (spread 0).
//
//	steps between = spread/stride · tiles · (tiles/2 · group) / blocks at once
func flashOrder(a graph.AttentionAttr, multiprocessors int) (spread, stride int32) {
	group, tiles := a.Heads/a.KVHeads, (a.Seq+cut.AttentionTile-1)/cut.AttentionTile
	if a.Batch*a.Heads*a.Seq*a.HeadDim*(2+2+4) <= flashCache {
		return 0, 1
	}
	const steps, blocks = 2.25, 3
	apart := steps * float64(blocks*max(multiprocessors, 1)) / (float64(tiles) * float64(tiles) / 2 * float64(group))
	if apart >= 1 {
		return int32(min(math.Round(apart), float64(a.Batch*a.KVHeads))), 1
	}
	return 1, int32(min(math.Round(1/apart), float64(tiles)))
}

// flashTiles adds the launch of a kernel that has one block for each tile of each head.
func (b *binding) flashTiles(a graph.AttentionAttr, name string, heads, block int64, shared int, args *driver.Args) {
	tiles := (a.Seq + cut.AttentionTile - 1) / cut.AttentionTile
	b.rows(flashSource(a), name+"_"+b.float(b.inBuf(0)), a.Batch*heads*tiles, block, shared, flashShape(a, args))
}

func flashSource(a graph.AttentionAttr) string { return fmt.Sprintf("flash_%d.cu", a.HeadDim) }

// flashShape adds the attention's shape to a kernel's parameters.
func flashShape(a graph.AttentionAttr, args *driver.Args) *driver.Args {
	return args.Int32(int32(a.Batch)).Int32(int32(a.Seq)).Int32(int32(a.Heads)).Int32(int32(a.Heads / a.KVHeads)).
		Float32(float32(a.Scale)).Int32(flag(a.Causal))
}

// bindFlashGrad adds the launches of the backward. The workspace holds delta, the sums of
// dq, one ticket counter, and for each tile of queries the turn of the next tile of keys.
func (b *binding) bindFlashGrad(a graph.AttentionAttr, h, d attentionHeads, y, lse, dy driver.Address) {
	deltas, sums, turns := cut.TensorAttentionWork(a)
	sumsAt := roundUp(deltas, workAlign)
	turnsAt := sumsAt + roundUp(sums, workAlign)
	work := b.work(turnsAt + turns)
	counts := turns / 4
	if counts > 1<<31-1 {
		b.failf("%d tiles of queries are more than the kernel counts", counts)
	}
	if b.err != nil {
		return
	}
	at := func(offset int64) driver.Address { return work + driver.Address(offset) }
	rows := a.Batch * a.Heads * a.Seq
	b.rows(flashSource(a), "flash_delta_"+b.float(b.inBuf(0)), (rows+flashDeltas-1)/flashDeltas, flashBackward, 0,
		flashShape(a, b.args().Pointer(y).Pointer(dy).Pointer(work).Pointer(at(turnsAt)).Int32(int32(counts))))
	spread, stride := flashOrder(a, b.lib.o.Device.SMs)
	b.flashTiles(a, "flash_backward", a.KVHeads, flashBackward, flashGradShared(a.HeadDim),
		b.args().Pointer(h.q).Pointer(h.k).Pointer(h.v).Pointer(dy).Int64(h.ldq).Int64(h.ldkv).Pointer(lse).Pointer(work).
			Pointer(at(sumsAt)).Pointer(at(turnsAt)).Pointer(d.q).Pointer(d.k).Pointer(d.v).Int64(d.ldq).Int64(d.ldkv).Int32(spread).Int32(stride))
}
