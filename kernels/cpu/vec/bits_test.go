//go:build linux

package vec

import (
	bin "encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

type runner interface{ Run(*pool.Pool) error }

// kcase makes a kernel with random arguments. make also returns the outputs: []float32, []uint16,
// []int64 or []float64.
type kcase struct {
	name string
	make func(g *gen) (runner, []any)
}

func out(x ...any) []any { return x }

func flip(g *gen) bool { return g.IntN(2) == 0 }

var cases = []kcase{
	{"Add", func(g *gen) (runner, []any) {
		n := g.dim(40000)
		k := &Binary[float32]{Op: Add, A: g.floats(n), B: g.floats(n), Y: g.floats(n), Accumulate: flip(g)}
		if flip(g) {
			k.Y = k.A
		}
		return k, out(k.Y)
	}},
	{"Sub", func(g *gen) (runner, []any) {
		n := g.dim(20000)
		k := &Binary[float32]{Op: Sub, A: g.floats(n), B: g.floats(n), Y: g.floats(n), Accumulate: flip(g)}
		if flip(g) {
			k.Y = k.B
		}
		return k, out(k.Y)
	}},
	{"Mul", func(g *gen) (runner, []any) {
		n := g.dim(20000)
		k := &Binary[float32]{Op: Mul, A: g.floats(n), B: g.floats(n), Y: g.floats(n), Accumulate: flip(g)}
		return k, out(k.Y)
	}},
	{"Scale", func(g *gen) (runner, []any) {
		n := g.dim(20000)
		k := &Scale[float32]{X: g.floats(n), Y: g.floats(n), Factor: g.value(), Accumulate: flip(g)}
		return k, out(k.Y)
	}},
	{"Fill", func(g *gen) (runner, []any) {
		k := &Fill[float32]{Y: g.floats(g.dim(20000)), Value: g.value(), Accumulate: flip(g)}
		if flip(g) {
			k.Value = 0
		}
		return k, out(k.Y)
	}},
	{"Activation", func(g *gen) (runner, []any) {
		n := g.dim(20000)
		k := &Activation[float32]{Act: Act(g.IntN(int(numActs))), X: g.floats(n), Y: g.floats(n)}
		if flip(g) {
			k.Y = k.X
		}
		return k, out(k.Y)
	}},
	{"ActivationGrad", func(g *gen) (runner, []any) {
		n := g.dim(20000)
		k := &ActivationGrad[float32]{Act: Act(g.IntN(int(numActs))), X: g.floats(n), DY: g.floats(n), DX: g.floats(n), Accumulate: flip(g)}
		if !k.Accumulate && flip(g) {
			k.DX = k.DY
		}
		return k, out(k.DX)
	}},
	{"SwiGLU", func(g *gen) (runner, []any) {
		n := g.dim(20000)
		k := &SwiGLU[float32]{Gate: g.floats(n), Up: g.floats(n), Y: g.floats(n)}
		return k, out(k.Y)
	}},
	{"SwiGLUGrad", func(g *gen) (runner, []any) {
		n := g.dim(20000)
		k := &SwiGLUGrad[float32]{DY: g.floats(n), Gate: g.floats(n), Up: g.floats(n), DGate: g.floats(n), DUp: g.floats(n)}
		if flip(g) {
			k.DGate, k.DUp = k.Gate, k.Up
		}
		return k, out(k.DGate, k.DUp)
	}},
	{"LayerNorm", func(g *gen) (runner, []any) {
		n, c := g.dim(40), max(g.dim(1000), 1)
		k := &LayerNorm[float32]{N: n, C: c, X: g.floats(n * c), Gamma: g.floats(c), Beta: g.floats(c), Eps: 1e-5,
			Y: g.floats(n * c), Mean: g.floats(n), Rstd: g.floats(n)}
		if flip(g) {
			k.Y = k.X
		}
		return k, out(k.Y, k.Mean, k.Rstd)
	}},
	{"LayerNormGrad", func(g *gen) (runner, []any) {
		n, c := g.dim(40), max(g.dim(1000), 1)
		k := &LayerNormGrad[float32]{N: n, C: c, DY: g.floats(n * c), X: g.floats(n * c), Gamma: g.floats(c),
			Mean: g.floats(n), Rstd: g.positive(n), DX: g.floats(n * c), DGamma: g.floats(c), DBeta: g.floats(c),
			AccumulateDX: flip(g), AccumulateDGamma: flip(g), AccumulateDBeta: flip(g)}
		if !k.AccumulateDX && flip(g) {
			k.DX = k.DY
		}
		return k, out(k.DX, k.DGamma, k.DBeta)
	}},
	{"RMSNorm", func(g *gen) (runner, []any) {
		n, c := g.dim(40), max(g.dim(1000), 1)
		k := &RMSNorm[float32]{N: n, C: c, X: g.floats(n * c), Gamma: g.floats(c), Eps: 1e-6, Y: g.floats(n * c), Rstd: g.floats(n)}
		return k, out(k.Y, k.Rstd)
	}},
	{"RMSNormGrad", func(g *gen) (runner, []any) {
		n, c := g.dim(40), max(g.dim(1000), 1)
		k := &RMSNormGrad[float32]{N: n, C: c, DY: g.floats(n * c), X: g.floats(n * c), Gamma: g.floats(c),
			Rstd: g.positive(n), DX: g.floats(n * c), DGamma: g.floats(c), AccumulateDX: flip(g), AccumulateDGamma: flip(g)}
		if !k.AccumulateDX && flip(g) {
			k.DX = k.DY
		}
		return k, out(k.DX, k.DGamma)
	}},
	{"Softmax", func(g *gen) (runner, []any) {
		n, c := g.dim(40), g.dim(1000)
		k := &Softmax[float32]{N: n, C: c, X: g.floats(n * c), Y: g.floats(n * c)}
		if flip(g) {
			k.Y = k.X
		}
		return k, out(k.Y)
	}},
	{"SoftmaxGrad", func(g *gen) (runner, []any) {
		n, c := g.dim(40), g.dim(1000)
		k := &SoftmaxGrad[float32]{N: n, C: c, DY: g.floats(n * c), Y: g.floats(n * c), DX: g.floats(n * c), Accumulate: flip(g)}
		if !k.Accumulate && flip(g) {
			k.DX = k.DY
		}
		return k, out(k.DX)
	}},
	{"CrossEntropy", func(g *gen) (runner, []any) {
		n, v := g.dim(30), max(g.dim(3000), 1)
		k := &CrossEntropy[float32]{N: n, V: v, Logits: g.floats(n * v), Targets: g.classes(n, -1, v), LSE: g.floats(n), Loss: []float64{g.Float64()}}
		if flip(g) {
			k.DLogits, k.RowLoss, k.Scale = k.Logits, guarded[float64](g, n), 0.125
		}
		return k, out(k.Logits, k.LSE, k.Loss)
	}},
	{"CrossEntropyGrad", func(g *gen) (runner, []any) {
		n, v := g.dim(30), max(g.dim(3000), 1)
		k := &CrossEntropyGrad[float32]{N: n, V: v, Logits: g.floats(n * v), Targets: g.classes(n, -1, v), LSE: g.floats(n), DLogits: g.floats(n * v), Scale: 0.3}
		return k, out(k.DLogits)
	}},
	{"Sum", func(g *gen) (runner, []any) {
		n := g.dim(300000)
		k := &Sum[float32]{X: g.floats(n), Y: []float64{g.Float64()}, Work: guarded[float64](g, SumWork(n)), Accumulate: flip(g)}
		return k, out(k.Y)
	}},
	{"SqSum", func(g *gen) (runner, []any) {
		k := &SqSum{X: g.floats(g.dim(200000)), Acc: guarded[int64](g, exact.Limbs)}
		k.Acc[33] = 12
		return k, out(k.Acc)
	}},
	{"ColumnSum", func(g *gen) (runner, []any) {
		n, c := g.dim(60), g.dim(700)
		k := &ColumnSum[float32]{N: n, C: c, X: g.floats(n * c), Y: g.floats(c), Accumulate: flip(g)}
		return k, out(k.Y)
	}},
	{"AddPos", func(g *gen) (runner, []any) {
		s, c := max(g.dim(30), 1), max(g.dim(300), 1)
		n := s*g.IntN(4) + g.IntN(3)
		k := &AddPos[float32]{N: n, C: c, Seq: s, X: g.floats(n * c), Pos: g.floats((s + g.IntN(3)) * c), Y: g.floats(n * c)}
		return k, out(k.Y)
	}},
	{"AddPosGrad", func(g *gen) (runner, []any) {
		s, c := max(g.dim(30), 1), max(g.dim(300), 1)
		n := s*g.IntN(4) + g.IntN(3)
		k := &AddPosGrad[float32]{N: n, C: c, Seq: s, DY: g.floats(n * c), DPos: g.floats((s + g.IntN(3)) * c), Accumulate: flip(g)}
		return k, out(k.DPos)
	}},
	{"Embed", func(g *gen) (runner, []any) {
		n, v, c := g.dim(200), max(g.dim(50), 1), g.dim(300)
		k := &Embed[float32]{N: n, V: v, C: c, Tokens: g.classes(n, 0, v), Table: g.floats(v * c), Y: g.floats(n * c)}
		return k, out(k.Y)
	}},
	{"EmbedGrad", func(g *gen) (runner, []any) {
		n, v, c := g.dim(200), max(g.dim(50), 1), g.dim(300)
		k := &EmbedGrad[float32]{N: n, V: v, C: c, Tokens: g.classes(n, 0, v), DY: g.floats(n * c), DTable: g.floats(v * c), Accumulate: flip(g)}
		return k, out(k.DTable)
	}},
	{"Rope", func(g *gen) (runner, []any) {
		n, h, d, s := g.dim(70), 1+g.IntN(4), 2*(1+g.IntN(70)), max(g.dim(30), 1)
		k := &Rope[float32]{N: n, Heads: h, D: d, Seq: s, X: g.floats(n * h * d), Y: g.floats(n * h * d), Table: g.floats(s * d), Inverse: flip(g)}
		if flip(g) {
			k.Y = k.X
		}
		return k, out(k.Y)
	}},
	{"RopeTable", func(g *gen) (runner, []any) {
		n, d := g.dim(70), 2*(1+g.IntN(70))
		k := &RopeTable[float32]{Seq: n, D: d, Theta: 10000, Table: g.floats(n * d)}
		if flip(g) {
			k.Factor, k.LowFreq, k.HighFreq, k.Original = 8, 1, 4, 64
		}
		return k, out(k.Table)
	}},
	{"Dropout", func(g *gen) (runner, []any) {
		e := max(g.dim(40000), 1)
		n := e * g.IntN(3)
		k := &Dropout[float32]{X: g.floats(n), Y: g.floats(n), Elems: e, P: g.Float64(), Seed: g.Uint64(), Site: g.Uint32(), Sample: g.Uint64()}
		if flip(g) {
			k.Y = k.X
		}
		return k, out(k.Y)
	}},
	{"Col2Im", func(g *gen) (runner, []any) {
		w := randomWindow(g)
		k := &Col2Im[float32]{Window: w, DCols: g.floats(w.B * w.OutH() * w.OutW() * w.KH * w.KW * w.C), DX: g.floats(w.B * w.H * w.W * w.C), Accumulate: flip(g)}
		return k, out(k.DX)
	}},
	{"Im2Col", func(g *gen) (runner, []any) {
		w := randomWindow(g)
		k := &Im2Col[float32]{Window: w, X: g.floats(w.B * w.H * w.W * w.C), Cols: g.floats(w.B * w.OutH() * w.OutW() * w.KH * w.KW * w.C)}
		return k, out(k.Cols)
	}},
	{"MaxPool", func(g *gen) (runner, []any) {
		w := randomWindow(g)
		w.Pad = min(w.Pad, w.KH-1, w.KW-1)
		k := &MaxPool[float32]{Window: w, X: g.floats(w.B * w.H * w.W * w.C), Y: g.floats(w.B * w.OutH() * w.OutW() * w.C)}
		return k, out(k.Y)
	}},
	{"MaxPoolGrad", func(g *gen) (runner, []any) {
		w := randomWindow(g)
		w.Pad = min(w.Pad, w.KH-1, w.KW-1)
		k := &MaxPoolGrad[float32]{Window: w, X: g.floats(w.B * w.H * w.W * w.C), DX: g.floats(w.B * w.H * w.W * w.C),
			DY: g.floats(w.B * w.OutH() * w.OutW() * w.C), Accumulate: flip(g)}
		return k, out(k.DX)
	}},
	{"AdamW", func(g *gen) (runner, []any) {
		k := &AdamW{Moments: randomMoments(g)}
		if as := Half(g.IntN(3)); as != NoHalf {
			k.LowAs, k.Low = as, guarded[uint16](g, len(k.P))
		}
		return k, out(k.P, k.M, k.V, k.Low)
	}},
	{"LAMBDirection", func(g *gen) (runner, []any) {
		k := &LAMBDirection{Moments: randomMoments(g)}
		return k, out(k.G, k.M, k.V)
	}},
	{"LAMBApply", func(g *gen) (runner, []any) {
		n := g.dim(40000)
		k := &LAMBApply{P: g.floats(n), U: g.floats(n), LR: 0.01, Ratio: g.Float64()}
		return k, out(k.P)
	}},
	{"Momentum", func(g *gen) (runner, []any) {
		n := g.dim(40000)
		k := &Momentum{P: g.floats(n), G: g.floats(n), GradScale: g.Float64(), Decay: 0.1, Rate: g.Float64(), Step: g.Float64()}
		if g.IntN(3) > 0 {
			k.B, k.Momentum, k.Nesterov = g.floats(n), 0.9, flip(g)
		}
		return k, out(k.P, k.B)
	}},
	{"SumTree", func(g *gen) (runner, []any) {
		n, r := g.dim(20000), 1+g.IntN(20)
		k := &SumTree{Dst: g.floats(n), Accumulate: flip(g)}
		for range r {
			k.Srcs = append(k.Srcs, g.floats(n))
		}
		if flip(g) {
			k.Dst = k.Srcs[g.IntN(r)]
		}
		return k, out(k.Dst)
	}},
	{"SumParts", func(g *gen) (runner, []any) {
		n, r := g.dim(20000), 1+g.IntN(20)
		k := &SumParts{Dst: g.floats(n), Parts: g.floats(n * r), Sequential: flip(g), Accumulate: flip(g)}
		return k, out(k.Dst)
	}},
	{"SumLeaves", func(g *gen) (runner, []any) {
		n := g.dim(20000)
		k := &SumLeaves{Dst: g.floats(n), As: Half(g.IntN(3)), Accumulate: flip(g)}
		for range 1 + g.IntN(20) {
			x := g.floats(n)
			if k.As == NoHalf {
				k.Srcs = append(k.Srcs, x)
				continue
			}
			h := guarded[uint16](g, n)
			narrow(k.As, h, x)
			k.Halves = append(k.Halves, h)
		}
		return k, out(k.Dst)
	}},
	{"SumTreeAll", func(g *gen) (runner, []any) {
		n, r := g.dim(20000), 1+g.IntN(20)
		k, outs := &SumTreeAll{}, out()
		for range r {
			k.Bufs = append(k.Bufs, g.floats(n))
			outs = append(outs, k.Bufs[len(k.Bufs)-1])
		}
		return k, outs
	}},
	{"Narrow", func(g *gen) (runner, []any) {
		n := g.dim(40000)
		k := &Narrow{To: BF16 + Half(g.IntN(2)), Src: g.floats(n), Dst: guarded[uint16](g, n)}
		for i := range k.Src {
			if g.IntN(3) == 0 {
				k.Src[i] = float32(math.Ldexp(g.Float64()-0.5, g.IntN(60)-35))
			}
		}
		return k, out(k.Dst)
	}},
	{"Widen", func(g *gen) (runner, []any) {
		n := g.dim(40000)
		k := &Widen{From: BF16 + Half(g.IntN(2)), Src: guarded[uint16](g, n), Dst: g.floats(n)}
		for i := range k.Src {
			k.Src[i] = uint16(g.Uint32())
		}
		return k, out(k.Dst)
	}},
}

func randomWindow(g *gen) Window {
	w := Window{B: 1 + g.IntN(3), H: 1 + g.IntN(9), W: 1 + g.IntN(9), C: 1 + g.IntN(40), Stride: 1 + g.IntN(3), Pad: g.IntN(3)}
	w.KH, w.KW = 1+g.IntN(min(3, w.H)), 1+g.IntN(min(3, w.W))
	return w
}

func randomMoments(g *gen) Moments {
	n := g.dim(40000)
	return Moments{P: g.floats(n), G: g.floats(n), M: g.floats(n), V: g.positive(n), AdamStep: AdamStep{GradScale: 0.7, LR: 1e-3,
		Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, BC1: 0.19, BC2: 0.0975}}
}

// levels returns the levels that this CPU can run, the reference (portable) first.
func levels() []level.Level {
	var ls []level.Level
	for l := level.Portable; l <= level.Best(); l++ {
		ls = append(ls, l)
	}
	return ls
}

// snapshot copies outputs and replaces every NaN by the same one.
func snapshot(outs []any) []any {
	var s []any
	for _, o := range outs {
		switch o := o.(type) {
		case []float32:
			b := make([]uint32, len(o))
			for i, v := range o {
				b[i] = math.Float32bits(v)
				if v != v {
					b[i] = 0x7fc00000
				}
			}
			s = append(s, b)
		case []float64:
			b := make([]uint64, len(o))
			for i, v := range o {
				b[i] = math.Float64bits(v)
				if v != v {
					b[i] = 0x7ff8 << 48
				}
			}
			s = append(s, b)
		case []uint16:
			s = append(s, append([]uint16(nil), o...))
		case []int64: // accumulators: the same value may have different digits
			b := append([]int64(nil), o...)
			if len(b) == exact.Limbs {
				exact.Accumulator(b).Normalize()
			}
			s = append(s, b)
		default:
			panic(fmt.Sprintf("snapshot of %T", o))
		}
	}
	return s
}

// Every kernel gives the same bits at every SIMD level and for any number of threads, and touches
// nothing beyond its slices.
func TestSameBitsAtEveryLevelAndThreadCount(t *testing.T) {
	p3 := pool.New(3)
	defer p3.Close()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			for seed := range long.Or(uint64(16), 40) {
				one := func(l level.Level, p *pool.Pool) []any {
					defer useLevel(l)()
					g := newGen(t, seed, seed%2 == 1)
					defer g.free()
					k, outs := c.make(g)
					require.NoError(t, k.Run(p))
					return snapshot(outs)
				}
				want := one(level.Portable, nil)
				for _, l := range levels() {
					for _, p := range []*pool.Pool{nil, p3} {
						got := one(l, p)
						for i := range want {
							requireSame(t, want[i], got[i], "seed %d, output %d at %v", seed, i, l)
						}
					}
				}
			}
		})
	}
}

func requireSame(t *testing.T, want, got any, format string, args ...any) {
	t.Helper()
	w, ok := want.([]uint32)
	g, _ := got.([]uint32)
	if ok && slices.Equal(w, g) || reflect.DeepEqual(want, got) {
		return
	}
	if ok && len(w) == len(g) {
		for i := range w {
			if w[i] != g[i] {
				require.Failf(t, "bits differ", "%s: element %d of %d: want %#x (%g), got %#x (%g)", fmt.Sprintf(format, args...), i, len(w),
					w[i], math.Float32frombits(w[i]), g[i], math.Float32frombits(g[i]))
			}
		}
	}
	require.Equal(t, want, got, append([]any{format}, args...)...)
}

// Dimensions of 0 and 1 give a result or an error, never a crash.
func TestZeroAndOne(t *testing.T) {
	for _, c := range cases {
		for _, fix := range []int{1, 2} {
			for _, l := range levels() {
				restore := useLevel(l)
				g := newGen(t, 5, false)
				g.fix = fix
				k, _ := c.make(g)
				require.NoError(t, k.Run(nil), "%s with dimensions of %d", c.name, fix-1)
				g.free()
				restore()
			}
		}
	}
}

func TestNoAllocations(t *testing.T) {
	p := pool.New(2)
	defer p.Close()
	for _, c := range cases {
		for _, l := range levels() {
			restore := useLevel(l)
			g := newGen(t, 8, false)
			k, _ := c.make(g)
			require.Zero(t, alloctest.PerRun(20, func() { _ = k.Run(p) }), "%s at %v", c.name, l)
			g.free()
			restore()
		}
	}
}

// A hash over all kernels' outputs matches a fixed value, which was the same on amd64 at every
// level and on arm64.
func TestBitsAreFixed(t *testing.T) {
	h := fnv.New64a()
	for _, c := range cases {
		for seed := range uint64(3) {
			g := newGen(t, seed, false)
			k, outs := c.make(g)
			require.NoError(t, k.Run(nil))
			for _, o := range snapshot(outs) {
				require.NoError(t, bin.Write(h, bin.LittleEndian, o))
			}
			g.free()
		}
	}
	require.Equal(t, uint64(0xed5cd0c1576d3db5), h.Sum64())
}
