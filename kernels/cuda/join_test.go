//go:build linux

package cuda

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	devcuda "github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// residual is a sum and its norm, as two operations of a program.
type residual struct {
	p                           *graph.Program
	a, b, sum, gamma, beta, y   graph.BufID
	mean, rstd                  graph.BufID
	offset                      []int64
	size                        int64
	before                      map[graph.BufID][]byte
	ops                         []graph.Op
	rows, cols                  int64
	dtype                       graph.DType
	inPlace, rms, yOverB, apart bool
}

func (r *residual) make(rng *rand.Rand) {
	r.p, r.before = &graph.Program{}, map[graph.BufID][]byte{}
	add := func(name string, t graph.DType, shape ...int64) graph.BufID {
		id := r.p.AddBuffer(graph.Buffer{Name: name, DType: t, Shape: shape})
		at := roundUp(r.size+64, 16)
		if r.apart { // addresses that are not multiples of four elements
			at += t.Size()
		}
		r.offset = append(r.offset, at)
		r.size = at + r.p.Buf(id).Bytes()
		return id
	}
	fill := func(id graph.BufID) graph.BufID {
		v := make([]float32, r.p.Buf(id).Elems())
		h := make([]uint16, len(v))
		for i := range v {
			v[i] = float32(rng.NormFloat64())
			h[i] = num.BF16(v[i])
			if r.dtype == graph.F16 {
				h[i] = num.F16(v[i])
			}
		}
		r.before[id] = optest.Bytes(h)
		if r.dtype == graph.F32 {
			r.before[id] = optest.Bytes(v)
		}
		return id
	}
	r.a, r.b = fill(add("a", r.dtype, r.rows, r.cols)), fill(add("b", r.dtype, r.rows, r.cols))
	r.gamma, r.beta = fill(add("gamma", r.dtype, r.cols)), fill(add("beta", r.dtype, r.cols))
	r.sum, r.y = add("sum", r.dtype, r.rows, r.cols), add("y", r.dtype, r.rows, r.cols)
	r.mean, r.rstd = add("mean", graph.F32, r.rows), add("rstd", graph.F32, r.rows)
	if r.yOverB {
		r.offset[r.y] = r.offset[r.b]
	}
	sum := graph.Out{Buf: r.sum}
	if r.inPlace {
		r.sum, sum = r.a, graph.Out{Buf: r.a, Mode: graph.ReadWrite}
	}
	norm := graph.NewOp(graph.LayerNorm, "norm", []graph.BufID{r.sum, r.gamma, r.beta}, []graph.Out{{Buf: r.y}, {Buf: r.mean}, {Buf: r.rstd}}, graph.NormAttr{Eps: 1e-5})
	if r.rms {
		norm = graph.NewOp(graph.RMSNorm, "norm", []graph.BufID{r.sum, r.gamma}, []graph.Out{{Buf: r.y}, {Buf: r.rstd}}, graph.NormAttr{Eps: 1e-5})
	}
	r.ops = []graph.Op{graph.NewOp(graph.Add, "add", []graph.BufID{r.a, r.b}, []graph.Out{sum}, nil), norm}
}

func (r *residual) binding(i int, in device.Arena) kernels.Binding {
	op := &r.ops[i]
	b := kernels.Binding{Program: r.p, Op: op}
	at := func(id graph.BufID) device.Ptr {
		return device.Ptr{Arena: in, Off: r.offset[id], Len: r.p.Buf(id).Bytes()}
	}
	for _, id := range op.In {
		b.In = append(b.In, at(id))
	}
	for _, o := range op.Out {
		b.Out = append(b.Out, at(o.Buf))
	}
	return b
}

// run launches the kernels and returns the arena's contents.
func (r *residual) run(t *testing.T, b *bench, a *arena, reversed bool, list ...device.Kernel) []byte {
	mem := a.bytes()
	for i := range mem {
		mem[i] = poisonByte
	}
	for id, v := range r.before {
		copy(mem[r.offset[id]:], v)
	}
	a.upload(t)
	b.reverse(t, reversed)
	for _, k := range list {
		require.NoError(t, k.(devcuda.Kernel).Enqueue(b.api, b.stream))
	}
	a.download(t)
	b.reverse(t, false)
	return bytes.Clone(mem)
}

// A sum and its norm in one kernel give the bits of the two kernels. This holds in every type, for
// rows in shared memory and longer ones, in place, with y in an addend's memory, and at any
// address.
func TestResidualAndNormAreOne(t *testing.T) {
	b := newBench(t)
	rng := rand.New(rand.NewPCG(31, 31))
	for i, cols := range []int64{1, 3, 4, 31, 64, 129, 768, 1030, 4100, 8200, 8196} {
		for j, dtype := range []graph.DType{graph.F32, graph.BF16, graph.F16} {
			r := &residual{rows: 1 + rng.Int64N(4), cols: cols, dtype: dtype, rms: (i+j)%2 == 0, inPlace: rng.IntN(3) == 0, yOverB: rng.IntN(2) == 0, apart: rng.IntN(3) == 0}
			what := fmt.Sprintf("%d columns of %v, %+v", cols, dtype, []bool{r.rms, r.inPlace, r.yOverB, r.apart})
			r.make(rng)
			a := b.newArena(t, r.size+64)
			add, err := b.lib.Bind(r.binding(0, a))
			require.NoError(t, err)
			norm, err := b.lib.Bind(r.binding(1, a))
			require.NoError(t, err)
			both, err := b.lib.Join(r.binding(0, a), r.binding(1, a))
			require.NoError(t, err)
			require.NotNil(t, both, what)
			require.Len(t, both.(*kernel).steps, 1)
			want := r.run(t, b, a, false, add, norm)
			require.Equal(t, want, r.run(t, b, a, false, both), what)
			require.Equal(t, want, r.run(t, b, a, true, both), what)
			a.free(t)
		}
	}
}

// Two operations are not joined if they are not a sum and its norm, or if their memory does not
// allow it.
func TestWhatIsNotJoined(t *testing.T) {
	b := newBench(t)
	for name, change := range map[string]func(r *residual, first, second *kernels.Binding){
		"":                 func(*residual, *kernels.Binding, *kernels.Binding) {},
		"added to":         func(r *residual, _, _ *kernels.Binding) { r.ops[0].Out[0].Mode = graph.Accum },
		"another kind":     func(r *residual, _, _ *kernels.Binding) { r.ops[0].Kind = graph.Mul },
		"another norm":     func(r *residual, _, _ *kernels.Binding) { r.ops[1].Kind = graph.Softmax },
		"of another value": func(_ *residual, _, second *kernels.Binding) { second.In[0].Off += 16 },
		"y beside b":       func(r *residual, first, second *kernels.Binding) { second.Out[0].Off = first.In[1].Off + 16 },
		"mean over a":      func(r *residual, first, second *kernels.Binding) { second.Out[1].Off = first.In[0].Off },
		"on the host": func(r *residual, first, _ *kernels.Binding) {
			p := first.In[0]
			p.Arena = &arena{space: graph.Host, size: p.Arena.Size()}
			first.In[0] = p
		},
	} {
		r := &residual{rows: 4, cols: 16, dtype: graph.F32}
		r.make(rand.New(rand.NewPCG(1, 2)))
		a := b.newArena(t, r.size+64)
		first, second := r.binding(0, a), r.binding(1, a)
		change(r, &first, &second)
		k, err := b.lib.Join(first, second)
		require.NoError(t, err)
		require.Equal(t, name == "", k != nil, name)
	}
}

// A joined kernel reads, writes and touches what its two operations do.
func TestJoinedOperandsAreBoths(t *testing.T) {
	b := newBench(t)
	r := &residual{rows: 2, cols: 8, dtype: graph.BF16}
	r.make(rand.New(rand.NewPCG(1, 3)))
	a := b.newArena(t, r.size+64)
	first, second := r.binding(0, a), r.binding(1, a)
	k, err := b.lib.Join(first, second)
	require.NoError(t, err)
	both := k.(*kernel)
	require.Equal(t, "norm", both.Label())
	for _, p := range append(append([]device.Ptr(nil), first.In...), second.In...) {
		require.Contains(t, both.Reads(), p)
		require.Contains(t, both.Touches(), p)
	}
	for _, p := range append(append([]device.Ptr(nil), first.Out...), second.Out...) {
		require.Contains(t, both.Writes(), p)
		require.Contains(t, both.Touches(), p)
	}
}

// A rehearsal loads joined kernels.
func TestRehearsalOfWhatRunsAsOne(t *testing.T) {
	b := newBench(t)
	b.double(t)
	r := &residual{rows: 2, cols: 8, dtype: graph.F32}
	r.make(rand.New(rand.NewPCG(1, 4)))
	r.p.Sections = []graph.Section{{Name: "s", Phases: []graph.Phase{{Name: "p", Repeat: 1, Ops: r.ops}}}}
	calls := b.api.(*drivertest.Driver).Calls
	re := Rehearsal{Program: r.p, Coords: [][]int{nil}, Offset: r.offset}
	re.Size[graph.Device] = r.size
	before := calls()["cuLaunchKernel"]
	_, err := b.lib.Rehearse(re, b.stream)
	require.NoError(t, err)
	require.Equal(t, 3, calls()["cuLaunchKernel"]-before, "the sum, the norm and both")
	require.Empty(t, b.api.(*drivertest.Driver).Faults())
}
