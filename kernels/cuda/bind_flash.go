package cuda

import (
	"fmt"
	"math"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// Blocks of flash.cuh: threads forward and backward, rows of delta of a block.
const (
	flashForward  = 128
	flashBackward = 128
	flashDeltas   = flashBackward / 16
)

// flashStages is how many tiles of queries the backward has under way, by the width of
// a head: the second argument of FLASH.
func flashStages(width int64) int64 {
	if width > 80 {
		return 1
	}
	return 2
}

// flashShared and flashGradShared are the bytes of shared memory of a block: queries,
// keys and values; keys, values, queries and gradients of y by stage, a tile of scores,
// and lse and delta of queries by stage. Rows are 8 elements longer than what they hold.
func flashShared(width int64) int { return int(3 * 2 * cut.AttentionTile * (width + 8)) }

func flashGradShared(width int64) int {
	tile, stages := cut.AttentionTile, flashStages(width)
	return int(2*((2+2*stages)*tile*(width+8)+tile*(tile+8)) + 2*4*tile*stages)
}

// flash says whether an attention runs on the tensor cores: the card has those of
// compute capability 8.0, the kernels know the shape, and all values lie at multiples
// of 16 bytes. If not, attention.cuh's kernels, in fp32, take it.
func (b *binding) flash(a graph.AttentionAttr, places ...driver.Address) bool {
	return b.lib.o.Device.Major >= 8 && cut.TensorAttention(a, b.inBuf(0).DType) && aligned(16, places...)
}

// bindFlash is the forward of attention on tensor cores.
func (b *binding) bindFlash(a *boundAttention, h attentionHeads) {
	b.flashTiles(a, "flash_forward", a.Heads, flashForward, flashShared(a.HeadDim),
		b.args().Pointer(h.q).Pointer(h.k).Pointer(h.v).Int64(h.ldq).Int64(h.ldkv).Pointer(b.out(0)).Pointer(b.out(1)).Int32(flashAtOnce(a)))
}

// flashCache is the bytes of a card's cache that the heads under way may take, which is 40
// to 60 MB on the cards that train.
var flashCache int64 = 32 << 20

// flashAtOnce is the heads of a group forward: their keys and values take half of flashCache.
func flashAtOnce(a *boundAttention) int32 {
	group := a.Heads / a.KVHeads
	return int32(max(flashCache/2/(2*2*a.Seq*a.HeadDim), 1) * group)
}

// flashOrder is struct Order of flash.cuh: how far a head's tiles of keys are apart in the
// order in which blocks take them. A tile finds its turn come where it begins at least two
// of the steps from one tile of queries to the next later than the tile before it, since it
// begins one tile of queries further on; here they are 2.25. Where queries, gradients and sums
// of all heads fit the cache, first tiles come first.
//
//	steps between = spread/stride · tiles · (tiles/2 · group) / blocks at once
func flashOrder(a *boundAttention, multiprocessors int) (spread, stride int32) {
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

// flashTiles is the launch of a kernel with a block for each tile of each head.
func (b *binding) flashTiles(a *boundAttention, name string, heads, block int64, shared int, args *driver.Args) {
	tiles := (a.Seq + cut.AttentionTile - 1) / cut.AttentionTile
	b.rows(flashSource(a), name+"_"+b.float(b.inBuf(0)), a.Batch*heads*tiles, block, shared, flashShape(a, args))
}

func flashSource(a *boundAttention) string { return fmt.Sprintf("flash_%d.cu", a.HeadDim) }

// flashShape adds the parameters that describe it.
func flashShape(a *boundAttention, args *driver.Args) *driver.Args {
	return args.Int32(int32(a.Batch)).Int32(int32(a.Seq)).Int32(int32(a.Heads)).Int32(int32(a.Heads / a.KVHeads)).
		Float32(float32(a.Scale)).Int32(flag(a.Causal))
}

// bindFlashGrad is the backward. Its workspace: delta, dq's sums, a ticket and a turn
// for each tile of queries.
func (b *binding) bindFlashGrad(a *boundAttention, h, d attentionHeads, y, lse, dy driver.Address) {
	deltas, sums, turns := cut.TensorAttentionWork(a.AttentionAttr)
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
