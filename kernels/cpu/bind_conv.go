package cpu

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// window is the geometry over images x (B, H, W, C).
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
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(&vec.HalfCol2Im{
			Window: b.window(b.Op.Out[0].Buf), As: as, DCols: in[uint16](b, 0), DX: out[uint16](b, 0), Accumulate: b.accum(0),
		})
	}
	return b.run(&vec.Col2Im[float32]{
		Window: b.window(b.Op.Out[0].Buf), DCols: in[float32](b, 0), DX: out[float32](b, 0), Accumulate: b.accum(0),
	})
}

func bindMaxPool(b *binding) func() error {
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(&vec.HalfMaxPool{Window: b.window(b.Op.In[0]), As: as, X: in[uint16](b, 0), Y: out[uint16](b, 0)})
	}
	return b.run(&vec.MaxPool[float32]{Window: b.window(b.Op.In[0]), X: in[float32](b, 0), Y: out[float32](b, 0)})
}

func bindMaxPoolGrad(b *binding) func() error {
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(&vec.HalfMaxPoolGrad{
			Window: b.window(b.Op.In[1]), As: as, DY: in[uint16](b, 0), X: in[uint16](b, 1), DX: out[uint16](b, 0), Accumulate: b.accum(0),
		})
	}
	return b.run(&vec.MaxPoolGrad[float32]{
		Window: b.window(b.Op.In[1]), DY: in[float32](b, 0), X: in[float32](b, 1), DX: out[float32](b, 0), Accumulate: b.accum(0),
	})
}
