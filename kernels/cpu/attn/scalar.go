package attn

import (
	"math"
	"unsafe"
)

// Float is the element type of a kernel: float32 for training, float64 for
// finite-difference checks of the same code.
type Float interface{ float32 | float64 }

func fma[T Float](a, b, c T) T {
	if unsafe.Sizeof(a) == 4 {
		return T(fma32(float32(a), float32(b), float32(c)))
	}
	return T(math.FMA(float64(a), float64(b), float64(c)))
}

// fma32 is a·b + c with one rounding. The product is exact in float64; the sum
// rounded to float64 rounds again to the right float32 unless it lies exactly
// between two of them, or in the subnormal range, where the float64 is first
// rounded to odd.
func fma32(a, b, c float32) float32 {
	p := float64(a) * float64(b)
	z := float64(c)
	s := p + z
	bits := math.Float64bits(s)
	if bits&0x1fffffff != 0x10000000 && bits&(1<<63-1) >= (1023-126)<<52 {
		return float32(s)
	}
	t := s - p
	e := (p - (s - t)) + (z - t)
	if e != 0 && bits&1 == 0 && e == e && s-s == 0 {
		if (e > 0) == (s > 0) {
			bits++
		} else {
			bits--
		}
		s = math.Float64frombits(bits)
	}
	return float32(s)
}

func exp[T Float](x T) T {
	if unsafe.Sizeof(x) == 4 {
		return T(exp32(float32(x)))
	}
	return T(math.Exp(float64(x)))
}

// exp32 is Cephes' expf with fixed fused steps.
func exp32(x float32) float32 {
	switch {
	case x != x:
		return x
	case x > 88.72284:
		return float32(math.Inf(1))
	case x < -103.97:
		return 0
	}
	n := float32(math.RoundToEven(float64(x * 1.44269504088896341)))
	r := fma32(n, -0.693359375, x)
	r = fma32(n, 2.12194440e-4, r)
	p := float32(1.9875691500e-4)
	p = fma32(p, r, 1.3981999507e-3)
	p = fma32(p, r, 8.3334519073e-3)
	p = fma32(p, r, 4.1665795894e-2)
	p = fma32(p, r, 1.6666665459e-1)
	p = fma32(p, r, 5.0000001201e-1)
	y := fma32(p, float32(r*r), r) + 1
	// y is in [0.7, 1.5] and has 24 bits, so the scaled float64 is exact and
	// the conversion is the only rounding.
	return float32(float64(y) * math.Float64frombits(uint64(1023+int(n))<<52))
}

// logOf is the natural logarithm, rounded to T once from float64. The float64
// algorithm is FreeBSD's e_log.c with every product rounded, so that it gives
// the same bits on every architecture (math.Log may fuse, or be assembly).
func logOf(x float64) float64 {
	switch {
	case x != x || x > math.MaxFloat64:
		return x
	case x < 0:
		return math.NaN()
	case x == 0:
		return math.Inf(-1)
	}
	const (
		ln2Hi = 6.93147180369123816490e-01
		ln2Lo = 1.90821492927058770002e-10
		l1    = 6.666666666666735130e-01
		l2    = 3.999999999940941908e-01
		l3    = 2.857142874366239149e-01
		l4    = 2.222219843214978396e-01
		l5    = 1.818357216161805012e-01
		l6    = 1.531383769920937332e-01
		l7    = 1.479819860511658591e-01
	)
	f1, ki := math.Frexp(x)
	if f1 < math.Sqrt2/2 {
		f1 *= 2
		ki--
	}
	f := f1 - 1
	k := float64(ki)
	s := f / (2 + f)
	s2 := s * s
	s4 := s2 * s2
	t1 := float64(s2 * (l1 + float64(s4*(l3+float64(s4*(l5+float64(s4*l7)))))))
	t2 := float64(s4 * (l2 + float64(s4*(l4+float64(s4*l6)))))
	r := t1 + t2
	hfsq := float64(float64(0.5*f) * f)
	return float64(k*ln2Hi) - ((hfsq - (float64(s*(hfsq+r)) + float64(k*ln2Lo))) - f)
}

func negInf[T Float]() T { return T(math.Inf(-1)) }

// tree16 adds 16 lanes: l with l+8, then +4, +2, +1.
func tree16[T Float](l *[16]T) T {
	for w := 8; w > 0; w /= 2 {
		for i := range w {
			l[i] += l[i+w]
		}
	}
	return l[0]
}
