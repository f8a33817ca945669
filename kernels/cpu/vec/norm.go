package vec

import (
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// LayerNorm normalises each row and applies gain and shift (Ba, Kiros and Hinton,
// "Layer normalization", 2016):
//
//	Mean = ΣX/C, Rstd = 1/√(Σ(X-Mean)²/C + Eps), Y = (X-Mean)·Rstd·Gamma + Beta
//
// Y may be X.
type LayerNorm[T num.Float] struct {
	N, C        int
	X           []T // (N, C)
	Gamma, Beta []T // (C)
	Eps         T
	Y           []T // (N, C)
	Mean, Rstd  []T // (N), kept for the gradient
}

// Run computes the normalisation.
func (k *LayerNorm[T]) Run(p *pool.Pool) error {
	c := check{op: "layernorm"}
	c.dim("N", k.N)
	c.positive("C", k.C)
	c.size2("X", "(N, C)", len(k.X), k.N, k.C)
	c.size1("Gamma", "C", len(k.Gamma), k.C)
	c.size1("Beta", "C", len(k.Beta), k.C)
	c.size2("Y", "(N, C)", len(k.Y), k.N, k.C)
	c.size1("Mean", "N", len(k.Mean), k.N)
	c.size1("Rstd", "N", len(k.Rstd), k.N)
	return c.run(p, tasks(k.N, rowGrain(k.C)), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *LayerNorm[T]) RunIndex(i int) {
	lo, hi := piece(i, rowGrain(k.C), k.N)
	for n := lo; n < hi; n++ {
		x, y := k.X[n*k.C:(n+1)*k.C], k.Y[n*k.C:(n+1)*k.C]
		k.Mean[n], k.Rstd[n] = layerNormRow(y, x, k.Gamma, k.Beta, k.Eps)
	}
}

func layerNormRow[T num.Float](y, x, gamma, beta []T, eps T) (mean, rstd T) {
	mean = rowSum(x) / T(len(x))
	rstd = 1 / num.Sqrt(rowSqDiff(x, mean)/T(len(x))+eps)
	normApply(y, x, gamma, beta, mean, rstd)
	return mean, rstd
}

// LayerNormGrad is the gradient of LayerNorm. With h = (X-Mean)·Rstd and
// g = DY·Gamma,
//
//	DX = Rstd·(g - Σg/C - h·Σ(g·h)/C), DGamma = Σ DY·h, DBeta = Σ DY over rows.
//
// An output that is nil is not computed. DX may be DY.
type LayerNormGrad[T num.Float] struct {
	N, C       int
	DY, X      []T // (N, C)
	Gamma      []T // (C)
	Mean, Rstd []T // (N)

	DX            []T // (N, C) or nil
	DGamma, DBeta []T // (C) or nil

	AccumulateDX, AccumulateDGamma, AccumulateDBeta bool

	columns bool // which half of Run the tasks are of
}

// Run computes the gradients.
func (k *LayerNormGrad[T]) Run(p *pool.Pool) error {
	c := check{op: "layernorm gradient"}
	c.dim("N", k.N)
	c.positive("C", k.C)
	c.size2("DY", "(N, C)", len(k.DY), k.N, k.C)
	c.size2("X", "(N, C)", len(k.X), k.N, k.C)
	c.size1("Gamma", "C", len(k.Gamma), k.C)
	c.size1("Mean", "N", len(k.Mean), k.N)
	c.size1("Rstd", "N", len(k.Rstd), k.N)
	if k.DX != nil {
		c.size2("DX", "(N, C)", len(k.DX), k.N, k.C)
	}
	if k.DGamma != nil {
		c.size1("DGamma", "C", len(k.DGamma), k.C)
	}
	if k.DBeta != nil {
		c.size1("DBeta", "C", len(k.DBeta), k.C)
	}
	if c.err != nil {
		return c.err
	}
	// Columns first: DX may overwrite DY.
	if k.DGamma != nil || k.DBeta != nil {
		k.columns = true
		run(p, tasks(k.C, colGrain), k)
	}
	if k.DX != nil {
		k.columns = false
		run(p, tasks(k.N, rowGrain(k.C)), k)
	}
	return nil
}

// RunIndex is a pool.Task's; call Run.
func (k *LayerNormGrad[T]) RunIndex(i int) {
	if k.columns {
		lo, hi := piece(i, colGrain, k.C)
		if k.DBeta != nil {
			colSum(k.DBeta[lo:hi], k.DY, k.N, k.C, lo, k.AccumulateDBeta)
		}
		if k.DGamma != nil {
			normCols(k.DGamma[lo:hi], k.DY, k.X, k.Mean, k.Rstd, k.N, k.C, lo, k.AccumulateDGamma)
		}
		return
	}
	lo, hi := piece(i, rowGrain(k.C), k.N)
	for n := lo; n < hi; n++ {
		a, b := n*k.C, (n+1)*k.C
		mean, rstd := k.Mean[n], k.Rstd[n]
		s1, s2 := normGradSums(k.DY[a:b], k.X[a:b], k.Gamma, mean, rstd)
		normGradApply(k.DX[a:b], k.DY[a:b], k.X[a:b], k.Gamma, mean, rstd, s1/T(k.C), s2/T(k.C), k.AccumulateDX)
	}
}

// RMSNorm divides each row by its root mean square and applies a gain (Zhang and
// Sennrich, "Root mean square layer normalization", 2019):
//
//	Rstd = 1/√(ΣX²/C + Eps), Y = X·Rstd·Gamma
//
// Y may be X. With Gain the gain is 1 + Gamma.
type RMSNorm[T num.Float] struct {
	N, C  int
	X     []T // (N, C)
	Gamma []T // (C)
	Gain  []T // nil, or room for 1 + Gamma (C)
	Eps   T
	Y     []T // (N, C)
	Rstd  []T // (N), kept for the gradient
}

// Run computes the normalisation.
func (k *RMSNorm[T]) Run(p *pool.Pool) error {
	c := check{op: "rmsnorm"}
	c.dim("N", k.N)
	c.positive("C", k.C)
	c.size2("X", "(N, C)", len(k.X), k.N, k.C)
	c.size1("Gamma", "C", len(k.Gamma), k.C)
	c.size2("Y", "(N, C)", len(k.Y), k.N, k.C)
	c.size1("Rstd", "N", len(k.Rstd), k.N)
	c.gain(len(k.Gain), k.C)
	if c.err == nil {
		plusOne(k.Gain, k.Gamma)
		run(p, tasks(k.N, rowGrain(k.C)), k)
	}
	return c.err
}

// gain checks the room for a gain of 1 + Gamma.
func (c *check) gain(have, want int) {
	if have != 0 {
		c.size1("Gain", "C", have, want)
	}
}

// plusOne sets gain to 1 + gamma where there is one.
func plusOne[T num.Float](gain, gamma []T) {
	for i := range gain {
		gain[i] = 1 + gamma[i]
	}
}

// orGain is the gain of a norm: gamma, or gain where there is one.
func orGain[T num.Float](gain, gamma []T) []T {
	if gain != nil {
		return gain
	}
	return gamma
}

// RunIndex is a pool.Task's; call Run.
func (k *RMSNorm[T]) RunIndex(i int) {
	lo, hi := piece(i, rowGrain(k.C), k.N)
	for n := lo; n < hi; n++ {
		x, y := k.X[n*k.C:(n+1)*k.C], k.Y[n*k.C:(n+1)*k.C]
		k.Rstd[n] = rmsNormRow(y, x, orGain(k.Gain, k.Gamma), k.Eps)
	}
}

func rmsNormRow[T num.Float](y, x, gamma []T, eps T) (rstd T) {
	rstd = 1 / num.Sqrt(rowDot(x, x)/T(len(x))+eps)
	rmsApply(y, x, gamma, rstd)
	return rstd
}

// RMSNormGrad is the gradient of RMSNorm. With h = X·Rstd and g = DY·Gamma,
//
//	DX = Rstd·(g - h·Σ(g·h)/C), DGamma = Σ DY·h over rows.
//
// An output that is nil is not computed. DX may be DY.
type RMSNormGrad[T num.Float] struct {
	N, C  int
	DY, X []T // (N, C)
	Gamma []T // (C)
	Gain  []T // as RMSNorm's
	Rstd  []T // (N)

	DX     []T // (N, C) or nil
	DGamma []T // (C) or nil

	AccumulateDX, AccumulateDGamma bool

	columns bool
}

// Run computes the gradients.
func (k *RMSNormGrad[T]) Run(p *pool.Pool) error {
	c := check{op: "rmsnorm gradient"}
	c.dim("N", k.N)
	c.positive("C", k.C)
	c.size2("DY", "(N, C)", len(k.DY), k.N, k.C)
	c.size2("X", "(N, C)", len(k.X), k.N, k.C)
	c.size1("Gamma", "C", len(k.Gamma), k.C)
	c.size1("Rstd", "N", len(k.Rstd), k.N)
	c.gain(len(k.Gain), k.C)
	if k.DX != nil {
		c.size2("DX", "(N, C)", len(k.DX), k.N, k.C)
	}
	if k.DGamma != nil {
		c.size1("DGamma", "C", len(k.DGamma), k.C)
	}
	if c.err != nil {
		return c.err
	}
	if k.DGamma != nil {
		k.columns = true
		run(p, tasks(k.C, colGrain), k)
	}
	if k.DX != nil {
		plusOne(k.Gain, k.Gamma)
		k.columns = false
		run(p, tasks(k.N, rowGrain(k.C)), k)
	}
	return nil
}

// RunIndex is a pool.Task's; call Run.
func (k *RMSNormGrad[T]) RunIndex(i int) {
	if k.columns {
		lo, hi := piece(i, colGrain, k.C)
		rmsCols(k.DGamma[lo:hi], k.DY, k.X, k.Rstd, k.N, k.C, lo, k.AccumulateDGamma)
		return
	}
	lo, hi := piece(i, rowGrain(k.C), k.N)
	gamma := orGain(k.Gain, k.Gamma)
	for n := lo; n < hi; n++ {
		a, b := n*k.C, (n+1)*k.C
		s := rmsGradSum(k.DY[a:b], k.X[a:b], gamma, k.Rstd[n])
		rmsGradApply(k.DX[a:b], k.DY[a:b], k.X[a:b], gamma, k.Rstd[n], s/T(k.C), k.AccumulateDX)
	}
}

func normApply[T num.Float](y, x, gamma, beta []T, mean, rstd T) {
	if fast[T](len(x)) {
		simd.normApply(ptr(y), ptr(x), ptr(gamma), ptr(beta), len(x), float32(mean), float32(rstd))
		return
	}
	for i, v := range x {
		y[i] = num.Fma(T((v-mean)*rstd), gamma[i], beta[i])
	}
}

// normGradSums returns Σg and Σg·h.
func normGradSums[T num.Float](dy, x, gamma []T, mean, rstd T) (s1, s2 T) {
	if fast[T](len(x)) {
		f1, f2 := simd.normGradSums(ptr(dy), ptr(x), ptr(gamma), len(x), float32(mean), float32(rstd))
		return T(f1), T(f2)
	}
	var a, b [16]T
	for i, v := range x {
		h := T((v - mean) * rstd)
		g := T(dy[i] * gamma[i])
		a[i&15] += g
		b[i&15] = num.Fma(g, h, b[i&15])
	}
	return tree(&a), tree(&b)
}

// normGradApply takes the means m1 of g and m2 of g·h.
func normGradApply[T num.Float](dx, dy, x, gamma []T, mean, rstd, m1, m2 T, acc bool) {
	if fast[T](len(x)) {
		simd.normGradApply[index(acc)](ptr(dx), ptr(dy), ptr(x), ptr(gamma), len(x), float32(mean), float32(rstd), float32(m1), float32(m2))
		return
	}
	for i, v := range x {
		h := T((v - mean) * rstd)
		g := T(dy[i] * gamma[i])
		set(&dx[i], T(rstd*num.Fma(-h, m2, g-m1)), acc)
	}
}

// normCols sums dy·h over n rows for the columns from col on.
func normCols[T num.Float](dgamma, dy, x, mean, rstd []T, n, c, col int, acc bool) {
	if !acc {
		clear(dgamma)
	}
	if n > 0 && fast[T](len(dgamma)) {
		for len(dgamma) > 0 {
			w := min(64, len(dgamma))
			if w < 64 {
				w = min(16, w)
				simd.normCols16(ptr(dgamma), ptr(dy[col:]), ptr(x[col:]), ptr(mean), ptr(rstd), n, c, w)
			} else {
				simd.normCols64(ptr(dgamma), ptr(dy[col:]), ptr(x[col:]), ptr(mean), ptr(rstd), n, c, w)
			}
			dgamma, col = dgamma[w:], col+w
		}
		return
	}
	for r := range n {
		dr, xr := dy[r*c+col:], x[r*c+col:]
		m, s := mean[r], rstd[r]
		for j := range dgamma {
			dgamma[j] += T(dr[j] * T((xr[j]-m)*s))
		}
	}
}

func rmsApply[T num.Float](y, x, gamma []T, rstd T) {
	if fast[T](len(x)) {
		simd.rmsApply(ptr(y), ptr(x), ptr(gamma), len(x), float32(rstd))
		return
	}
	for i, v := range x {
		y[i] = T(T(v*rstd) * gamma[i])
	}
}

func rmsGradSum[T num.Float](dy, x, gamma []T, rstd T) T {
	if fast[T](len(x)) {
		return T(simd.rmsGradSum(ptr(dy), ptr(x), ptr(gamma), len(x), float32(rstd)))
	}
	var a [16]T
	for i, v := range x {
		a[i&15] = num.Fma(T(dy[i]*gamma[i]), T(v*rstd), a[i&15])
	}
	return tree(&a)
}

func rmsGradApply[T num.Float](dx, dy, x, gamma []T, rstd, m T, acc bool) {
	if fast[T](len(x)) {
		simd.rmsGradApply[index(acc)](ptr(dx), ptr(dy), ptr(x), ptr(gamma), len(x), float32(rstd), float32(m))
		return
	}
	for i, v := range x {
		set(&dx[i], T(rstd*num.Fma(-T(v*rstd), m, T(dy[i]*gamma[i]))), acc)
	}
}

func rmsCols[T num.Float](dgamma, dy, x, rstd []T, n, c, col int, acc bool) {
	if !acc {
		clear(dgamma)
	}
	if n > 0 && fast[T](len(dgamma)) {
		for len(dgamma) > 0 {
			w := min(64, len(dgamma))
			if w < 64 {
				w = min(16, w)
				simd.rmsCols16(ptr(dgamma), ptr(dy[col:]), ptr(x[col:]), ptr(rstd), n, c, w)
			} else {
				simd.rmsCols64(ptr(dgamma), ptr(dy[col:]), ptr(x[col:]), ptr(rstd), n, c, w)
			}
			dgamma, col = dgamma[w:], col+w
		}
		return
	}
	for r := range n {
		dr, xr := dy[r*c+col:], x[r*c+col:]
		s := rstd[r]
		for j := range dgamma {
			dgamma[j] += T(dr[j] * T(xr[j]*s))
		}
	}
}

// colSum sums n rows of width c for the len(y) columns from col on.
func colSum[T num.Float](y, x []T, n, c, col int, acc bool) {
	if !acc {
		clear(y)
	}
	if n > 0 && fast[T](len(y)) {
		for len(y) > 0 {
			w := min(64, len(y))
			if w < 64 {
				w = min(16, w)
				simd.colSum16(ptr(y), ptr(x[col:]), n, c, w)
			} else {
				simd.colSum64(ptr(y), ptr(x[col:]), n, c, w)
			}
			y, col = y[w:], col+w
		}
		return
	}
	for r := range n {
		for j, v := range x[r*c+col:][:len(y)] {
			y[j] += v
		}
	}
}
