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

// score is the score of a query for key j, -Inf before the first that it sees, and its
// derivative by the scaled score.
func score[T Float](q, k []T, scale, limit T, j, first int) (s, d T) {
	s, d = T(scale*dot(q, k)), 1
	if limit != 0 {
		s = num.SoftCap(s, limit)
		d = num.SoftCapGrad(s, limit)
	}
	if j < first {
		s = negInf[T]()
	}
	return s, d
}

// forwardRow computes query row t of sequence b, head h.
func (f *Forward[T]) forwardRow(b, h, t int, scratch []T) {
	g := h / (f.H / f.KV)
	other := scratch[2*f.D:]
	q := f.q.read(b, t, h, f.D, scratch)
	y := f.y.write(b, t, h, f.D, scratch[f.D:])
	clear(y)
	m := negInf[T]()
	var l [16]T
	var p [KeyTile]T
	see := viewOf(&f.Shape, f.Starts, b)
	n, first := f.visible(t), see.first(t)
	for j0 := see.beginOf(t); j0 < n; j0 += KeyTile {
		w := min(KeyTile, n-j0)
		next := m
		for j := range w {
			p[j], _ = score(q, f.k.read(b, j0+j, g, f.D, other), f.scale, f.Cap, j0+j, first)
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
			axpy(p[j], f.v.read(b, j0+j, g, f.D, other), y)
		}
	}
	sum := tree16(&l)
	for d := range y {
		y[d] /= sum
	}
	f.y.stored(b, t, h, f.D, y)
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
func (f *Backward[T]) backwardHead(b, h int, scratch []T) {
	group := f.H / f.KV
	g := h / group
	dk, dv := f.sums(scratch)
	see := viewOf(&f.Shape, f.Starts, b)
	row := func(i int) []T { return scratch[i*f.D : (i+1)*f.D] }
	if h%group == 0 {
		for j := range f.Tk {
			clear(dk.row(b, j, g, f.D))
			clear(dv.row(b, j, g, f.D))
		}
	}
	for t := range f.Tq {
		q, dy, dq := f.q.read(b, t, h, f.D, row(0)), f.dy.read(b, t, h, f.D, row(1)), f.dq.write(b, t, h, f.D, row(2))
		clear(dq)
		delta := deltaOf(dy, f.y.read(b, t, h, f.D, row(3)))
		lse := f.Lse[(b*f.H+h)*f.Tq+t]
		first := see.first(t)
		for j := see.beginOf(t); j < f.visible(t); j++ {
			k := f.k.read(b, j, g, f.D, row(4))
			s, d := score(q, k, f.scale, f.Cap, j, first)
			p := num.Exp(s - lse)
			dp := dot(dy, f.v.read(b, j, g, f.D, row(5)))
			ds := T(p * (dp - delta))
			if f.Cap != 0 {
				ds = T(ds * d)
			}
			ds = T(ds * f.scale)
			axpy(p, dy, dv.row(b, j, g, f.D))
			axpy(ds, q, dk.row(b, j, g, f.D))
			axpy(ds, k, dq)
		}
		f.dq.stored(b, t, h, f.D, dq)
	}
	if h%group == group-1 {
		f.settle(b, g, &dk, &dv)
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
