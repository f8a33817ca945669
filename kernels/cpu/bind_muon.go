package cpu

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// bySpan prepares work on the elements of each span, a piece at a time.
func bySpan(spans []kernels.Span, each func(s kernels.Span, lo, hi int)) []pieces {
	var list []pieces
	for _, s := range spans {
		list = append(list, pieces{s.Hi - s.Lo, func(lo, hi int) { each(s, s.Lo+lo, s.Lo+hi) }})
	}
	return list
}

func bindMuonMomentum(b *binding) func() error {
	u := b.update()
	g := b.gradient(0)
	u.coef = in[float32](b, 1)
	m, d := out[float32](b, 0), out[float32](b, 1)
	if b.err != nil {
		return nil
	}
	work := bySpan(u.spans, func(s kernels.Span, lo, hi int) {
		x, coef := d[lo:hi], u.coef[0]
		if g.half.X != nil {
			vec.WidenRow(g.half.As, x, g.half.X[lo:hi])
		} else {
			copy(x, g.f32[lo:hi])
		}
		for i, v := range x {
			// The conversions keep compilers from fusing, which would change bits.
			h, k := float32(coef*v), lo+i
			m[k] = float32(graph.MuonMomentum*m[k]) + h
			x[i] = float32(graph.MuonMomentum*m[k]) + h
		}
	})
	pool := b.pool
	return func() error {
		for i := range work {
			work[i].run(pool)
		}
		return nil
	}
}

func bindMuonApply(b *binding) func() error {
	u := b.update()
	d := in[float32](b, 0)
	u.hyper = in[float64](b, 1)
	p := out[float32](b, 0)
	copies := b.copies(u.spans, p, 1)
	if b.err != nil {
		return nil
	}
	work := bySpan(u.spans, func(s kernels.Span, lo, hi int) {
		lr, decay := float32(u.lr()), float32(u.decay(s))
		for i := lo; i < hi; i++ {
			p[i] -= float32(lr * (d[i] + float32(decay*p[i])))
		}
	})
	pool := b.pool
	return func() error {
		for i := range work {
			work[i].run(pool)
		}
		return runCopies(copies, pool)
	}
}
