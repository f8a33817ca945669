package optest

import (
	"math/rand/v2"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
)

// largeShapes has kinds whose kernels divide their work, with shapes below and above the limits.
var largeShapes = map[graph.Kind]func(*rand.Rand) spec{
	graph.Embed: func(r *rand.Rand) spec {
		n, v, c := upTo(r, 700), upTo(r, 90), 8*upTo(r, 100)
		return spec{in: of(dims{n}, dims{v, c}), out: of(dims{n, c}), classes: int(v)}
	},
	graph.EmbedGrad: func(r *rand.Rand) spec {
		n, v, c := upTo(r, 700), upTo(r, 90), packed(r, upTo(r, 600))
		return spec{in: of(dims{n}, dims{n, c}), out: of(dims{v, c}), classes: int(v)}
	},
	graph.AddPosGrad: func(r *rand.Rand) spec {
		b, s, c := upTo(r, 9), upTo(r, 90), upTo(r, 300)
		return spec{attr: graph.PosAttr{Seq: s}, in: of(lead(r, b*s, c)), out: of(dims{s + r.Int64N(4), c})}
	},
	graph.LayerNorm: func(r *rand.Rand) spec {
		n, c := upTo(r, 5), wide(r)
		return spec{attr: graph.NormAttr{Eps: 1e-5}, in: of(dims{n, c}, dims{c}, dims{c}), out: of(dims{n, c}, dims{n}, dims{n})}
	},
	graph.LayerNormGrad: func(r *rand.Rand) spec {
		n, c := tall(r)
		return spec{attr: graph.NormAttr{Eps: 1e-5}, in: of(dims{n, c}, dims{n, c}, dims{c}, dims{n}, dims{n}), out: of(dims{n, c}, dims{c}, dims{c})}
	},
	graph.RMSNorm: func(r *rand.Rand) spec {
		n, c := upTo(r, 5), wide(r)
		return spec{attr: graph.NormAttr{Eps: 1e-6}, in: of(dims{n, c}, dims{c}), out: of(dims{n, c}, dims{n})}
	},
	graph.RMSNormGrad: func(r *rand.Rand) spec {
		n, c := tall(r)
		return spec{attr: graph.NormAttr{Eps: 1e-6}, in: of(dims{n, c}, dims{n, c}, dims{c}, dims{n}), out: of(dims{n, c}, dims{c})}
	},
	graph.SumParts: func(r *rand.Rand) spec { return partsOf(r, upTo(r, 70), upTo(r, 90000)) },
	graph.Sum:      func(r *rand.Rand) spec { return spec{in: of(dims{upTo(r, 1<<19)}), out: of(dims{1})} },
	graph.Dropout: func(r *rand.Rand) spec {
		x := dims{upTo(r, 4), upTo(r, 30000)}
		return spec{attr: graph.DropoutAttr{P: r.Float64() * 0.9, Site: 1<<32 - 1, Elems: x[1]}, in: of(x, dims{graph.NumKey}), out: of(x), classes: 1}
	},
	graph.Rope: func(r *rand.Rand) spec { return ropeShapes(r, 2000, 65) },

	graph.SqSum: func(r *rand.Rand) spec {
		s, a := largeUnit(r)
		s.attr, s.in, s.out = a, of(dims{a.Len}), of(dims{exact.Limbs})
		return s
	},
	graph.ParamNorms: func(r *rand.Rand) spec { return normShapes(r, true) },
}

// wide returns a width of a norm, often that of a model, up to 9,000.
func wide(r *rand.Rand) int64 {
	return []int64{129, 768, 1024, 1025, 1600, 4096, 4100, 8192, upTo(r, 9000)}[r.IntN(9)]
}

// tall returns rows and columns of a norm's gradient.
func tall(r *rand.Rand) (n, c int64) {
	if r.IntN(2) == 0 {
		return upTo(r, 3), wide(r)
	}
	return upTo(r, 1400), upTo(r, 130)
}

// largeUnit draws a unit with more parameters than fit in one launch, one of them with several
// blocks.
func largeUnit(r *rand.Rand) (spec, graph.ShardAttr) {
	n := make([]int64, 14+upTo(r, 60))
	for i := range n {
		n[i] = upTo(r, 900)
	}
	n[r.IntN(len(n))] = upTo(r, 200000)
	return unitOf(r, n)
}
