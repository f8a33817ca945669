package cuda

import (
	"math"

	"github.com/spillway-ml/spillway/graph"
)

// conv adds the launch of a kernel over windows of images x (B,H,W,C). Each thread
// computes 16 bytes of neighbouring elements of y. Images are the grid's rows; indices
// within one image have 32 bits.
func (b *binding) conv(name string, x *graph.Buffer, accumulates bool) {
	args, y := b.operands(), b.outBuf(0)
	a, s := attr[graph.ConvAttr](b), x.Shape
	oh, ow := a.OutSize(s[1], a.KH), a.OutSize(s[2], a.KW)
	for _, v := range []int64{s[0], s[1], s[2], s[3], a.KH, a.KW, a.Stride, a.Pad, oh, ow} {
		args.Int64(v) // struct Window of conv.cu
	}
	if n := max(s[1]*s[2]*s[3], oh*ow*a.KH*a.KW*s[3], s[1]+a.Pad, s[2]+a.Pad, a.KH, a.KW, a.Stride); n > math.MaxInt32/2 {
		b.failf("an image of %d×%d×%d and its windows count up to %d; the kernel takes %d", s[1], s[2], s[3], n, math.MaxInt32/2)
		return
	}
	if accumulates {
		args.Int32(b.accum(0))
	}
	b.overRows("conv.cu", name+"_"+b.float(y), s[0], y.Elems()/max(s[0], 1), perThread(y), args)
}
