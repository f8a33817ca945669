package attn

import (
	"math"

	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// The definition of the numbers, in plain Go; what SIMD code is compared with.
// A product is converted where it is rounded: arm64 would fuse it into a sum.

// dot is the fma chain over d of a[d]·b[d], from +0.
func dot[T Float](a, b []T) (s T) {
	b = b[:len(a)]
	for d, x := range a {
		s = num.Fma(x, b[d], s)
	}
	return s
}

// axpy adds p·x to acc, an fma an element.
func axpy[T Float](p T, x, acc []T) {
	acc = acc[:len(x)]
	for d, v := range x {
		acc[d] = num.Fma(p, v, acc[d])
	}
}

// forwardRow computes query row t of sequence b, head h.
func (f *Forward[T]) forwardRow(b, h, t int) {
	g := h / (f.H / f.KV)
	q := f.q.row(b, t, h, f.D)
	y := f.y.row(b, t, h, f.D)
	clear(y)
	m := negInf[T]()
	var l [16]T
	var p [KeyTile]T
	n := f.visible(t)
	for j0 := 0; j0 < n; j0 += KeyTile {
		w := min(KeyTile, n-j0)
		next := m
		for j := range w {
			p[j] = T(f.scale * dot(q, f.k.row(b, j0+j, g, f.D)))
			if p[j] > next {
				next = p[j]
			}
		}
		c := next
		if c == negInf[T]() {
			c = 0
		}
		alpha := num.Exp(m - c)
		m = next
		for i := range l {
			l[i] = T(l[i] * alpha)
		}
		for d := range y {
			y[d] = T(y[d] * alpha)
		}
		for j := range w {
			p[j] = num.Exp(p[j] - c)
			l[j%16] += p[j]
			axpy(p[j], f.v.row(b, j0+j, g, f.D), y)
		}
	}
	sum := tree16(&l)
	for d := range y {
		y[d] /= sum
	}
	if f.Lse != nil {
		f.Lse[(b*f.H+h)*f.Tq+t] = logSumExp(m, sum)
	}
}

// deltaOf is the 16-lane dot product of a row of dy and one of y, both
// continued with +0 to a multiple of 16 (which can only turn a lane's -0 to +0).
func deltaOf[T Float](dy, y []T) T {
	var l [16]T
	for d := range dy {
		l[d%16] = num.Fma(dy[d], y[d], l[d%16])
	}
	for d := len(dy); d%16 != 0; d++ {
		l[d%16] += 0
	}
	return tree16(&l)
}

// backwardHead adds query head h of sequence b to dk and dv of its key/value
// head, which the first head of a group clears, and writes its dq.
func (f *Backward[T]) backwardHead(b, h int) {
	group := f.H / f.KV
	g := h / group
	if h%group == 0 {
		for j := range f.Tk {
			clear(f.dk.row(b, j, g, f.D))
			clear(f.dv.row(b, j, g, f.D))
		}
	}
	for t := range f.Tq {
		q, dy, dq := f.q.row(b, t, h, f.D), f.dy.row(b, t, h, f.D), f.dq.row(b, t, h, f.D)
		clear(dq)
		delta := deltaOf(dy, f.y.row(b, t, h, f.D))
		lse := f.Lse[(b*f.H+h)*f.Tq+t]
		for j := range f.visible(t) {
			k := f.k.row(b, j, g, f.D)
			s := T(f.scale * dot(q, k))
			p := num.Exp(s - lse)
			dp := dot(dy, f.v.row(b, j, g, f.D))
			ds := T(T(p*(dp-delta)) * f.scale)
			axpy(p, dy, f.dv.row(b, j, g, f.D))
			axpy(ds, q, f.dk.row(b, j, g, f.D))
			axpy(ds, k, dq)
		}
	}
}

// tree16 adds 16 lanes: l with l+8, then +4, +2, +1.
func tree16[T Float](l *[16]T) T {
	for w := 8; w > 0; w /= 2 {
		for i := range w {
			l[i] += l[i+w]
		}
	}
	return l[0]
}

func negInf[T Float]() T { return T(math.Inf(-1)) }

// logSumExp is m + log sum, rounded once. It is not below m.
func logSumExp[T Float](m, sum T) T { return T(float64(m) + num.Log(float64(sum))) }
