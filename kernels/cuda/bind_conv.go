package cuda

import (
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

func init() {
	register(map[graph.Kind]binder{
		graph.Im2Col: func(b *binding) {
			b.conv("im2col", b.inBuf(0), b.outBuf(0), b.args().Pointer(b.in(0)).Pointer(b.out(0)), false)
		},
		graph.Col2Im: func(b *binding) {
			b.conv("col2im", b.outBuf(0), b.outBuf(0), b.args().Pointer(b.in(0)).Pointer(b.out(0)), true)
		},
		graph.MaxPool: func(b *binding) {
			b.conv("maxpool", b.inBuf(0), b.outBuf(0), b.args().Pointer(b.in(0)).Pointer(b.out(0)), false)
		},
		graph.MaxPoolGrad: func(b *binding) {
			b.conv("maxpool_grad", b.inBuf(1), b.outBuf(0), b.args().Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.out(0)), true)
		},
	})
}

// conv launches a kernel over windows of images x (B,H,W,C), with a thread for
// each element of y.
func (b *binding) conv(name string, x, y *graph.Buffer, args *driver.Args, accumulates bool) {
	a, s := attr[graph.ConvAttr](b), x.Shape
	for _, v := range []int64{s[0], s[1], s[2], s[3], a.KH, a.KW, a.Stride, a.Pad, a.OutSize(s[1], a.KH), a.OutSize(s[2], a.KW)} {
		args.Int64(v) // struct Window of conv.cu
	}
	if accumulates {
		args.Int32(b.accum(0))
	}
	b.over("conv.cu", name+"_"+b.float(y), y.Elems(), 1, args)
}
