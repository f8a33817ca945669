package vlib

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
)

// Coefficients of package num.
const (
	expHi  = 88.72284
	expLo  = -103.97
	log2e  = 1.44269504088896341
	expLn2 = 0.693359375
	expLnL = -2.12194440e-4
	expP0  = 1.9875691500e-4
	expP1  = 1.3981999507e-3
	expP2  = 8.3334519073e-3
	expP3  = 4.1665795894e-2
	expP4  = 1.6666665459e-1
	expP5  = 5.0000001201e-1
)

// ExpConstants are those of Exp, for Hold.
var ExpConstants = []float32{log2e, expLn2, expLnL, expP1, expP2, expP3, expP4, expP5, 1, expLo}

// Exp returns e^x as num.Exp does.
func (g *Gen) Exp(x Vec) Vec { return g.exp(x, true) }

// ExpLow returns e^x as num.Exp does for x <= 88 or NaN: for differences to a
// maximum.
func (g *Gen) ExpLow(x Vec) Vec { return g.exp(x, false) }

func (g *Gen) exp(x Vec, high bool) Vec {
	const nearest = 8 // round to nearest even, no precision exception
	n := g.Mul(x, g.C(log2e))
	for _, r := range n {
		if g.AVX512 {
			VRNDSCALEPS(operand.Imm(nearest), r, r)
		} else {
			VROUNDPS(operand.Imm(nearest), r, r)
		}
	}
	r := g.Copy(x)
	g.Fnma231(r, n, g.C(expLn2))
	g.Fnma231(r, n, g.C(expLnL))
	p := g.Copy(g.C(expP0))
	for _, c := range []float32{expP1, expP2, expP3, expP4, expP5} {
		g.Fma213(p, r, g.C(c))
	}
	r2 := g.Mul(r, r)
	g.Fma213(p, r2, r)
	g.AddTo(p, g.C(1))
	if g.AVX512 {
		return g.scale512(x, n, p, high)
	}
	return g.scale256(x, n, p, high)
}

// scale512 returns p·2^n and the limits' values.
func (g *Gen) scale512(x, n, p Vec, high bool) Vec {
	k := K()
	if lo, ok := g.C(expLo).(constant); ok {
		VCMPPS_BCST(operand.Imm(notLess), lo.mem, x[0], k)
	} else {
		VCMPPS(operand.Imm(notLess), g.C(expLo).half(0), x[0], k)
	}
	VSCALEFPS_Z(n[0], p[0], k, p[0])
	if high {
		k := K()
		hi := constant{word(math.Float32bits(expHi))}
		VCMPPS_BCST(operand.Imm(greater), hi.mem, x[0], k)
		VBROADCASTSS(word(0x7f800000), k, p[0])
	}
	return p
}

// scale256 multiplies by 2^(n/2) and 2^(n-n/2), so that only the second product
// can round.
func (g *Gen) scale256(x, n, p Vec, high bool) Vec {
	bias := word(127)
	for i := range n {
		h := YMM()
		VCVTPS2DQ(n[i], n[i])
		VPSRAD(operand.Imm(1), n[i], h)
		VPSUBD(h, n[i], n[i])
		VPADDD(bias, h, h)
		VPSLLD(operand.Imm(23), h, h)
		VMULPS(h, p[i], p[i])
		VPADDD(bias, n[i], n[i])
		VPSLLD(operand.Imm(23), n[i], n[i])
		VMULPS(n[i], p[i], p[i])
		VCMPPS(operand.Imm(notLess), word(math.Float32bits(expLo)), x[i], h)
		VANDPS(h, p[i], p[i])
		if high {
			VCMPPS(operand.Imm(greater), word(math.Float32bits(expHi)), x[i], h)
			VBLENDVPS(h, word(0x7f800000), p[i], p[i])
		}
	}
	return p
}

// SigmoidNeg returns 1/(1 + e^nx): the sigmoid of -nx as num.Sigmoid gives it.
func (g *Gen) SigmoidNeg(nx Vec) Vec {
	e := g.Exp(nx)
	g.AddTo(e, g.C(1))
	return g.Div(g.R(1), e)
}
