package vec

import (
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// Window is the geometry of a convolution or pooling over an image batch
// (B, H, W, C), channels last: a KH×KW window moves by Stride over the image
// padded by Pad on every side.
type Window struct {
	B, H, W, C  int
	KH, KW      int
	Stride, Pad int
}

// OutH returns the number of window positions down the image.
func (w *Window) OutH() int { return (w.H+2*w.Pad-w.KH)/w.Stride + 1 }

// OutW returns the number of window positions across the image.
func (w *Window) OutW() int { return (w.W+2*w.Pad-w.KW)/w.Stride + 1 }

func (w *Window) check(c *check) {
	c.dim("B", w.B)
	c.positive("H", w.H)
	c.positive("W", w.W)
	c.positive("C", w.C)
	c.positive("KH", w.KH)
	c.positive("KW", w.KW)
	c.positive("Stride", w.Stride)
	c.dim("Pad", w.Pad)
	const huge = 1 << 30 // keeps the sums below from overflowing
	if c.err == nil && (w.H > huge || w.W > huge || w.Pad > huge || w.KH > w.H+2*w.Pad || w.KW > w.W+2*w.Pad) {
		c.fail("window (KH, KW) = (%d, %d) exceeds the padded image (%d, %d)", w.KH, w.KW, w.H+2*w.Pad, w.W+2*w.Pad)
	}
}

// Im2Col gathers the window of every output position into a row, so that a
// convolution is a matrix product with weights (KH·KW·C, out channels). What lies
// in the padding is 0.
type Im2Col[T Element] struct {
	Window
	X    []T // (B, H, W, C)
	Cols []T // (B·OutH·OutW, KH·KW·C)
}

// Run gathers.
func (k *Im2Col[T]) Run(p *pool.Pool) error {
	c := check{op: "im2col"}
	k.Window.check(&c)
	if c.err != nil {
		return c.err
	}
	c.size4("X", "(B, H, W, C)", len(k.X), k.B, k.H, k.W, k.C)
	c.size4("Cols", "(B, OutH, OutW, KH·KW·C)", len(k.Cols), k.B, k.OutH(), k.OutW(), k.KH*k.KW*k.C)
	return c.run(p, k.B*k.OutH(), k)
}

// RunIndex is a pool.Task's; call Run. It computes one row of output positions.
func (k *Im2Col[T]) RunIndex(i int) {
	oh, ow := k.OutH(), k.OutW()
	b, y := i/oh, i%oh
	dst := k.Cols[i*ow*k.KH*k.KW*k.C:]
	for x := range ow {
		for kh := range k.KH {
			h := y*k.Stride + kh - k.Pad
			for kw := range k.KW {
				w := x*k.Stride + kw - k.Pad
				if h < 0 || h >= k.H || w < 0 || w >= k.W {
					clear(dst[:k.C])
				} else {
					copy(dst[:k.C], k.X[((b*k.H+h)*k.W+w)*k.C:])
				}
				dst = dst[k.C:]
			}
		}
	}
}

// Col2Im is the gradient of Im2Col: DX of a pixel is the sum of the DCols that it
// was copied to, over window rows and in them columns in increasing order, from 0
// or, with Accumulate, from the old value.
type Col2Im[T num.Float] struct {
	Window
	DCols         []T // (B·OutH·OutW, KH·KW·C)
	DX            []T // (B, H, W, C)
	As            Half
	DCols16, DX16 []uint16 // in place of DCols and DX
	Accumulate    bool
}

// Run scatters.
func (k *Col2Im[T]) Run(p *pool.Pool) error {
	c := check{op: "col2im"}
	k.Window.check(&c)
	if c.err != nil {
		return c.err
	}
	c.size4("DX", "(B, H, W, C)", len(k.DX)+len(k.DX16), k.B, k.H, k.W, k.C)
	c.size4("DCols", "(B, OutH, OutW, KH·KW·C)", len(k.DCols)+len(k.DCols16), k.B, k.OutH(), k.OutW(), k.KH*k.KW*k.C)
	return c.run(p, k.B*k.H, k)
}

// RunIndex is a pool.Task's; call Run. It computes one row of pixels.
func (k *Col2Im[T]) RunIndex(i int) {
	if k.As != NoHalf {
		k.half(i)
		return
	}
	oh, ow := k.OutH(), k.OutW()
	b, h := i/k.H, i%k.H
	for w := range k.W {
		d := k.DX[(i*k.W+w)*k.C:][:k.C]
		if !k.Accumulate {
			clear(d)
		}
		for kh := range k.KH {
			y, ok := origin(h+k.Pad-kh, k.Stride, oh)
			if !ok {
				continue
			}
			for kw := range k.KW {
				if x, ok := origin(w+k.Pad-kw, k.Stride, ow); ok {
					s := ((((b*oh+y)*ow+x)*k.KH+kh)*k.KW + kw) * k.C
					binary(Add, d, d, k.DCols[s:s+k.C], false)
				}
			}
		}
	}
}

// half is RunIndex of 16-bit elements.
func (k *Col2Im[T]) half(i int) {
	oh, ow := k.OutH(), k.OutW()
	b, h := i/k.H, i%k.H
	s := borrow(2 * k.C)
	defer s.giveBack()
	d, add := s.buf[:k.C], s.buf[k.C:2*k.C]
	for w := range k.W {
		to := k.DX16[(i*k.W+w)*k.C:][:k.C]
		clear(d)
		if k.Accumulate {
			widen(k.As, d, to)
		}
		for kh := range k.KH {
			y, ok := origin(h+k.Pad-kh, k.Stride, oh)
			if !ok {
				continue
			}
			for kw := range k.KW {
				if x, ok := origin(w+k.Pad-kw, k.Stride, ow); ok {
					from := ((((b*oh+y)*ow+x)*k.KH+kh)*k.KW + kw) * k.C
					widen(k.As, add, k.DCols16[from:from+k.C])
					binary(Add, d, d, add, false)
				}
			}
		}
		narrow(k.As, to, d)
	}
}

// origin returns the window position that starts at padded coordinate v.
func origin(v, stride, n int) (int, bool) {
	if v < 0 || v%stride != 0 || v/stride >= n {
		return 0, false
	}
	return v / stride, true
}

// MaxPool is the maximum over each window and channel; padding does not take
// part. A NaN in a window makes its maximum NaN.
type MaxPool[T num.Float] struct {
	Window
	X        []T // (B, H, W, C)
	Y        []T // (B, OutH, OutW, C)
	As       Half
	X16, Y16 []uint16 // in place of X and Y
}

// checkPool refuses windows that can lie in the padding alone.
func (w *Window) checkPool(c *check) {
	w.check(c)
	if c.err == nil && (w.Pad >= w.KH || w.Pad >= w.KW) {
		c.fail("Pad is %d, want below KH = %d and KW = %d", w.Pad, w.KH, w.KW)
	}
}

// Run computes the maxima.
func (k *MaxPool[T]) Run(p *pool.Pool) error {
	c := check{op: "maxpool"}
	k.checkPool(&c)
	if c.err != nil {
		return c.err
	}
	c.size4("X", "(B, H, W, C)", len(k.X)+len(k.X16), k.B, k.H, k.W, k.C)
	c.size4("Y", "(B, OutH, OutW, C)", len(k.Y)+len(k.Y16), k.B, k.OutH(), k.OutW(), k.C)
	if k.As != NoHalf {
		return c.run(p, k.B, k)
	}
	return c.run(p, k.B*k.OutH(), k)
}

// RunIndex is a pool.Task's; call Run. It computes one row of output positions, of 16 bits one
// image.
func (k *MaxPool[T]) RunIndex(i int) {
	if k.As == NoHalf {
		k.row(i)
		return
	}
	in, out := k.H*k.W*k.C, k.OutH()*k.OutW()*k.C
	s := borrow(in + out)
	defer s.giveBack()
	one := MaxPool[float32]{Window: k.Window, X: s.buf[:in], Y: s.buf[in : in+out]}
	widen(k.As, one.X, k.X16[i*in:(i+1)*in])
	for y := range k.OutH() {
		one.row(y)
	}
	narrow(k.As, k.Y16[i*out:(i+1)*out], one.Y)
}

// row computes a row of output positions.
func (k *MaxPool[T]) row(i int) {
	oh, ow := k.OutH(), k.OutW()
	b, oy := i/oh, i%oh
	for ox := range ow {
		y := k.Y[(i*ow+ox)*k.C:][:k.C]
		first := true
		for h := max(0, oy*k.Stride-k.Pad); h < min(k.H, oy*k.Stride-k.Pad+k.KH); h++ {
			for w := max(0, ox*k.Stride-k.Pad); w < min(k.W, ox*k.Stride-k.Pad+k.KW); w++ {
				x := k.X[((b*k.H+h)*k.W+w)*k.C:][:k.C]
				if first {
					copy(y, x)
					first = false
					continue
				}
				for c, v := range x {
					if v > y[c] || v != v {
						y[c] = v
					}
				}
			}
		}
	}
}

// argmax returns the index in x of the first maximum of a window: its first NaN
// if it has one. The first pixel of the window that is in the image wins a tie.
func argmax[T num.Float](w *Window, x []T, b, oy, ox, c int) int {
	best := -1
	for kh := range w.KH {
		h := oy*w.Stride + kh - w.Pad
		if h < 0 || h >= w.H {
			continue
		}
		for kw := range w.KW {
			v := ox*w.Stride + kw - w.Pad
			if v < 0 || v >= w.W {
				continue
			}
			at := ((b*w.H+h)*w.W+v)*w.C + c
			if best < 0 || x[at] > x[best] || num.IsNaN(x[at]) && !num.IsNaN(x[best]) {
				best = at
			}
		}
	}
	return best
}

// MaxPoolGrad adds each DY to the DX of its window's first maximum, found again
// from X, in increasing order of output positions; DX starts at 0 or, with
// Accumulate, at the old value.
type MaxPoolGrad[T num.Float] struct {
	Window
	DY              []T // (B, OutH, OutW, C)
	X, DX           []T // (B, H, W, C)
	As              Half
	DY16, X16, DX16 []uint16 // in place of DY, X and DX
	Accumulate      bool
}

// Run scatters.
func (k *MaxPoolGrad[T]) Run(p *pool.Pool) error {
	c := check{op: "maxpool gradient"}
	k.checkPool(&c)
	if c.err != nil {
		return c.err
	}
	c.size4("X", "(B, H, W, C)", len(k.X)+len(k.X16), k.B, k.H, k.W, k.C)
	c.size4("DX", "(B, H, W, C)", len(k.DX)+len(k.DX16), k.B, k.H, k.W, k.C)
	c.size4("DY", "(B, OutH, OutW, C)", len(k.DY)+len(k.DY16), k.B, k.OutH(), k.OutW(), k.C)
	return c.run(p, k.B, k)
}

// RunIndex is a pool.Task's; call Run. It computes one image.
func (k *MaxPoolGrad[T]) RunIndex(b int) {
	if k.As == NoHalf {
		k.image(b)
		return
	}
	in, out := k.H*k.W*k.C, k.OutH()*k.OutW()*k.C
	s := borrow(2*in + out)
	defer s.giveBack()
	one := MaxPoolGrad[float32]{
		Window: k.Window, X: s.buf[:in], DX: s.buf[in : 2*in], DY: s.buf[2*in : 2*in+out], Accumulate: k.Accumulate,
	}
	widen(k.As, one.X, k.X16[b*in:(b+1)*in])
	widen(k.As, one.DY, k.DY16[b*out:(b+1)*out])
	if k.Accumulate {
		widen(k.As, one.DX, k.DX16[b*in:(b+1)*in])
	}
	one.image(0)
	narrow(k.As, k.DX16[b*in:(b+1)*in], one.DX)
}

func (k *MaxPoolGrad[T]) image(b int) {
	n, oh, ow := k.H*k.W*k.C, k.OutH(), k.OutW()
	if !k.Accumulate {
		clear(k.DX[b*n : (b+1)*n])
	}
	dy := k.DY[b*oh*ow*k.C:]
	for y := range oh {
		for x := range ow {
			for c := range k.C {
				k.DX[argmax(&k.Window, k.X, b, y, x, c)] += dy[(y*ow+x)*k.C+c]
			}
		}
	}
}
