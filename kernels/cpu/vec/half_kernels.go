package vec

import (
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// HalfActivation is Activation of 16-bit operands. y may be x.
func HalfActivation(as Half, act Act, x, y []uint16) *HalfRows {
	return elementwise16("activation", as, [3][]uint16{x}, y, false, func(t *tile) { activate(act, t.out[0], t.in[0]) })
}

// ActivateTile16 applies an activation to rows [r0, r1) and columns [c0, c1) of
// 16-bit matrices of n columns. y may be x.
func ActivateTile16(as Half, act Act, x, y []uint16, n, r0, r1, c0, c1 int) {
	s := borrow(c1 - c0)
	defer s.giveBack()
	v := s.buf[:c1-c0]
	for r := r0; r < r1; r++ {
		widen(as, v, x[r*n+c0:r*n+c1])
		activate(act, v, v)
		narrow(as, y[r*n+c0:r*n+c1], v)
	}
}

// ActivateSums16 rounds rows [r0, r1) and columns [c0, c1) of a matrix of n columns, and
// the activation of what it was before, to 16 bits. It leaves the activation in sums.
func ActivateSums16(as Half, act Act, sums []float32, pre, y []uint16, n, r0, r1, c0, c1 int) {
	for r := r0; r < r1; r++ {
		v := sums[r*n+c0 : r*n+c1]
		narrow(as, pre[r*n+c0:r*n+c1], v)
		activate(act, v, v)
		narrow(as, y[r*n+c0:r*n+c1], v)
	}
}

// HalfActivationGrad is ActivationGrad of 16-bit operands.
func HalfActivationGrad(as Half, act Act, dy, x, dx []uint16, accumulate bool) *HalfRows {
	return elementwise16("activation gradient", as, [3][]uint16{dy, x}, dx, accumulate, func(t *tile) {
		activateGrad(act, t.out[0], t.in[0], t.in[1], accumulate)
	})
}

// HalfSwiGLU is SwiGLU of 16-bit operands.
func HalfSwiGLU(as Half, gate, up, y []uint16) *HalfRows {
	return elementwise16("swiglu", as, [3][]uint16{gate, up}, y, false, func(t *tile) { swiglu(t.out[0], t.in[0], t.in[1]) })
}

// HalfSwiGLUGrad is SwiGLUGrad of 16-bit operands.
func HalfSwiGLUGrad(as Half, dy, gate, up, dgate, dup []uint16) *HalfRows {
	k := elementwise16("swiglu gradient", as, [3][]uint16{dy, gate, up}, dgate, false, func(t *tile) {
		swigluGrad(t.out[0], t.out[1], t.in[0], t.in[1], t.in[2])
	})
	k.out[1] = dup
	return k
}

// HalfBinary is Binary of 16-bit operands.
func HalfBinary(op Op, as Half, a, b, y []uint16, accumulate bool) *HalfRows {
	return elementwise16(opNames[op], as, [3][]uint16{a, b}, y, accumulate, func(t *tile) {
		binary(op, t.out[0], t.in[0], t.in[1], accumulate)
	})
}

// HalfScale is Scale of 16-bit operands.
func HalfScale(as Half, x, y []uint16, factor float32, accumulate bool) *HalfRows {
	return elementwise16("scale", as, [3][]uint16{x}, y, accumulate, func(t *tile) { scale(t.out[0], t.in[0], factor, accumulate) })
}

// HalfFill is y = *value, or y += *value, of 16-bit elements.
func HalfFill(as Half, y []uint16, value *float32, accumulate bool) *HalfRows {
	return elementwise16("fill", as, [3][]uint16{}, y, accumulate, func(t *tile) { fill(t.out[0], *value, accumulate) })
}

func elementwise16(name string, as Half, in [3][]uint16, y []uint16, acc bool, body func(*tile)) *HalfRows {
	return &HalfRows{name: name, as: as, n: len(y), c: 1, in: in, out: [2][]uint16{y}, acc: acc, body: body}
}

// HalfSoftmax is Softmax of rows of c 16-bit elements.
func HalfSoftmax(as Half, c int, x, y []uint16) *HalfRows {
	return rows16("softmax", as, c, [3][]uint16{x}, y, false, func(t *tile) {
		for o := 0; o < len(t.in[0]); o += c {
			softmaxRow(t.out[0][o:o+c], t.in[0][o:o+c])
		}
	})
}

// HalfSoftmaxGrad is SoftmaxGrad of rows of c 16-bit elements.
func HalfSoftmaxGrad(as Half, c int, dy, y, dx []uint16, accumulate bool) *HalfRows {
	return rows16("softmax gradient", as, c, [3][]uint16{dy, y}, dx, accumulate, func(t *tile) {
		for o := 0; o < len(t.in[0]); o += c {
			dy, y := t.in[0][o:o+c], t.in[1][o:o+c]
			softmaxGrad(t.out[0][o:o+c], dy, y, rowDot(dy, y), accumulate)
		}
	})
}

func rows16(name string, as Half, c int, in [3][]uint16, y []uint16, acc bool, body func(*tile)) *HalfRows {
	return &HalfRows{name: name, as: as, n: len(in[0]) / max(c, 1), c: c, in: in, out: [2][]uint16{y}, acc: acc, body: body}
}

// HalfLayerNorm is LayerNorm of 16-bit operands with float32 statistics.
func HalfLayerNorm(as Half, eps float32, x, gamma, beta, y []uint16, mean, rstd []float32) *HalfRows {
	c := len(gamma)
	k := rows16("layernorm", as, c, [3][]uint16{x}, y, false, func(t *tile) {
		for n := t.lo; n < t.hi; n++ {
			o := (n - t.lo) * c
			mean[n], rstd[n] = layerNormRow(t.out[0][o:o+c], t.in[0][o:o+c], t.vec[0], t.vec[1], eps)
		}
	})
	k.vec = [2][]uint16{gamma, beta}
	return k
}

// HalfRMSNorm is RMSNorm of 16-bit operands with a float32 statistic. With onePlus the
// gain is 1 + gamma.
func HalfRMSNorm(as Half, eps float32, onePlus bool, x, gamma, y []uint16, rstd []float32) *HalfRows {
	c := len(gamma)
	k := rows16("rmsnorm", as, c, [3][]uint16{x}, y, false, func(t *tile) {
		for n := t.lo; n < t.hi; n++ {
			o := (n - t.lo) * c
			rstd[n] = rmsNormRow(t.out[0][o:o+c], t.in[0][o:o+c], t.vec[0], eps)
		}
	})
	k.vec[0], k.plusOne = gamma, onePlus
	return k
}

// HalfSum is where a sum over rows goes: 16-bit or float32 elements.
type HalfSum struct {
	To         []uint16
	To32       []float32 // instead of To
	Accumulate bool
}

func (s *HalfSum) wanted() bool { return s.To != nil || s.To32 != nil }

// HalfNormGrad are the operands of LayerNormGrad and RMSNormGrad in 16 bits.
type HalfNormGrad struct {
	As            Half
	DY, X         []uint16 // (N, C)
	Gamma         []uint16 // (C)
	Mean, Rstd    []float32
	DX            []uint16 // (N, C) or nil; may be DY
	AccumulateDX  bool
	DGamma, DBeta HalfSum // not wanted if empty
	PlusOne       bool    // the gain is 1 + Gamma
}

// HalfLayerNormGrad is LayerNormGrad of 16-bit operands.
func HalfLayerNormGrad(g HalfNormGrad) Steps {
	c := len(g.Gamma)
	var s Steps
	if g.DBeta.wanted() { // columns first: DX may overwrite DY
		s = append(s, HalfColumnSum(g.As, c, g.DY, g.DBeta))
	}
	if g.DGamma.wanted() {
		s = append(s, columns16("layernorm gradient", g.As, c, [2][]uint16{g.DY, g.X}, g.DGamma, func(sum []float32, t *tile) {
			normCols(sum, t.in[0], t.in[1], g.Mean[t.lo:t.hi], g.Rstd[t.lo:t.hi], t.hi-t.lo, len(sum), 0, true)
		}))
	}
	if g.DX == nil {
		return s
	}
	k := rows16("layernorm gradient", g.As, c, [3][]uint16{g.DY, g.X}, g.DX, g.AccumulateDX, func(t *tile) {
		for n := t.lo; n < t.hi; n++ {
			o := (n - t.lo) * c
			dy, x, mean, rstd := t.in[0][o:o+c], t.in[1][o:o+c], g.Mean[n], g.Rstd[n]
			s1, s2 := normGradSums(dy, x, t.vec[0], mean, rstd)
			normGradApply(t.out[0][o:o+c], dy, x, t.vec[0], mean, rstd, s1/float32(c), s2/float32(c), g.AccumulateDX)
		}
	})
	k.vec[0] = g.Gamma
	return append(s, k)
}

// HalfRMSNormGrad is RMSNormGrad of 16-bit operands.
func HalfRMSNormGrad(g HalfNormGrad) Steps {
	c := len(g.Gamma)
	var s Steps
	if g.DGamma.wanted() {
		s = append(s, columns16("rmsnorm gradient", g.As, c, [2][]uint16{g.DY, g.X}, g.DGamma, func(sum []float32, t *tile) {
			rmsCols(sum, t.in[0], t.in[1], g.Rstd[t.lo:t.hi], t.hi-t.lo, len(sum), 0, true)
		}))
	}
	if g.DX == nil {
		return s
	}
	k := rows16("rmsnorm gradient", g.As, c, [3][]uint16{g.DY, g.X}, g.DX, g.AccumulateDX, func(t *tile) {
		for n := t.lo; n < t.hi; n++ {
			o := (n - t.lo) * c
			dy, x := t.in[0][o:o+c], t.in[1][o:o+c]
			sum := rmsGradSum(dy, x, t.vec[0], g.Rstd[n])
			rmsGradApply(t.out[0][o:o+c], dy, x, t.vec[0], g.Rstd[n], sum/float32(c), g.AccumulateDX)
		}
	})
	k.vec[0], k.plusOne = g.Gamma, g.PlusOne
	return append(s, k)
}

// HalfColumnSum is ColumnSum of rows of c 16-bit elements.
func HalfColumnSum(as Half, c int, x []uint16, to HalfSum) *HalfColumns {
	return columns16("column sum", as, c, [2][]uint16{x}, to, func(sum []float32, t *tile) {
		colSum(sum, t.in[0], t.hi-t.lo, len(sum), 0, true)
	})
}

func columns16(name string, as Half, c int, in [2][]uint16, to HalfSum, body func([]float32, *tile)) *HalfColumns {
	return &HalfColumns{
		name: name, as: as, n: len(in[0]) / max(c, 1), c: c, in: in, out: to.To, out32: to.To32, acc: to.Accumulate, body: body,
	}
}

// HalfRope is Rope of rows of heads·d 16-bit elements; the table is float32.
func HalfRope(as Half, heads, d, seq int, inverse bool, x, y []uint16, table, starts []float32) *HalfRows {
	w, h := heads*d, d/2
	return rows16("rope", as, w, [3][]uint16{x}, y, false, func(t *tile) {
		for n := t.lo; n < t.hi; n++ {
			at := position(n, 0, seq, starts) * d
			cos, sin := table[at:at+h], table[at+h:at+d]
			for o := (n - t.lo) * w; o < (n-t.lo+1)*w; o += d {
				in, out := t.in[0], t.out[0]
				rotate(out[o:o+h], out[o+h:o+d], in[o:o+h], in[o+h:o+d], cos, sin, inverse)
			}
		}
	})
}

// HalfAddPos is AddPos of rows of c 16-bit elements.
func HalfAddPos(as Half, c, first, seq int, x, pos, y []uint16, starts []float32) *HalfRows {
	return rows16("add positions", as, c, [3][]uint16{x}, y, false, func(t *tile) {
		p := borrow(c)
		defer p.giveBack()
		for n := t.lo; n < t.hi; n++ {
			o, at := (n-t.lo)*c, position(n, first, seq, starts)*c
			widen(as, p.buf[:c], pos[at:at+c])
			binary(Add, t.out[0][o:o+c], t.in[0][o:o+c], p.buf[:c], false)
		}
	})
}

// HalfAddPosGrad is AddPosGrad of 16-bit rows; DPos is 16-bit or float32.
type HalfAddPosGrad struct {
	As     Half
	C, Seq int
	First  int       // as AddPos's
	Starts []float32 // as AddPos's
	DY     []uint16  // (N, C)
	DPos   HalfSum   // (P, C), P >= Seq
}

// Run computes the sums.
func (k *HalfAddPosGrad) Run(p *pool.Pool) error {
	c := check{op: "add positions gradient"}
	c.half("As", k.As)
	c.positive("C", k.C)
	c.positive("Seq", k.Seq)
	if c.err == nil && len(k.DY)%k.C != 0 {
		c.fail("DY has %d elements, want rows of C = %d", len(k.DY), k.C)
	}
	n := max(len(k.DPos.To), len(k.DPos.To32))
	c.atLeastRows("DPos", n, k.Seq, k.C)
	if c.err == nil {
		c.starts(len(k.Starts), len(k.DY)/k.C)
	}
	if c.err == nil {
		run(p, tasks(n/k.C, rowGrain(k.C)), k)
	}
	return c.err
}

// RunIndex is a pool.Task's; call Run.
func (k *HalfAddPosGrad) RunIndex(i int) {
	s := borrow(2 * k.C)
	defer s.giveBack()
	row := s.buf[k.C : 2*k.C]
	lo, hi := piece(i, rowGrain(k.C), max(len(k.DPos.To), len(k.DPos.To32))/k.C)
	for t := lo; t < hi; t++ {
		if t >= k.Seq && k.DPos.Accumulate {
			return
		}
		sum := k.DPos.begin(k.As, s.buf[:k.C], t*k.C)
		rows := len(k.DY) / k.C
		for n := nextAt(0, t, k.First, k.Seq, rows, k.Starts); t < k.Seq && n < rows; n = nextAt(n+1, t, k.First, k.Seq, rows, k.Starts) {
			widen(k.As, row, k.DY[n*k.C:(n+1)*k.C])
			binary(Add, sum, sum, row, false)
		}
		k.DPos.end(k.As, sum, t*k.C)
	}
}

// begin returns the float32 sum that starts at element at: scratch, or where it
// will stay, holding 0 or the old value.
func (s *HalfSum) begin(as Half, scratch []float32, at int) []float32 {
	sum := scratch
	if s.To == nil {
		sum = s.To32[at : at+len(scratch)]
	}
	switch {
	case !s.Accumulate:
		clear(sum)
	case s.To != nil:
		widen(as, sum, s.To[at:at+len(sum)])
	}
	return sum
}

// end stores a sum that begin returned.
func (s *HalfSum) end(as Half, sum []float32, at int) {
	if s.To != nil {
		narrow(as, s.To[at:at+len(sum)], sum)
	}
}
