//go:build linux

package cuda_test

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	devcuda "github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/device/cuda/drivertest"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
	"github.com/spillway-ml/spillway/kernels/cuda/blas/blastest"
	"github.com/spillway-ml/spillway/kernels/cuda/shim"
	"github.com/spillway-ml/spillway/kernels/optest"
)

// double is a GPU in a test: the driver's double, kernels compiled for the CPU
// from their CUDA source, products computed on the host.
type double struct {
	t        *testing.T
	driver   *drivertest.Driver
	products *blastest.Library
	lib      *cuda.Library
	stream   driver.Stream
	images   map[string][]byte
	compiler *shim.Compiler
}

func newDouble(t *testing.T) *double {
	c, err := shim.New()
	if err == shim.ErrNoCompiler {
		t.Skip(err)
	}
	require.NoError(t, err)
	g := &double{t: t, driver: drivertest.Start(t, drivertest.Options{}), images: map[string][]byte{}, compiler: c}
	g.products = blastest.New(g.driver)
	p := pool.New(1)
	devices, err := g.driver.Devices()
	require.NoError(t, err)
	g.lib, err = cuda.New(cuda.Options{API: g.driver, Device: devices[0], Compiler: g, Products: g.products, Host: cpu.New(p)})
	require.NoError(t, err)
	g.stream, err = g.driver.NewStream()
	require.NoError(t, err)
	t.Cleanup(func() {
		p.Close()
		require.NoError(t, g.lib.Close())
		require.NoError(t, g.driver.DestroyStream(g.stream))
	})
	return g
}

// Compile notes what was compiled, for reverse.
func (g *double) Compile(name, source string, dev driver.Device) ([]byte, error) {
	image, err := g.compiler.Compile(name, source, dev)
	g.images[name] = image
	return image, err
}

// reverse makes blocks and threads run from the last to the first.
func (g *double) reverse(on bool) {
	for _, image := range g.images {
		l, err := shim.Open(image)
		require.NoError(g.t, err)
		l.Reverse(on)
	}
}

// place is device memory as an arena.
type place struct {
	at   driver.Address
	size int64
}

func (p *place) Space() graph.Space      { return graph.Device }
func (p *place) Size() int64             { return p.size }
func (p *place) Touched() int64          { return 0 }
func (p *place) Address() driver.Address { return p.at }

// products have a predicate, and operands that are not aligned, nowhere.
var products = map[graph.Kind]bool{graph.Linear: true, graph.LinearGradX: true, graph.LinearGradW: true, graph.HeadLoss: true, graph.HeadLossGrad: true}

// run executes an operation and returns its operands after it. Nothing but its
// outputs and its workspace may change.
func (g *double) run(o *optest.Operation) map[graph.BufID][]byte {
	t := g.t
	op := o.Op()
	offsets, size := o.Layout(256)
	if products[op.Kind] {
		for id := range offsets {
			offsets[id] = (offsets[id] + 255) / 256 * 256
			if id > 0 { // Layout leaves gaps of more than that
				b := o.P.Buffers[id-1]
				offsets[id] = max(offsets[id], (offsets[id-1]+b.Bytes()+64+255)/256*256)
			}
			size = offsets[id] + o.P.Buffers[id].Bytes() + 64
		}
	}
	at, err := g.driver.Alloc(size)
	require.NoError(t, err)
	defer func() { require.NoError(t, g.driver.Free(at)) }()
	mem, err := g.driver.Bytes(at, size)
	require.NoError(t, err)
	for i := range mem {
		mem[i] = byte(i * 37)
	}
	for id, b := range o.Before {
		copy(mem[offsets[id]:], b)
	}
	before := bytes.Clone(mem)
	k, err := g.lib.Bind(o.Binding(&place{at, size}, offsets))
	require.NoError(t, err, "%s", describe(o))
	require.NoError(t, k.(devcuda.Kernel).Enqueue(g.driver, g.stream))
	require.NoError(t, g.driver.Synchronize(g.stream), "%s", describe(o))
	require.NoError(t, k.(devcuda.Checked).Check())
	after := map[graph.BufID][]byte{}
	clear := func(id graph.BufID) {
		b := o.P.Buf(id)
		copy(before[offsets[id]:offsets[id]+b.Bytes()], mem[offsets[id]:])
	}
	for id := range o.Before {
		after[id] = bytes.Clone(mem[offsets[id] : offsets[id]+o.P.Buf(id).Bytes()])
	}
	for _, out := range op.Out {
		if out.Buf != graph.NoBuf {
			clear(out.Buf)
		}
	}
	if op.Work != graph.NoBuf {
		clear(op.Work)
	}
	require.True(t, bytes.Equal(before, mem), "%s: wrote elsewhere", describe(o))
	return after
}

func describe(o *optest.Operation) string {
	op := o.Op()
	text := fmt.Sprintf("%s %+v", op.Kind, op.Attr)
	for _, id := range op.In {
		if id != graph.NoBuf {
			text += fmt.Sprintf(" %s%v", o.P.Buf(id).DType, o.P.Buf(id).Shape)
		}
	}
	for _, out := range op.Out {
		if out.Buf != graph.NoBuf {
			text += fmt.Sprintf(" → %s%v %v", o.P.Buf(out.Buf).DType, o.P.Buf(out.Buf).Shape, out.Mode)
		}
	}
	return text
}

// widened returns a buffer's elements.
func widened(dt graph.DType, b []byte) []float64 {
	var out []float64
	switch dt {
	case graph.F32:
		for _, v := range optest.Values[float32](b) {
			out = append(out, float64(v))
		}
	case graph.F64:
		out = optest.Values[float64](b)
	case graph.BF16:
		for _, v := range optest.Values[uint16](b) {
			out = append(out, float64(num.FromBF16(v)))
		}
	}
	return out
}

// near requires an output to be what is wanted, within a share of its element
// and of the root mean square of all; what is not finite is the same.
func near(t *testing.T, want, got []float64, tolerance float64, what string) {
	t.Helper()
	require.Len(t, got, len(want), what)
	var squares float64
	var n int
	for _, v := range want {
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			squares += v * v
			n++
		}
	}
	rms := math.Sqrt(squares / float64(max(n, 1)))
	for i, v := range want {
		switch {
		case math.IsNaN(v) && math.IsNaN(got[i]), v == got[i]:
		case !(math.Abs(got[i]-v) <= tolerance*(math.Abs(v)+rms)):
			t.Fatalf("%s: element %d is %g, want %g (root mean square %g)", what, i, got[i], v, rms)
		}
	}
}

// check runs an operation and compares it with the CPU's arithmetic; then again
// with blocks and threads in the other order, which must give the same bits.
func (g *double) check(o *optest.Operation) {
	t := g.t
	t.Helper()
	if products[o.Op().Kind] {
		o.Op().Skip = graph.NoBuf
	}
	want, err := o.Interpret()
	require.NoError(t, err)
	got := g.run(o)
	g.reverse(true)
	again := g.run(o)
	g.reverse(false)
	for _, out := range o.Op().Out {
		if out.Buf == graph.NoBuf {
			continue
		}
		b := o.P.Buf(out.Buf)
		tolerance := 1e-5
		for _, id := range append([]graph.BufID{out.Buf}, o.Op().In...) {
			if id != graph.NoBuf && o.P.Buf(id).DType == graph.BF16 {
				tolerance = 1e-2
			}
		}
		what := describe(o) + ": " + b.Name
		near(t, widened(b.DType, want[out.Buf]), widened(b.DType, got[out.Buf]), tolerance, what)
		require.True(t, bytes.Equal(got[out.Buf], again[out.Buf]), "%s: bits depend on the order of blocks or threads", what)
	}
}

// TestMatrixKinds runs the kinds of linear.cu, loss.cu and the products over
// random shapes, in both types.
func TestMatrixKinds(t *testing.T) {
	g := newDouble(t)
	rng := rand.New(rand.NewPCG(7, 7))
	for _, kind := range []graph.Kind{
		graph.Linear, graph.LinearGradX, graph.LinearGradW, graph.BiasGrad, graph.Softmax, graph.SoftmaxGrad,
		graph.CrossEntropy, graph.CrossEntropyGrad, graph.HeadLoss, graph.HeadLossGrad,
	} {
		for i := range 12 {
			g.check(optest.New(kind, rng, optest.Options{Target: graph.CUDATarget(), Half: i%2 == 1, Finite: i%3 != 0}))
		}
	}
}

// Larger shapes than those: parts of column sums, sums over many rows and long
// rows, and several chunks of the head.
func TestMatrixKindsAtSize(t *testing.T) {
	g := newDouble(t)
	rng := rand.New(rand.NewPCG(8, 8))
	for _, half := range []bool{false, true} {
		opts := optest.Options{Target: graph.CUDATarget(), Half: half, Finite: true}
		for _, rows := range []int64{128, 129, 1000, 9000} {
			g.check(optest.Of(graph.BiasGrad, nil, [][]int64{{rows, 37}}, [][]int64{{37}}, 1, rng, opts))
		}
		g.check(optest.Of(graph.Softmax, nil, [][]int64{{3, 5001}}, [][]int64{{3, 5001}}, 1, rng, opts))
		g.check(optest.Of(graph.SoftmaxGrad, nil, [][]int64{{3, 5000}, {3, 5000}}, [][]int64{{3, 5000}}, 1, rng, opts))
		// 2048 rows to a chunk: two whole ones and a rest.
		n, c, v := int64(4100), int64(3), int64(70)
		g.check(optest.Of(graph.HeadLossGrad, nil, [][]int64{{n, c}, {v, c}, {n}, {graph.NumHyper}}, [][]int64{{1}, {n, c}, {v, c}}, int(v), rng, opts))
	}
	g.check(optest.Of(graph.CrossEntropy, nil, [][]int64{{700, 1030}, {700}}, [][]int64{{1}, {700}}, 1030, rng, optest.Options{Target: graph.CUDATarget(), Finite: true}))
}

// attention draws an attention, or its gradient with the outputs of a forward.
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

// TestAttention goes over head widths of every tile, odd and even, lengths below
// and over a tile, groups of heads, packed and not, with and without a mask.
func TestAttention(t *testing.T) {
	g := newDouble(t)
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
			g.check(drawAttention(t, a, grad, rng, optest.Options{Target: graph.CUDATarget(), Half: i > 1, Finite: i > 0}))
		}
	}
}

// What a causal mask hides has no part in what is before it, not even as an
// infinity times zero.
func TestAttentionDoesNotLookAhead(t *testing.T) {
	g := newDouble(t)
	rng := rand.New(rand.NewPCG(10, 10))
	a := graph.AttentionAttr{Batch: 1, Seq: 40, KVHeads: 1, Heads: 2, HeadDim: 8, Scale: 0.3, Causal: true}
	for _, grad := range []bool{false, true} {
		o := drawAttention(t, a, grad, rng, optest.Options{Target: graph.CUDATarget(), Finite: true})
		o.Op().Skip = graph.NoBuf
		last := func(in int, v float64) { // of keys or values
			m := optest.Values[float32](o.Before[o.Op().In[in]])
			m[len(m)-1] = float32(v)
		}
		last(1, math.NaN())
		last(2, math.Inf(1))
		g.check(o)
		first := widened(graph.F32, g.run(o)[o.Op().Out[0].Buf])[:39*16]
		for i, v := range first {
			require.False(t, math.IsNaN(v) || math.IsInf(v, 0), "gradient %v, element %d is %g", grad, i, v)
		}
	}
}

// A bias for which the library has no algorithm is added after the product.
func TestBiasWithoutTheLibrary(t *testing.T) {
	g := newDouble(t)
	g.products.Unsupported = func(p blas.Product) bool { return p.Bias }
	rng := rand.New(rand.NewPCG(11, 11))
	for i := range 8 {
		g.check(optest.New(graph.Linear, rng, optest.Options{Target: graph.CUDATarget(), Half: i%2 == 1, Finite: true}))
	}
	for _, p := range g.products.Bound() {
		require.False(t, p.Bias)
	}
}

// A target that is no class is told with its place.
func TestTargetsAreChecked(t *testing.T) {
	g := newDouble(t)
	rng := rand.New(rand.NewPCG(12, 12))
	for _, kind := range []graph.Kind{graph.CrossEntropy, graph.CrossEntropyGrad, graph.HeadLoss, graph.HeadLossGrad} {
		o := optest.New(kind, rng, optest.Options{Target: graph.CUDATarget(), Finite: true})
		o.Op().Skip = graph.NoBuf
		for i, id := range o.Op().In {
			if o.P.Buf(id).Name != "targets" {
				continue
			}
			targets := optest.Values[int32](o.Before[o.Op().In[i]])
			targets[len(targets)-1] = 1 << 20
		}
		err := g.fails(o)
		require.ErrorContains(t, err, "of targets is 1048576, want -1 to ", "%s", kind)
	}
}

// fails runs an operation and returns what the kernel says of its data.
func (g *double) fails(o *optest.Operation) error {
	t := g.t
	offsets, size := make([]int64, len(o.P.Buffers)), int64(0)
	for id := range o.P.Buffers {
		offsets[id] = size
		size += (o.P.Buffers[id].Bytes() + 255) / 256 * 256
	}
	at, err := g.driver.Alloc(size)
	require.NoError(t, err)
	defer func() { require.NoError(t, g.driver.Free(at)) }()
	mem, err := g.driver.Bytes(at, size)
	require.NoError(t, err)
	for id, b := range o.Before {
		copy(mem[offsets[id]:], b)
	}
	k, err := g.lib.Bind(o.Binding(&place{at, size}, offsets))
	if err != nil {
		return err
	}
	require.NoError(t, k.(devcuda.Kernel).Enqueue(g.driver, g.stream))
	require.NoError(t, g.driver.Synchronize(g.stream))
	return k.(devcuda.Checked).Check()
}

// What the matrix kernels do not take is refused by name.
func TestMatrixRefusals(t *testing.T) {
	g := newDouble(t)
	rng := rand.New(rand.NewPCG(13, 13))
	opts := optest.Options{Target: graph.CUDATarget(), Finite: true}
	o := optest.Of(graph.Linear, graph.LinearAttr{}, [][]int64{{4, 8}, {8, 8}, {8}}, [][]int64{{4, 8}, {4, 8}}, 1, rng, opts)
	o.Op().Skip = o.P.AddBuffer(graph.Buffer{Name: "skip", DType: graph.I32, Shape: []int64{1}})
	require.ErrorContains(t, g.fails(o), "cannot be skipped by a predicate")

	wide := drawAttention(t, graph.AttentionAttr{Batch: 1, Seq: 2, KVHeads: 1, Heads: 1, HeadDim: 257, Scale: 1}, false, rng, opts)
	require.ErrorContains(t, g.fails(wide), "heads have 257 elements, the kernel takes 256 at most")

	for _, kind := range []graph.Kind{graph.CrossEntropy, graph.AttentionGrad, graph.HeadLossGrad} {
		o := optest.New(kind, rng, opts)
		o.Op().Skip = graph.NoBuf
		o.P.Buf(o.Op().Work).Shape[0] -= 256
		require.ErrorContains(t, g.fails(o), "workspace has", "%s", kind)
	}
}

var _ device.Arena = (*place)(nil)
