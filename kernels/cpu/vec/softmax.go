package vec

import (
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// Softmax is Y = exp(X - max X) · (1 / Σ exp(X - max X)) over each row. Y may be
// X. A row with a NaN, with +Inf, or of -Inf alone becomes NaN.
type Softmax[T num.Float] struct {
	N, C int
	X, Y []T // (N, C)
}

// Run computes the softmax.
func (k *Softmax[T]) Run(p *pool.Pool) error {
	c := check{op: "softmax"}
	c.dim("N", k.N)
	c.dim("C", k.C)
	c.size2("X", "(N, C)", len(k.X), k.N, k.C)
	c.size2("Y", "(N, C)", len(k.Y), k.N, k.C)
	return c.run(p, tasks(k.N, rowGrain(k.C)), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *Softmax[T]) RunIndex(i int) {
	lo, hi := piece(i, rowGrain(k.C), k.N)
	for n := lo; n < hi; n++ {
		x, y := k.X[n*k.C:(n+1)*k.C], k.Y[n*k.C:(n+1)*k.C]
		softmaxRow(y, x)
	}
}

func softmaxRow[T num.Float](y, x []T) {
	s := rowExpSum(y, x, rowMax(x))
	scale(y, y, 1/s, false)
}

// SoftmaxGrad is DX = Y·(DY - ΣDY·Y) over each row, or DX += that. DX may be DY or Y.
type SoftmaxGrad[T num.Float] struct {
	N, C       int
	DY, Y, DX  []T // (N, C)
	Accumulate bool
}

// Run computes the gradient.
func (k *SoftmaxGrad[T]) Run(p *pool.Pool) error {
	c := check{op: "softmax gradient"}
	c.dim("N", k.N)
	c.dim("C", k.C)
	c.size2("DY", "(N, C)", len(k.DY), k.N, k.C)
	c.size2("Y", "(N, C)", len(k.Y), k.N, k.C)
	c.size2("DX", "(N, C)", len(k.DX), k.N, k.C)
	return c.run(p, tasks(k.N, rowGrain(k.C)), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *SoftmaxGrad[T]) RunIndex(i int) {
	lo, hi := piece(i, rowGrain(k.C), k.N)
	for n := lo; n < hi; n++ {
		a, b := n*k.C, (n+1)*k.C
		y, dy := k.Y[a:b], k.DY[a:b]
		softmaxGrad(k.DX[a:b], dy, y, rowDot(dy, y), k.Accumulate)
	}
}

// CrossEntropy adds to Loss the negative log-likelihoods of the targets:
//
//	LSE = max + log Σ exp(Logits - max), rounded to T
//	Loss += LSE - Logits[target], in float64, row by row in increasing order
//
// so that a batch computed in pieces of rows gives the same bits as a whole one.
// A row whose target is -1 adds nothing (its LSE is computed). With DLogits not
// nil it also writes the gradient as CrossEntropyGrad does, with the same bits,
// while the row is in the cache; DLogits may be Logits, and RowLoss is needed. With
// LowAs the gradient's rows are then rounded to 16 bits, each over the first half
// of its own memory. With Cap not 0 the logits are bounded first, in place (SoftCap).
//
// A Loss of 2 elements also counts, without DLogits: Loss[1] += rows whose target has the
// largest logit, the first of equal ones.
type CrossEntropy[T num.Float] struct {
	N, V    int
	Logits  []T     // (N, V)
	Targets []int32 // (N): -1 or in [0, V)
	LSE     []T     // (N)
	Loss    []float64

	DLogits []T // (N, V) or nil
	Scale   T   // factor of DLogits
	LowAs   Half
	Cap     T

	RowLoss []float64 // workspace (N), needed with DLogits
}

// Run computes the loss.
func (k *CrossEntropy[T]) Run(p *pool.Pool) error {
	c := check{op: "cross entropy"}
	c.dim("N", k.N)
	c.positive("V", k.V)
	c.size2("Logits", "(N, V)", len(k.Logits), k.N, k.V)
	c.size1("LSE", "N", len(k.LSE), k.N)
	if len(k.Loss) != 2 || k.DLogits != nil {
		c.size1("Loss", "1", len(k.Loss), 1)
	}
	if k.DLogits != nil {
		c.size2("DLogits", "(N, V)", len(k.DLogits), k.N, k.V)
		c.size1("RowLoss", "N", len(k.RowLoss), k.N)
	}
	c.targets(k.Targets, k.N, k.V)
	if c.err != nil {
		return c.err
	}
	run(p, tasks(k.N, rowGrain(k.V)), k)
	l := k.Loss[0]
	for n, t := range k.Targets {
		switch {
		case t < 0:
		case k.DLogits != nil:
			l += k.RowLoss[n]
		default:
			l += float64(k.LSE[n]) - float64(k.Logits[n*k.V+int(t)])
		}
	}
	k.Loss[0] = l
	if len(k.Loss) > 1 {
		for n, t := range k.Targets {
			if t >= 0 && isLargest(k.Logits[n*k.V:(n+1)*k.V], int(t)) {
				k.Loss[1]++
			}
		}
	}
	return nil
}

// isLargest says whether x[t] is the first of the largest elements of x. Nothing is where
// it is not a number.
func isLargest[T num.Float](x []T, t int) bool {
	for j, v := range x {
		if !(v < x[t] || v == x[t] && j >= t) {
			return false
		}
	}
	return true
}

// targets refuses classes outside [-1, v).
func (c *check) targets(t []int32, n, v int) {
	c.size1("Targets", "N", len(t), n)
	if c.err != nil {
		return
	}
	for i, x := range t {
		if x < -1 || int(x) >= v {
			c.fail("Targets[%d] is %d, want -1 or in [0, V = %d)", i, x, v)
			return
		}
	}
}

// RunIndex is a pool.Task's; call Run.
func (k *CrossEntropy[T]) RunIndex(i int) {
	lo, hi := piece(i, rowGrain(k.V), k.N)
	for n := lo; n < hi; n++ {
		x := k.Logits[n*k.V : (n+1)*k.V]
		if k.Cap != 0 {
			softCap(x, x, k.Cap)
		}
		m := rowMax(x)
		lse := T(float64(m) + num.Log(float64(rowExpSum(nil, x, m))))
		k.LSE[n] = lse
		if k.DLogits == nil {
			continue
		}
		t := k.Targets[n]
		if t >= 0 {
			k.RowLoss[n] = float64(lse) - float64(x[t])
		}
		d := k.DLogits[n*k.V : (n+1)*k.V]
		crossEntropyGrad(d, x, t, lse, k.Scale, k.Cap)
		if k.LowAs != NoHalf {
			narrowInPlace(k.LowAs, d)
		}
	}
}

// narrowInPlace rounds a row of float32 to 16 bits at the row's start: element i
// is written behind what has been read when it is.
func narrowInPlace[T num.Float](as Half, row []T) {
	if f, ok := any(row).([]float32); ok {
		narrow(as, unsafe.Slice((*uint16)(unsafe.Pointer(unsafe.SliceData(f))), len(f)), f)
	}
}

// CrossEntropyGrad is DLogits = (exp(Logits - LSE) - onehot(target))·Scale; rows
// whose target is -1 become 0. DLogits may be Logits. With Cap not 0 the logits are
// bounded already, and the gradient is of those before.
type CrossEntropyGrad[T num.Float] struct {
	N, V    int
	Logits  []T     // (N, V)
	Targets []int32 // (N): -1 or in [0, V)
	LSE     []T     // (N)
	DLogits []T     // (N, V)
	Scale   T       // 1/(counted targets of the global batch) · loss scale
	Cap     T
}

// Run computes the gradient.
func (k *CrossEntropyGrad[T]) Run(p *pool.Pool) error {
	c := check{op: "cross entropy gradient"}
	c.dim("N", k.N)
	c.positive("V", k.V)
	c.size2("Logits", "(N, V)", len(k.Logits), k.N, k.V)
	c.size1("LSE", "N", len(k.LSE), k.N)
	c.size2("DLogits", "(N, V)", len(k.DLogits), k.N, k.V)
	c.targets(k.Targets, k.N, k.V)
	return c.run(p, tasks(k.N, rowGrain(k.V)), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *CrossEntropyGrad[T]) RunIndex(i int) {
	lo, hi := piece(i, rowGrain(k.V), k.N)
	for n := lo; n < hi; n++ {
		a, b := n*k.V, (n+1)*k.V
		crossEntropyGrad(k.DLogits[a:b], k.Logits[a:b], k.Targets[n], k.LSE[n], k.Scale, k.Cap)
	}
}

// crossEntropyGrad is one row's; dx may be x. With limit not 0, x is after SoftCap and
// dx is of before.
func crossEntropyGrad[T num.Float](dx, x []T, target int32, lse, scale, limit T) {
	switch {
	case target < 0:
		clear(dx)
		return
	case limit != 0:
		var y [256]T // the row is overwritten
		for lo := 0; lo < len(x); lo += len(y) {
			n := copy(y[:], x[lo:])
			d, t := dx[lo:lo+n], int(target)-lo
			expScale(d, y[:n], lse, scale)
			if t >= 0 && t < n {
				d[t] = T((num.Exp(y[t]-lse) - 1) * scale)
			}
			softCapGrad(d, d, y[:n], limit, false)
		}
		return
	}
	xt := x[target]
	expScale(dx, x, lse, scale)
	dx[target] = T((num.Exp(xt-lse) - 1) * scale)
}

// expScale sets y to exp(x-m)·f.
func expScale[T num.Float](y, x []T, m, f T) {
	if fast[T](len(x)) {
		simd.expScale(ptr(y), ptr(x), len(x), float32(m), float32(f))
		return
	}
	for i, v := range x {
		y[i] = T(num.Exp(v-m) * f)
	}
}

func softmaxGrad[T num.Float](dx, dy, y []T, dot T, acc bool) {
	if fast[T](len(y)) {
		simd.softmaxGrad[index(acc)](ptr(dx), ptr(dy), ptr(y), len(y), float32(dot))
		return
	}
	for i, v := range y {
		set(&dx[i], T(v*(dy[i]-dot)), acc)
	}
}
