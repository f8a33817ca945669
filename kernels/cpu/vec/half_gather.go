package vec

import (
	"slices"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// HalfEmbedGrad is EmbedGrad of 16-bit rows; DTable is 16-bit or float32. A row
// of the table is summed in float32 over all its tokens and rounded once. Tasks
// own columns, so that no two write the same element.
type HalfEmbedGrad struct {
	As           Half
	N, V, C      int
	Tokens       []int32  // (N), in [0, V), or with Total in [0, Total)
	DY           []uint16 // (N, C)
	DTable       HalfSum  // (V, C)
	First, Total int      // see EmbedGrad
	// Order is workspace (N): the rows by token, and of a token in their order.
	Order []int64

	zero Fill[float32]
	low  zero16
}

// Run computes the sums.
func (k *HalfEmbedGrad) Run(p *pool.Pool) error {
	c := check{op: "embed gradient"}
	c.half("As", k.As)
	c.dim("N", k.N)
	c.dim("V", k.V)
	c.dim("C", k.C)
	c.size2("DTable", "(V, C)", max(len(k.DTable.To), len(k.DTable.To32)), k.V, k.C)
	c.size2("DY", "(N, C)", len(k.DY), k.N, k.C)
	c.size1("Order", "N", len(k.Order), k.N)
	c.tokens(k.Tokens, k.N, max(k.V, k.Total))
	if c.err != nil {
		return c.err
	}
	if !k.DTable.Accumulate {
		k.zero.Y, k.low = k.DTable.To32, zero16{k.DTable.To}
		if err := k.zero.Run(p); err != nil {
			return err
		}
		run(p, tasks(len(k.low.y), grain), &k.low)
	}
	for n, t := range k.Tokens {
		k.Order[n] = int64(t)<<32 | int64(n)
	}
	slices.Sort(k.Order)
	run(p, tasks(k.C, embedGrain), k)
	return nil
}

// zero16 clears 16-bit elements in pieces.
type zero16 struct{ y []uint16 }

func (k *zero16) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.y))
	clear(k.y[lo:hi])
}

// RunIndex is a pool.Task's; call Run.
func (k *HalfEmbedGrad) RunIndex(i int) {
	lo, hi := piece(i, embedGrain, k.C)
	s := borrow(2 * embedGrain)
	defer s.giveBack()
	row := s.buf[embedGrain:][:hi-lo]
	for at := 0; at < len(k.Order); {
		token := int(k.Order[at] >> 32)
		if token < k.First || token >= k.First+k.V {
			at++
			continue
		}
		begin := (token-k.First)*k.C + lo
		sum := k.DTable.begin(k.As, s.buf[:hi-lo], begin)
		for ; at < len(k.Order) && int(k.Order[at]>>32) == token; at++ {
			n := int(k.Order[at] & (1<<32 - 1))
			widen(k.As, row, k.DY[n*k.C+lo:n*k.C+hi])
			binary(Add, sum, sum, row, false)
		}
		k.DTable.end(k.As, sum, begin)
	}
}

// HalfCol2Im is Col2Im of 16-bit elements.
type HalfCol2Im struct {
	Window
	As         Half
	DCols      []uint16 // (B·OutH·OutW, KH·KW·C)
	DX         []uint16 // (B, H, W, C)
	Accumulate bool
}

// Run scatters.
func (k *HalfCol2Im) Run(p *pool.Pool) error {
	c := check{op: "col2im"}
	c.half("As", k.As)
	k.Window.check(&c)
	if c.err != nil {
		return c.err
	}
	c.size4("DX", "(B, H, W, C)", len(k.DX), k.B, k.H, k.W, k.C)
	c.size4("DCols", "(B, OutH, OutW, KH·KW·C)", len(k.DCols), k.B, k.OutH(), k.OutW(), k.KH*k.KW*k.C)
	return c.run(p, k.B*k.H, k)
}

// RunIndex is a pool.Task's; call Run. It computes one row of pixels.
func (k *HalfCol2Im) RunIndex(i int) {
	oh, ow := k.OutH(), k.OutW()
	b, h := i/k.H, i%k.H
	s := borrow(2 * k.C)
	defer s.giveBack()
	d, add := s.buf[:k.C], s.buf[k.C:2*k.C]
	for w := range k.W {
		to := k.DX[(i*k.W+w)*k.C:][:k.C]
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
					widen(k.As, add, k.DCols[from:from+k.C])
					binary(Add, d, d, add, false)
				}
			}
		}
		narrow(k.As, to, d)
	}
}

// HalfMaxPool is MaxPool of 16-bit elements.
type HalfMaxPool struct {
	Window
	As Half
	X  []uint16 // (B, H, W, C)
	Y  []uint16 // (B, OutH, OutW, C)
}

// Run computes the maxima.
func (k *HalfMaxPool) Run(p *pool.Pool) error {
	c := check{op: "maxpool"}
	c.half("As", k.As)
	k.checkPool(&c)
	if c.err != nil {
		return c.err
	}
	c.size4("X", "(B, H, W, C)", len(k.X), k.B, k.H, k.W, k.C)
	c.size4("Y", "(B, OutH, OutW, C)", len(k.Y), k.B, k.OutH(), k.OutW(), k.C)
	return c.run(p, k.B, k)
}

// RunIndex is a pool.Task's; call Run. It computes one image.
func (k *HalfMaxPool) RunIndex(b int) {
	in, out := k.H*k.W*k.C, k.OutH()*k.OutW()*k.C
	s := borrow(in + out)
	defer s.giveBack()
	one := MaxPool[float32]{Window: k.Window, X: s.buf[:in], Y: s.buf[in : in+out]}
	one.B = 1
	widen(k.As, one.X, k.X[b*in:(b+1)*in])
	for i := range one.OutH() {
		one.RunIndex(i)
	}
	narrow(k.As, k.Y[b*out:(b+1)*out], one.Y)
}

// HalfMaxPoolGrad is MaxPoolGrad of 16-bit elements.
type HalfMaxPoolGrad struct {
	Window
	As         Half
	DY         []uint16 // (B, OutH, OutW, C)
	X, DX      []uint16 // (B, H, W, C)
	Accumulate bool
}

// Run scatters.
func (k *HalfMaxPoolGrad) Run(p *pool.Pool) error {
	c := check{op: "maxpool gradient"}
	c.half("As", k.As)
	k.checkPool(&c)
	if c.err != nil {
		return c.err
	}
	c.size4("X", "(B, H, W, C)", len(k.X), k.B, k.H, k.W, k.C)
	c.size4("DX", "(B, H, W, C)", len(k.DX), k.B, k.H, k.W, k.C)
	c.size4("DY", "(B, OutH, OutW, C)", len(k.DY), k.B, k.OutH(), k.OutW(), k.C)
	return c.run(p, k.B, k)
}

// RunIndex is a pool.Task's; call Run. It computes one image.
func (k *HalfMaxPoolGrad) RunIndex(b int) {
	in, out := k.H*k.W*k.C, k.OutH()*k.OutW()*k.C
	s := borrow(2*in + out)
	defer s.giveBack()
	one := MaxPoolGrad[float32]{
		Window: k.Window, X: s.buf[:in], DX: s.buf[in : 2*in], DY: s.buf[2*in : 2*in+out], Accumulate: k.Accumulate,
	}
	one.B = 1
	widen(k.As, one.X, k.X[b*in:(b+1)*in])
	widen(k.As, one.DY, k.DY[b*out:(b+1)*out])
	if k.Accumulate {
		widen(k.As, one.DX, k.DX[b*in:(b+1)*in])
	}
	one.RunIndex(0)
	narrow(k.As, k.DX[b*in:(b+1)*in], one.DX)
}
