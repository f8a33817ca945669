//go:build linux

package cuda

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	devcuda "github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// inexact are kinds whose sums have another order than the CPU's; their results agree within a
// tolerance. All other kinds give the CPU's bits.
var inexact = []graph.Kind{
	graph.LayerNorm, graph.LayerNormGrad, graph.RMSNorm, graph.RMSNormGrad,
	graph.Linear, graph.LinearAct, graph.LinearGradX, graph.LinearGradAct, graph.LinearGradW, graph.LinearGradWB, graph.BiasGrad, graph.Softmax, graph.SoftmaxGrad,
	graph.CrossEntropy, graph.CrossEntropyGrad, graph.HeadLoss, graph.HeadLossGrad, graph.Attention, graph.AttentionGrad,
}

// multiplying are kinds with matrix products. Their operands are aligned and they have no
// predicate.
var multiplying = []graph.Kind{graph.Linear, graph.LinearAct, graph.LinearGradX, graph.LinearGradAct, graph.LinearGradW, graph.LinearGradWB, graph.HeadLoss, graph.HeadLossGrad}

// target returns the target that determines the workspace in these tests.
func target() graph.Target { return graph.CUDATarget() }

// drawn draws an operation with options that the kind's kernels accept.
func drawn(kind graph.Kind, rng *rand.Rand, opts optest.Options) *optest.Operation {
	many := slices.Contains(multiplying, kind)
	opts.Aligned = opts.Aligned || many
	o := optest.New(kind, rng, opts)
	if many {
		o.Op().Skip = graph.NoBuf
	}
	return o
}

// tolerance returns the allowed error of an operation's outputs, relative to each element or the
// mean magnitude: 0 requires the CPU's bits.
func tolerance(o *optest.Operation) float64 {
	if !slices.Contains(inexact, o.Op().Kind) {
		return 0
	}
	for i := range o.P.Buffers {
		switch {
		case o.P.Buffers[i].DType != graph.BF16 && o.P.Buffers[i].DType != graph.F16:
		case tensorCores(o):
			return 5e-2 // probabilities, below 1 in a row of few keys, are rounded before the products
		case o.Op().Kind == graph.HeadLossGrad:
			return 2e-2 // the logits' gradient is rounded before products in which it cancels
		default:
			return 1e-2
		}
	}
	return 1e-5
}

// tensorCores reports whether an operation is an attention that runs on the tensor cores.
func tensorCores(o *optest.Operation) bool {
	a, ok := o.Op().Attr.(graph.AttentionAttr)
	return ok && cut.TensorAttention(a, o.P.Buf(o.Op().In[0]).DType)
}

// TestKernelsFollowTheCPU runs random operations of every kind, with tails, in f32, bf16 and f16,
// at addresses that are only multiples of the element's size. Every byte of the arena must equal
// the interpreter's, or be close to it for inexact kinds. The bits must not depend on the order of
// blocks and threads, and nothing else may be written.
func TestKernelsFollowTheCPU(t *testing.T) {
	for _, kind := range optest.Everywhere() {
		require.Contains(t, binders, kind)
		t.Run(string(kind), func(t *testing.T) {
			b := newBench(t)
			for seed := range long.Or(uint64(12), 24) {
				for _, half := range []bool{false, true} {
					o := drawn(kind, rand.New(rand.NewPCG(seed, 11)), optest.Options{Target: target(), Half: half, F16: half && seed%4 > 1, Aligned: seed%2 == 0})
					require.NoError(t, graph.Check(o.P, o.Op()))
					want, err := o.Interpret()
					require.NoError(t, err)
					b.compare(t, o, want, fmt.Sprintf("seed %d, 16 bits %v", seed, half))
				}
			}
		})
	}
}

// compare runs an operation in both orders of blocks and threads.
func (b *bench) compare(t *testing.T, o *optest.Operation, want map[graph.BufID][]byte, what string) {
	offsets, size := o.Layout(workAlign)
	a := b.newArena(t, size)
	defer a.free(t)
	k, err := b.lib.Bind(o.Binding(a, offsets))
	require.NoError(t, err, what)
	var first []byte
	for _, reversed := range []bool{false, true} {
		mem := a.bytes()
		for i := range mem {
			mem[i] = poisonByte
		}
		for id, v := range o.Before {
			copy(mem[offsets[id]:], v)
		}
		before := slices.Clone(mem)
		a.upload(t)
		b.reverse(t, reversed)
		require.NoError(t, k.(devcuda.Kernel).Enqueue(b.api, b.stream), what)
		a.download(t)
		b.reverse(t, false)
		for id := range o.P.Buffers {
			at, n := offsets[id], o.P.Buffers[id].Bytes()
			buf := graph.BufID(id)
			if w, ok := want[buf]; ok {
				got := mem[at : at+n]
				if err := agree(o.P.Buf(buf).DType, got, w, tolerance(o)); err != nil {
					require.Failf(t, "the result differs from the CPU's", "%s, reversed %v: %s of %+v attr %+v shapes %s: %v", what, reversed,
						o.P.Buf(buf).Name, o.Op(), o.Op().Attr, shapesOf(o), err)
				}
				copy(before[at:], got)
			} else { // workspace: its contents are undefined
				clear(before[at : at+n])
				clear(mem[at : at+n])
			}
		}
		require.True(t, bytes.Equal(before, mem), "%s: written outside the operands", what)
		if first == nil {
			first = slices.Clone(mem)
		}
		require.True(t, bytes.Equal(first, mem), "%s: the bits depend on the order of threads", what)
	}
	if r, ok := k.(devcuda.Checked); ok {
		require.NoError(t, r.Check())
	}
}

// TestLargeShapes runs the same test for shapes larger than a block of threads.
func TestLargeShapes(t *testing.T) {
	for _, kind := range optest.Everywhere() {
		if !optest.HasLarge(kind) {
			continue
		}
		t.Run(string(kind), func(t *testing.T) {
			b := newBench(t)
			for seed := range uint64(2) { // aligned and unaligned
				for _, half := range []bool{false, true} {
					if !long.On() && half != (seed == 0) {
						continue
					}
					o := drawn(kind, rand.New(rand.NewPCG(seed, 12)), optest.Options{Target: target(), Half: half, Large: true, Aligned: seed%2 == 0, Finite: true})
					require.NoError(t, graph.Check(o.P, o.Op()))
					want, err := o.Interpret()
					require.NoError(t, err)
					b.compare(t, o, want, fmt.Sprintf("seed %d, 16 bits %v", seed, half))
				}
			}
		})
	}
}

// TestNormGradients runs both kernels of a norm's gradients with fewer and with more rows than
// lanes. A block with several rows reads one row ahead. Some row lengths are not multiples of 16
// bytes.
func TestNormGradients(t *testing.T) {
	b := newBench(t)
	lanes := cut.NormLanes
	for k, kind := range []graph.Kind{graph.LayerNormGrad, graph.RMSNormGrad} {
		for i, s := range [][2]int64{{lanes - 1, 24}, {2*lanes + 3, 24}, {3 * lanes, 7}, {2, 4096}, {lanes + 2, 4104}, {3, 8200}, {2, 8193}} {
			for _, half := range []bool{false, true} {
				if !long.On() && half != ((i+k)%2 == 0) { // each shape in one width, aligned and unaligned
					continue
				}
				row, one, n := []int64{s[0], s[1]}, []int64{s[1]}, []int64{s[0]}
				in, out := [][]int64{row, row, one, n}, [][]int64{row, one}
				if kind == graph.LayerNormGrad {
					in, out = append(in, n), append(out, one)
				}
				rng := rand.New(rand.NewPCG(uint64(i), 17))
				b.check(t, optest.Of(kind, graph.NormAttr{Eps: 1e-5}, in, out, 1, rng, optest.Options{Target: target(), Half: half, Finite: true, Aligned: i%2 == 0}))
			}
		}
	}
}

func shapesOf(o *optest.Operation) string {
	s := ""
	for i := range o.P.Buffers {
		s += fmt.Sprintf("%s %v%v ", o.P.Buffers[i].Name, o.P.Buffers[i].DType, o.P.Buffers[i].Shape)
	}
	return s
}

// agree compares two contents of a buffer: the same bits, or a difference within a share of the
// larger of the value and the mean magnitude.
func agree(dt graph.DType, got, want []byte, tolerance float64) error {
	if optest.SameBits(dt, got, want) {
		return nil
	}
	var g, w []float64
	switch dt {
	case graph.F64:
		g, w = optest.Values[float64](got), optest.Values[float64](want)
	case graph.F32:
		for i := range optest.Values[float32](got) {
			g, w = append(g, float64(optest.Values[float32](got)[i])), append(w, float64(optest.Values[float32](want)[i]))
		}
	case graph.F16:
		for i := range optest.Values[uint16](got) {
			g, w = append(g, float64(num.FromF16(optest.Values[uint16](got)[i]))), append(w, float64(num.FromF16(optest.Values[uint16](want)[i])))
		}
	case graph.BF16:
		for i := range optest.Values[uint16](got) {
			g, w = append(g, float64(num.FromBF16(optest.Values[uint16](got)[i]))), append(w, float64(num.FromBF16(optest.Values[uint16](want)[i])))
		}
	default:
		return fmt.Errorf("got %v, want %v", optest.Head(dt, got), optest.Head(dt, want))
	}
	scale, n := 0.0, 0
	for _, v := range w {
		if v-v == 0 {
			scale += math.Abs(v)
			n++
		}
	}
	scale /= math.Max(float64(n), 1)
	for i := range w {
		same := g[i] == w[i] || g[i] != g[i] && w[i] != w[i]
		if same || math.Abs(g[i]-w[i]) <= tolerance*math.Max(math.Abs(w[i]), scale) {
			continue
		}
		return fmt.Errorf("element %d is %g, want %g", i, g[i], w[i])
	}
	return nil
}
