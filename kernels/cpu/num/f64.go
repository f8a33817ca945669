package num

import "math"

// The float64 functions below use no fused multiply-add and no processor-
// specific code, so that their bits are the same everywhere; the standard
// library's may be compiled with fused operations or use assembly.

// Log returns the natural logarithm (fdlibm's e_log, Sun Microsystems 1993).
// The error is below 1 ulp.
func Log(x float64) float64 {
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
	switch {
	case x != x || x > math.MaxFloat64:
		return x
	case x < 0:
		return math.NaN()
	case x == 0:
		return math.Inf(-1)
	}
	e := 0
	b := math.Float64bits(x)
	if b < 1<<52 { // subnormal
		b = math.Float64bits(x * (1 << 52))
		e = -52
	}
	// x = m·2^k with m in [√½, √2), without a branch that random x mispredict.
	e += int(b>>52) - 1022
	b = b&(1<<52-1) | 1022<<52
	low := (b - 0x3fe6a09e667f3bcd) >> 63 // 1 below √½
	f := math.Float64frombits(b+low<<52) - 1
	k := float64(e - int(low))
	s := f / (2 + f)
	s2 := float64(s * s)
	s4 := float64(s2 * s2)
	t1 := float64(s2 * (l1 + float64(s4*(l3+float64(s4*(l5+float64(s4*l7)))))))
	t2 := float64(s4 * (l2 + float64(s4*(l4+float64(s4*l6)))))
	r := t1 + t2
	h := float64(float64(0.5*f) * f)
	return float64(k*ln2Hi) - ((h - (float64(s*(h+r)) + float64(k*ln2Lo))) - f)
}

// Exp64 returns e^x (fdlibm's e_exp). The error is below 1 ulp.
func Exp64(x float64) float64 {
	const (
		ln2Hi = 6.93147180369123816490e-01
		ln2Lo = 1.90821492927058770002e-10
		log2e = 1.44269504088896338700e+00
		p1    = 1.66666666666666657415e-01
		p2    = -2.77777777770155933842e-03
		p3    = 6.61375632143793436117e-05
		p4    = -1.65339022054652515390e-06
		p5    = 4.13813679705723846039e-08
	)
	switch {
	case x != x || x > math.MaxFloat64:
		return x
	case x > 7.09782712893383973096e+02:
		return math.Inf(1)
	case x < -7.45133219101941108420e+02:
		return 0
	}
	k := math.RoundToEven(float64(log2e * x))
	hi := x - float64(k*ln2Hi)
	lo := float64(k * ln2Lo)
	r := hi - lo
	t := float64(r * r)
	c := r - float64(t*(p1+float64(t*(p2+float64(t*(p3+float64(t*(p4+float64(t*p5)))))))))
	y := 1 - ((lo - float64(r*c)/(2-c)) - hi)
	return math.Ldexp(y, int(k))
}

// Pow returns base^y for a positive base, to about 1e-15·(1 + |y·log base|).
func Pow(base, y float64) float64 { return Exp64(float64(y * Log(base))) }

// Sincos returns the sine and cosine of x radians, |x| < 2^29 (Cephes, S.
// Moshier). Beyond, and for NaN, both are NaN.
func Sincos(x float64) (sin, cos float64) {
	const (
		pi4a = 7.85398125648498535156e-1 // π/4 in three parts
		pi4b = 3.77489470793079817668e-8
		pi4c = 2.69515142907905952645e-15
	)
	if !(math.Abs(x) < 1<<29) {
		return math.NaN(), math.NaN()
	}
	sign := math.Float64bits(x) & (1 << 63)
	x = math.Abs(x)
	j := uint64(float64(x * (4 / math.Pi)))
	j += j & 1 // zeros to the origin
	y := float64(j)
	z := ((x - float64(y*pi4a)) - float64(y*pi4b)) - float64(y*pi4c)
	sin, cos = sincosKernel(z)
	// Quarter turns swap the two and change signs, in bits: branches would be
	// mispredicted.
	q := j >> 1
	s, c := math.Float64bits(sin), math.Float64bits(cos)
	swap := (s ^ c) & -(q & 1)
	s, c = s^swap, c^swap
	s ^= (q >> 1 & 1) << 63
	c ^= ((q + 1) >> 1 & 1) << 63
	s ^= sign
	return math.Float64frombits(s), math.Float64frombits(c)
}

// sincosKernel serves |z| <= π/4.
func sincosKernel(z float64) (sin, cos float64) {
	zz := float64(z * z)
	s := 1.58962301576546568060e-10
	s = float64(s*zz) - 2.50507477628578072866e-8
	s = float64(s*zz) + 2.75573136213857245213e-6
	s = float64(s*zz) - 1.98412698295895385996e-4
	s = float64(s*zz) + 8.33333333332211858878e-3
	s = float64(s*zz) - 1.66666666666666307295e-1
	sin = z + float64(float64(z*zz)*s)
	c := -1.13585365213876817300e-11
	c = float64(c*zz) + 2.08757008419747316778e-9
	c = float64(c*zz) - 2.75573141792967388112e-7
	c = float64(c*zz) + 2.48015872888517045348e-5
	c = float64(c*zz) - 1.38888888888730564116e-3
	c = float64(c*zz) + 4.16666666666665929218e-2
	cos = 1 - float64(0.5*zz) + float64(float64(zz*zz)*c)
	return sin, cos
}
