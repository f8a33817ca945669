package interp_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/interp"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/model"
)

// The gradient checks of package graph have one small shape a kind. These are
// random shapes, across the sizes at which kernels change course (16 lanes, a
// tile of 64 keys, a K-block of 256), and whole models.

const (
	invCount  = 0.125
	lossScale = 4.0
)

// inputs fills a program's inputs and parameters from a seed.
func inputs[T num.Float](t *testing.T, p *graph.Program, seed uint64, params [][]float64) *interp.World[T] {
	w := interp.New[T](p)
	rng := rand.New(rand.NewPCG(seed, 10))
	for i := range p.Params {
		require.NoError(t, w.Set(p.Params[i].Value, as[T](params[i])))
	}
	if x := p.Find("x"); x != graph.NoBuf {
		require.NoError(t, w.Set(x, as[T](normals(rng, p.Buf(x).Elems(), 1))))
	}
	for _, id := range []graph.BufID{p.Tokens, p.Targets} {
		if id == graph.NoBuf {
			continue
		}
		v, err := w.I32(0, id)
		require.NoError(t, err)
		for i := range v {
			v[i] = rng.Int32N(classesOf(p))
			if id == p.Targets && i%7 == 3 {
				v[i] = -1
			}
		}
	}
	if p.Hyper != graph.NoBuf {
		h, err := w.F64(0, p.Hyper)
		require.NoError(t, err)
		h[graph.HyperInvCount], h[graph.HyperLossScale] = invCount, lossScale
	}
	if p.Key != graph.NoBuf {
		k, err := w.I64(0, p.Key)
		require.NoError(t, err)
		k[graph.KeySeed], k[graph.KeyStep], k[graph.KeySample] = int64(seed), 2, 5
	}
	loss, err := w.F64(0, p.Loss)
	require.NoError(t, err)
	loss[0] = 0
	return w
}

// classesOf is what tokens and targets are below.
func classesOf(p *graph.Program) int32 {
	for _, op := range p.Sections[0].Phases[0].Ops {
		switch op.Kind {
		case graph.Embed, graph.HeadLoss, graph.HeadLossGrad:
			return int32(p.Buf(op.In[1]).Shape[0])
		case graph.CrossEntropy:
			s := p.Buf(op.In[0]).Shape
			return int32(s[len(s)-1])
		}
	}
	return 1
}

func as[T num.Float](v []float64) []T {
	out := make([]T, len(v))
	for i := range v {
		out[i] = T(v[i])
	}
	return out
}

func normals(rng *rand.Rand, n int64, std float64) []float64 {
	out := make([]float64, n)
	for i := range out {
		out[i] = std * rng.NormFloat64()
	}
	return out
}

func loss[T num.Float](t *testing.T, p *graph.Program, seed uint64, params [][]float64) (float64, *interp.World[T]) {
	w := inputs[T](t, p, seed, params)
	require.NoError(t, w.Run(p.Sections[0].Name))
	l, err := w.F64(0, p.Loss)
	require.NoError(t, err)
	return l[0], w
}

// checkDirections compares, for every trainable parameter, the gradient's
// product with two random directions with the central difference of the loss
// along them: all elements take part. It also compares float32 with float64.
func checkDirections(t *testing.T, p *graph.Program, seed uint64, std float64) {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 20))
	params := make([][]float64, len(p.Params))
	for i := range params {
		params[i] = normals(rng, p.Params[i].Elems(), std)
		if p.Params[i].Init == graph.InitOnes {
			for k := range params[i] {
				params[i][k]++
			}
		}
	}
	q, err := graph.Differentiate(p)
	require.NoError(t, err)
	for _, op := range q.Sections[0].Phases[0].Ops {
		require.NoError(t, graph.Check(q, &op))
	}
	base, w64 := loss[float64](t, q, seed, params)
	forward, _ := loss[float64](t, p, seed, params)
	require.Equal(t, forward, base, "seed %d: the forward alone, and with its backward", seed)
	single, w32 := loss[float32](t, q, seed, params)
	require.InEpsilon(t, 1+math.Abs(base), 1+math.Abs(single), 1e-4, "seed %d", seed)

	const scale = invCount * lossScale
	for i := range q.Params {
		pr := &q.Params[i]
		if pr.Frozen {
			require.Equal(t, graph.NoBuf, pr.Grad)
			continue
		}
		g, err := w64.Floats(0, pr.Grad)
		require.NoError(t, err)
		g32, err := w32.Floats(0, pr.Grad)
		require.NoError(t, err)
		norm, diff := 0.0, 0.0
		for k := range g {
			norm += g[k] * g[k]
			diff += (g[k] - float64(g32[k])) * (g[k] - float64(g32[k]))
		}
		norm = math.Sqrt(norm)
		require.LessOrEqual(t, math.Sqrt(diff), 2e-4*(norm+1e-3), "seed %d: %s in float32", seed, pr.Name)
		require.False(t, math.IsNaN(norm), "seed %d: %s", seed, pr.Name)
		for range 2 {
			dir := normals(rng, pr.Elems(), 1)
			const h = 1e-6
			want, was := 0.0, params[i]
			for k := range dir {
				want += g[k] * dir[k]
			}
			at := func(step float64) float64 {
				params[i] = make([]float64, len(was))
				for k := range was {
					params[i][k] = was[k] + step*dir[k]
				}
				l, _ := loss[float64](t, p, seed, params)
				return l
			}
			numeric := scale * (at(h) - at(-h)) / (2 * h)
			params[i] = was
			require.InDelta(t, numeric, want, 1e-6*(1+norm*math.Sqrt(float64(len(dir))))+1e-7*math.Abs(base),
				"seed %d: %s %v along a direction", seed, pr.Name, pr.Shape)
		}
	}

	// Joining operations changes no bit.
	fused := graph.Fuse(q)
	fl, wf := loss[float32](t, fused, seed, params)
	require.Equal(t, single, fl, "seed %d: fused", seed)
	for i := range q.Params {
		if g := q.Params[i].Grad; g != graph.NoBuf {
			want, _ := w32.Floats(0, g)
			got, err := wf.Floats(0, fused.Params[i].Grad)
			require.NoError(t, err)
			require.Equal(t, want, got, "seed %d: %s fused", seed, q.Params[i].Name)
		}
	}
}

func program(t *testing.T, f func(b *graph.Builder)) *graph.Program {
	b := graph.NewBuilder()
	b.Unit("u")
	f(b)
	p, err := b.Program()
	require.NoError(t, err)
	return p
}

func param(b *graph.Builder, name string, shape ...int64) graph.Value {
	return b.Param(name, graph.Normal(1), shape...)
}

// weigh is a loss whose gradient by y is different at every element.
func weigh(b *graph.Builder, y graph.Value) {
	b.SumLoss("loss", b.Mul("weigh", y, param(b, "c", b.Shape(y)...)))
}

// randomPrograms draw shapes for what has inner dimensions.
var randomPrograms = map[string]func(r *rand.Rand, b *graph.Builder){
	"linear": func(r *rand.Rand, b *graph.Builder) {
		m, k, n := 1+r.Int64N(20), 1+r.Int64N(300), 1+r.Int64N(20)
		dims := []*int64{&m, &k, &n}
		r.Shuffle(3, func(i, j int) { *dims[i], *dims[j] = *dims[j], *dims[i] })
		x := b.Scale("s", param(b, "a", m, k), 0.5)
		w, trans := []int64{k, n}, r.IntN(2) == 0
		if trans {
			w = []int64{n, k}
		}
		bias := graph.Value{}
		if r.IntN(2) == 0 {
			bias = param(b, "bias", n)
		}
		y := b.Linear("y", x, param(b, "w", w...), bias, graph.LinearAttr{TransW: trans})
		if r.IntN(2) == 0 {
			y = b.Activation("act", y, []graph.ActKind{graph.ActGELU, graph.ActGELUTanh, graph.ActSiLU, graph.ActReLU}[r.IntN(4)])
		}
		weigh(b, y)
	},
	"norms": func(r *rand.Rand, b *graph.Builder) {
		n, c := 1+r.Int64N(9), 2+r.Int64N(100)
		x := b.Scale("s", param(b, "a", n, c), 0.5)
		x = b.LayerNorm("ln", x, param(b, "gamma", c), param(b, "beta", c), 1e-5)
		x = b.RMSNorm("rms", x, param(b, "gain", c), 1e-6)
		weigh(b, b.Softmax("soft", x))
	},
	"attention": func(r *rand.Rand, b *graph.Builder) {
		kv := 1 + r.Int64N(3)
		a := graph.AttentionAttr{
			Batch: 1 + r.Int64N(2), Seq: 1 + r.Int64N(150), KVHeads: kv, Heads: kv * (1 + r.Int64N(3)), HeadDim: 2 * (1 + r.Int64N(9)),
			Scale: 0.2 + r.Float64(), Causal: r.IntN(3) > 0,
		}
		n := a.Batch * a.Seq
		if r.IntN(2) == 0 {
			weigh(b, b.AttentionPacked("y", param(b, "qkv", n, (a.Heads+2*kv)*a.HeadDim), a))
			return
		}
		turn := graph.RopeAttr{Heads: a.Heads, HeadDim: a.HeadDim, Seq: a.Seq, Theta: 10000}
		q := b.Rope("rq", param(b, "q", n, a.Heads*a.HeadDim), turn)
		turn.Heads = kv
		k := b.Rope("rk", param(b, "k", n, kv*a.HeadDim), turn)
		weigh(b, b.Attention("y", q, k, param(b, "v", n, kv*a.HeadDim), a))
	},
	"head": func(r *rand.Rand, b *graph.Builder) {
		n, c, v := 1+r.Int64N(300), 1+r.Int64N(20), 1+r.Int64N(40)
		b.HeadLoss("loss", b.Scale("s", param(b, "a", n, c), 0.5), param(b, "w", v, c), b.Targets(n, 1))
	},
	"convolution": func(r *rand.Rand, b *graph.Builder) {
		a := graph.ConvAttr{KH: 1 + r.Int64N(3), KW: 1 + r.Int64N(3), Stride: 1 + r.Int64N(2)}
		a.Pad = r.Int64N(min(a.KH, a.KW))
		h, w, c, o := 4+r.Int64N(6), 4+r.Int64N(6), 1+r.Int64N(20), 1+r.Int64N(20)
		y := b.Conv2D("y", param(b, "a", 2, h, w, c), param(b, "w", o, a.KH*a.KW*c), param(b, "bias", o), a)
		weigh(b, b.MaxPool("pool", y, graph.ConvAttr{KH: 2, KW: 2, Stride: 1}))
	},
	"embedding": func(r *rand.Rand, b *graph.Builder) {
		rows, seq, v, c := 1+r.Int64N(4), 1+r.Int64N(9), 1+r.Int64N(30), 1+r.Int64N(200)
		x := b.Embed("e", b.Tokens(rows, seq), param(b, "table", v, c))
		x = b.AddPos("p", x, param(b, "pos", seq+r.Int64N(3), c), seq)
		weigh(b, b.Dropout("d", x, r.Float64()*0.9, rows))
	},
	"swiglu": func(r *rand.Rand, b *graph.Builder) {
		n, c := 1+r.Int64N(9), 1+r.Int64N(100)
		weigh(b, b.SwiGLU("y", param(b, "gate", n, c), param(b, "up", n, c)))
	},
}

func TestGradientsOfRandomShapes(t *testing.T) {
	for name, f := range randomPrograms {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(8) {
				r := rand.New(rand.NewPCG(seed, 30))
				checkDirections(t, program(t, func(b *graph.Builder) { f(r, b) }), seed, 1)
			}
		})
	}
}

// models are tiny instances of every family.
var models = map[string]struct {
	config     model.Config
	batch, seq int
	freeze     string
}{
	"gpt2": {config: model.Config{
		Family: model.GPT2, Layers: 2, Width: 12, Heads: 3, Vocab: 19, Positions: 9, TiedHead: true,
	}, batch: 2, seq: 7},
	"gpt2, untied, dropout, exact gelu": {config: model.Config{
		Family: model.GPT2, Layers: 2, Width: 8, Heads: 2, Vocab: 11, Positions: 5, Act: graph.ActGELU, EmbdDropout: 0.2, ResidDropout: 0.3,
	}, batch: 3, seq: 5},
	"gpt2, embeddings and the first block frozen": {config: model.Config{
		Family: model.GPT2, Layers: 2, Width: 8, Heads: 2, Vocab: 11, Positions: 5, TiedHead: false,
	}, batch: 2, seq: 5, freeze: "*h.0.*"},
	"llama, grouped queries": {config: model.Config{
		Family: model.Llama, Layers: 2, Width: 12, Heads: 6, KVHeads: 2, HeadDim: 4, FFN: 20, Vocab: 23, Positions: 80,
	}, batch: 2, seq: 70},
	"llama, tied, scaled rotary, biases": {config: model.Config{
		Family: model.Llama, Layers: 1, Width: 8, Heads: 2, KVHeads: 1, FFN: 12, Vocab: 13, Positions: 6, TiedHead: true,
		QKVBias: true, OutBias: true, MLPBias: true, RopeTheta: 500,
		RopeScaling: &model.RopeScaling{Factor: 8, LowFreq: 1, HighFreq: 4, OriginalPositions: 32},
	}, batch: 2, seq: 6},
	"gemma2": {config: model.Config{
		Family: model.Gemma2, Layers: 2, Width: 12, Heads: 4, KVHeads: 2, HeadDim: 6, FFN: 20, Vocab: 23, Positions: 80, TiedHead: true,
		Gemma2Config: model.Gemma2Config{AttnCap: 1.5, LogitCap: 2, Window: 7, QueryScalar: 5},
	}, batch: 2, seq: 70},
	"mlp": {config: model.Config{Family: model.MLP, Inputs: 17, Hidden: []int{9, 33}, Classes: 5}, batch: 6, seq: 1},
	"cnn": {config: model.Config{Family: model.CNN, Height: 12, ImgWidth: 12, Chans: 3, Hidden: []int{4, 5}, Classes: 7}, batch: 3, seq: 1},
}

func buildModel(t *testing.T, name string) *graph.Program {
	m := models[name]
	p, err := model.Build(m.config, model.Train, m.batch, m.seq)
	require.NoError(t, err)
	if m.freeze != "" {
		_, err := graph.Freeze(p, m.freeze)
		require.NoError(t, err)
	}
	return p
}

func TestGradientsOfModels(t *testing.T) {
	for name := range models {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(2) {
				checkDirections(t, buildModel(t, name), seed, 0.3)
			}
		})
	}
}

// TestCollectives: every rank has the sums in the order of the tree, in its
// shard, gathered, and in place; and its part of what every rank sends.
func TestCollectives(t *testing.T) {
	for _, ranks := range []int{1, 2, 3, 5, 8} {
		t.Run(fmt.Sprint(ranks), func(t *testing.T) {
			p := &graph.Program{Mesh: []graph.Axis{{Name: "data", Size: ranks}}}
			n := int64(4)
			full := p.AddBuffer(graph.Buffer{Name: "full", Shape: []int64{n * int64(ranks)}})
			shard := p.AddBuffer(graph.Buffer{Name: "shard", Shape: []int64{n}, View: &graph.View{Base: full, RankStride: 4 * n}})
			all := p.AddBuffer(graph.Buffer{Name: "all", Shape: []int64{n}})
			send := p.AddBuffer(graph.Buffer{Name: "send", DType: graph.U8, Shape: []int64{n * int64(ranks)}})
			recv := p.AddBuffer(graph.Buffer{Name: "recv", DType: graph.U8, Shape: []int64{n * int64(ranks)}})
			attr := graph.GroupAttr{Axis: 0}
			op := func(k graph.Kind, in []graph.BufID, out graph.BufID, m graph.Mode) graph.Op {
				return graph.Op{Kind: k, Name: string(k), Attr: attr, In: in, Out: []graph.Out{{Buf: out, Mode: m}}, Work: graph.NoBuf, Skip: graph.NoBuf}
			}
			p.Sections = []graph.Section{{Name: "s", Phases: []graph.Phase{{Name: "p", Ops: []graph.Op{
				op(graph.ReduceScatter, []graph.BufID{full}, shard, graph.Write),
				op(graph.AllGather, []graph.BufID{shard}, full, graph.Write),
				op(graph.AllReduce, nil, all, graph.ReadWrite),
				op(graph.AllToAll, []graph.BufID{send}, recv, graph.Write),
			}}}}}
			w := interp.New[float32](p)
			rng := rand.New(rand.NewPCG(uint64(ranks), 0))
			values := make([][]float32, ranks)
			for r := range ranks {
				values[r] = as[float32](normals(rng, n*int64(ranks), 1))
				f, err := w.Floats(r, full)
				require.NoError(t, err)
				copy(f, values[r])
				a, err := w.Floats(r, all)
				require.NoError(t, err)
				copy(a, values[r])
				s, err := w.U8(r, send)
				require.NoError(t, err)
				for i := range s {
					s[i] = uint8(16*r + i/int(n))
				}
			}
			require.NoError(t, w.Run("s"))
			want := func(i int) float32 {
				v := make([]float32, ranks)
				for r := range v {
					v[r] = values[r][i]
				}
				for len(v) > 1 { // pairs of neighbours, an odd one left over: the same tree
					var next []float32
					for j := 0; j < len(v); j += 2 {
						if j+1 < len(v) {
							next = append(next, v[j]+v[j+1])
						} else {
							next = append(next, v[j])
						}
					}
					v = next
				}
				return v[0]
			}
			for r := range ranks {
				f, _ := w.Floats(r, full)
				for i := range f {
					require.Equal(t, want(i), f[i], "rank %d element %d", r, i)
				}
				a, _ := w.Floats(r, all)
				for i := range a {
					require.Equal(t, want(i), a[i])
				}
				got, _ := w.U8(r, recv)
				for i := range got {
					require.EqualValues(t, 16*(i/int(n))+r, got[i], "rank %d element %d: part %d of rank %d", r, i, r, i/int(n))
				}
			}
		})
	}
}
