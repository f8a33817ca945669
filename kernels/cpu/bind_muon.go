package cpu

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// muonPiece is the number of elements of a task: its two f32 arrays fit the first-level cache.
const muonPiece = 1 << 11

// muonMomentum is the elementwise part of Muon before the matrices are gathered.
type muonMomentum struct {
	g    gradient // of the span
	m, d []float32
	coef []float32
}

func (k *muonMomentum) run(p *pool.Pool) { p.Run((len(k.m)+muonPiece-1)/muonPiece, k) }

func (k *muonMomentum) RunIndex(i int) {
	lo := i * muonPiece
	hi := min(lo+muonPiece, len(k.m))
	d, m := k.d[lo:hi], k.m[lo:hi]
	if k.g.half.X != nil {
		vec.WidenRow(k.g.half.As, d, k.g.half.X[lo:hi])
		vec.ScaleRow(d, d, k.coef[0], false)
	} else {
		vec.ScaleRow(d, k.g.f32[lo:hi], k.coef[0], false)
	}
	vec.ScaleRow(m, m, graph.MuonMomentum, false)
	vec.AddRow(m, m, d)
	vec.ScaleRow(d, m, graph.MuonMomentum, true)
}

func bindMuonMomentum(b *binding) func() error {
	u := b.update()
	g := b.gradient(0)
	coef := in[float32](b, 1)
	m, d := out[float32](b, 0), out[float32](b, 1)
	if b.err != nil {
		return nil
	}
	var parts []muonMomentum
	for _, s := range u.spans {
		k := muonMomentum{m: m[s.Lo:s.Hi], d: d[s.Lo:s.Hi], coef: coef}
		k.g.f32, k.g.half = g.part(s)
		parts = append(parts, k)
	}
	pool := b.pool
	return func() error {
		for i := range parts {
			parts[i].run(pool)
		}
		return nil
	}
}

// bindMuonApply binds SGD's step along the update.
func bindMuonApply(b *binding) func() error {
	u := b.update()
	d := in[float32](b, 0)
	u.hyper = in[float64](b, 1)
	p := out[float32](b, 0)
	copies := b.copies(u.spans, p, 1)
	if b.err != nil {
		return nil
	}
	var parts []vec.Momentum
	for _, s := range u.spans {
		parts = append(parts, vec.Momentum{P: p[s.Lo:s.Hi], G: d[s.Lo:s.Hi], GradScale: 1, Rate: 1, Decay: u.decay(s)})
	}
	pool := b.pool
	return func() error {
		return runUpdate(parts, copies, pool, func(_ int, k *vec.Momentum) { k.Step = u.lr() })
	}
}
