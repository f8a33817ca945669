package graph_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/interp"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// Scalars that the checks set.
const (
	invCount  = 0.25
	lossScale = 2.0
)

// world returns a program's memory with all inputs set. Parameters and float inputs are uniform in
// [−1, 1), at least 0.01 from zero because relu has a corner there. Targets and tokens are within
// limits; some targets are −1.
func world[T num.Float](t *testing.T, p *graph.Program, seed uint64, params [][]float64) *interp.World[T] {
	t.Helper()
	w := interp.New[T](p)
	rng := rand.New(rand.NewPCG(seed, 1))
	for i := range p.Params {
		require.NoError(t, w.Set(p.Params[i].Value, convert[T](params[i])))
	}
	if x := p.Find("x"); x != graph.NoBuf {
		require.NoError(t, w.Set(x, convert[T](values(rng, p.Buf(x).Elems()))))
	}
	if s := p.Find("starts"); s != graph.NoBuf { // two documents a row
		rows, seq := p.Buf(s).Shape[0], p.Buf(s).Shape[1]
		v := make([]T, rows*seq)
		for i := range v {
			if second := int64(i)/seq + 1; int64(i)%seq >= second {
				v[i] = T(second)
			}
		}
		require.NoError(t, w.Set(s, v))
	}
	ints := func(id graph.BufID, limit int32, holes bool) {
		if id == graph.NoBuf {
			return
		}
		v, err := w.I32(0, id)
		require.NoError(t, err)
		for i := range v {
			v[i] = rng.Int32N(limit)
			if holes && i%5 == 3 {
				v[i] = -1
			}
		}
	}
	limit := classes(p)
	ints(p.Tokens, limit, false)
	ints(p.Targets, limit, true)
	if p.Hyper != graph.NoBuf {
		h, err := w.F64(0, p.Hyper)
		require.NoError(t, err)
		h[graph.HyperInvCount], h[graph.HyperLossScale] = invCount, lossScale
	}
	if p.Key != graph.NoBuf {
		k, err := w.I64(0, p.Key)
		require.NoError(t, err)
		k[graph.KeySeed], k[graph.KeyStep], k[graph.KeySample] = 7, 3, 11
	}
	loss, err := w.F64(0, p.Loss)
	require.NoError(t, err)
	loss[0] = 0
	return w
}

// classes returns the smallest number of rows of a table or of logits in the program.
func classes(p *graph.Program) int32 {
	n := int64(math.MaxInt32)
	for _, op := range p.Sections[0].Phases[0].Ops {
		switch op.Kind {
		case graph.Embed:
			n = min(n, p.Buf(op.In[1]).Shape[0])
		case graph.HeadLoss, graph.HeadLossGrad:
			n = min(n, p.Buf(op.In[1]).Shape[0])
		case graph.CrossEntropy:
			n = min(n, p.Buf(op.In[0]).Shape[1])
		}
	}
	return int32(n)
}

func convert[T num.Float](v []float64) []T {
	out := make([]T, len(v))
	for i := range v {
		out[i] = T(v[i])
	}
	return out
}

func values(rng *rand.Rand, n int64) []float64 {
	out := make([]float64, n)
	for i := range out {
		v := 2*rng.Float64() - 1
		out[i] = v + math.Copysign(0.01, v)
	}
	return out
}

func randomParams(p *graph.Program, seed uint64) [][]float64 {
	rng := rand.New(rand.NewPCG(seed, 2))
	out := make([][]float64, len(p.Params))
	for i := range out {
		out[i] = values(rng, p.Params[i].Elems())
	}
	return out
}

func lossOf[T num.Float](t *testing.T, p *graph.Program, seed uint64, params [][]float64) (float64, *interp.World[T]) {
	t.Helper()
	w := world[T](t, p, seed, params)
	require.NoError(t, w.Run("forward"), "seed %d\n%s", seed, dump(p))
	loss, err := w.F64(0, p.Loss)
	require.NoError(t, err)
	return loss[0], w
}

// checkGradients differentiates p. It compares the float64 gradients with central differences, at
// up to 12 elements a parameter, and the float32 loss and gradients with float64. It returns the
// differentiated program.
func checkGradients(t *testing.T, p *graph.Program, seed uint64) *graph.Program {
	t.Helper()
	q, err := graph.Differentiate(p)
	require.NoError(t, err)
	checkOps(t, q)
	params := randomParams(p, seed)
	want, _ := lossOf[float64](t, p, seed, params)
	got, w64 := lossOf[float64](t, q, seed, params)
	require.Equal(t, want, got, "the loss of the differentiated program")
	single, w32 := lossOf[float32](t, q, seed, params)
	require.InDelta(t, got, single, 1e-4*(1+math.Abs(got)), "the loss in float32")

	const scale = invCount * lossScale
	rng := rand.New(rand.NewPCG(seed, 3))
	const h = 1e-5
	for i := range q.Params {
		pr := &q.Params[i]
		if pr.Frozen {
			require.Equal(t, graph.NoBuf, pr.Grad)
			continue
		}
		g64, err := w64.Floats(0, pr.Grad)
		require.NoError(t, err)
		g32, err := w32.Floats(0, pr.Grad)
		require.NoError(t, err)
		largest := 0.0
		for k := range g64 {
			largest = max(largest, math.Abs(g64[k]))
		}
		for k := range g64 {
			require.InDelta(t, g64[k], float64(g32[k]), 1e-3*(largest+1e-3), "%s[%d] in float32", pr.Name, k)
		}
		for range min(12, len(g64)) {
			k := rng.IntN(len(g64))
			was := params[i][k]
			params[i][k] = was + h
			up, _ := lossOf[float64](t, p, seed, params)
			params[i][k] = was - h
			down, _ := lossOf[float64](t, p, seed, params)
			params[i][k] = was
			numeric := scale * (up - down) / (2 * h)
			require.InDelta(t, numeric, g64[k], 1e-6*(1+largest), "d loss / d %s[%d], seed %d\n%s", pr.Name, k, seed, dump(q))
		}
	}
	return q
}

// checkOps verifies a program and requires unique names, because plans and traces identify
// operations and buffers by name.
func checkOps(t *testing.T, p *graph.Program) {
	t.Helper()
	require.NoError(t, graph.Verify(p), dump(p))
	seen := map[string]bool{}
	for _, op := range p.Sections[0].Phases[0].Ops {
		require.NoError(t, graph.Check(p, &op))
		require.False(t, seen[op.Name], "two operations are named %s", op.Name)
		seen[op.Name] = true
	}
	names := map[string]bool{}
	for i := range p.Buffers {
		require.False(t, names[p.Buffers[i].Name], "two buffers are named %s", p.Buffers[i].Name)
		names[p.Buffers[i].Name] = true
	}
}

// build runs f on a builder with a unit and returns the program.
func build(t *testing.T, f func(b *graph.Builder)) *graph.Program {
	t.Helper()
	b := graph.NewBuilder()
	b.Unit("u")
	f(b)
	p, err := b.Program()
	require.NoError(t, err)
	return p
}

// param adds a parameter whose values the checks choose.
func param(b *graph.Builder, name string, shape ...int64) graph.Value {
	return b.Param(name, graph.Normal(1), shape...)
}

// starts adds the input that marks document starts, which world fills.
func starts(b *graph.Builder, rows, seq int64) graph.Value { return b.Input("starts", rows, seq) }

// weigh adds the loss Σ y·c, so that y's gradient is not constant. c is a parameter, whose gradient
// is y.
func weigh(b *graph.Builder, y graph.Value) {
	c := param(b, "c", b.Shape(y)...)
	b.SumLoss("loss", b.Mul("weigh", y, c))
}

// gradchecks has a program for each differentiable kind. The name up to a slash is the kind.
var gradchecks = []struct {
	name string
	f    func(b *graph.Builder)
}{
	{"embed", func(b *graph.Builder) {
		weigh(b, b.Embed("y", b.Tokens(2, 5), param(b, "table", 7, 3)))
	}},
	{"add_pos", func(b *graph.Builder) {
		weigh(b, b.AddPos("y", param(b, "a", 6, 4), param(b, "pos", 5, 4), 3))
	}},
	{"add_pos/in place", func(b *graph.Builder) {
		weigh(b, b.AddPos("y", b.Embed("e", b.Tokens(2, 3), param(b, "table", 7, 4)), param(b, "pos", 5, 4), 3, graph.InPlace))
	}},
	{"linear", func(b *graph.Builder) {
		weigh(b, b.Linear("y", param(b, "a", 5, 3), param(b, "w", 3, 4), graph.Value{}, graph.LinearAttr{}))
	}},
	{"linear/transposed, bias", func(b *graph.Builder) {
		weigh(b, b.Linear("y", param(b, "a", 5, 3), param(b, "w", 4, 3), param(b, "bias", 4), graph.LinearAttr{TransW: true}))
	}},
	{"layernorm", func(b *graph.Builder) {
		weigh(b, b.LayerNorm("y", param(b, "a", 4, 6), param(b, "gamma", 6), param(b, "beta", 6), 1e-5))
	}},
	{"layernorm/one vector twice", func(b *graph.Builder) {
		g := param(b, "gamma", 6)
		weigh(b, b.LayerNorm("y", param(b, "a", 4, 6), g, g, 1e-5))
	}},
	{"rmsnorm", func(b *graph.Builder) {
		weigh(b, b.RMSNorm("y", param(b, "a", 4, 6), param(b, "gamma", 6), 1e-6))
	}},
	{"rmsnorm/1 + gamma", func(b *graph.Builder) {
		weigh(b, b.RMSNormPlusOne("y", param(b, "a", 4, 6), param(b, "gamma", 6), 1e-6))
	}},
	{"softcap", func(b *graph.Builder) { weigh(b, b.SoftCap("y", param(b, "a", 4, 6), 1.5)) }},
	{"softcap/in place", func(b *graph.Builder) {
		weigh(b, b.SoftCap("y", b.Scale("s", param(b, "a", 4, 6), 1.5), 1.5, graph.InPlace))
	}},
	{"head_loss/soft cap", func(b *graph.Builder) {
		b.CappedHeadLoss("loss", b.Scale("s", param(b, "a", 6, 4), 1.5), param(b, "w", 5, 4), b.Targets(2, 3), 1.5)
	}},
	{"act/gelu_tanh", func(b *graph.Builder) { weigh(b, b.Activation("y", param(b, "a", 4, 6), graph.ActGELUTanh)) }},
	{"act/gelu", func(b *graph.Builder) { weigh(b, b.Activation("y", param(b, "a", 4, 6), graph.ActGELU)) }},
	{"act/silu", func(b *graph.Builder) { weigh(b, b.Activation("y", param(b, "a", 4, 6), graph.ActSiLU)) }},
	{"act/relu", func(b *graph.Builder) { weigh(b, b.Activation("y", param(b, "a", 4, 6), graph.ActReLU)) }},
	{"swiglu", func(b *graph.Builder) { weigh(b, b.SwiGLU("y", param(b, "gate", 4, 6), param(b, "up", 4, 6))) }},
	{"swiglu/one operand twice", func(b *graph.Builder) {
		a := b.Scale("s", param(b, "a", 4, 6), 1.5)
		weigh(b, b.SwiGLU("y", a, a))
	}},
	{"softmax", func(b *graph.Builder) { weigh(b, b.Softmax("y", param(b, "a", 4, 6))) }},
	{"rope", func(b *graph.Builder) {
		weigh(b, b.Rope("y", param(b, "a", 6, 8), graph.RopeAttr{Heads: 2, HeadDim: 4, Seq: 3, Theta: 100}))
	}},
	{"add_pos/documents", func(b *graph.Builder) {
		b.Documents(starts(b, 2, 3))
		weigh(b, b.AddPos("y", param(b, "a", 6, 4), param(b, "pos", 5, 4), 3))
	}},
	{"rope/documents", func(b *graph.Builder) {
		b.Documents(starts(b, 2, 3))
		weigh(b, b.Rope("y", param(b, "a", 6, 8), graph.RopeAttr{Heads: 2, HeadDim: 4, Seq: 3, Theta: 100}))
	}},
	{"attention/documents", func(b *graph.Builder) {
		b.Documents(starts(b, 2, 4))
		weigh(b, b.Attention("y", param(b, "q", 8, 8), param(b, "k", 8, 4), param(b, "v", 8, 4),
			graph.AttentionAttr{Batch: 2, Seq: 4, Heads: 4, KVHeads: 2, HeadDim: 2, Scale: 0.7, Causal: true, Cap: 0.9}))
	}},
	{"attention/documents, packed, window", func(b *graph.Builder) {
		b.Documents(starts(b, 2, 4))
		weigh(b, b.AttentionPacked("y", param(b, "qkv", 8, 16),
			graph.AttentionAttr{Batch: 2, Seq: 4, Heads: 4, KVHeads: 2, HeadDim: 2, Scale: 0.7, Causal: true, Window: 2}))
	}},
	{"rope/in place, inverse, scaled", func(b *graph.Builder) {
		a := b.Scale("s", param(b, "a", 6, 8), 1.5)
		weigh(b, b.Rope("y", a, graph.RopeAttr{Heads: 2, HeadDim: 4, Seq: 3, Theta: 100, Inverse: true,
			ScaleFactor: 8, LowFreq: 1, HighFreq: 4, OriginalPositions: 16}, graph.InPlace))
	}},
	{"attention", func(b *graph.Builder) {
		weigh(b, b.Attention("y", param(b, "q", 6, 8), param(b, "k", 6, 4), param(b, "v", 6, 4),
			graph.AttentionAttr{Batch: 2, Seq: 3, Heads: 4, KVHeads: 2, HeadDim: 2, Scale: 0.7, Causal: true}))
	}},
	{"attention/soft cap and window", func(b *graph.Builder) {
		weigh(b, b.Attention("y", param(b, "q", 8, 8), param(b, "k", 8, 4), param(b, "v", 8, 4),
			graph.AttentionAttr{Batch: 2, Seq: 4, Heads: 4, KVHeads: 2, HeadDim: 2, Scale: 0.7, Causal: true, Cap: 0.9, Window: 2}))
	}},
	{"attention/packed, not causal", func(b *graph.Builder) {
		weigh(b, b.AttentionPacked("y", param(b, "qkv", 6, 16),
			graph.AttentionAttr{Batch: 2, Seq: 3, Heads: 4, KVHeads: 2, HeadDim: 2, Scale: 0.7}))
	}},
	{"attention/one operand thrice", func(b *graph.Builder) {
		a := b.Scale("s", param(b, "a", 6, 8), 1.5)
		weigh(b, b.Attention("y", a, a, a, graph.AttentionAttr{Batch: 2, Seq: 3, Heads: 4, KVHeads: 4, HeadDim: 2, Scale: 0.7, Causal: true}))
	}},
	{"dropout", func(b *graph.Builder) { weigh(b, b.Dropout("y", param(b, "a", 6, 8), 0.4, 2)) }},
	{"dropout/in place", func(b *graph.Builder) {
		weigh(b, b.Dropout("y", b.Scale("s", param(b, "a", 6, 8), 1.5), 0.4, 2, graph.InPlace))
	}},
	{"add", func(b *graph.Builder) { weigh(b, b.Add("y", param(b, "a", 3, 4), param(b, "b", 3, 4))) }},
	{"add/one parameter twice", func(b *graph.Builder) {
		a := param(b, "a", 3, 4)
		weigh(b, b.Add("y", a, a))
	}},
	{"sub", func(b *graph.Builder) { weigh(b, b.Sub("y", param(b, "a", 3, 4), param(b, "b", 3, 4))) }},
	{"sub/in place", func(b *graph.Builder) {
		weigh(b, b.Sub("y", b.Scale("s", param(b, "a", 3, 4), 1.5), param(b, "b", 3, 4), graph.InPlace))
	}},
	{"mul", func(b *graph.Builder) { weigh(b, b.Mul("y", param(b, "a", 3, 4), param(b, "b", 3, 4))) }},
	{"mul/square", func(b *graph.Builder) {
		a := b.Scale("s", param(b, "a", 3, 4), 1.5)
		weigh(b, b.Mul("y", a, a))
	}},
	{"scale", func(b *graph.Builder) { weigh(b, b.Scale("y", param(b, "a", 3, 4), -1.5)) }},
	{"sum", func(b *graph.Builder) {
		a := param(b, "a", 3, 4)
		b.SumLoss("loss", a)
		b.SumLoss("loss2", b.Mul("square", a, a))
	}},
	{"im2col", func(b *graph.Builder) {
		weigh(b, b.Im2Col("y", param(b, "a", 2, 5, 4, 3), graph.ConvAttr{KH: 3, KW: 2, Stride: 2, Pad: 1}))
	}},
	{"im2col/convolution", func(b *graph.Builder) {
		weigh(b, b.Conv2D("y", param(b, "a", 2, 5, 4, 3), param(b, "w", 6, 27), param(b, "bias", 6), graph.ConvAttr{KH: 3, KW: 3, Stride: 1, Pad: 1}))
	}},
	{"maxpool", func(b *graph.Builder) {
		weigh(b, b.MaxPool("y", param(b, "a", 2, 5, 4, 3), graph.ConvAttr{KH: 2, KW: 2, Stride: 2}))
	}},
	{"maxpool/overlapping, padded", func(b *graph.Builder) {
		weigh(b, b.MaxPool("y", param(b, "a", 2, 5, 4, 3), graph.ConvAttr{KH: 3, KW: 3, Stride: 1, Pad: 1}))
	}},
	{"cross_entropy", func(b *graph.Builder) {
		b.CrossEntropy("loss", b.Scale("s", param(b, "a", 6, 5), 1.5), b.Targets(6, 1))
	}},
	{"cross_entropy/of a parameter", func(b *graph.Builder) {
		b.CrossEntropy("loss", param(b, "a", 6, 5), b.Targets(6, 1))
	}},
	{"head_loss", func(b *graph.Builder) {
		b.HeadLoss("loss", b.Scale("s", param(b, "a", 6, 4), 1.5), param(b, "w", 5, 4), b.Targets(2, 3))
	}},
	{"head_loss/of a parameter", func(b *graph.Builder) {
		b.HeadLoss("loss", param(b, "a", 6, 4), param(b, "w", 5, 4), b.Targets(2, 3))
	}},
	{"head_loss/two heads on one stream", func(b *graph.Builder) {
		x, w := b.Scale("s", param(b, "a", 6, 4), 1.5), param(b, "w", 5, 4)
		b.HeadLoss("loss", x, w, b.Targets(2, 3))
		b.HeadLoss("loss2", b.Activation("act", x, graph.ActGELU), w, b.Targets(2, 3))
		b.HeadLoss("loss3", x, w, b.Targets(2, 3))
	}},
}

func TestGradientsOfEveryKind(t *testing.T) {
	covered := map[graph.Kind]bool{}
	for _, c := range gradchecks {
		t.Run(c.name, func(t *testing.T) {
			p := build(t, c.f)
			for _, op := range p.Sections[0].Phases[0].Ops {
				covered[op.Kind] = true
			}
			for seed := range uint64(2) {
				checkGradients(t, p, seed)
			}
		})
	}
	t.Run("linear_act", func(t *testing.T) { // which only Fuse makes
		p := graph.Fuse(mlpProgram(t, ""))
		ops := p.Sections[0].Phases[0].Ops
		for i, pre := range []string{"l1", "l2"} {
			ops[i].Kind, ops[i].Out[1].Buf = graph.LinearAct, p.Find(pre)
		}
		covered[graph.LinearAct] = true
		for seed := range uint64(2) {
			require.Contains(t, dump(checkGradients(t, p, seed)), "l2/dpre: act_grad(a2.grad, l2) → ~a2.grad")
		}
	})
	for _, k := range graph.Kinds() {
		info, _ := graph.InfoOf(k)
		if info.Differentiable() {
			require.True(t, covered[k], "%s has a derivative and no check", k)
		}
	}
}

// With any one parameter frozen, the gradients of the others do not change.
func TestGradientsWithOneFrozenParameter(t *testing.T) {
	for _, c := range gradchecks {
		p := build(t, c.f)
		for i := range p.Params {
			if len(p.Params) == 1 {
				continue
			}
			q := p.Clone()
			q.Params[i].Frozen = true
			t.Run(fmt.Sprintf("%s, %s frozen", c.name, p.Params[i].Name), func(t *testing.T) { checkGradients(t, q, 5) })
		}
	}
}
