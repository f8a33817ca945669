package main

import (
	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

// Constants of package num.
const (
	geluCubic  = 0.044715
	geluScale  = 2 * 0.7978845608
	geluDeriv  = 3 * geluCubic * geluScale
	sqrtHalf   = 1.41421356237309504880168872420969807856967187537694 / 2
	invSqrt2Pi = 0.398942280401432677939946
	erfMax     = 4
)

var erfP = []float32{-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
	-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02}
var erfQ = []float32{-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02}

// variants emits a kernel that writes and one that accumulates; put stores the
// value of the current elements.
func variants(field, name, signature, doc, dst string, body func(g *vlib.Gen, put func(vlib.Vec))) {
	for i, suffix := range []string{"", "Acc"} {
		kernel(fmt2("%s[%d]", field, i), name+suffix, signature, doc, func(g *vlib.Gen) {
			d := g.Ptr(dst)
			body(g, func(v vlib.Vec) {
				if i == 1 {
					g.AddTo(v, g.Src(g.At(d)))
				}
				g.Store(v, g.At(d))
			})
		})
	}
}

const full = " for n elements, a multiple of 16."

// elementwise writes the kernels that work on single elements, in groups of 16. Go code handles the
// remainder. A table: a row for each kernel.
func elementwise() {
	for i, op := range []struct {
		name, sign string
		f          func(g *vlib.Gen, a vlib.Vec, b vlib.Arg) vlib.Vec
	}{{"add", "+", (*vlib.Gen).Add}, {"sub", "-", (*vlib.Gen).Sub}, {"mul", "·", (*vlib.Gen).Mul}} {
		variants(fmt2("binary[%d]", i), op.name, "func(y, a, b *float32, n int)", "is y = a "+op.sign+" b (Acc: +=)"+full, "y",
			func(g *vlib.Gen, put func(vlib.Vec)) {
				a, b, n := g.Ptr("a"), g.Ptr("b"), g.Ptr("n")
				g.LoopFull(n, func() { put(op.f(g, g.Load(g.At(a)), g.At(b))) })
				g.Return()
			})
	}
	variants("scale", "scale", "func(y, x *float32, n int, f float32)", "is y = f·x (Acc: +=)"+full, "y",
		func(g *vlib.Gen, put func(vlib.Vec)) {
			x, n, f := g.Ptr("x"), g.Ptr("n"), g.Param("f")
			g.LoopFull(n, func() { put(g.Mul(f, g.At(x))) })
			g.Return()
		})
	variants("fill", "fill", "func(y *float32, n int, v float32)", "is y = v (Acc: +=)"+full, "y",
		func(g *vlib.Gen, put func(vlib.Vec)) {
			n, v := g.Ptr("n"), g.Param("v")
			g.LoopFull(n, func() { put(g.Copy(v)) })
			g.Return()
		})

	acts := []struct {
		name string
		f    func(g *vlib.Gen, x func() vlib.Vec) vlib.Vec // the value
		d    func(g *vlib.Gen, x func() vlib.Vec) vlib.Vec // the derivative
	}{
		{"geluTanh", func(g *vlib.Gen, x func() vlib.Vec) vlib.Vec {
			return g.Mul(geluSigmoid(g, x()), x())
		}, func(g *vlib.Gen, x func() vlib.Vec) vlib.Vec {
			s := geluSigmoid(g, x())
			q := g.Mul(s, x())
			q = g.Mul(q, g.Sub(g.R(1), s))
			x2 := x()
			g.MulTo(x2, x2)
			z := g.Copy(g.C(geluScale))
			g.Fma231(z, x2, g.C(geluDeriv))
			g.Fma231(s, q, z)
			return s
		}},
		{"gelu", func(g *vlib.Gen, x func() vlib.Vec) vlib.Vec {
			return g.Mul(normalCDF(g, x()), x())
		}, func(g *vlib.Gen, x func() vlib.Vec) vlib.Vec {
			c := normalCDF(g, x())
			v := x()
			e := g.ExpLow(g.Mul(g.Mul(v, v), g.C(-0.5)))
			g.Fma231(c, g.Mul(x(), g.C(invSqrt2Pi)), e)
			return c
		}},
		{"silu", func(g *vlib.Gen, x func() vlib.Vec) vlib.Vec {
			return g.Mul(g.SigmoidNeg(g.Neg(x())), x())
		}, func(g *vlib.Gen, x func() vlib.Vec) vlib.Vec {
			s := g.SigmoidNeg(g.Neg(x()))
			q := g.Mul(s, x())
			g.Fma231(s, q, g.Sub(g.R(1), s))
			return s
		}},
	}
	for i, a := range acts {
		kernel(fmt2("act[%d]", i), a.name, "func(y, x *float32, n int)", "is y = "+a.name+"(x)"+full, func(g *vlib.Gen) {
			y, x, n := g.Ptr("y"), g.Ptr("x"), g.Ptr("n")
			g.Hold(vlib.ExpConstants...)
			g.LoopFull(n, func() {
				g.Store(a.f(g, func() vlib.Vec { return g.Load(g.At(x)) }), g.At(y))
			})
			g.Return()
		})
		variants(fmt2("actGrad[%d]", i), a.name+"Grad", "func(dx, dy, x *float32, n int)", "is dx = dy·"+a.name+"'(x) (Acc: +=)"+full, "dx",
			func(g *vlib.Gen, put func(vlib.Vec)) {
				dy, x, n := g.Ptr("dy"), g.Ptr("x"), g.Ptr("n")
				g.Hold(vlib.ExpConstants...)
				g.LoopFull(n, func() {
					d := a.d(g, func() vlib.Vec { return g.Load(g.At(x)) })
					g.MulTo(d, g.At(dy))
					put(d)
				})
				g.Return()
			})
	}
	kernel("act[3]", "relu", "func(y, x *float32, n int)", "is y = max(x, 0)"+full, func(g *vlib.Gen) {
		y, x, n := g.Ptr("y"), g.Ptr("x"), g.Ptr("n")
		zero := g.Zero()
		g.LoopFull(n, func() { g.Store(g.Max(zero, g.At(x)), g.At(y)) })
		g.Return()
	})
	variants("actGrad[3]", "reluGrad", "func(dx, dy, x *float32, n int)", "is dx = dy where x > 0, else 0 (Acc: +=)"+full, "dx",
		func(g *vlib.Gen, put func(vlib.Vec)) {
			dy, x, n := g.Ptr("dy"), g.Ptr("x"), g.Ptr("n")
			g.LoopFull(n, func() { put(g.ZeroWhereNotPositive(g.Load(g.At(dy)), g.Load(g.At(x)))) })
			g.Return()
		})
	kernel("swiglu", "swiglu", "func(y, gate, up *float32, n int)", "is y = silu(gate)·up"+full, func(g *vlib.Gen) {
		y, gate, up, n := g.Ptr("y"), g.Ptr("gate"), g.Ptr("up"), g.Ptr("n")
		g.Hold(vlib.ExpConstants...)
		g.LoopFull(n, func() {
			s := g.SigmoidNeg(g.Neg(g.Load(g.At(gate))))
			g.MulTo(s, g.At(gate))
			g.MulTo(s, g.At(up))
			g.Store(s, g.At(y))
		})
		g.Return()
	})
	kernel("swigluGrad", "swigluGrad", "func(dgate, dup, dy, gate, up *float32, n int)", "is the gradient of swiglu"+full, func(g *vlib.Gen) {
		dgate, dup, dy, gate, up, n := g.Ptr("dgate"), g.Ptr("dup"), g.Ptr("dy"), g.Ptr("gate"), g.Ptr("up"), g.Ptr("n")
		g.Hold(vlib.ExpConstants...)
		g.LoopFull(n, func() {
			s := g.SigmoidNeg(g.Neg(g.Load(g.At(gate))))
			q := g.Mul(s, g.At(gate))
			g.Fma231(s, q, g.Sub(g.R(1), s))
			d := g.Load(g.At(dy))
			g.MulTo(q, d)
			g.MulTo(d, g.At(up))
			g.MulTo(d, s)
			g.Store(q, g.At(dup))
			g.Store(d, g.At(dgate))
		})
		g.Return()
	})
	for i, inverse := range []bool{false, true} {
		name := "rotate"
		if inverse {
			name = "rotateBack"
		}
		kernel(fmt2("rotate[%d]", i), name, "func(y1, y2, x1, x2, cos, sin *float32, n int)", "rotates pairs"+full, func(g *vlib.Gen) {
			y1, y2, x1, x2 := g.Ptr("y1"), g.Ptr("y2"), g.Ptr("x1"), g.Ptr("x2")
			cos, sin, n := g.Ptr("cos"), g.Ptr("sin"), g.Ptr("n")
			g.LoopFull(n, func() {
				a, b, c, s := g.Load(g.At(x1)), g.Load(g.At(x2)), g.Load(g.At(cos)), g.Load(g.At(sin))
				u, v := g.Mul(a, c), g.Mul(b, c)
				if inverse {
					g.Fma231(u, b, s)
					g.Fnma231(v, a, s)
				} else {
					g.Fnma231(u, b, s)
					g.Fma231(v, a, s)
				}
				g.Store(u, g.At(y1))
				g.Store(v, g.At(y2))
			})
			g.Return()
		})
	}
}

// geluSigmoid returns sigmoid(2u) of GELU's tanh form.
func geluSigmoid(g *vlib.Gen, x vlib.Vec) vlib.Vec {
	x3 := g.Mul(g.Mul(x, x), x)
	u := g.Copy(x)
	g.Fma231(u, x3, g.C(geluCubic))
	g.MulTo(u, g.C(-geluScale))
	return g.SigmoidNeg(u)
}

// normalCDF returns Φ(x) = 0.5·erf(x/√2) + 0.5.
func normalCDF(g *vlib.Gen, x vlib.Vec) vlib.Vec {
	x = g.Mul(x, g.C(sqrtHalf))
	x = g.Min(g.R(erfMax), x)
	x = g.Max(g.R(-erfMax), x)
	z := g.Mul(x, x)
	p := poly(g, z, erfP)
	q := poly(g, z, erfQ)
	e := g.Div(g.Mul(x, p), q)
	h := g.Copy(g.C(0.5))
	g.Fma231(h, e, g.C(0.5))
	return h
}

// poly is Horner's scheme, the highest power first.
func poly(g *vlib.Gen, z vlib.Vec, cs []float32) vlib.Vec {
	p := g.Copy(g.C(cs[0]))
	for _, c := range cs[1:] {
		g.Fma213(p, z, g.C(c))
	}
	return p
}
