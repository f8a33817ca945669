//go:build linux

package cuda

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	devcuda "github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// flashShapes are attentions for the tensor cores: complete and partial tiles, masks, groups of
// heads, both layouts and all head widths.
var flashShapes = []graph.AttentionAttr{
	{Batch: 1, Seq: 130, Heads: 1, KVHeads: 1, HeadDim: 64, Causal: true, Packed: true},
	{Batch: 2, Seq: 64, Heads: 2, KVHeads: 1, HeadDim: 64, Causal: true},
	{Batch: 1, Seq: 65, Heads: 2, KVHeads: 1, HeadDim: 80},
	{Batch: 1, Seq: 70, Heads: 1, KVHeads: 1, HeadDim: 96, Causal: true, Packed: true},
	{Batch: 1, Seq: 66, Heads: 2, KVHeads: 1, HeadDim: 128, Causal: true},
	{Batch: 1, Seq: 7, Heads: 1, KVHeads: 1, HeadDim: 128, Packed: true},
}

// flashOperation draws an attention, or its gradient. The gradient's lse and y are those of the
// drawn queries, keys and values.
func flashOperation(t *testing.T, kind graph.Kind, a graph.AttentionAttr, f16 bool, seed uint64) *optest.Operation {
	a.Scale = 1 / math.Sqrt(float64(a.HeadDim))
	n, wide, narrow, stats := a.Batch*a.Seq, a.Heads*a.HeadDim, a.KVHeads*a.HeadDim, []int64{a.Batch * a.Heads * a.Seq}
	qkv := [][]int64{{n, wide}, {n, narrow}, {n, narrow}}
	if a.Packed {
		qkv = [][]int64{{n, wide + 2*narrow}}
	}
	y, opts := []int64{n, wide}, optest.Options{Target: target(), Half: true, F16: f16, Aligned: true, Finite: true}
	forward := optest.Of(graph.Attention, a, qkv, [][]int64{y, stats}, 1, rand.New(rand.NewPCG(seed, 21)), opts)
	forward.Op().Skip = graph.NoBuf
	if kind == graph.Attention {
		return forward
	}
	o := optest.Of(kind, a, append(slices.Clone(qkv), y, stats, y), qkv, 1, rand.New(rand.NewPCG(seed, 22)), opts)
	o.Op().Skip = graph.NoBuf
	for i := range qkv {
		copy(o.Before[o.Op().In[i]], forward.Before[forward.Op().In[i]])
	}
	result, err := forward.Interpret()
	require.NoError(t, err)
	copy(o.Before[o.Op().In[len(qkv)]], result[forward.Op().Out[0].Buf])
	copy(o.Before[o.Op().In[len(qkv)+1]], result[forward.Op().Out[1].Buf])
	return o
}

// TestFlashFollowsTheCPU runs tensor-core attention with C++ twins of its instructions. Results are
// close to the CPU's, with the same bits in any order of blocks and threads. Nothing else is
// written.
func TestFlashFollowsTheCPU(t *testing.T) {
	b := newBench(t)
	for i, a := range flashShapes {
		for _, kind := range []graph.Kind{graph.Attention, graph.AttentionGrad} {
			o := flashOperation(t, kind, a, i%2 == 1, uint64(i))
			want, err := o.Interpret()
			require.NoError(t, err)
			require.Contains(t, strings.Join(b.sourcesOf(t, o), " "), fmt.Sprintf("flash_%d.cu", a.HeadDim))
			b.compare(t, o, want, fmt.Sprintf("%+v", a))
		}
	}
}

// If the heads' queries, gradients and sums exceed the cache, blocks process the tiles of a few
// heads at a time, in another order. Every tile is processed once, and none waits for a later one.
func TestFlashOrderOfManyHeads(t *testing.T) {
	b := newBench(t)
	was, sms := flashCache, b.lib.o.Device.SMs
	defer func() { flashCache, b.lib.o.Device.SMs = was, sms }()
	large := graph.AttentionAttr{Batch: 16, Seq: 1024, Heads: 25, KVHeads: 25, HeadDim: 64}
	spread, stride := flashOrder(large, 132)
	require.Equal(t, [2]int32{7, 1}, [2]int32{spread, stride})
	require.EqualValues(t, 64, flashAtOnce(large))
	large.Batch = 1
	spread, _ = flashOrder(large, 132)
	require.Zero(t, spread, "all fit the cache")
	large.Batch, large.Seq, large.Heads, large.KVHeads = 1, 8192, 32, 8
	spread, stride = flashOrder(large, 132)
	require.Equal(t, [2]int32{1, 37}, [2]int32{spread, stride})

	flashCache, b.lib.o.Device.SMs = 1, 1
	for i, c := range []struct {
		a              graph.AttentionAttr
		spread, stride int32
	}{
		{graph.AttentionAttr{Batch: 2, Seq: 130, Heads: 3, KVHeads: 3, HeadDim: 64, Causal: true, Packed: true}, 2, 1},
		{graph.AttentionAttr{Batch: 2, Seq: 300, Heads: 2, KVHeads: 1, HeadDim: 64, Causal: true}, 1, 4},
	} {
		spread, stride := flashOrder(c.a, 1)
		require.Equal(t, [2]int32{c.spread, c.stride}, [2]int32{spread, stride})
		for _, kind := range []graph.Kind{graph.Attention, graph.AttentionGrad} {
			o := flashOperation(t, kind, c.a, false, uint64(40+i))
			want, err := o.Interpret()
			require.NoError(t, err)
			b.compare(t, o, want, fmt.Sprintf("%+v", c.a))
		}
	}
}

// sourcesOf returns the source files of an operation's launches.
func (b *bench) sourcesOf(t *testing.T, o *optest.Operation) []string {
	offsets, size := o.Layout(workAlign)
	a := b.newArena(t, size)
	defer a.free(t)
	k, err := b.lib.Bind(o.Binding(a, offsets))
	require.NoError(t, err)
	var names []string
	for _, s := range k.(*kernel).steps {
		for name, f := range b.lib.functions {
			if l, ok := s.(*launch); ok && l.f == f {
				source, _, _ := strings.Cut(name, ":")
				names = append(names, source)
			}
		}
	}
	return names
}

// TestFlashIsChosenByCardAndShape: older cards, other widths, fp32 and misaligned values use the
// fp32 kernels.
func TestFlashIsChosenByCardAndShape(t *testing.T) {
	b := newBench(t)
	b.double(t)
	flash := func(o *optest.Operation) bool {
		return slices.ContainsFunc(b.sourcesOf(t, o), func(s string) bool { return strings.HasPrefix(s, "flash_") })
	}
	a := flashShapes[1]
	require.True(t, flash(flashOperation(t, graph.AttentionGrad, a, false, 1)))
	other := a
	other.HeadDim = 32
	require.False(t, flash(flashOperation(t, graph.AttentionGrad, other, false, 1)))
	b.lib.o.Device.Major, b.lib.o.Device.Minor = 7, 5
	require.False(t, flash(flashOperation(t, graph.AttentionGrad, a, false, 1)))
	require.False(t, flash(flashOperation(t, graph.Attention, a, false, 1)))
}

// TestFlashError compares the outputs with fp64 sums of the same 16-bit inputs. The error by norm
// is that of rounding the probabilities, the scores' gradients and the result.
func TestFlashError(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		f16   bool
		bound float64
	}{{false, 5e-3}, {true, 7e-4}} {
		forward, backward := flashOperation(t, graph.Attention, flashShapes[0], c.f16, 5), flashOperation(t, graph.AttentionGrad, flashShapes[0], c.f16, 5)
		y, dqkv := attention64(backward, c.f16)
		b.requireNear(t, forward, "y", y, 1, c.f16, c.bound)
		b.requireNear(t, backward, "dq dk dv", dqkv, 3, c.f16, c.bound)
	}
}

// requireNear runs an operation and compares its first output by norm. The output's rows consist of
// several parts.
func (b *bench) requireNear(t *testing.T, o *optest.Operation, names string, want []float64, parts int, f16 bool, bound float64) {
	offsets, size := o.Layout(workAlign)
	arena := b.newArena(t, size)
	defer arena.free(t)
	values := half64(b.run(t, o, arena, offsets)[o.Op().Out[0].Buf], f16)
	require.Len(t, values, len(want))
	width := int(flashShapes[0].Heads * flashShapes[0].HeadDim)
	for part, name := range strings.Fields(names) {
		off, norm := 0.0, 0.0
		for i := range values {
			if i/width%parts == part {
				off += (values[i] - want[i]) * (values[i] - want[i])
				norm += want[i] * want[i]
			}
		}
		t.Logf("f16 %v: %s is %.2g from fp64's", f16, name, math.Sqrt(off/norm))
		require.Less(t, math.Sqrt(off/norm), bound, "f16 %v: %s", f16, name)
	}
}

func half64(data []byte, f16 bool) []float64 {
	var out []float64
	for _, v := range optest.Values[uint16](data) {
		if f16 {
			out = append(out, float64(num.FromF16(v)))
		} else {
			out = append(out, float64(num.FromBF16(v)))
		}
	}
	return out
}

// attention64 computes y and dqkv of a packed, causal attention by its definition in fp64. It has
// as many key heads as query heads.
func attention64(o *optest.Operation, f16 bool) (y, dqkv []float64) {
	a := o.Op().Attr.(graph.AttentionAttr)
	qkv, dy := half64(o.Before[o.Op().In[0]], f16), half64(o.Before[o.Op().In[3]], f16)
	s, d, w := int(a.Seq), int(a.HeadDim), int(a.Heads*a.HeadDim)
	y, out := make([]float64, len(dy)), make([]float64, len(qkv))
	dot := func(x, y []float64) (sum float64) {
		for i := range x {
			sum += x[i] * y[i]
		}
		return sum
	}
	for h := range int(a.Heads) {
		at := func(m []float64, part, row int) []float64 { return m[row*3*w+part*w+h*d:][:d] }
		for i := range s {
			g := dy[i*w+h*d:][:d]
			p, top, sum := make([]float64, i+1), math.Inf(-1), 0.0
			for j := range p {
				p[j] = dot(at(qkv, 0, i), at(qkv, 1, j)) * a.Scale
				top = max(top, p[j])
			}
			for j := range p {
				p[j] = math.Exp(p[j] - top)
				sum += p[j]
			}
			delta, dp := 0.0, make([]float64, i+1)
			for j := range p {
				p[j] /= sum
				dp[j] = dot(g, at(qkv, 2, j))
				delta += p[j] * dp[j]
			}
			for j := range p {
				ds := p[j] * (dp[j] - delta) * a.Scale
				for k := range d {
					y[i*w+h*d+k] += p[j] * at(qkv, 2, j)[k]
					at(out, 0, i)[k] += ds * at(qkv, 1, j)[k]
					at(out, 1, j)[k] += ds * at(qkv, 0, i)[k]
					at(out, 2, j)[k] += p[j] * g[k]
				}
			}
		}
	}
	return y, out
}

// run executes an operation once and returns its outputs.
func (b *bench) run(t *testing.T, o *optest.Operation, a *arena, offsets []int64) map[graph.BufID][]byte {
	k, err := b.lib.Bind(o.Binding(a, offsets))
	require.NoError(t, err)
	mem := a.bytes()
	for i := range mem {
		mem[i] = poisonByte
	}
	for id, v := range o.Before {
		copy(mem[offsets[id]:], v)
	}
	a.upload(t)
	require.NoError(t, k.(devcuda.Kernel).Enqueue(b.api, b.stream))
	a.download(t)
	got := map[graph.BufID][]byte{}
	for _, out := range o.Op().Out {
		got[out.Buf] = slices.Clone(mem[offsets[out.Buf]:][:o.P.Buf(out.Buf).Bytes()])
	}
	return got
}
