package vec

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// These tests compare kernels with the textbook's formula in float64.

func randoms[T num.Float](r *rand.Rand, n int) []T {
	x := make([]T, n)
	for i := range x {
		x[i] = T(r.NormFloat64())
	}
	return x
}

func near[T num.Float](t *testing.T, want []float64, got []T, tol float64) {
	t.Helper()
	require.Len(t, got, len(want))
	for i := range want {
		require.InDelta(t, want[i], float64(got[i]), tol*math.Max(1, math.Abs(want[i])), "element %d", i)
	}
}

func wide[T num.Float](x []T) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

func TestNorms(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 20 {
		n, c := 1+r.IntN(9), 1+r.IntN(300)
		x, gamma, beta := randoms[float32](r, n*c), randoms[float32](r, c), randoms[float32](r, c)
		ln := LayerNorm[float32]{N: n, C: c, X: x, Gamma: gamma, Beta: beta, Eps: 1e-5,
			Y: make([]float32, n*c), Mean: make([]float32, n), Rstd: make([]float32, n)}
		require.NoError(t, ln.Run(nil))
		rms := RMSNorm[float32]{N: n, C: c, X: x, Gamma: gamma, Eps: 1e-5, Y: make([]float32, n*c), Rstd: make([]float32, n)}
		require.NoError(t, rms.Run(nil))
		wantLN, wantRMS := make([]float64, n*c), make([]float64, n*c)
		for i := range n {
			var s, v, q float64
			for _, e := range x[i*c : (i+1)*c] {
				s += float64(e)
				q += float64(e) * float64(e)
			}
			mean := s / float64(c)
			for _, e := range x[i*c : (i+1)*c] {
				v += (float64(e) - mean) * (float64(e) - mean)
			}
			for j := range c {
				e := float64(x[i*c+j])
				wantLN[i*c+j] = (e-mean)/math.Sqrt(v/float64(c)+1e-5)*float64(gamma[j]) + float64(beta[j])
				wantRMS[i*c+j] = e / math.Sqrt(q/float64(c)+1e-5) * float64(gamma[j])
			}
		}
		near(t, wantLN, ln.Y, 2e-5*math.Max(1, 30/float64(c)))
		near(t, wantRMS, rms.Y, 1e-5)
	}
}

func TestSoftmaxAndCrossEntropy(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 1))
	for range 20 {
		n, v := 1+r.IntN(9), 1+r.IntN(500)
		x := randoms[float32](r, n*v)
		for i := range x {
			x[i] *= 5
		}
		targets := make([]int32, n)
		for i := range targets {
			targets[i] = int32(r.IntN(v+1) - 1)
		}
		sm := Softmax[float32]{N: n, C: v, X: x, Y: make([]float32, n*v)}
		require.NoError(t, sm.Run(nil))
		ce := CrossEntropy[float32]{N: n, V: v, Logits: x, Targets: targets, LSE: make([]float32, n), Loss: []float64{1},
			DLogits: make([]float32, n*v), Scale: 0.25, RowLoss: make([]float64, n)}
		require.NoError(t, ce.Run(nil))
		p, d, loss := make([]float64, n*v), make([]float64, n*v), 1.0
		for i := range n {
			s := 0.0
			for _, e := range x[i*v : (i+1)*v] {
				s += math.Exp(float64(e))
			}
			require.InDelta(t, math.Log(s), float64(ce.LSE[i]), 1e-5)
			for j := range v {
				p[i*v+j] = math.Exp(float64(x[i*v+j])) / s
				if targets[i] >= 0 {
					d[i*v+j] = p[i*v+j] * 0.25
				}
			}
			if tg := targets[i]; tg >= 0 {
				d[i*v+int(tg)] -= 0.25
				loss += math.Log(s) - float64(x[i*v+int(tg)])
			}
		}
		near(t, p, sm.Y, 2e-6)
		near(t, d, ce.DLogits, 2e-6)
		require.InDelta(t, loss, ce.Loss[0], 1e-5*float64(n+1))
	}
}

// Cross-entropy over pieces of the rows, or with loss and gradient separate or in place, gives the
// bits of the complete batch.
func TestCrossEntropyInPieces(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 1))
	const n, v = 23, 97
	x := randoms[float32](r, n*v)
	targets := make([]int32, n)
	for i := range targets {
		targets[i] = int32(r.IntN(v+1) - 1)
	}
	lse, dx, loss := make([]float32, n), make([]float32, n*v), []float64{0.5}
	require.NoError(t, (&CrossEntropy[float32]{N: n, V: v, Logits: x, Targets: targets, LSE: lse, Loss: loss}).Run(nil))
	require.NoError(t, (&CrossEntropyGrad[float32]{N: n, V: v, Logits: x, Targets: targets, LSE: lse, DLogits: dx, Scale: 0.1}).Run(nil))
	y, sum := append([]float32(nil), x...), []float64{0.5}
	for lo := 0; lo < n; lo += 5 {
		hi := min(lo+5, n)
		rows := y[lo*v : hi*v]
		require.NoError(t, (&CrossEntropy[float32]{N: hi - lo, V: v, Logits: rows, Targets: targets[lo:hi], LSE: make([]float32, hi-lo),
			Loss: sum, DLogits: rows, Scale: 0.1, RowLoss: make([]float64, hi-lo)}).Run(nil))
	}
	require.Equal(t, loss, sum)
	require.Equal(t, dx, y)
}

// blockTree is the tree over block sums, as a recursion.
func blockTree(s []float64) float64 {
	switch len(s) {
	case 0:
		return 0
	case 1:
		return s[0]
	}
	p := split(len(s))
	return blockTree(s[:p]) + blockTree(s[p:])
}

func TestSumIsTheTreeOverBlocks(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 1))
	for _, n := range []int{0, 1, 255, 256, 257, 70000, 65536 * 3, 65536*6 + 300, 65536*5 + 1000} {
		x := randoms[float32](r, n)
		var blocks []float64
		for lo := 0; lo < n; lo += block {
			blocks = append(blocks, blockSum(x[lo:min(lo+block, n)]))
		}
		y := []float64{3}
		require.NoError(t, (&Sum[float32]{X: x, Y: y, Work: make([]float64, SumWork(n))}).Run(nil))
		require.Equal(t, blockTree(blocks), y[0], "n = %d", n)
	}
}

// The sum of squares does not depend on how a parameter is cut into shards at multiples of 256.
func TestSqSumIsIndependentOfShards(t *testing.T) {
	p := pool.New(2)
	defer p.Close()
	r := rand.New(rand.NewPCG(5, 1))
	const n = 256*700 + 77
	x := randoms[float32](r, n)
	whole := make([]int64, exact.Limbs)
	require.NoError(t, (&SqSum{X: x, Acc: whole}).Run(p))
	want := exact.Accumulator(whole).Float64()
	s := 0.0
	for _, v := range x {
		s += float64(v) * float64(v)
	}
	require.InEpsilon(t, s, want, 1e-12)
	for range 10 {
		parts := make([]int64, exact.Limbs)
		for lo := 0; lo < n; {
			hi := min(n, lo+256*(1+r.IntN(300)))
			part := make([]int64, exact.Limbs)
			require.NoError(t, (&SqSum{X: x[lo:hi], Acc: part}).Run(nil))
			exact.Accumulator(parts).Merge(part)
			lo = hi
		}
		require.Equal(t, want, exact.Accumulator(parts).Float64())
	}
}

func TestSumTreeOrder(t *testing.T) {
	// 2^24 + 1 is not a float32, so the result shows the order of the additions.
	big := float32(1 << 24)
	for _, c := range []struct{ in []float32 }{
		{[]float32{big, 1, 1}}, {[]float32{1, 1, big}}, {[]float32{1, big, 1, 1, 1}},
		{[]float32{big, 1, 1, 1, 1, 1, 1}}, {[]float32{1, 1, 1, 1, 1, 1, 1, 1, big}},
	} {
		k := SumTree{Dst: make([]float32, 1)}
		for _, v := range c.in {
			k.Srcs = append(k.Srcs, []float32{v})
		}
		require.NoError(t, k.Run(nil))
		want := treeAt(k.Srcs, 0)
		require.Equal(t, want, k.Dst[0])
		require.NoError(t, (&SumTreeAll{Bufs: k.Srcs}).Run(nil))
		for _, b := range k.Srcs {
			require.Equal(t, want, b[0])
		}
	}
	require.Equal(t, float32(1<<24)+2, treeAt([][]float32{{1}, {1}, {big}}, 0))
	require.Equal(t, float32(1<<24), treeAt([][]float32{{big}, {1}, {1}}, 0)) // (big + 1) + 1
}

func TestRope(t *testing.T) {
	const d, seq, heads, theta = 8, 16, 2, 10000.0
	table := make([]float64, seq*d)
	require.NoError(t, (&RopeTable[float64]{Seq: seq, D: d, Theta: theta, Table: table}).Run(nil))
	r := rand.New(rand.NewPCG(6, 1))
	const n = 2 * seq
	x := randoms[float64](r, n*heads*d)
	y := make([]float64, len(x))
	k := Rope[float64]{N: n, Heads: heads, D: d, Seq: seq, X: x, Y: y, Table: table}
	require.NoError(t, k.Run(nil))
	for i := range n {
		for h := range heads {
			for j := range d / 2 {
				a := float64(i%seq) * math.Pow(theta, -2*float64(j)/d)
				o := (i*heads + h) * d
				require.InDelta(t, x[o+j]*math.Cos(a)-x[o+j+d/2]*math.Sin(a), y[o+j], 1e-12)
				require.InDelta(t, x[o+j+d/2]*math.Cos(a)+x[o+j]*math.Sin(a), y[o+j+d/2], 1e-12)
			}
		}
	}
	back := Rope[float64]{N: n, Heads: heads, D: d, Seq: seq, X: y, Y: y, Table: table, Inverse: true}
	require.NoError(t, back.Run(nil))
	near(t, x, y, 1e-12)
}

// The three ranges of Llama 3.1's frequencies, computed as in Hugging Face.
func TestRopeScaling(t *testing.T) {
	const d, theta = 128, 500000.0
	plain, scaled := make([]float64, 2*d), make([]float64, 2*d)
	k := RopeTable[float64]{Seq: 2, D: d, Theta: theta, Table: plain}
	require.NoError(t, k.Run(nil))
	k = RopeTable[float64]{Seq: 2, D: d, Theta: theta, Table: scaled, Factor: 8, LowFreq: 1, HighFreq: 4, Original: 8192}
	require.NoError(t, k.Run(nil))
	regimes := map[string]int{}
	for i := range d / 2 {
		f := math.Pow(theta, -2*float64(i)/d)
		wave := 2 * math.Pi / f
		switch {
		case wave < 8192.0/4:
			regimes["kept"]++
		case wave > 8192.0/1:
			f /= 8
			regimes["divided"]++
		default:
			s := (8192/wave - 1) / (4 - 1)
			f = (1-s)*f/8 + s*f
			regimes["smooth"]++
		}
		require.InDelta(t, math.Sin(f), scaled[d+d/2+i], 1e-12, "frequency %d", i)
		require.InDelta(t, math.Cos(f), scaled[d+i], 1e-12)
	}
	require.Len(t, regimes, 3)
}

func TestDropout(t *testing.T) {
	const elems, p = 1000, 0.3
	x := make([]float32, 6*elems)
	for i := range x {
		x[i] = 1
	}
	y := make([]float32, len(x))
	k := Dropout[float32]{X: x, Y: y, Elems: elems, P: p, Seed: 9, Site: 3, Sample: 40}
	require.NoError(t, k.Run(nil))
	kept := 0
	for e, v := range y {
		i := e % elems
		w := num.Philox([4]uint32{uint32(i/64*16 + i%16), 3, uint32(40 + e/elems), 0}, [2]uint32{9, 0})[i/16%4]
		if float64(w) >= p*(1<<32) {
			require.Equal(t, float32(1/(1-p)), v)
			kept++
		} else {
			require.Zero(t, v)
		}
	}
	require.InDelta(t, 1-p, float64(kept)/float64(len(y)), 0.03)

	// The same samples on another rank: a single sample gives the same values.
	for s := range 6 {
		z := make([]float32, elems)
		require.NoError(t, (&Dropout[float32]{X: x[:elems], Y: z, Elems: elems, P: p, Seed: 9, Site: 3, Sample: 40 + uint64(s)}).Run(nil))
		require.Equal(t, y[s*elems:(s+1)*elems], z)
	}
	other := Dropout[float32]{X: x, Y: make([]float32, len(x)), Elems: elems, P: p, Seed: 9, Site: 4, Sample: 40}
	require.NoError(t, other.Run(nil))
	require.NotEqual(t, y, other.Y)
	all := Dropout[float32]{X: x, Y: make([]float32, len(x)), Elems: elems, Seed: 9}
	require.NoError(t, all.Run(nil))
	require.Equal(t, x, all.Y)
}

func TestConvolutionByIm2Col(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 1))
	for range 30 {
		w := Window{B: 1 + r.IntN(2), H: 3 + r.IntN(5), W: 3 + r.IntN(5), C: 1 + r.IntN(3), KH: 1 + r.IntN(3), KW: 1 + r.IntN(3), Stride: 1 + r.IntN(2), Pad: r.IntN(2)}
		oh, ow := w.OutH(), w.OutW()
		kk := w.KH * w.KW * w.C
		x, f := randoms[float64](r, w.B*w.H*w.W*w.C), randoms[float64](r, kk)
		cols := make([]float64, w.B*oh*ow*kk)
		require.NoError(t, (&Im2Col[float64]{Window: w, X: x, Cols: cols}).Run(nil))
		for b := range w.B {
			for y := range oh {
				for xo := range ow {
					want, got := 0.0, 0.0
					for kh := range w.KH {
						for kw := range w.KW {
							for c := range w.C {
								h, v := y*w.Stride+kh-w.Pad, xo*w.Stride+kw-w.Pad
								if h >= 0 && h < w.H && v >= 0 && v < w.W {
									want += x[((b*w.H+h)*w.W+v)*w.C+c] * f[(kh*w.KW+kw)*w.C+c]
								}
							}
						}
					}
					for i, v := range cols[((b*oh+y)*ow+xo)*kk:][:kk] {
						got += v * f[i]
					}
					require.InDelta(t, want, got, 1e-12)
				}
			}
		}
		// Col2Im is the transpose: <cols(x), d> = <x, col2im(d)>.
		d, dx := randoms[float64](r, len(cols)), make([]float64, len(x))
		require.NoError(t, (&Col2Im[float64]{Window: w, DCols: d, DX: dx}).Run(nil))
		require.InDelta(t, rowDot(cols, d), rowDot(x, dx), 1e-9)
	}
}

func TestMaxPool(t *testing.T) {
	x := []float64{ // (1, 3, 3, 1), ties
		1, 5, 5,
		2, 5, 0,
		7, 1, 9,
	}
	w := Window{B: 1, H: 3, W: 3, C: 1, KH: 2, KW: 2, Stride: 1}
	y, dx := make([]float64, 4), make([]float64, 9)
	require.NoError(t, (&MaxPool[float64]{Window: w, X: x, Y: y}).Run(nil))
	require.Equal(t, []float64{5, 5, 7, 9}, y)
	require.NoError(t, (&MaxPoolGrad[float64]{Window: w, X: x, DY: []float64{1, 10, 100, 1000}, DX: dx}).Run(nil))
	require.Equal(t, []float64{0, 11, 0, 0, 0, 0, 100, 0, 1000}, dx)
	x[4] = math.NaN()
	require.NoError(t, (&MaxPool[float64]{Window: w, X: x, Y: y}).Run(nil))
	for _, v := range y {
		require.True(t, math.IsNaN(v))
	}
}

func TestEmbeddings(t *testing.T) {
	table := []float32{1, 2, 3, 4, 5, 6}
	y := make([]float32, 8)
	tokens := []int32{2, 0, 2, 1}
	require.NoError(t, (&Embed[float32]{N: 4, V: 3, C: 2, Tokens: tokens, Table: table, Y: y}).Run(nil))
	require.Equal(t, []float32{5, 6, 1, 2, 5, 6, 3, 4}, y)
	d := []float32{9, 9, 9, 9, 9, 9}
	k := EmbedGrad[float32]{N: 4, V: 3, C: 2, Tokens: tokens, DY: []float32{1, 2, 3, 4, 5, 6, 7, 8}, DTable: d}
	require.NoError(t, k.Run(nil))
	require.Equal(t, []float32{3, 4, 7, 8, 6, 8}, d)
	k.Accumulate = true
	require.NoError(t, k.Run(nil))
	require.Equal(t, []float32{6, 8, 14, 16, 12, 16}, d)
}

// Operations on parts of the rows give the same values as on all rows, wherever a part begins:
// dropout at any element, positions at any row of a sequence.
func TestPartsOfRows(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	for range 200 {
		samples, seq, cols := 1+rng.IntN(3), 1+rng.IntN(9), 1+rng.IntN(90)
		n := samples * seq
		x, starts := make([]float32, n*cols), make([]float32, n)
		for i := range x {
			x[i] = float32(rng.NormFloat64())
		}
		for i, doc := 0, 0; i < n; i++ { // documents of a few rows
			if i%seq == 0 || rng.IntN(3) == 0 {
				doc = i % seq
			}
			starts[i] = float32(doc)
		}
		if rng.IntN(2) == 0 {
			starts = nil
		}
		part := func(lo, hi int) []float32 { return starts[min(lo, len(starts)):min(hi, len(starts))] }
		pos := slices.Clone(x[:seq*cols])
		drop, add := make([]float32, len(x)), make([]float32, len(x))
		grad, each := make([]float32, seq*cols), make([]float32, seq*cols)
		dropped := func(y []float32, lo, hi int) {
			k := Dropout[float32]{X: x[lo:hi], Y: y[lo:hi], Elems: seq * cols, First: lo, P: 0.3, Seed: 4, Site: 2, Sample: 7}
			require.NoError(t, k.Run(nil))
		}
		added := func(y []float32, lo, hi int) {
			k := AddPos[float32]{N: hi - lo, C: cols, Seq: seq, First: lo, Starts: part(lo, hi), X: x[lo*cols : hi*cols], Pos: pos, Y: y[lo*cols : hi*cols]}
			require.NoError(t, k.Run(nil))
		}
		summed := func(d []float32, lo, hi int) {
			k := AddPosGrad[float32]{N: hi - lo, C: cols, Seq: seq, First: lo, Starts: part(lo, hi), DY: x[lo*cols : hi*cols], DPos: d, Accumulate: true}
			require.NoError(t, k.Run(nil))
		}
		dropped(drop, 0, len(x))
		added(add, 0, n)
		summed(grad, 0, n)
		got := make([]float32, len(x))
		for lo := 0; lo < len(x); {
			hi := lo + 1 + rng.IntN(len(x)-lo)
			dropped(got, lo, hi)
			lo = hi
		}
		require.Equal(t, drop, got)
		clear(got)
		for lo := 0; lo < n; {
			hi := lo + 1 + rng.IntN(n-lo)
			added(got, lo, hi)
			summed(each, lo, hi)
			lo = hi
		}
		require.Equal(t, add, got)
		require.Equal(t, grad, each, "sums go on in the order of rows")
	}
}

func TestAddPositions(t *testing.T) {
	pos := []float32{10, 20, 30, 40, 99, 99}
	y := make([]float32, 8)
	require.NoError(t, (&AddPos[float32]{N: 4, C: 2, Seq: 2, X: []float32{1, 2, 3, 4, 5, 6, 7, 8}, Pos: pos, Y: y}).Run(nil))
	require.Equal(t, []float32{11, 22, 33, 44, 15, 26, 37, 48}, y)
	k := AddPosGrad[float32]{N: 4, C: 2, Seq: 2, DY: []float32{1, 2, 3, 4, 5, 6, 7, 8}, DPos: pos}
	require.NoError(t, k.Run(nil))
	require.Equal(t, []float32{6, 8, 10, 12, 0, 0}, pos)
	k.Accumulate = true
	require.NoError(t, k.Run(nil))
	require.Equal(t, []float32{12, 16, 20, 24, 0, 0}, pos)
}

func TestOptimizers(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 1))
	const n, lr, b1, b2, eps, wd, clip = 100, 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5
	p, g := randoms[float32](r, n), randoms[float32](r, n)
	p64 := wide(p)
	m, v := make([]float32, n), make([]float32, n)
	m64, v64 := make([]float64, n), make([]float64, n)
	low := make([]uint16, n)
	for step := 1; step <= 5; step++ {
		bc1, bc2 := 1-math.Pow(b1, float64(step)), 1-math.Pow(b2, float64(step))
		k := AdamW{Moments: Moments{P: p, G: g, M: m, V: v, AdamStep: AdamStep{GradScale: clip, LR: lr, Beta1: b1, Beta2: b2, Eps: eps, Decay: wd, BC1: bc1, BC2: bc2}}, Low: low, LowAs: F16}
		require.NoError(t, k.Run(nil))
		for i := range n {
			gi := float64(g[i]) * clip
			p64[i] *= 1 - lr*wd
			m64[i] = b1*m64[i] + (1-b1)*gi
			v64[i] = b2*v64[i] + (1-b2)*gi*gi
			p64[i] -= lr / bc1 * m64[i] / (math.Sqrt(v64[i])/math.Sqrt(bc2) + eps)
		}
	}
	near(t, p64, p, 1e-6)
	near(t, m64, m, 1e-6)
	near(t, v64, v, 1e-6)
	for i := range low {
		require.Equal(t, num.F16(p[i]), low[i])
	}

	u := append([]float32(nil), g...)
	p0, m0, v0 := wide(p), wide(m), wide(v)
	k := LAMBDirection{Moments: Moments{P: p, G: u, M: m, V: v, AdamStep: AdamStep{GradScale: clip, Beta1: b1, Beta2: b2, Eps: eps, Decay: wd, BC1: 0.3, BC2: 0.2}}}
	require.NoError(t, k.Run(nil))
	want := make([]float64, n)
	for i := range n {
		gi := float64(g[i]) * clip
		mi, vi := b1*m0[i]+(1-b1)*gi, b2*v0[i]+(1-b2)*gi*gi
		want[i] = mi/0.3/(math.Sqrt(vi)/math.Sqrt(0.2)+eps) + wd*p0[i]
	}
	near(t, want, u, 1e-5)
	apply := LAMBApply{P: p, U: u, LR: lr, Ratio: LAMBRatio(3, 2)}
	require.NoError(t, apply.Run(nil))
	for i := range n {
		want[i] = p0[i] - lr*1.5*want[i]
	}
	near(t, want, p, 1e-6)

	for _, c := range []struct {
		name string
		k    Momentum
	}{
		{"sgd", Momentum{GradScale: 0.5, Decay: 0.1, Rate: 1, Step: lr}},
		{"sgd momentum", Momentum{GradScale: 0.5, Decay: 0.1, Rate: 1, Momentum: 0.9, Step: lr}},
		{"sgd nesterov", Momentum{GradScale: 0.5, Decay: 0.1, Rate: 1, Momentum: 0.9, Step: lr, Nesterov: true}},
		{"lars", Momentum{GradScale: 0.5, Decay: 0.1, Rate: lr * LARSRatio(3, 2, 0.1, 1e-3, 1), Momentum: 0.9, Step: 1}},
	} {
		p, g := randoms[float32](r, n), randoms[float32](r, n)
		p64, b64 := wide(p), make([]float64, n)
		c.k.P, c.k.G = p, g
		if c.k.Momentum != 0 {
			c.k.B = make([]float32, n)
		}
		for range 4 {
			require.NoError(t, c.k.Run(nil))
			for i := range n {
				d := c.k.Rate * (c.k.GradScale*float64(g[i]) + c.k.Decay*p64[i])
				b64[i] = c.k.Momentum*b64[i] + d
				s := b64[i]
				if c.k.Nesterov {
					s = d + c.k.Momentum*b64[i]
				}
				p64[i] -= c.k.Step * s
			}
		}
		near(t, p64, p, 1e-6)
	}
	require.Equal(t, 1.0, LAMBRatio(0, 2))
	require.InDelta(t, 1e-3*3/(2+0.3), LARSRatio(3, 2, 0.1, 1e-3, 1), 1e-15)
	require.Equal(t, 0.25, LARSRatio(0, 2, 0.1, 1e-3, 0.25))
	require.Equal(t, 0.25, LARSRatio(2, 0, 0.1, 1e-3, 0.25))
	require.Equal(t, 1.0, LARCRatio(3, 2, 0.1, 1e-3, 1e-6))
	require.Equal(t, 1.0, LARCRatio(0, 2, 0.1, 1e-3, 1e-6))
	require.Equal(t, 4.0, NovoGradMoment(0, 4, 0.9, true))
	require.InDelta(t, 0.9*2+0.1*4, NovoGradMoment(2, 4, 0.9, false), 1e-15)
}
