package cuda

import (
	"fmt"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

const embedding = "embed.cu"

func bindEmbed(b *binding) {
	n := b.inBuf(0).Elems()
	v, c := matrix(b.inBuf(1))
	y := b.outBuf(0)
	name := "embed_" + b.float(y)
	b.overRows(embedding, name, n, c, perThread(y), b.args().Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.out(0)).
		Int64(n).Int64(v).Int64(c).Pointer(b.report("tokens", fmt.Sprintf("0 to %d", v-1))))
}

// embedRows and embedCols are the rows and columns of the embedding table that one block
// of EmbedGrad processes. embedRows is ROWS of embed.cu.
const embedRows, embedCols = 16, 256

func bindEmbedGrad(b *binding) {
	n := b.inBuf(0).Elems()
	dy, table := b.inBuf(1), b.outBuf(0)
	v, c := matrix(table)
	tiles := (c + embedCols - 1) / embedCols
	if tiles > 65535 {
		b.failf("%d columns are more than the kernel takes, %d", c, 65535*embedCols)
		return
	}
	b.launch(embedding, "embed_grad_"+b.float(dy)+"_"+b.float(table),
		driver.Dim{X: uint32((v + embedRows - 1) / embedRows), Y: uint32(tiles), Z: 1}, driver.Dim{X: embedCols, Y: 1, Z: 1}, 0,
		b.args().Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.out(0)).Int64(n).Int64(v).Int64(c).Int32(b.accum(0)).
			Pointer(b.report("tokens", fmt.Sprintf("0 to %d", v-1))))
}

func bindAddPos(b *binding) {
	n, c := matrix(b.outBuf(0))
	b.overRows(embedding, "add_pos_"+b.float(b.outBuf(0)), n, c, perThread(b.outBuf(0)),
		b.args().Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.out(0)).Int64(n).Int64(c).Int64(attr[graph.PosAttr](b).Seq))
}

func bindAddPosGrad(b *binding) {
	dy, dpos := b.inBuf(0), b.outBuf(0)
	n, c := matrix(dy)
	p, _ := matrix(dpos)
	b.over(embedding, "add_pos_grad_"+b.float(dy)+"_"+b.float(dpos), p*c, perThread(dy),
		b.args().Pointer(b.in(0)).Pointer(b.out(0)).Int64(n).Int64(c).Int64(attr[graph.PosAttr](b).Seq).Int64(p).Int32(b.accum(0)))
}

func bindSelectRow(b *binding) {
	n, c := matrix(b.inBuf(0))
	b.over(embedding, "select_row_"+b.float(b.outBuf(0)), c, 1,
		b.args().Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.out(0)).Int64(n).Int64(c).
			Pointer(b.report("key", fmt.Sprintf("a row, 0 to %d", n-1))))
}

// bindRope computes the table of rotations in the workspace at every run, as the CPU does.
// The table is small compared with x, and nothing outside the arena may keep state.
func bindRope(b *binding) {
	a := attr[graph.RopeAttr](b)
	n, _ := matrix(b.outBuf(0))
	table := b.work(4 * a.Seq * a.HeadDim)
	b.overRows(embedding, "rope_table", a.Seq, a.HeadDim/2, 1, b.args().Pointer(table).Int64(a.Seq).Int64(a.HeadDim).
		Float64(a.Theta).Float64(a.ScaleFactor).Float64(a.LowFreq).Float64(a.HighFreq).Float64(float64(a.OriginalPositions)))
	if a.Heads*a.HeadDim > 1<<31 {
		b.failf("rows have %d elements, the kernel takes %d at most", a.Heads*a.HeadDim, int64(1)<<31)
		return
	}
	b.overRows(embedding, "rope_"+b.float(b.outBuf(0)), n, a.Heads*a.HeadDim/2, perThread(b.outBuf(0)),
		b.args().Pointer(b.in(0)).Pointer(b.out(0)).Pointer(table).Int64(n).Int64(a.Heads).Int64(a.HeadDim).Int64(a.Seq).Int32(flag(a.Inverse)))
}
