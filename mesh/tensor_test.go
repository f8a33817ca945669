package mesh

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/interp"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/model"
)

// models have heads and widths that four slices divide. The vocabularies of the first two are not
// divisible by four.
var models = map[string]model.Config{
	"gpt2":  {Family: model.GPT2, Layers: 2, Width: 16, Heads: 4, Vocab: 21, Positions: 6, TiedHead: true},
	"llama": {Family: model.Llama, Layers: 2, Width: 16, FFN: 24, Heads: 8, KVHeads: 4, HeadDim: 2, Vocab: 30, Positions: 6, NormEps: 1e-5, RopeTheta: 1e4, QKVBias: true},
	"qwen3": {Family: model.Llama, Layers: 1, Width: 16, FFN: 24, Heads: 4, KVHeads: 4, HeadDim: 6, Vocab: 32, Positions: 6, NormEps: 1e-5, RopeTheta: 1e4, NormHeads: true, TiedHead: true, OutBias: true, MLPBias: true},
}

// differentiated returns the training program of a micro-batch of 2 rows of 5 tokens.
func differentiated(t testing.TB, c model.Config, adapters ...string) *graph.Program {
	return differentiatedOf(t, c, 2, 5, adapters...)
}

func differentiatedOf(t testing.TB, c model.Config, batch, seq int, adapters ...string) *graph.Program {
	p, err := model.Build(c, model.Train, batch, seq)
	require.NoError(t, err)
	if len(adapters) > 0 {
		p, err = lora.Adapt(p, lora.Options{Rank: 3, Alpha: 6, Targets: adapters})
		require.NoError(t, err)
	}
	p, err = graph.Differentiate(p)
	require.NoError(t, err)
	return p
}

// eachProgram calls visit with every model, without and with adapters.
func eachProgram(t testing.TB, visit func(name string, p *graph.Program, vocab int)) {
	for name, c := range models {
		visit(name, differentiated(t, c), c.Vocab)
		targets := [][]string{{"*attn*", "*mlp*"}, {"*[qv]_proj.weight"}, {"*.[od]*_proj.weight"}}
		if c.Family == model.GPT2 {
			targets = [][]string{{"*attn*", "*mlp*"}, {"*c_attn.weight"}, {"*.c_proj.weight"}}
		}
		for _, targets := range targets {
			visit(fmt.Sprint(name, " with adapters of ", targets), differentiated(t, c, targets...), c.Vocab)
		}
	}
}

// cut returns the program in slices over ranks, without dividing its rows.
func cut(t testing.TB, p *graph.Program, ranks, slices int) *graph.Program {
	return tensorOf(t, p, ranks, Options{Slices: slices})
}

// tensorOf returns the program in slices over ranks, with the given options.
func tensorOf(t testing.TB, p *graph.Program, ranks int, o Options) *graph.Program {
	q := p.Clone()
	if o.Axis = -1; ranks > 1 {
		q.Mesh, o.Axis = []graph.Axis{{Name: graph.TensorAxis, Size: ranks}}, 0
	}
	before := graph.Format(q)
	r, err := Tensor(q, o)
	require.NoError(t, err)
	require.NoError(t, graph.VerifyStructure(r))
	require.Equal(t, before, graph.Format(q), "it leaves its input alone")
	return r
}

// ran runs one micro-batch on fixed values. It returns the loss and the complete gradient of each
// parameter, which must be equal on every rank.
func ran[T num.Float](t *testing.T, p *graph.Program, vocab int) (loss float64, grads [][]T) {
	rng := rand.New(rand.NewPCG(1, 2))
	w := interp.New[T](p)
	value := func(run graph.Run, rank int, id func(q *graph.Param) graph.BufID) []T {
		v, err := w.Floats(rank, id(&p.Params[run.Param]))
		require.NoError(t, err)
		return v[run.From : run.From+run.Len]
	}
	each := func(param int, visit func(run graph.Run, rank int)) {
		require.NoError(t, p.Runs(param, 0, p.Params[param].Elems(), func(run graph.Run) error {
			for rank := range w.Ranks() {
				if run.Rank < 0 || run.Rank == rank {
					visit(run, rank)
				}
			}
			return nil
		}))
	}
	for i := range p.Params {
		for rank := range w.Ranks() { // rows of the last slice that are beyond the vocabulary
			v, err := w.Floats(rank, p.Params[i].Value)
			require.NoError(t, err)
			clear(v)
		}
	}
	for i := range p.Tensors() {
		whole := make([]T, p.Params[i].Elems())
		for k := range whole {
			whole[k] = T(float32(0.3 * rng.NormFloat64()))
		}
		each(i, func(run graph.Run, rank int) {
			copy(value(run, rank, func(q *graph.Param) graph.BufID { return q.Value }), whole[run.At:])
		})
	}
	n := p.Buf(p.Tokens).Elems()
	tokens, targets := make([]int32, n), make([]int32, n)
	for i := range tokens {
		tokens[i], targets[i] = rng.Int32N(int32(vocab)), rng.Int32N(int32(vocab))
	}
	targets[3] = -1
	for rank := range w.Ranks() {
		for id, v := range map[graph.BufID][]int32{p.Tokens: tokens, p.Targets: targets} {
			dst, err := w.I32(rank, id)
			require.NoError(t, err)
			copy(dst, v)
		}
		h, err := w.F64(rank, p.Hyper)
		require.NoError(t, err)
		h[graph.HyperInvCount], h[graph.HyperLossScale] = 1/float64(n-1), 1
		if p.Key != graph.NoBuf {
			k, err := w.I64(rank, p.Key)
			require.NoError(t, err)
			k[graph.KeySeed], k[graph.KeySample] = 5, 2
		}
		if s := p.Find(model.Starts); s != graph.NoBuf { // two documents in each row
			starts, err := w.Floats(rank, s)
			require.NoError(t, err)
			for i := range starts {
				if t := int64(i) % p.Buf(s).Shape[1]; t > 0 {
					starts[i] = 1
				}
			}
		}
		l, err := w.F64(rank, p.Loss)
		require.NoError(t, err)
		l[0] = 0
	}
	require.NoError(t, w.Run(p.Sections[0].Name))
	for i := range p.Tensors() {
		whole := make([]T, p.Params[i].Elems())
		if grads = append(grads, whole); p.Params[i].Grad == graph.NoBuf {
			continue // frozen: all zeros
		}
		each(i, func(run graph.Run, rank int) {
			v := value(run, rank, func(q *graph.Param) graph.BufID { return q.Grad })
			if run.Rank < 0 && rank > 0 {
				require.Equal(t, whole[run.At:run.At+run.Len], v, "%s is whole on rank %d", p.Params[i].Name, rank)
			}
			copy(whole[run.At:], v)
		})
	}
	for rank := range w.Ranks() {
		l, err := w.F64(rank, p.Loss)
		require.NoError(t, err)
		if rank > 0 {
			require.Equal(t, loss, l[0], "the loss of rank %d", rank)
		}
		loss = l[0]
	}
	return loss, grads
}

// A program in slices has the same loss and gradients as the original, up to float64 rounding.
func TestSlicesHaveTheGradients(t *testing.T) {
	eachProgram(t, func(name string, p *graph.Program, vocab int) {
		wantLoss, want := ran[float64](t, p, vocab)
		for _, n := range [][2]int{{1, 2}, {1, 4}, {2, 2}, {2, 4}, {4, 4}} {
			loss, got := ran[float64](t, cut(t, p, n[0], n[1]), vocab)
			require.InEpsilon(t, wantLoss, loss, 1e-12, "%s, %d slices over %d ranks", name, n[1], n[0])
			for i := range want {
				require.InDeltaSlice(t, want[i], got[i], 1e-12, "%s, %d slices over %d ranks: %s", name, n[1], n[0], p.Params[i].Name)
			}
		}
	})
}

// For a fixed number of slices, loss and gradients have the same bits on 1, 2 and 4 ranks.
func TestSlicesHaveTheSameBitsOnAnyRanks(t *testing.T) {
	eachProgram(t, func(name string, p *graph.Program, vocab int) {
		wantLoss, want := ran[float32](t, cut(t, p, 1, 4), vocab)
		for _, ranks := range []int{2, 4} {
			loss, got := ran[float32](t, cut(t, p, ranks, 4), vocab)
			require.Equal(t, wantLoss, loss, "%s over %d ranks", name, ranks)
			require.Equal(t, want, got, "%s over %d ranks", name, ranks)
		}
	})
}

// Megatron-LM (Shoeybi et al. 2019, section 3) has two all-reduces of N·C elements in each layer,
// forward and backward. Besides, only the embedding and the head's dx are all-reduced, and
// statistics of each slice's logits are gathered.
func TestSumsOfALayer(t *testing.T) {
	for name, c := range models {
		c.NormHeads = false // their gradients are all-reduced too
		for _, ranks := range []int{2, 4} {
			p := cut(t, differentiated(t, c), ranks, 4)
			sums, gathered := int64(0), int64(0)
			for _, op := range p.Sections[0].Phases[0].Ops {
				switch op.Kind {
				case graph.AllReduce:
					require.Equal(t, int64(10*c.Width), p.Buf(op.Out[0].Buf).Elems(), op.Name)
					sums++
				case graph.AllGather:
					gathered += p.Buf(op.Out[0].Buf).Elems()
				}
			}
			require.EqualValues(t, 4*c.Layers+2, sums, "%s over %d ranks", name, ranks)
			require.EqualValues(t, 4*10*graph.HeadStatistics, gathered)
		}
	}
}

// Tensor refuses a program that it cannot divide. The error names the operation that prevents it.
func TestProductsThatCannotBeCut(t *testing.T) {
	for _, c := range []struct {
		model model.Config
		want  string
	}{
		{model.Config{Family: model.GPT2, Layers: 1, Width: 18, Heads: 3, Vocab: 20, Positions: 6}, "h.0.attn.c_attn cannot be divided by 2: h.0.attn has 3 heads"},
		{model.Config{Family: model.GPT2, Layers: 1, Width: 16, Heads: 4, FFN: 7, Vocab: 20, Positions: 6}, "dimension 1 of h.0.mlp.c_fc.weight [16 7] has 7 elements"},
		{model.Config{Family: model.Llama, Layers: 1, Width: 16, FFN: 8, Heads: 4, KVHeads: 1, HeadDim: 4, Vocab: 20, Positions: 6, NormEps: 1e-5, RopeTheta: 1e4}, "4 heads and 1 of keys and values"},
		{model.Config{Family: model.Llama, Layers: 1, Width: 16, FFN: 8, Heads: 4, KVHeads: 4, HeadDim: 4, Vocab: 20, Positions: 6, NormEps: 1e-5, RopeTheta: 1e4, NormQK: true, PostNorm: true}, "whose rows of 16 elements are of several heads"},
	} {
		_, err := Tensor(differentiated(t, c.model), Options{Axis: -1, Slices: 2})
		require.ErrorContains(t, err, c.want)
	}
	p, err := model.Build(model.Config{Family: model.MLP, Inputs: 8, Hidden: []int{8, 8}, Classes: 4}, model.Train, 2, 1)
	require.NoError(t, err)
	p, err = graph.Differentiate(p)
	require.NoError(t, err)
	_, err = Tensor(p, Options{Axis: -1, Slices: 2})
	require.ErrorContains(t, err, "cannot be divided by 2: its result goes through loss (cross_entropy)")
}
