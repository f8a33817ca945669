//go:build linux

package cuda

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	devcpu "github.com/spillway-ml/spillway/device/cpu"
	devcuda "github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
	"github.com/spillway-ml/spillway/kernels"
)

// draw returns the first random operation of a kind that f accepts, in f32.
func draw(kind graph.Kind, f func(o *optest.Operation) bool) *optest.Operation {
	for seed := uint64(0); ; seed++ {
		o := optest.New(kind, rand.New(rand.NewPCG(seed, 13)), optest.Options{Target: target(), Aligned: true, Finite: true})
		if f(o) {
			return o
		}
	}
}

func always(o *optest.Operation) bool { return o.Op().Skip == graph.NoBuf }

// place puts an operation's contents into a device arena.
func (b *bench) place(t *testing.T, o *optest.Operation) (*arena, kernels.Binding) {
	offsets, size := o.Layout(workAlign)
	a := b.newArena(t, size)
	for id, v := range o.Before {
		copy(a.bytes()[offsets[id]:], v)
	}
	a.upload(t)
	require.NoError(t, b.api.Synchronize(b.stream))
	return a, o.Binding(a, offsets)
}

func TestWrongDataIsToldNotRead(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		kind  graph.Kind
		spoil func(o *optest.Operation)
		want  string
	}{
		{graph.Embed, func(o *optest.Operation) { optest.Values[int32](o.Before[0])[1] = -7 }, "op (embed): element 1 of tokens is -7, want 0 to "},
		{graph.EmbedGrad, func(o *optest.Operation) { optest.Values[int32](o.Before[0])[1] = 1 << 30 }, "op (embed_grad): element 1 of tokens is 1073741824, want 0 to "},
		{graph.SelectRow, func(o *optest.Operation) { optest.Values[int64](o.Before[1])[graph.KeyRow] = 99 }, "op (select_row): element 3 of key is 99, want a row, 0 to "},
	} {
		o := draw(c.kind, func(o *optest.Operation) bool { return always(o) && o.P.Buf(o.Op().In[0]).Elems() > 1 })
		c.spoil(o)
		a, kb := b.place(t, o)
		k, err := b.lib.Bind(kb)
		require.NoError(t, err)
		require.NoError(t, k.(devcuda.Kernel).Enqueue(b.api, b.stream))
		require.NoError(t, b.api.Synchronize(b.stream))
		require.ErrorContains(t, k.(devcuda.Checked).Check(), c.want)
		a.free(t)
	}
}

func TestBindRefuses(t *testing.T) {
	b := newBench(t)
	scale := func() *optest.Operation { return draw(graph.Scale, always) }
	for _, c := range []struct {
		name string
		o    *optest.Operation
		f    func(o *optest.Operation, kb *kernels.Binding)
		want string
	}{
		{"a collective", scale(), func(o *optest.Operation, kb *kernels.Binding) { o.Op().Kind = graph.AllReduce }, `cuda: bind op: no kernel for kind "all_reduce"`},
		{"a shape", scale(), func(o *optest.Operation, kb *kernels.Binding) { o.P.Buf(o.Op().In[0]).Shape = []int64{3, 5, 7, 11} }, "cuda: bind"},
		{"outside the arena", scale(), func(o *optest.Operation, kb *kernels.Binding) { kb.In[0].Off = 1 << 40 }, "input 0 (x): bytes"},
		{"another device's memory", scale(), func(o *optest.Operation, kb *kernels.Binding) {
			ctx := devcpu.New(0, devcpu.Options{})
			t.Cleanup(func() { require.NoError(t, ctx.Close()) })
			m, err := ctx.Alloc(graph.Device, kb.In[0].Len)
			require.NoError(t, err)
			kb.In[0] = device.Ptr{Arena: m, Len: kb.In[0].Len}
		}, "input 0: not memory of the CUDA device (*cpu.Arena)"},
		{"no workspace", draw(graph.Sum, always), func(o *optest.Operation, kb *kernels.Binding) { o.Op().Work = graph.NoBuf }, "workspace has"},
		{"misplaced workspace", draw(graph.Rope, always), func(o *optest.Operation, kb *kernels.Binding) { kb.Work.Off += 64 }, "want a multiple of 256"},
		{"a value that is none of the type", draw(graph.Fill, func(o *optest.Operation) bool { return always(o) && o.P.Buf(o.Op().Out[0].Buf).DType == graph.I32 }),
			func(o *optest.Operation, kb *kernels.Binding) { o.Op().Attr = graph.FillAttr{Value: 1e18} }, "value 1e+18 is no i32"},
		{"no coordinate", draw("adamw", func(o *optest.Operation) bool {
			return always(o) && o.Op().Attr.(graph.UpdateAttr).Shard.Axis == 0
		}), func(o *optest.Operation, kb *kernels.Binding) { kb.Coord = nil }, "shard lies along mesh axis 0"},
		{"norms of a part", draw(graph.ParamNorms, always), func(o *optest.Operation, kb *kernels.Binding) {
			o.P.Params[0].Shape = []int64{o.P.Params[0].Shape[0] + 256}
		}, "norms by parameter need all of them in one unit"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			a, kb := b.place(t, c.o)
			defer a.free(t)
			c.f(c.o, &kb)
			_, err := b.lib.Bind(kb)
			require.ErrorContains(t, err, c.want)
			require.ErrorContains(t, err, "op")
		})
	}
	_, err := b.lib.Bind(kernels.Binding{})
	require.ErrorContains(t, err, "want a program and an operation")
	_, err = New(Options{})
	require.ErrorContains(t, err, "want a driver, a compiler")
}

// badCompiler fails, or returns bytes that are no image.
type badCompiler struct{ err error }

func (c badCompiler) Compile(string, string, driver.Device) ([]byte, error) {
	return make([]byte, 64), c.err // aligned to 8 bytes, unlike an allocation of one byte
}

func TestCompilationFails(t *testing.T) {
	b := newBench(t)
	a, kb := b.place(t, draw(graph.Scale, always))
	defer a.free(t)
	b.lib.o.Compiler = badCompiler{errors.New("line 3: what?")}
	_, err := b.lib.Bind(kb)
	require.EqualError(t, err, "cuda: bind op (scale): compile elementwise.cu: line 3: what?")
	b.lib.o.Compiler = badCompiler{}
	_, err = b.lib.Bind(kb)
	require.ErrorContains(t, err, "cuda: bind op (scale): load elementwise.cu: cuModuleLoadData")
}

// hosted is page-locked memory that the CPU's device can access too.
type hosted struct {
	*devcpu.Arena
}

func (h hosted) Address() driver.Address { return 0 }

func (h hosted) HostMemory() ([]byte, error) {
	return devcpu.Bytes(device.Ptr{Arena: h.Arena, Len: h.Size()})
}

// TestHostMemoryIsTheCPUs: operations on host memory use the CPU's kernels.
func TestHostMemoryIsTheCPUs(t *testing.T) {
	b := newBench(t)
	o := draw("adamw", always)
	ctx := devcpu.New(0, devcpu.Options{})
	defer func() { require.NoError(t, ctx.Close()) }()
	offsets, size := o.Layout(workAlign)
	m, err := ctx.Alloc(graph.Host, size)
	require.NoError(t, err)
	mem, err := ctx.HostBytes(device.Ptr{Arena: m, Len: size})
	require.NoError(t, err)
	for id, v := range o.Before {
		copy(mem[offsets[id]:], v)
	}
	kb := o.Binding(hosted{m.(*devcpu.Arena)}, offsets)
	k, err := b.lib.Bind(kb)
	require.NoError(t, err)
	require.IsType(t, &hostKernel{}, k)
	require.Equal(t, "op", k.Label())
	require.Equal(t, kb.In[0], k.Touches()[0], "in the caller's arena")
	require.NoError(t, k.(devcuda.HostKernel).Run())
	want, err := o.Interpret()
	require.NoError(t, err)
	for id, w := range want {
		require.True(t, optest.SameBits(o.P.Buf(id).DType, mem[offsets[id]:][:len(w)], w))
	}
	kb.In[0].Arena = m // host memory of another owner
	_, err = b.lib.Bind(kb)
	require.ErrorContains(t, err, "which the CPU's kernels do not reach")
}

// nullDriver counts launches and does nothing else.
type nullDriver struct {
	driver.API
	launches int
}

func (d *nullDriver) Launch(driver.Function, driver.Dim, driver.Dim, int, driver.Stream, unsafe.Pointer, uintptr) error {
	d.launches++
	return nil
}

// TestLaunchAllocatesNothing: a launch allocates nothing, and its operands are divided into reads
// and writes.
func TestLaunchAllocatesNothing(t *testing.T) {
	b := newBench(t)
	d := &nullDriver{}
	for _, kind := range optest.Everywhere() {
		if slices.Contains(multiplying, kind) {
			continue // library calls are tested in package blas
		}
		o := draw(kind, func(o *optest.Operation) bool { return true })
		a, kb := b.place(t, o)
		k, err := b.lib.Bind(kb)
		require.NoError(t, err)
		n := alloctest.PerRun(10, func() {
			if k.(devcuda.Kernel).Enqueue(d, b.stream) != nil {
				panic("failed")
			}
		})
		require.Zero(t, n, "%s allocates", kind)
		ac := k.(devcuda.Accessor)
		require.Equal(t, len(k.Touches()), len(ac.Reads())+len(ac.Writes()), "%s", kind)
		a.free(t)
	}
	require.NotZero(t, d.launches)
}
