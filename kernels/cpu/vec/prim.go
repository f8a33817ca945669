package vec

import "github.com/spillway-ml/spillway/kernels/cpu/num"

// The lower-case functions of this package work on one piece of memory; the
// kernels are made of them. Each hands float32 to the assembly of the SIMD level
// in use, and its Go loop is both the fallback and the oracle.

// tree adds 16 lanes in the fixed order.
func tree[T num.Float](a *[16]T) T {
	for h := 8; h > 0; h /= 2 {
		for l := range h {
			a[l] += a[l+h]
		}
	}
	return a[0]
}

func rowSum[T num.Float](x []T) T {
	if fast[T](len(x)) {
		return T(simd.rowSum(ptr(x), len(x)))
	}
	var a [16]T
	for i, v := range x {
		a[i&15] += v
	}
	return tree(&a)
}

// rowSqDiff returns Σ (x-mean)².
func rowSqDiff[T num.Float](x []T, mean T) T {
	if fast[T](len(x)) {
		return T(simd.rowSqDiff(ptr(x), len(x), float32(mean)))
	}
	var a [16]T
	for i, v := range x {
		d := v - mean
		a[i&15] = num.Fma(d, d, a[i&15])
	}
	return tree(&a)
}

func rowDot[T num.Float](x, y []T) T {
	if fast[T](len(x)) {
		return T(simd.rowDot(ptr(x), ptr(y), len(x)))
	}
	var a [16]T
	for i, v := range x {
		a[i&15] = num.Fma(v, y[i], a[i&15])
	}
	return tree(&a)
}

// rowMax ignores NaN and starts from -Inf.
func rowMax[T num.Float](x []T) T {
	if fast[T](len(x)) {
		return T(simd.rowMax(ptr(x), len(x)))
	}
	m := num.Inf[T](-1)
	for _, v := range x {
		if v > m {
			m = v
		}
	}
	return m
}

// rowExpSum returns Σ exp(x-m) and, with y not nil, sets y to the addends. x-m is
// at most 0 or NaN.
func rowExpSum[T num.Float](y, x []T, m T) T {
	if fast[T](len(x)) {
		if y == nil {
			return T(simd.rowExpSum(ptr(x), len(x), float32(m)))
		}
		return T(simd.rowExpStore(ptr(y), ptr(x), len(x), float32(m)))
	}
	var a [16]T
	for i, v := range x {
		e := num.Exp(v - m)
		if y != nil {
			y[i] = e
		}
		a[i&15] += e
	}
	return tree(&a)
}

// set writes or accumulates one element.
func set[T num.Float](y *T, v T, acc bool) {
	if acc {
		v += *y
	}
	*y = v
}
