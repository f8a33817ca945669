// Package num holds the scalar numerics that every kernel of the CPU device
// shares: a single-rounding multiply-add, the fixed exponential, the activation
// functions, 16-bit conversions and the counter-based random generator. Their
// float32 results are defined bit for bit; the SIMD kernels follow the same
// order of operations, so that a result does not depend on the processor.
//
// The float64 instantiations serve finite-difference checks of gradients: they
// use the standard library's functions and have no promise about bits.
package num

import (
	"math"
	"unsafe"
)

// Float is the element type of a kernel: float32 to train, float64 to check
// gradients.
type Float interface{ float32 | float64 }

// is32 is true in the float32 instantiation. It is a constant to the compiler.
func is32[T Float]() bool {
	var z T
	return unsafe.Sizeof(z) == 4
}

// Fma returns a·b + c with a single rounding.
func Fma[T Float](a, b, c T) T {
	if is32[T]() {
		return T(Fma32(float32(a), float32(b), float32(c)))
	}
	return T(math.FMA(float64(a), float64(b), float64(c)))
}

// Fma32 returns a·b + c with a single rounding, as an FMA instruction does.
//
// The product of two float32 is exact in float64. The float64 sum s may round
// to a tie between two float32 (or to a float32's own value), where rounding
// again would lose on which side the exact sum lay; there s is moved to the odd
// neighbour in the direction of the lost part (rounding to odd: Boldo and
// Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
func Fma32(a, b, c float32) float32 {
	p := float64(a) * float64(b)
	z := float64(c)
	s := float64(p) + z
	bits := math.Float64bits(s)
	// A tie of float32, normal or subnormal, has its low 28 bits clear.
	if bits&0x0fffffff != 0 || bits&0x7ff0000000000000 == 0x7ff0000000000000 {
		return float32(s)
	}
	// Knuth's two-sum: e is the exact error of s.
	t := s - p
	e := (p - (s - t)) + (z - t)
	if e != 0 && bits&1 == 0 {
		if (e > 0) == (s > 0) {
			bits++
		} else {
			bits--
		}
		s = math.Float64frombits(bits)
	}
	return float32(s)
}

// Sqrt returns the correctly rounded square root.
func Sqrt[T Float](x T) T { return T(math.Sqrt(float64(x))) }

// IsNaN reports whether x is not a number.
func IsNaN[T Float](x T) bool { return x != x }

// Inf returns the infinity with the sign of s.
func Inf[T Float](s int) T { return T(math.Inf(s)) }

// Constants of Exp, float32. The polynomial is Cephes' expf (S. Moshier).
const (
	ExpHi  = 88.72284 // above: +Inf
	ExpLo  = -103.97  // below: 0
	Log2E  = 1.44269504088896341
	ExpLn2 = 0.693359375     // high part of ln 2
	ExpLnL = -2.12194440e-4  // low part of ln 2
	ExpP0  = 1.9875691500e-4 // degree 5 … 0
	ExpP1  = 1.3981999507e-3
	ExpP2  = 8.3334519073e-3
	ExpP3  = 4.1665795894e-2
	ExpP4  = 1.6666665459e-1
	ExpP5  = 5.0000001201e-1
)

// Exp returns e^x. In float32 the error is below 1 ulp of normal results.
func Exp[T Float](x T) T {
	if is32[T]() {
		return T(exp32(float32(x)))
	}
	return T(math.Exp(float64(x)))
}

func exp32(x float32) float32 {
	switch {
	case x > ExpHi:
		return float32(math.Inf(1))
	case x < ExpLo:
		return 0
	case x != x:
		return x
	}
	n := float32(math.RoundToEven(float64(float32(x * Log2E))))
	r := Fma32(n, -ExpLn2, x)
	r = Fma32(n, -ExpLnL, r)
	p := Fma32(ExpP0, r, ExpP1)
	p = Fma32(p, r, ExpP2)
	p = Fma32(p, r, ExpP3)
	p = Fma32(p, r, ExpP4)
	p = Fma32(p, r, ExpP5)
	y := Fma32(p, float32(r*r), r) + 1
	// Two factors, so that only the second can round (a subnormal result).
	i := int32(n)
	h := i >> 1
	return float32(float32(y*pow2(h)) * pow2(i-h))
}

// pow2 returns 2^n for n in [-126, 127].
func pow2(n int32) float32 { return math.Float32frombits(uint32(n+127) << 23) }

// Sigmoid returns 1 / (1 + e^-x).
func Sigmoid[T Float](x T) T { return 1 / (1 + Exp(-x)) }

// Coefficients of Tanh, float32: x + x³·P(x²) below TanhPoly. The polynomial is
// Cephes' tanhf (S. Moshier).
const (
	TanhPoly = 0.625
	TanhP0   = -5.70498872745e-3 // degree 4 … 0
	TanhP1   = 2.06390887954e-2
	TanhP2   = -5.37397155531e-2
	TanhP3   = 1.33314422036e-1
	TanhP4   = -3.33332819422e-1
)

// Tanh returns the hyperbolic tangent.
func Tanh[T Float](x T) T {
	if !is32[T]() {
		return T(math.Tanh(float64(x)))
	}
	a := x
	if a < 0 {
		a = -a
	}
	if a < TanhPoly {
		z := T(x * x)
		p := Fma(Fma(Fma(Fma(T(TanhP0), z, TanhP1), z, TanhP2), z, TanhP3), z, TanhP4)
		return Fma(T(p*z), x, x)
	}
	t := 1 - 2/(Exp(T(2*a))+1)
	if x < 0 {
		return -t
	}
	return t
}

// SoftCap returns c·tanh(x/c), which bounds a logit.
func SoftCap[T Float](x, c T) T { return T(c * Tanh(T(x/c))) }

// SoftCapGrad returns the derivative of SoftCap where it is y.
func SoftCapGrad[T Float](y, c T) T {
	u := T(y / c)
	return T(1 - T(u*u))
}

// Constants of the tanh form of GELU: u = GELUScale/2·(x + 0.044715·x³), and
// 0.5·(1 + tanh u) = sigmoid(2u).
const (
	GELUCubic = 0.044715
	GELUScale = 2 * 0.7978845608
	GELUDeriv = 3 * GELUCubic * GELUScale
)

// GELUTanh is the tanh form of GELU (Hendrycks and Gimpel, 2016), as GPT-2 uses.
func GELUTanh[T Float](x T) T {
	_, s := geluTanh(x)
	return T(x * s)
}

func geluTanh[T Float](x T) (x2, s T) {
	x2 = T(x * x)
	u := Fma(GELUCubic, T(x2*x), x)
	return x2, 1 / (1 + Exp(T(u*-GELUScale)))
}

// GELUTanhGrad returns the derivative of GELUTanh at x.
func GELUTanhGrad[T Float](x T) T {
	x2, s := geluTanh(x)
	q := T(T(x*s) * T(1-s))
	return Fma(q, Fma(GELUDeriv, x2, GELUScale), s)
}

// GELU is x·Φ(x) with the normal distribution function Φ by Erf.
func GELU[T Float](x T) T {
	return T(x * Fma(0.5, Erf(T(x*math.Sqrt2/2)), 0.5))
}

// GELUGrad returns the derivative of GELU at x: Φ(x) + x·φ(x).
func GELUGrad[T Float](x T) T {
	cdf := Fma(0.5, Erf(T(x*math.Sqrt2/2)), 0.5)
	e := Exp(T(T(x*x) * -0.5))
	return Fma(T(x*InvSqrt2Pi), e, cdf)
}

// InvSqrt2Pi is 1/√(2π).
const InvSqrt2Pi = 0.398942280401432677939946

// Coefficients of Erf, float32: x·P(x²)/Q(x²) on [-4, 4], beyond which erf
// rounds to ±1. The rational approximation is the one of Eigen's and XLA's float
// erf.
const (
	ErfMax = 4
	ErfP0  = -2.72614225801306e-10 // x^13 … x^1
	ErfP1  = 2.77068142495902e-08
	ErfP2  = -2.10102402082508e-06
	ErfP3  = -5.69250639462346e-05
	ErfP4  = -7.34990630326855e-04
	ErfP5  = -2.95459980854025e-03
	ErfP6  = -1.60960333262415e-02
	ErfQ0  = -1.45660718464996e-05 // x^8 … x^0
	ErfQ1  = -2.13374055278905e-04
	ErfQ2  = -1.68282697438203e-03
	ErfQ3  = -7.37332916720468e-03
	ErfQ4  = -1.42647390514189e-02
)

// Erf returns the error function. In float32 the error is below 4e-7.
func Erf[T Float](x T) T {
	if !is32[T]() {
		return T(math.Erf(float64(x)))
	}
	if x > ErfMax {
		x = ErfMax
	}
	if x < -ErfMax {
		x = -ErfMax
	}
	z := T(x * x)
	p := Fma(ErfP0, z, ErfP1)
	p = Fma(p, z, ErfP2)
	p = Fma(p, z, ErfP3)
	p = Fma(p, z, ErfP4)
	p = Fma(p, z, ErfP5)
	p = Fma(p, z, ErfP6)
	q := Fma(ErfQ0, z, ErfQ1)
	q = Fma(q, z, ErfQ2)
	q = Fma(q, z, ErfQ3)
	q = Fma(q, z, ErfQ4)
	return T(x*p) / q
}

// SiLU returns x·sigmoid(x) (also named swish).
func SiLU[T Float](x T) T { return T(x * Sigmoid(x)) }

// SiLUGrad returns the derivative of SiLU at x.
func SiLUGrad[T Float](x T) T {
	s := Sigmoid(x)
	return Fma(T(x*s), T(1-s), s)
}

// ReLU returns x, or 0 where x is below 0. NaN stays.
func ReLU[T Float](x T) T {
	if x < 0 {
		return 0
	}
	return x
}
