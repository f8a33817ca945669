package main

import (
	. "github.com/mmcloughlin/avo/build"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

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

// lows are the types of the copy that an update writes, by Half.
var lows = []struct {
	suffix string
	narrow func(g *vlib.Gen, v vlib.Vec, m vlib.Mem)
}{{"", nil}, {"BF16", (*vlib.Gen).StoreBF16}, {"F16", (*vlib.Gen).StoreF16}}

func optim() {
	for i, low := range lows {
		sig := "func(p, d, m, v *float32, n int, s *float32, low *uint16)"
		kernel(fmt2("adamw[%d]", i), "adamw"+low.suffix, sig, "is adamw"+full, func(g *vlib.Gen) {
			p, gr, m, v, n := g.Ptr("p"), g.Ptr("d"), g.Ptr("m"), g.Ptr("v"), g.Ptr("n")
			s := g.Scalars(g.Ptr("s"), adamFields)
			out := g.Ptr("low")
			g.LoopFull(n, func() {
				g.Fetch(p, gr, m, v)
				d, mi := moments(g, s, g.At(gr), g.At(m), g.At(v))
				adamwStep(g, s, g.At(p), d, mi, func(x vlib.Vec) {
					if low.narrow != nil {
						low.narrow(g, x, g.At16(out))
					}
				})
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

// adamwStep moves the parameters at p, and gives what they have become to low.
func adamwStep(g *vlib.Gen, s []vlib.Arg, p vlib.Mem, d, mi vlib.Vec, low func(x vlib.Vec)) {
	q := g.Div(mi, d)
	x := g.Load(p)
	g.MulTo(x, s[adamKeep])
	g.Fnma231(x, q, s[adamStep])
	g.Store(x, p)
	low(x)
}

// moment is where a moment comes from and goes to.
type moment struct {
	read     func() vlib.Vec
	to       vlib.Mem
	top      vlib.Vec // takes the largest magnitude by lane, as bits; nil: nobody asks
	positive bool     // never negative, but perhaps NaN
	decayed  bool     // read times its beta
}

// old returns the moment times its beta.
func (m *moment) old(g *vlib.Gen, beta vlib.Arg) vlib.Vec {
	if m.decayed {
		return m.read()
	}
	return g.Mul(m.read(), beta)
}

func (m *moment) write(g *vlib.Gen, v vlib.Vec) {
	g.Store(v, m.to)
	for i, top := range m.top {
		t := v[i]
		if !m.positive {
			t = g.NewReg()
			g.AndWord(1<<31-1, v[i], t)
		}
		VPMAXUD(t, top, top)
	}
}

// moments updates the moments in memory and returns Adam's denominator and the
// new first moment.
func moments(g *vlib.Gen, s []vlib.Arg, gr, m, v vlib.Mem) (d, mi vlib.Vec) {
	return momentsOf(g, s, gr,
		moment{read: func() vlib.Vec { return g.Load(m) }, to: m},
		moment{read: func() vlib.Vec { return g.Load(v) }, to: v})
}

// momentsOf is moments for any of them.
func momentsOf(g *vlib.Gen, s []vlib.Arg, gr vlib.Mem, m, v moment) (d, mi vlib.Vec) {
	x := g.Mul(g.Load(gr), s[adamGradScale])
	mi = m.old(g, s[adamBeta1])
	g.Fma231(mi, x, s[adamRest1])
	m.write(g, mi)
	g.MulTo(x, x)
	vi := v.old(g, s[adamBeta2])
	g.Fma231(vi, x, s[adamRest2])
	v.write(g, vi)
	d = g.Sqrt(vi)
	if g.AVX512 { // root2 is a register wherever the others may be memory
		g.Fma213(d, s[adamRoot2].(vlib.Vec), s[adamEps])
		return d, mi
	}
	e := g.CopyScalar(s[adamEps])
	g.Fma231(e, d, s[adamRoot2])
	return e, mi
}
