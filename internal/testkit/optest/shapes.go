package optest

import (
	"math/rand/v2"
	"slices"
	"unsafe"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
)

// spec holds the shapes of one random operation, in the kind table's order.
type spec struct {
	attr    any
	in, out [][]int64
	classes int // tokens, targets and positions are below it
	slots   int // the first of a cache's is below it

	// Updates: the unit, cut over world ranks.
	unit   *graph.Unit
	params []graph.Param
	world  int

	types     []graph.DType // of a cast or a sum of parts: from, to
	overflows bool          // accumulators may hold Inf and NaN
	finite    bool          // no infinities among the values
}

// Bytes returns the memory of a slice's elements as bytes.
func Bytes[T any](v []T) []byte {
	if len(v) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), len(v)*int(unsafe.Sizeof(v[0])))
}

// Values returns bytes as a slice of T; it is the inverse of Bytes.
func Values[T any](b []byte) []T {
	if len(b) == 0 {
		return nil
	}
	var z T
	return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), len(b)/int(unsafe.Sizeof(z)))
}

type dims = []int64

func of(s ...dims) [][]int64 { return s }

// upTo returns a random number from 1 to n.
func upTo(r *rand.Rand, n int64) int64 { return 1 + r.Int64N(n) }

// some returns a random number from 1 to n, often a small one.
func some(r *rand.Rand, n int64) int64 {
	if r.IntN(3) == 0 {
		n = min(n, 40)
	}
	return upTo(r, n)
}

// lead splits n rows into leading dimensions in one of two ways.
func lead(r *rand.Rand, n, cols int64) dims {
	if n%2 == 0 && r.IntN(2) == 0 {
		return dims{2, n / 2, cols}
	}
	return dims{n, cols}
}

var actKinds = []graph.ActKind{graph.ActGELUTanh, graph.ActGELU, graph.ActSiLU, graph.ActReLU}

func anyAct(r *rand.Rand) graph.ActKind { return actKinds[r.IntN(len(actKinds))] }

// shapes draws small operations; bigShapes draws ones whose workspace reaches its bounds.
var shapes = map[graph.Kind]func(*rand.Rand) spec{
	graph.Embed: func(r *rand.Rand) spec {
		n, v, c := upTo(r, 40), upTo(r, 20), upTo(r, 200)
		return sometimesSliced(r, v, spec{in: of(dims{n}, dims{v, c}), out: of(dims{n, c}), classes: int(v)})
	},
	graph.EmbedGrad: func(r *rand.Rand) spec {
		n, v, c := upTo(r, 40), upTo(r, 20), packed(r, upTo(r, 200))
		return sometimesSliced(r, v, spec{in: of(dims{n}, dims{n, c}), out: of(dims{v, c}), classes: int(v)})
	},
	graph.AddPos: func(r *rand.Rand) spec {
		b, s, p, c := upTo(r, 4), upTo(r, 9), r.Int64N(4), upTo(r, 70)
		rows := sometimesPart(r, b*s, s)
		x := lead(r, b*s, c)
		return spec{attr: graph.PosAttr{Seq: s, Rows: rows}, in: of(x, dims{s + p, c}, dims{b * s}), out: of(x)}
	},
	graph.AddPosGrad: func(r *rand.Rand) spec {
		b, s, p, c := upTo(r, 4), upTo(r, 9), r.Int64N(4), upTo(r, 70)
		rows := sometimesPart(r, b*s, s)
		return spec{attr: graph.PosAttr{Seq: s, Rows: rows}, in: of(lead(r, b*s, c), dims{b * s}), out: of(dims{s + p, c})}
	},
	graph.Linear:        func(r *rand.Rand) spec { return linearShapes(r, graph.Linear, 70) },
	graph.LinearAct:     func(r *rand.Rand) spec { return linearShapes(r, graph.LinearAct, 70) },
	graph.LinearGradX:   func(r *rand.Rand) spec { return linearShapes(r, graph.LinearGradX, 70) },
	graph.LinearGradAct: func(r *rand.Rand) spec { return linearShapes(r, graph.LinearGradAct, 70) },
	graph.LinearGradW:   func(r *rand.Rand) spec { return linearShapes(r, graph.LinearGradW, 70) },
	graph.LinearGradWB:  func(r *rand.Rand) spec { return linearShapes(r, graph.LinearGradWB, 70) },
	graph.BiasGrad: func(r *rand.Rand) spec {
		n, c := upTo(r, 50), upTo(r, 200)
		return spec{in: of(lead(r, n, c)), out: of(dims{c})}
	},
	graph.LayerNorm: func(r *rand.Rand) spec {
		n, c := upTo(r, 12), upTo(r, 200)
		x := lead(r, n, c)
		return spec{attr: graph.NormAttr{Eps: 1e-5}, in: of(x, dims{c}, dims{c}), out: of(x, dims{n}, dims{n})}
	},
	graph.LayerNormGrad: func(r *rand.Rand) spec {
		n, c := upTo(r, 12), upTo(r, 200)
		x := lead(r, n, c)
		return spec{attr: graph.NormAttr{Eps: 1e-5}, in: of(x, x, dims{c}, dims{n}, dims{n}), out: of(x, dims{c}, dims{c})}
	},
	graph.RMSNorm: func(r *rand.Rand) spec {
		n, c := upTo(r, 12), upTo(r, 200)
		x := lead(r, n, c)
		return spec{attr: graph.NormAttr{Eps: 1e-6, PlusOne: r.IntN(3) == 0}, in: of(x, dims{c}), out: of(x, dims{n})}
	},
	graph.RMSNormGrad: func(r *rand.Rand) spec {
		n, c := upTo(r, 12), upTo(r, 200)
		x := lead(r, n, c)
		return spec{attr: graph.NormAttr{Eps: 1e-6, PlusOne: r.IntN(3) == 0}, in: of(x, x, dims{c}, dims{n}), out: of(x, dims{c})}
	},
	graph.Softmax:     func(r *rand.Rand) spec { return rowsOf(r, nil, 1, 1) },
	graph.SoftmaxGrad: func(r *rand.Rand) spec { return rowsOf(r, nil, 2, 1) },
	graph.Activation:  func(r *rand.Rand) spec { return rowsOf(r, graph.ActAttr{Act: anyAct(r)}, 1, 1) },
	graph.ActivationGrad: func(r *rand.Rand) spec {
		return rowsOf(r, graph.ActAttr{Act: anyAct(r)}, 2, 1)
	},
	graph.SoftCap:     func(r *rand.Rand) spec { return rowsOf(r, graph.CapAttr{Cap: 0.5 + 3*r.Float64()}, 1, 1) },
	graph.SoftCapGrad: func(r *rand.Rand) spec { return rowsOf(r, graph.CapAttr{Cap: 0.5 + 3*r.Float64()}, 2, 1) },
	graph.SwiGLU:      func(r *rand.Rand) spec { return rowsOf(r, nil, 2, 1) },
	graph.SwiGLUGrad:  func(r *rand.Rand) spec { return rowsOf(r, nil, 3, 2) },
	graph.Add:         func(r *rand.Rand) spec { return rowsOf(r, nil, 2, 1) },
	graph.Sub:         func(r *rand.Rand) spec { return rowsOf(r, nil, 2, 1) },
	graph.Mul:         func(r *rand.Rand) spec { return rowsOf(r, nil, 2, 1) },
	graph.Scale:       func(r *rand.Rand) spec { return rowsOf(r, graph.ScaleAttr{Factor: r.NormFloat64()}, 1, 1) },
	graph.Sum: func(r *rand.Rand) spec {
		return spec{in: of(dims{upTo(r, 3), upTo(r, 40000)}), out: of(dims{1})}
	},
	graph.SumGrad:  func(r *rand.Rand) spec { return spec{in: of(dims{1}), out: of(lead(r, upTo(r, 9), upTo(r, 99)))} },
	graph.LossSeed: func(*rand.Rand) spec { return spec{in: of(dims{graph.NumHyper}), out: of(dims{1})} },
	graph.Fill: func(r *rand.Rand) spec {
		return spec{attr: graph.FillAttr{Value: float64(r.IntN(5))}, out: of(dims{upTo(r, 3), upTo(r, 40000)})}
	},
	graph.Cast: func(r *rand.Rand) spec {
		x := dims{upTo(r, 3), upTo(r, 9000)}
		types := [][]graph.DType{{graph.F32, graph.BF16}, {graph.F32, graph.F16}, {graph.BF16, graph.F32}, {graph.F16, graph.F32}}
		return spec{in: of(x), out: of(x), types: types[r.IntN(len(types))]}
	},
	graph.SumParts: func(r *rand.Rand) spec { return partsOf(r, 1+upTo(r, 20), upTo(r, 9000)) },
	graph.OverflowCheck: func(r *rand.Rand) spec {
		return spec{in: of(dims{exact.Limbs}), out: of(dims{1}), classes: 1, overflows: true}
	},
	graph.LossScaleUpdate: func(r *rand.Rand) spec {
		a := graph.LossScaleAttr{Growth: 2, Backoff: 0.5, Floor: []float64{0.01, 1}[r.IntN(2)], Interval: upTo(r, 2), Hysteresis: r.Int64N(4)}
		return spec{attr: a, in: of(dims{1}), out: of(dims{graph.NumScale}), classes: 2}
	},
	graph.SelectRow: func(r *rand.Rand) spec {
		n, c := upTo(r, 12), upTo(r, 80)
		return spec{in: of(lead(r, n, c), dims{graph.NumKey}), out: of(dims{1, c}), classes: int(n)}
	},
	graph.Rope:            func(r *rand.Rand) spec { return ropeShapes(r, 7, 9) },
	graph.RopeAt:          func(r *rand.Rand) spec { return ropeAtShapes(r, 9) },
	graph.AttentionCached: func(r *rand.Rand) spec { return cachedShapes(r, 70) },
	graph.Dropout: func(r *rand.Rand) spec {
		b, n := upTo(r, 4), upTo(r, 300)
		x := dims{b, n}
		return spec{
			attr: graph.DropoutAttr{P: r.Float64() * 0.9, Site: r.Int64N(100), Elems: n, Part: sometimesPart(r, b*n, n)},
			in:   of(x, dims{graph.NumKey}), out: of(x), classes: 1,
		}
	},
	graph.Attention:     func(r *rand.Rand) spec { return attentionShapes(r, false, 70) },
	graph.AttentionGrad: func(r *rand.Rand) spec { return attentionShapes(r, true, 70) },

	graph.Im2Col: func(r *rand.Rand) spec {
		x, cols, _, a := images(r)
		return spec{attr: a, in: of(x), out: of(cols)}
	},
	graph.Col2Im: func(r *rand.Rand) spec {
		x, cols, _, a := images(r)
		return spec{attr: a, in: of(cols), out: of(x)}
	},
	graph.MaxPool: func(r *rand.Rand) spec {
		x, _, y, a := images(r)
		return spec{attr: a, in: of(x), out: of(y)}
	},
	graph.MaxPoolGrad: func(r *rand.Rand) spec {
		x, _, y, a := images(r)
		return spec{attr: a, in: of(y, x), out: of(x)}
	},

	graph.CrossEntropy: func(r *rand.Rand) spec {
		n, v := upTo(r, 20), upTo(r, 300)
		return spec{in: of(lead(r, n, v), dims{n}), out: of(dims{1}, dims{n}), classes: int(v)}
	},
	graph.CrossEntropyGrad: func(r *rand.Rand) spec {
		n, v := upTo(r, 20), upTo(r, 300)
		x := lead(r, n, v)
		return spec{in: of(x, dims{n}, dims{n}, dims{graph.NumHyper}), out: of(x), classes: int(v)}
	},
	// Numbers of rows below and above one chunk and two.
	graph.HeadLoss:     func(r *rand.Rand) spec { return headShapes(r, false, 700, 40, 20) },
	graph.HeadLossGrad: func(r *rand.Rand) spec { return headShapes(r, true, 700, 40, 20) },
	graph.HeadStats:    func(r *rand.Rand) spec { return headSliceShapes(r, false, 700, 40, 20) },
	graph.HeadLSE: func(r *rand.Rand) spec {
		s, n := spec{}, upTo(r, 50)
		slices := sliced(r, 1+upTo(r, 9), &s)
		s.in, s.out = of(dims{slices * n, graph.HeadStatistics}, dims{n}), of(dims{1}, dims{n})
		return s
	},
	graph.HeadSliceGrad: func(r *rand.Rand) spec { return headSliceShapes(r, true, 700, 40, 20) },

	graph.SqSum: func(r *rand.Rand) spec {
		s, a := units(r)
		s.attr, s.in, s.out = a, of(dims{a.Len}), of(dims{exact.Limbs})
		return s
	},
	graph.ClipCoef: func(r *rand.Rand) spec {
		return spec{attr: graph.ClipAttr{Max: r.Float64() * float64(r.IntN(2))}, in: of(dims{exact.Limbs}, dims{graph.NumHyper}), out: of(dims{1}, dims{1})}
	},
	graph.Quantize:      func(r *rand.Rand) spec { return quantShapes(r, graph.Quantize) },
	graph.Dequantize:    func(r *rand.Rand) spec { return quantShapes(r, graph.Dequantize) },
	graph.DequantizeSum: func(r *rand.Rand) spec { return quantShapes(r, graph.DequantizeSum) },
	graph.ParamNorms:    func(r *rand.Rand) spec { return normShapes(r, false) },
	graph.NewtonSchulz:  func(r *rand.Rand) spec { return newtonSchulzShapes(r, 60) },
}

func newtonSchulzShapes(r *rand.Rand, most int64) spec {
	m := dims{upTo(r, most), upTo(r, most)}
	return spec{attr: graph.NewtonSchulzAttr{Axis: -1, Ranks: 1, Factor: 0.1 + r.Float64()}, in: of(m), out: of(m), finite: true}
}

// bigShapes has the kinds that need workspace.
var bigShapes = map[graph.Kind]func(*rand.Rand) spec{
	graph.Linear:        func(r *rand.Rand) spec { return linearShapes(r, graph.Linear, 4000) },
	graph.LinearAct:     func(r *rand.Rand) spec { return linearShapes(r, graph.LinearAct, 4000) },
	graph.LinearGradX:   func(r *rand.Rand) spec { return linearShapes(r, graph.LinearGradX, 4000) },
	graph.LinearGradAct: func(r *rand.Rand) spec { return linearShapes(r, graph.LinearGradAct, 4000) },
	graph.LinearGradW:   func(r *rand.Rand) spec { return linearShapes(r, graph.LinearGradW, 4000) },
	graph.LinearGradWB:  func(r *rand.Rand) spec { return linearShapes(r, graph.LinearGradWB, 4000) },
	graph.NewtonSchulz:  func(r *rand.Rand) spec { return newtonSchulzShapes(r, 3000) },
	graph.Rope:          func(r *rand.Rand) spec { return ropeShapes(r, 3000, 65) },
	graph.RopeAt:        func(r *rand.Rand) spec { return ropeAtShapes(r, 65) },

	graph.AttentionCached: func(r *rand.Rand) spec { return cachedShapes(r, 3000) },
	graph.Attention:       func(r *rand.Rand) spec { return attentionShapes(r, false, 3000) },
	graph.AttentionGrad:   func(r *rand.Rand) spec { return attentionShapes(r, true, 3000) },
	graph.HeadLoss:        func(r *rand.Rand) spec { return headShapes(r, false, 3000, 50000, 3000) },
	graph.HeadLossGrad:    func(r *rand.Rand) spec { return headShapes(r, true, 3000, 50000, 3000) },
	graph.HeadStats:       func(r *rand.Rand) spec { return headSliceShapes(r, false, 3000, 50000, 3000) },
	graph.HeadSliceGrad:   func(r *rand.Rand) spec { return headSliceShapes(r, true, 3000, 50000, 3000) },
	graph.Sum:             func(r *rand.Rand) spec { return spec{in: of(dims{upTo(r, 1<<20)}), out: of(dims{1})} },
}

// bigHalfShapes has the kinds that need workspace only for 16-bit values.
var bigHalfShapes = map[graph.Kind]func(*rand.Rand) spec{
	graph.EmbedGrad: func(r *rand.Rand) spec {
		n, v, c := upTo(r, 1<<16), upTo(r, 1<<16), upTo(r, 1<<12)
		return spec{in: of(dims{n}, dims{n, c}), out: of(dims{v, c}), classes: int(v)}
	},
}

// packed returns n or a nearby multiple of 16 bytes of any type. Kernels load 16 bytes at a time
// from the latter only.
func packed(r *rand.Rand, n int64) int64 {
	if r.IntN(2) == 0 {
		return (n + 7) / 8 * 8
	}
	return n
}

// partsOf returns a sum of parts of n elements.
func partsOf(r *rand.Rand, parts, n int64) spec {
	n = packed(r, n)
	types := [][]graph.DType{{graph.F32, graph.F32}, {graph.BF16, graph.F32}, {graph.F16, graph.F32}, {graph.F64, graph.F64}}
	return spec{attr: graph.SumPartsAttr{Order: graph.SumOrder(r.IntN(int(graph.NumSumOrders)))}, in: of(dims{parts, n}), out: of(dims{n}), types: types[r.IntN(len(types))]}
}

func rowsOf(r *rand.Rand, attr any, ins, outs int) spec {
	x := lead(r, upTo(r, 12), upTo(r, 300))
	s := spec{attr: attr}
	for range ins {
		s.in = append(s.in, x)
	}
	for range outs {
		s.out = append(s.out, x)
	}
	return s
}

func linearShapes(r *rand.Rand, kind graph.Kind, most int64) spec {
	m, k, n := some(r, most), some(r, most), some(r, most)
	if r.IntN(3) == 0 { // beyond a K-block
		switch kind {
		case graph.Linear, graph.LinearAct:
			k += 256
		case graph.LinearGradX, graph.LinearGradAct:
			n += 256
		default:
			m += 256
		}
	}
	a := graph.LinearAttr{TransW: r.IntN(2) == 0}
	w := dims{k, n}
	if a.TransW {
		w = dims{n, k}
	}
	x, y := lead(r, m, k), dims{m, n}
	if len(x) == 3 {
		y = dims{2, m / 2, n}
	}
	switch kind {
	case graph.Linear, graph.LinearAct:
		if kind == graph.LinearAct || r.IntN(2) == 0 {
			a.Act = anyAct(r)
		}
		return spec{attr: a, in: of(x, w, dims{n}), out: of(y, y)}
	case graph.LinearGradX:
		return spec{attr: a, in: of(y, w), out: of(x)}
	case graph.LinearGradAct:
		a.Act = anyAct(r)
		return spec{attr: a, in: of(y, w, x), out: of(x)}
	case graph.LinearGradWB:
		return spec{attr: a, in: of(x, y), out: of(w, dims{n})}
	}
	return spec{attr: a, in: of(x, y), out: of(w)}
}

func ropeShapes(r *rand.Rand, seq, half int64) spec {
	a := graph.RopeAttr{Heads: upTo(r, 3), HeadDim: 2 * upTo(r, half), Seq: upTo(r, seq), Theta: 10000, Inverse: r.IntN(2) == 0}
	if r.IntN(2) == 0 {
		a.ScaleFactor, a.LowFreq, a.HighFreq, a.OriginalPositions = 8, 1, 4, 8192
	}
	n := a.Seq * upTo(r, 3)
	x := lead(r, n, a.Heads*a.HeadDim)
	return spec{attr: a, in: of(x, dims{n}), out: of(x)}
}

func attentionShapes(r *rand.Rand, grad bool, seq int64) spec {
	kv := upTo(r, 3)
	a := graph.AttentionAttr{
		Batch: upTo(r, 3), Seq: upTo(r, seq), KVHeads: kv, Heads: kv * upTo(r, 3), HeadDim: upTo(r, 40),
		Scale: 0.1 + r.Float64(), Causal: r.IntN(2) == 0, Packed: r.IntN(2) == 0,
	}
	if r.IntN(3) == 0 {
		a.Cap = 1 + r.Float64()
	}
	if a.Causal && r.IntN(3) == 0 {
		a.Window = upTo(r, a.Seq)
	}
	n := a.Batch * a.Seq
	y, lse := dims{n, a.Heads * a.HeadDim}, dims{n * a.Heads}
	q := of(y, dims{n, kv * a.HeadDim}, dims{n, kv * a.HeadDim})
	if a.Packed {
		q = of(dims{n, (a.Heads + 2*kv) * a.HeadDim})
	}
	ins, outs := slices.Clone(q), of(y, lse)
	if grad {
		ins, outs = append(ins, y, lse, y), q
	}
	if a.Causal {
		ins = append(ins, dims{n})
	}
	return spec{attr: a, in: ins, out: outs}
}

func ropeAtShapes(r *rand.Rand, half int64) spec {
	a := ropeShapes(r, 9, half).attr.(graph.RopeAttr)
	x := dims{a.Seq, a.Heads * a.HeadDim}
	return spec{attr: a, in: of(x, dims{a.Seq}), out: of(x), classes: 500}
}

// cachedShapes draws attention of the last rows over caches, which may have more rows and more
// slots than used.
func cachedShapes(r *rand.Rand, seq int64) spec {
	a := attentionShapes(r, false, seq).attr.(graph.AttentionAttr)
	a.Causal = true
	more, slots, n := r.Int64N(90), r.Int64N(3), a.Batch*a.Seq
	q, kv, cache := dims{n, a.Heads * a.HeadDim}, dims{n, a.KVHeads * a.HeadDim}, dims{a.Batch + slots, a.Seq + more, a.KVHeads * a.HeadDim}
	s := spec{attr: a, in: of(q, kv, kv), out: of(q, cache, cache), classes: int(more) + 1, slots: int(slots) + 1}
	if a.Packed {
		s.in = of(dims{n, q[1] + 2*kv[1]})
	}
	s.in = append(s.in, dims{n}, dims{graph.NumKey})
	return s
}

func images(r *rand.Rand) (x, cols, y dims, a graph.ConvAttr) {
	for {
		a = graph.ConvAttr{KH: upTo(r, 4), KW: upTo(r, 4), Stride: upTo(r, 3)}
		a.Pad = r.Int64N(min(a.KH, a.KW))
		x = dims{upTo(r, 3), upTo(r, 9), upTo(r, 9), packed(r, upTo(r, 20))}
		oh, ow := a.OutSize(x[1], a.KH), a.OutSize(x[2], a.KW)
		if oh > 0 && ow > 0 {
			return x, dims{x[0] * oh * ow, a.KH * a.KW * x[3]}, dims{x[0], oh, ow, x[3]}, a
		}
	}
}

func headShapes(r *rand.Rand, grad bool, rows, vocab, width int64) spec {
	n, v, c := some(r, rows), upTo(r, vocab), some(r, width)
	x := lead(r, n, c)
	s := spec{in: of(x, dims{v, c}, dims{n}), out: of(dims{1}), classes: int(v)}
	if r.IntN(3) == 0 {
		s.attr = graph.CapAttr{Cap: 1 + r.Float64()}
	}
	if grad {
		s.in, s.out = append(s.in, dims{graph.NumHyper}), append(s.out, x, dims{v, c})
	}
	return s
}

// sliced draws a vocabulary divided into slices of each tokens; the operation has one of them. It
// returns the number of slices.
func sliced(r *rand.Rand, each int64, s *spec) int64 {
	slices := upTo(r, 5)
	a := graph.SliceAttr{Axis: -1, PerRank: slices, Index: r.Int64N(slices), Each: each, Total: slices*each - r.Int64N(each)}
	s.attr, s.classes = a, int(a.Total)
	return slices
}

// sometimesSliced divides the vocabulary into slices of v tokens, in half of the cases.
func sometimesSliced(r *rand.Rand, v int64, s spec) spec {
	if r.IntN(2) == 0 {
		sliced(r, v, &s)
	}
	return s
}

// sometimesPart makes the n elements one of several equal parts of complete groups of size, in half
// of the cases.
func sometimesPart(r *rand.Rand, n, size int64) graph.SliceAttr {
	if r.IntN(2) == 0 {
		return graph.SliceAttr{}
	}
	parts := size * upTo(r, 3) // so many times n is a multiple of size
	return graph.SliceAttr{Axis: -1, PerRank: parts, Index: r.Int64N(parts), Each: n, Total: parts * n}
}

func headSliceShapes(r *rand.Rand, grad bool, rows, vocab, width int64) spec {
	n, v, c := some(r, rows), upTo(r, vocab), some(r, width)
	x := lead(r, n, c)
	s := spec{in: of(x, dims{v, c}, dims{n}), out: of(dims{n, graph.HeadStatistics})}
	sliced(r, v, &s)
	if grad {
		s.in, s.out = append(s.in, dims{n}, dims{graph.NumHyper}), of(x, dims{v, c})
	}
	return s
}

// units draws a unit of parameters with padding between them, some frozen,
// some without decay, over several ranks.
func units(r *rand.Rand) (spec, graph.ShardAttr) {
	n := make([]int64, upTo(r, 5))
	for i := range n {
		n[i] = upTo(r, 1500)
	}
	return unitOf(r, n)
}

// unitOf draws a unit of parameters of the given lengths.
func unitOf(r *rand.Rand, lengths []int64) (spec, graph.ShardAttr) {
	s := spec{unit: &graph.Unit{Name: "u"}, world: int(upTo(r, 4)), classes: 1}
	for i, n := range lengths {
		s.params = append(s.params, graph.Param{
			Name: string(rune('a' + i)), Shape: dims{n}, Decay: r.IntN(2) == 0, Frozen: r.IntN(4) == 0,
			Value: graph.NoBuf, Grad: graph.NoBuf,
		})
		s.unit.Segments = append(s.unit.Segments, graph.Segment{Param: i, Len: n, Flat: s.unit.FlatLen})
		s.unit.FlatLen += (n + 255) / 256 * 256
	}
	per := int64(s.world) * 256
	s.unit.FlatLen = (s.unit.FlatLen + per - 1) / per * per
	a := graph.ShardAttr{Axis: 0, Len: s.unit.FlatLen / int64(s.world)}
	if r.IntN(3) == 0 {
		a = graph.ShardAttr{Axis: -1, Len: s.unit.FlatLen}
	}
	return s, a
}

func normShapes(r *rand.Rand, large bool) spec {
	info, _ := graph.InfoOf(graph.ParamNorms)
	return updateShapes(r, info.In, info.Out, large)
}

// updateShapes draws a unit and the operands of an update over its shard.
func updateShapes(r *rand.Rand, ins, outs []graph.Operand, large bool) spec {
	unit := units
	if large {
		unit = largeUnit
	}
	s, a := unit(r)
	s.attr = graph.UpdateAttr{
		Shard: a, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, Trust: 0.02, Nesterov: r.IntN(2) == 0, Clip: r.IntN(2) == 0, AdaptAll: r.IntN(2) == 0,
	}
	params := int64(len(s.params))
	shape := func(o graph.Operand) dims {
		switch {
		case o.Name == "coef":
			return dims{1}
		case o.Name == "hyper":
			return dims{graph.NumHyper}
		case o.Name == "norms":
			return dims{2 * params * exact.Limbs}
		case o.Per == graph.PerParam:
			return dims{params}
		}
		return dims{a.Len}
	}
	s.in, s.out = nil, nil
	for _, o := range ins {
		s.in = append(s.in, shape(o))
	}
	for _, o := range outs {
		if o.ScaleOf == "" {
			s.out = append(s.out, shape(o))
		}
	}
	return s
}

// quantShapes draws a unit's flat buffer, or a part of it, or rows that belong to no unit.
func quantShapes(r *rand.Rand, kind graph.Kind) spec {
	s, a := units(r)
	q := graph.QuantAttr{Block: graph.QuantBlock, Parts: 1, Shard: a}
	if a.Axis < 0 {
		q.Parts = int64(s.world)
	}
	x := dims{a.Len}
	if r.IntN(2) == 0 {
		s = spec{classes: 1}
		q = graph.QuantAttr{Block: upTo(r, 300), Parts: upTo(r, 5)}
		x = dims{q.Parts * upTo(r, 9), q.Block}
	}
	n := x[0]
	if len(x) > 1 {
		n *= x[1]
	}
	if kind == graph.DequantizeSum {
		q.Shard, q.Order = graph.ShardAttr{}, graph.SumOrder(r.IntN(int(graph.NumSumOrders)))
	} else {
		n /= q.Parts
	}
	s.attr, s.in, s.out = q, of(x), of(dims{q.Bytes(n)})
	if kind != graph.Quantize {
		s.in, s.out = s.out, s.in
	}
	return s
}
