//go:build linux

package cuda

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	devcuda "github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
)

// check runs an operation in both orders of blocks and threads and compares it with the CPU's
// arithmetic.
func (b *bench) check(t *testing.T, o *optest.Operation) {
	t.Helper()
	if slices.Contains(multiplying, o.Op().Kind) {
		o.Op().Skip = graph.NoBuf
	}
	want, err := o.Interpret()
	require.NoError(t, err)
	b.compare(t, o, want, shapesOf(o))
}

// Larger shapes than the random ones: partial column sums, sums over many rows and long rows, and
// several chunks of the head.
func TestMatrixKindsAtSize(t *testing.T) {
	b := newBench(t)
	rng := rand.New(rand.NewPCG(8, 8))
	for _, half := range []bool{false, true} {
		opts := optest.Options{Target: target(), Half: half, Finite: true, Aligned: true}
		for _, rows := range []int64{128, 129, 1000, 9000} {
			b.check(t, optest.Of(graph.BiasGrad, nil, [][]int64{{rows, 37}}, [][]int64{{37}}, 1, rng, opts))
			b.check(t, optest.Of(graph.LinearGradWB, graph.LinearAttr{}, [][]int64{{rows, 3}, {rows, 37}}, [][]int64{{3, 37}, {37}}, 1, rng, opts))
		}
		b.check(t, optest.Of(graph.Softmax, nil, [][]int64{{3, 5001}}, [][]int64{{3, 5001}}, 1, rng, opts))
		b.check(t, optest.Of(graph.SoftmaxGrad, nil, [][]int64{{3, 5000}, {3, 5000}}, [][]int64{{3, 5000}}, 1, rng, opts))
		// 2048 rows per chunk: two complete chunks and a rest.
		n, c, v := int64(4100), int64(3), int64(70)
		b.check(t, optest.Of(graph.HeadLossGrad, nil, [][]int64{{n, c}, {v, c}, {n}, {graph.NumHyper}}, [][]int64{{1}, {n, c}, {v, c}}, int(v), rng, opts))
	}
	b.check(t, optest.Of(graph.CrossEntropy, nil, [][]int64{{700, 1030}, {700}}, [][]int64{{1}, {700}}, 1030, rng, optest.Options{Target: target(), Finite: true, Aligned: true}))
}

// drawAttention draws an attention, or its gradient with the outputs of a forward.
func drawAttention(t *testing.T, a graph.AttentionAttr, grad bool, rng *rand.Rand, opts optest.Options) *optest.Operation {
	n := a.Batch * a.Seq
	y, lse, kv := []int64{n, a.Heads * a.HeadDim}, []int64{n * a.Heads}, []int64{n, a.KVHeads * a.HeadDim}
	qkv := [][]int64{y, kv, kv}
	if a.Packed {
		qkv = [][]int64{{n, (a.Heads + 2*a.KVHeads) * a.HeadDim}}
	}
	forward := optest.Of(graph.Attention, a, qkv, [][]int64{y, lse}, 1, rng, opts)
	if !grad {
		return forward
	}
	after, err := forward.Interpret()
	require.NoError(t, err)
	o := optest.Of(graph.AttentionGrad, a, append(slices.Clone(qkv), y, lse, y), qkv, 1, rng, opts)
	skip := func(op *graph.Op) []graph.BufID { return op.In }
	for i, id := range forward.Op().In {
		o.Before[skip(o.Op())[i]] = forward.Before[id]
	}
	for i, out := range forward.Op().Out {
		o.Before[o.Op().In[len(qkv)+i]] = after[out.Buf]
	}
	forward.Op().Skip = graph.NoBuf
	return o
}

// TestAttention runs head widths of every tile, odd and even, lengths below and above a tile,
// groups of heads, packed and not, with and without a mask.
func TestAttention(t *testing.T) {
	b := newBench(t)
	rng := rand.New(rand.NewPCG(9, 9))
	for _, dim := range []int64{1, 7, 20, 32, 48, 63, 64, 65, 80, 128, 129, 256} {
		for i, grad := range []bool{false, true, false, true} {
			kv := 1 + rng.Int64N(2)
			a := graph.AttentionAttr{
				Batch: 1 + rng.Int64N(2), Seq: 1 + rng.Int64N(70), KVHeads: kv, Heads: kv * (1 + rng.Int64N(3)), HeadDim: dim,
				Scale: 1 / math.Sqrt(float64(dim)), Causal: rng.IntN(4) > 0, Packed: rng.IntN(2) == 0,
			}
			if i == 0 && dim <= 64 {
				a.Seq = 128 + rng.Int64N(20)
			}
			b.check(t, drawAttention(t, a, grad, rng, optest.Options{Target: target(), Half: i > 1, Finite: i > 0, Aligned: i%2 == 0}))
		}
	}
}

// Masked keys and values do not affect earlier rows, not even as infinity times zero.
func TestAttentionDoesNotLookAhead(t *testing.T) {
	b := newBench(t)
	rng := rand.New(rand.NewPCG(10, 10))
	a := graph.AttentionAttr{Batch: 1, Seq: 40, KVHeads: 1, Heads: 2, HeadDim: 8, Scale: 0.3, Causal: true}
	for _, grad := range []bool{false, true} {
		o := drawAttention(t, a, grad, rng, optest.Options{Target: target(), Finite: true, Aligned: true})
		o.Op().Skip = graph.NoBuf
		last := func(in int, v float64) { // of keys or values
			m := optest.Values[float32](o.Before[o.Op().In[in]])
			m[len(m)-1] = float32(v)
		}
		last(1, math.NaN())
		last(2, math.Inf(1))
		want, err := o.Interpret()
		require.NoError(t, err)
		out := o.Op().Out[0].Buf
		for i, v := range optest.Values[float32](want[out])[:39*16] {
			require.False(t, v-v != 0, "gradient %v, element %d is %g", grad, i, v)
		}
		b.compare(t, o, want, "a key that is NaN and an infinite value at the end")
	}
}

// If the library has no algorithm for a bias, it is added after the product.
func TestBiasWithoutTheLibrary(t *testing.T) {
	b := newBench(t)
	b.double(t).Unsupported = func(p blas.Product) bool { return p.Bias }
	rng := rand.New(rand.NewPCG(11, 11))
	for i := range 8 {
		b.check(t, optest.New(graph.Linear, rng, optest.Options{Target: target(), Half: i%2 == 1, Finite: true, Aligned: true}))
	}
	for _, p := range b.products.Bound() {
		require.False(t, p.Bias)
	}
}

// In 16 bits the library applies GELU's derivative, if rows are complete packs of 16 bytes.
// Otherwise, or if it cannot, a kernel does. Results of both are close to the CPU's.
func TestDerivativeOfProduct(t *testing.T) {
	b := newBench(t)
	b.double(t)
	rng := rand.New(rand.NewPCG(13, 13))
	by := func() (n int) {
		for _, p := range b.products.Bound() {
			if p.DGELU {
				n++
			}
		}
		return n
	}
	for i, unsupported := range []bool{false, false, true, true} {
		b.products.Unsupported = func(p blas.Product) bool { return unsupported && p.DGELU }
		for _, width := range []int64{24, 20} {
			a := graph.LinearAttr{TransW: i%2 == 1, Act: graph.ActGELUTanh}
			w := []int64{width, 33}
			if a.TransW {
				w = []int64{33, width}
			}
			before := by()
			o := optest.Of(graph.LinearGradAct, a, [][]int64{{7, 33}, w, {7, width}}, [][]int64{{7, width}}, 1, rng,
				optest.Options{Target: target(), Half: true, F16: i > 1, Finite: true, Aligned: true})
			b.check(t, o)
			half := o.P.Buf(o.Op().Out[0].Buf).DType != graph.F32
			require.Equal(t, half && width == 24 && !unsupported, by() > before, "%d wide", width)
		}
	}
}

// In 16 bits the library applies GELU to a product and also writes its argument, if rows are
// complete packs of 16 bytes. Otherwise, or if it cannot, a kernel does. Results of both are close
// to the CPU's.
func TestActivationOfProduct(t *testing.T) {
	b := newBench(t)
	b.double(t)
	by := func() (n int) {
		for _, p := range b.products.Bound() {
			if p.GELU {
				n++
			}
		}
		return n
	}
	for i, unsupported := range []bool{false, false, true, true} {
		b.products.Unsupported = func(p blas.Product) bool { return unsupported && p.GELU }
		for _, width := range []int64{24, 20} {
			for _, act := range []graph.ActKind{graph.ActGELUTanh, graph.ActGELU} {
				a := graph.LinearAttr{TransW: i%2 == 1, Act: act}
				w := []int64{33, width}
				if a.TransW {
					w = []int64{width, 33}
				}
				before, y := by(), []int64{7, width}
				o := optest.Of(graph.LinearAct, a, [][]int64{{7, 33}, w, {width}}, [][]int64{y, y}, 1, rand.New(rand.NewPCG(14, uint64(i))),
					optest.Options{Target: target(), Half: true, F16: i > 1, Finite: true, Aligned: true})
				b.check(t, o)
				half := o.P.Buf(o.Op().Out[0].Buf).DType != graph.F32
				require.Equal(t, half && width == 24 && !unsupported && act == graph.ActGELUTanh, by() > before, "%d wide, %s", width, act)
			}
		}
	}
}

// In 16 bits the column sums of dy are the product's epilogue; accumulating ones go through the
// workspace. If the library cannot compute them, kernels do. Results of both are close to the
// interpreter's.
func TestBiasGradientOfProduct(t *testing.T) {
	b := newBench(t)
	b.double(t)
	rng := rand.New(rand.NewPCG(14, 14))
	for i := range 48 {
		unsupported, trans := i%3 == 2, i/3%2 == 1
		b.products.Unsupported = func(p blas.Product) bool { return unsupported && p.Sums != blas.NoSums }
		rows, k, n := []int64{7, 300}[i/6%2], int64(24), int64(40)
		w := []int64{k, n}
		if trans {
			w = []int64{n, k}
		}
		o := optest.Of(graph.LinearGradWB, graph.LinearAttr{TransW: trans}, [][]int64{{rows, k}, {rows, n}}, [][]int64{w, {n}}, 1, rng,
			optest.Options{Target: target(), Half: i%4 != 3, F16: i%2 == 1, Finite: true, Aligned: true})
		before := len(b.products.Bound())
		b.check(t, o)
		var sums []blas.Side
		for _, p := range b.products.Bound()[before:] {
			if p.Sums != blas.NoSums {
				sums = append(sums, p.Sums)
			}
		}
		op := o.Op()
		in, dw, db := o.P.Buf(op.In[1]).DType, o.P.Buf(op.Out[0].Buf).DType, o.P.Buf(op.Out[1].Buf).DType
		if want := map[bool]blas.Side{false: blas.SumsB, true: blas.SumsA}[trans]; in != graph.F32 && dw == db && !unsupported {
			require.NotEmpty(t, sums, "%v", shapesOf(o))
			require.Equal(t, want, sums[0])
		} else {
			require.Empty(t, sums, "%v", shapesOf(o))
		}
	}
}

// A target that is not a class is reported with its position.
func TestTargetsAreChecked(t *testing.T) {
	b := newBench(t)
	rng := rand.New(rand.NewPCG(12, 12))
	for _, kind := range []graph.Kind{graph.CrossEntropy, graph.CrossEntropyGrad, graph.HeadLoss, graph.HeadLossGrad} {
		o := optest.New(kind, rng, optest.Options{Target: target(), Finite: true, Aligned: true})
		o.Op().Skip = graph.NoBuf
		for i, id := range o.Op().In {
			if o.P.Buf(id).Name != "targets" {
				continue
			}
			targets := optest.Values[int32](o.Before[o.Op().In[i]])
			targets[len(targets)-1] = 1 << 20
		}
		err := b.fails(t, o)
		require.ErrorContains(t, err, "of targets is 1048576, want -1 to ", "%s", kind)
	}
}

// fails runs an operation and returns the error of binding it, or the error that the kernel found
// in its data.
func (b *bench) fails(t *testing.T, o *optest.Operation) error {
	offsets, size := o.Layout(workAlign)
	a := b.newArena(t, size)
	k, err := b.lib.Bind(o.Binding(a, offsets))
	if err != nil {
		return err
	}
	for id, v := range o.Before {
		copy(a.bytes()[offsets[id]:], v)
	}
	a.upload(t)
	require.NoError(t, k.(devcuda.Kernel).Enqueue(b.api, b.stream))
	a.download(t)
	return k.(devcuda.Checked).Check()
}

// Operations that the matrix kernels do not support are refused by name.
func TestMatrixRefusals(t *testing.T) {
	b := newBench(t)
	rng := rand.New(rand.NewPCG(13, 13))
	opts := optest.Options{Target: target(), Finite: true, Aligned: true}
	o := optest.Of(graph.Linear, graph.LinearAttr{}, [][]int64{{4, 8}, {8, 8}, {8}}, [][]int64{{4, 8}, {4, 8}}, 1, rng, opts)
	o.Op().Skip = o.P.AddBuffer(graph.Buffer{Name: "skip", DType: graph.I32, Shape: []int64{1}})
	require.ErrorContains(t, b.fails(t, o), "cannot be skipped by a predicate")

	wide := drawAttention(t, graph.AttentionAttr{Batch: 1, Seq: 2, KVHeads: 1, Heads: 1, HeadDim: 257, Scale: 1}, false, rng, opts)
	require.ErrorContains(t, b.fails(t, wide), "heads have 257 elements, the kernel takes 256 at most")

	for _, kind := range []graph.Kind{graph.CrossEntropy, graph.AttentionGrad, graph.HeadLossGrad} {
		o := optest.New(kind, rng, opts)
		o.Op().Skip = graph.NoBuf
		o.P.Buf(o.Op().Work).Shape[0] -= 256
		require.ErrorContains(t, b.fails(t, o), "workspace has", "%s", kind)
	}
}
