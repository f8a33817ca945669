package cpu

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// window returns the geometry over images x (B, H, W, C).
func (b *binding) window(x graph.BufID) vec.Window {
	a := attr[graph.ConvAttr](b)
	s := b.Program.Buf(x).Shape
	return vec.Window{
		B: int(s[0]), H: int(s[1]), W: int(s[2]), C: int(s[3]),
		KH: int(a.KH), KW: int(a.KW), Stride: int(a.Stride), Pad: int(a.Pad),
	}
}

func bindIm2Col(b *binding) func() error {
	if b.asIn(0) != vec.NoHalf {
		return b.run(&vec.Im2Col[uint16]{Window: b.window(b.Op.In[0]), X: in[uint16](b, 0), Cols: out[uint16](b, 0)})
	}
	return b.run(&vec.Im2Col[float32]{Window: b.window(b.Op.In[0]), X: in[float32](b, 0), Cols: out[float32](b, 0)})
}

func bindCol2Im(b *binding) func() error {
	d, dx := b.inMatrix(0), b.outMatrix(0)
	return b.run(&vec.Col2Im[float32]{
		Window: b.window(b.Op.Out[0].Buf), DCols: d.f32, DX: dx.f32, As: b.asIn(0), DCols16: d.u16, DX16: dx.u16, Accumulate: b.accum(0),
	})
}

func bindMaxPool(b *binding) func() error {
	x, y := b.inMatrix(0), b.outMatrix(0)
	return b.run(&vec.MaxPool[float32]{Window: b.window(b.Op.In[0]), X: x.f32, Y: y.f32, As: b.asIn(0), X16: x.u16, Y16: y.u16})
}

func bindMaxPoolGrad(b *binding) func() error {
	dy, x, dx := b.inMatrix(0), b.inMatrix(1), b.outMatrix(0)
	return b.run(&vec.MaxPoolGrad[float32]{
		Window: b.window(b.Op.In[1]), DY: dy.f32, X: x.f32, DX: dx.f32, As: b.asIn(0), DY16: dy.u16, X16: x.u16, DX16: dx.u16,
		Accumulate: b.accum(0),
	})
}
