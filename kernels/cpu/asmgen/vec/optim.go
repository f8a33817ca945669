package main

import "github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"

// Fields of adamScalars, in order.
const (
	adamGradScale = iota
	adamKeep
	adamBeta1
	adamRest1
	adamBeta2
	adamRest2
	adamRoot2
	adamEps
	adamStep
	adamFields
)

// Fields of momentumScalars, in order.
const (
	momGradScale = iota
	momDecay
	momRate
	momMomentum
	momStep
	momFields
)

func optim() {
	for i, low := range []struct {
		suffix, param string
		narrow        func(g *vlib.Gen, v vlib.Vec, m vlib.Mem)
	}{{"", "", nil}, {"BF16", ", low *uint16", (*vlib.Gen).StoreBF16}, {"F16", ", low *uint16", (*vlib.Gen).StoreF16}} {
		sig := "func(p, d, m, v *float32, n int, s *float32, low *uint16)"
		kernel(fmt2("adamw[%d]", i), "adamw"+low.suffix, sig, "is adamw"+full, func(g *vlib.Gen) {
			p, gr, m, v, n := g.Ptr("p"), g.Ptr("d"), g.Ptr("m"), g.Ptr("v"), g.Ptr("n")
			s := g.Scalars(g.Ptr("s"), adamFields)
			out := g.Ptr("low")
			g.LoopFull(n, func() {
				g.Fetch(p, gr, m, v)
				d, mi := moments(g, s, g.At(gr), g.At(m), g.At(v))
				q := g.Div(mi, d)
				x := g.Load(g.At(p))
				g.MulTo(x, s[adamKeep])
				g.Fnma231(x, q, s[adamStep])
				g.Store(x, g.At(p))
				if low.narrow != nil {
					low.narrow(g, x, g.At16(out))
				}
			})
			g.Return()
		})
	}
	kernel("lambDirection", "lambDirection", "func(p, d, m, v *float32, n int, s *float32)", "is lambDirection"+full, func(g *vlib.Gen) {
		p, gr, m, v, n := g.Ptr("p"), g.Ptr("d"), g.Ptr("m"), g.Ptr("v"), g.Ptr("n")
		s := g.Scalars(g.Ptr("s"), adamFields)
		g.LoopFull(n, func() {
			d, mi := moments(g, s, g.At(gr), g.At(m), g.At(v))
			u := g.Div(g.Mul(mi, s[adamStep]), d)
			g.Fma231(u, g.Load(g.At(p)), s[adamKeep])
			g.Store(u, g.At(gr))
		})
		g.Return()
	})
	kernel("axpy", "axpy", "func(y, x *float32, n int, f float32)", "is y = f·x + y, fused,"+full, func(g *vlib.Gen) {
		y, x, n, f := g.Ptr("y"), g.Ptr("x"), g.Ptr("n"), g.Param("f")
		g.LoopFull(n, func() {
			a := g.Load(g.At(y))
			g.Fma231(a, f, g.At(x))
			g.Store(a, g.At(y))
		})
		g.Return()
	})
	for i, name := range []string{"sgd", "momentum", "nesterov"} {
		kernel(fmt2("momentum[%d]", i), name+"Update", "func(p, d, b *float32, n int, s *float32)", "is momentumUpdate"+full, func(g *vlib.Gen) {
			p, gr, b, n := g.Ptr("p"), g.Ptr("d"), g.Ptr("b"), g.Ptr("n")
			s := g.Scalars(g.Ptr("s"), momFields)
			g.LoopFull(n, func() {
				x := g.Load(g.At(p))
				d := g.Mul(g.Load(g.At(gr)), s[momGradScale])
				g.Fma231(d, x, s[momDecay])
				g.MulTo(d, s[momRate])
				u := d
				if i > 0 {
					u = g.Copy(d)
					g.Fma231(u, g.Load(g.At(b)), s[momMomentum])
					g.Store(u, g.At(b))
				}
				if i > 1 {
					g.Fma231(d, u, s[momMomentum])
					u = d
				}
				g.Fnma231(x, u, s[momStep])
				g.Store(x, g.At(p))
			})
			g.Return()
		})
	}
}

// moments updates the moments in memory and returns Adam's denominator and the
// new first moment.
func moments(g *vlib.Gen, s []vlib.Arg, gr, m, v vlib.Mem) (d, mi vlib.Vec) {
	x := g.Mul(g.Load(gr), s[adamGradScale])
	mi = g.Mul(g.Load(m), s[adamBeta1])
	g.Fma231(mi, x, s[adamRest1])
	g.Store(mi, m)
	g.MulTo(x, x)
	vi := g.Mul(g.Load(v), s[adamBeta2])
	g.Fma231(vi, x, s[adamRest2])
	g.Store(vi, v)
	d = g.Sqrt(vi)
	if g.AVX512 {
		g.Fma213(d, s[adamRoot2].(vlib.Vec), s[adamEps])
		return d, mi
	}
	e := g.CopyScalar(s[adamEps])
	g.Fma231(e, d, s[adamRoot2])
	return e, mi
}
