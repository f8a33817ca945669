package graph

// Convolution as a matrix product (Im2Col and Linear), and max-pooling. Images
// are channels last.

var convKinds = []*Info{
	{
		Kind: Im2Col,
		Doc: "Gathers the windows of x (B,H,W,C) as rows: cols (B·OH·OW, KH·KW·C), window elements in order (kh, kw, c), zero outside x; " +
			"OH = (H + 2·Pad − KH)/Stride + 1, OW alike. A linear with TransW and w (O, KH·KW·C) makes it a convolution.",
		Derivative: "dx = col2im(dcols): each element gets the sum over the windows that hold it",
		In:         []Operand{in("x", "(B,H,W,C)")},
		Out:        []Operand{out("cols", "(B·OH·OW,KH·KW·C)")},
		Attr:       ConvAttr{},
		check:      func(c *checker) { c.windows(c.in(0), c.out(0)) },
	},
	{
		Kind:  Col2Im,
		Doc:   "dx[b,h,w,c] = Σ of dcols over the windows that hold it; dcols (B·OH·OW, KH·KW·C), dx (B,H,W,C).",
		In:    []Operand{in("dcols", "(B·OH·OW,KH·KW·C)")},
		Out:   []Operand{acc("dx", "(B,H,W,C)")},
		Attr:  ConvAttr{},
		check: func(c *checker) { c.windows(c.out(0), c.in(0)) },
		flops: func(c *checker) int64 { return c.in(0).elems() },
	},
	{
		Kind:       MaxPool,
		Doc:        "y[b,i,j,c] = max over the window of x; x (B,H,W,C), y (B,OH,OW,C), sizes as im2col; outside x is −Inf.",
		Derivative: "dx: each dy goes to the first largest element of its window",
		In:         []Operand{in("x", "(B,H,W,C)")},
		Out:        []Operand{out("y", "(B,OH,OW,C)")},
		Attr:       ConvAttr{},
		Saves:      []string{"x"},
		check:      func(c *checker) { c.pooled(c.in(0), c.out(0)) },
		flops:      poolFlops,
	},
	{
		Kind: MaxPoolGrad,
		Doc:  "Gradient of maxpool; dy (B,OH,OW,C), x, dx (B,H,W,C).",
		In:   []Operand{in("dy", "(B,OH,OW,C)"), in("x", "(B,H,W,C)")},
		Out:  []Operand{acc("dx", "(B,H,W,C)")},
		Attr: ConvAttr{},
		check: func(c *checker) {
			c.pooled(c.in(1), c.in(0))
			c.same(c.out(0), c.in(1))
		},
		flops: func(c *checker) int64 {
			a := c.op.Attr.(ConvAttr)
			return c.in(0).elems() * a.KH * a.KW
		},
	},
}

func poolFlops(c *checker) int64 {
	a := c.op.Attr.(ConvAttr)
	return c.out(0).elems() * a.KH * a.KW
}

// maxWindow limits the sides of a window, so that products fit an int64.
const maxWindow = 1 << 15

// OutSize returns how many windows of size k fit along a dimension of n elements, with the
// attribute's stride and padding; 0 if none does.
func (a ConvAttr) OutSize(n, k int64) int64 {
	span := n + 2*a.Pad - k
	if span < 0 || a.Stride < 1 {
		return 0
	}
	return span/a.Stride + 1
}

func (c *checker) conv(x ref) (a ConvAttr, oh, ow int64) {
	a = c.op.Attr.(ConvAttr)
	c.within("KH", a.KH, maxWindow)
	c.within("KW", a.KW, maxWindow)
	c.positive("Stride", a.Stride)
	if c.err == nil && (a.Pad < 0 || a.Pad >= a.KH || a.Pad >= a.KW) {
		c.failf("Pad is %d, want at least 0 and less than the window (%d, %d)", a.Pad, a.KH, a.KW)
	}
	if !c.rank(x, 4) {
		return a, 1, 1
	}
	oh, ow = a.OutSize(x.buf.Shape[1], a.KH), a.OutSize(x.buf.Shape[2], a.KW)
	if oh < 1 || ow < 1 {
		c.failf("operand %s (%s, shape %v): a window of (%d, %d) with padding %d does not fit", x.name, x.buf.Name, x.buf.Shape, a.KH, a.KW, a.Pad)
	}
	return a, oh, ow
}

func (c *checker) windows(x, cols ref) {
	a, oh, ow := c.conv(x)
	if c.err == nil {
		s := x.buf.Shape
		c.matrix(cols, s[0]*oh*ow, a.KH*a.KW*s[3], "B·OH·OW rows of KH·KW·C")
	}
}

func (c *checker) pooled(x, y ref) {
	_, oh, ow := c.conv(x)
	if c.err == nil {
		s := x.buf.Shape
		c.shape(y, []int64{s[0], oh, ow, s[3]}, "B, OH, OW, C")
	}
}
