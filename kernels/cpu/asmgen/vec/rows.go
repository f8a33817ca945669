package main

import (
	"fmt"

	"math"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

func fmt2(format string, args ...any) string { return fmt.Sprintf(format, args...) }

// rows are the kernels along one row of n elements, n at least 1.
// A table: a row for each kernel.
func rows() {
	kernel("rowSum", "rowSum", "func(x *float32, n int) float32", "returns Σx, added up in 16 lanes.", func(g *vlib.Gen) {
		x, n := g.Ptr("x"), g.Ptr("n")
		a := g.Zero()
		g.Loop(n, func() { g.AddTo(a, g.Src(g.At(x))) })
		finish(g, a)
	})
	kernel("rowSqDiff", "rowSqDiff", "func(x *float32, n int, mean float32) float32", "returns Σ(x-mean)², added up in 16 lanes.", func(g *vlib.Gen) {
		x, n, mean := g.Ptr("x"), g.Ptr("n"), g.Param("mean")
		a := g.Zero()
		g.Loop(n, func() {
			d := g.Sub(g.Load(g.At(x)), mean)
			g.Keep(d)
			g.Fma231(a, d, d)
		})
		finish(g, a)
	})
	kernel("rowDot", "rowDot", "func(x, y *float32, n int) float32", "returns Σx·y, added up in 16 lanes.", func(g *vlib.Gen) {
		x, y, n := g.Ptr("x"), g.Ptr("y"), g.Ptr("n")
		a := g.Zero()
		g.Loop(n, func() { g.Fma231(a, g.Load(g.At(x)), g.Src(g.At(y))) })
		finish(g, a)
	})
	kernel("rowMax", "rowMax", "func(x *float32, n int) float32", "returns the largest element that is no NaN, or -Inf.", func(g *vlib.Gen) {
		x, n := g.Ptr("x"), g.Ptr("n")
		a := g.Copy(g.C(negInf))
		g.Loop(n, func() {
			v := g.Load(g.At(x))
			g.Else(v, negInf)
			g.MaxTo(a, v)
		})
		r := g.Max16(a)
		g.Result(0, r)
		g.Return()
	})
	kernel("rowExpSum", "rowExpSum", "func(x *float32, n int, m float32) float32", "returns Σexp(x-m), added up in 16 lanes.", func(g *vlib.Gen) {
		x, n, m := g.Ptr("x"), g.Ptr("n"), g.Param("m")
		g.Hold(vlib.ExpConstants...)
		a := g.Zero()
		g.Loop(n, func() {
			e := g.ExpLow(g.Sub(g.Load(g.At(x)), m))
			g.Keep(e)
			g.AddTo(a, e)
		})
		finish(g, a)
	})
	kernel("rowExpStore", "rowExpStore", "func(y, x *float32, n int, m float32) float32", "sets y = exp(x-m) and returns Σy, added up in 16 lanes.", func(g *vlib.Gen) {
		y, x, n, m := g.Ptr("y"), g.Ptr("x"), g.Ptr("n"), g.Param("m")
		g.Hold(vlib.ExpConstants...)
		a := g.Zero()
		g.Loop(n, func() {
			e := g.ExpLow(g.Sub(g.Load(g.At(x)), m))
			g.Keep(e)
			g.Store(e, g.At(y))
			g.AddTo(a, e)
		})
		finish(g, a)
	})
	kernel("expScale", "expScale", "func(y, x *float32, n int, m, f float32)", "is y = exp(x-m)·f.", func(g *vlib.Gen) {
		y, x, n, m, f := g.Ptr("y"), g.Ptr("x"), g.Ptr("n"), g.Param("m"), g.Param("f")
		g.Hold(vlib.ExpConstants...)
		g.Loop(n, func() {
			e := g.Exp(g.Sub(g.Load(g.At(x)), m))
			g.MulTo(e, f)
			g.Store(e, g.At(y))
		})
		g.Return()
	})
	variants("softmaxGrad", "softmaxGrad", "func(dx, dy, y *float32, n int, dot float32)", "is dx = y·(dy-dot) (Acc: +=).", "dx",
		func(g *vlib.Gen, put func(vlib.Vec)) {
			dy, y, n, dot := g.Ptr("dy"), g.Ptr("y"), g.Ptr("n"), g.Param("dot")
			g.Loop(n, func() {
				d := g.Sub(g.Load(g.At(dy)), dot)
				g.MulTo(d, g.Src(g.At(y)))
				put(d)
			})
			g.Return()
		})

	kernel("normApply", "normApply", "func(y, x, gamma, beta *float32, n int, mean, rstd float32)", "is y = (x-mean)·rstd·gamma + beta.", func(g *vlib.Gen) {
		y, x, gamma, beta, n := g.Ptr("y"), g.Ptr("x"), g.Ptr("gamma"), g.Ptr("beta"), g.Ptr("n")
		mean, rstd := g.Param("mean"), g.Param("rstd")
		g.Loop(n, func() {
			h := g.Sub(g.Load(g.At(x)), mean)
			g.MulTo(h, rstd)
			g.Fma213(h, g.Load(g.At(gamma)), g.Src(g.At(beta)))
			g.Store(h, g.At(y))
		})
		g.Return()
	})
	kernel("normGradSums", "normGradSums", "func(dy, x, gamma *float32, n int, mean, rstd float32) (s1, s2 float32)",
		"returns Σg and Σg·h with g = dy·gamma, h = (x-mean)·rstd, added up in 16 lanes.", func(g *vlib.Gen) {
			dy, x, gamma, n := g.Ptr("dy"), g.Ptr("x"), g.Ptr("gamma"), g.Ptr("n")
			mean, rstd := g.Param("mean"), g.Param("rstd")
			a, b := g.Zero(), g.Zero()
			g.Loop(n, func() {
				h := g.Sub(g.Load(g.At(x)), mean)
				g.MulTo(h, rstd)
				g.Keep(h)
				v := g.Load(g.At(dy))
				g.MulTo(v, g.Src(g.At(gamma)))
				g.AddTo(a, v)
				g.Fma231(b, v, h)
			})
			g.Result(0, g.Sum(a))
			g.Result(1, g.Sum(b))
			g.Return()
		})
	variants("normGradApply", "normGradApply", "func(dx, dy, x, gamma *float32, n int, mean, rstd, m1, m2 float32)",
		"is dx = rstd·(g-m1-h·m2) with g = dy·gamma, h = (x-mean)·rstd (Acc: +=).", "dx", func(g *vlib.Gen, put func(vlib.Vec)) {
			dy, x, gamma, n := g.Ptr("dy"), g.Ptr("x"), g.Ptr("gamma"), g.Ptr("n")
			mean, rstd, m1, m2 := g.Param("mean"), g.Param("rstd"), g.Param("m1"), g.Param("m2")
			g.Loop(n, func() {
				h := g.Sub(g.Load(g.At(x)), mean)
				g.MulTo(h, rstd)
				v := g.Load(g.At(dy))
				g.MulTo(v, g.Src(g.At(gamma)))
				v = g.Sub(v, m1)
				g.Fnma231(v, h, m2)
				g.MulTo(v, rstd)
				put(v)
			})
			g.Return()
		})
	kernel("rmsApply", "rmsApply", "func(y, x, gamma *float32, n int, rstd float32)", "is y = x·rstd·gamma.", func(g *vlib.Gen) {
		y, x, gamma, n, rstd := g.Ptr("y"), g.Ptr("x"), g.Ptr("gamma"), g.Ptr("n"), g.Param("rstd")
		g.Loop(n, func() {
			h := g.Mul(rstd, g.Src(g.At(x)))
			g.MulTo(h, g.Src(g.At(gamma)))
			g.Store(h, g.At(y))
		})
		g.Return()
	})
	kernel("rmsGradSum", "rmsGradSum", "func(dy, x, gamma *float32, n int, rstd float32) float32",
		"returns Σg·h with g = dy·gamma, h = x·rstd, added up in 16 lanes.", func(g *vlib.Gen) {
			dy, x, gamma, n, rstd := g.Ptr("dy"), g.Ptr("x"), g.Ptr("gamma"), g.Ptr("n"), g.Param("rstd")
			a := g.Zero()
			g.Loop(n, func() {
				h := g.Mul(rstd, g.Src(g.At(x)))
				g.Keep(h)
				v := g.Load(g.At(dy))
				g.MulTo(v, g.Src(g.At(gamma)))
				g.Fma231(a, v, h)
			})
			finish(g, a)
		})
	variants("rmsGradApply", "rmsGradApply", "func(dx, dy, x, gamma *float32, n int, rstd, m float32)",
		"is dx = rstd·(g-h·m) with g = dy·gamma, h = x·rstd (Acc: +=).", "dx", func(g *vlib.Gen, put func(vlib.Vec)) {
			dy, x, gamma, n, rstd, m := g.Ptr("dy"), g.Ptr("x"), g.Ptr("gamma"), g.Ptr("n"), g.Param("rstd"), g.Param("m")
			g.Loop(n, func() {
				h := g.Mul(rstd, g.Src(g.At(x)))
				v := g.Load(g.At(dy))
				g.MulTo(v, g.Src(g.At(gamma)))
				g.Fnma231(v, h, m)
				g.MulTo(v, rstd)
				put(v)
			})
			g.Return()
		})
}

// finish returns the sum of a's lanes.
func finish(g *vlib.Gen, a vlib.Vec) {
	g.Result(0, g.Sum(a))
	g.Return()
}

var negInf = float32(math.Inf(-1))
