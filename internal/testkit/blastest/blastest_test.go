//go:build linux

package blastest

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
)

func TestProducts(t *testing.T) { d := drivertest.Start(t, drivertest.Options{}); Check(t, d, New(d)) }

// wrong is a library that makes a mistake.
type wrong struct {
	*Library
	change func(p *blas.Product)
}

func (w wrong) Bind(p blas.Product, at blas.Places) (blas.Call, error) {
	w.change(&p)
	return w.Library.Bind(p, at)
}

// failed is a test that has.
type failed struct{ testing.TB }

func (f failed) Errorf(string, ...any) {}
func (f failed) Fatalf(string, ...any) { panic(f) }
func (f failed) FailNow()              { panic(f) }

// The check finds what it is there to find.
func TestCheckFindsMistakes(t *testing.T) {
	for name, change := range map[string]func(p *blas.Product){
		"":                func(*blas.Product) {},
		"accumulates not": func(p *blas.Product) { p.Accumulate = false },
		"no bias":         func(p *blas.Product) { p.Bias = false },
		"no GELU":         func(p *blas.Product) { p.GELU = false },
		"no derivative":   func(p *blas.Product) { p.DGELU = false },
		"no sums":         func(p *blas.Product) { p.Sums = blas.NoSums },
		"a short sum":     func(p *blas.Product) { p.K = max(p.K-1, 1) },
	} {
		runtime.LockOSThread()
		d := drivertest.New(drivertest.Options{})
		c, err := d.Retain(0)
		require.NoError(t, err)
		require.NoError(t, d.SetCurrent(c))
		run := func() { Check(failed{t}, d, wrong{New(d), change}) }
		if name == "" {
			require.NotPanics(t, run)
		} else {
			require.Panics(t, run, name)
		}
		_ = d.Close() // a check that stopped leaves its memory behind
		runtime.UnlockOSThread()
	}
}

// Workspace has no contents to rely on.
func TestWorkspaceIsOverwritten(t *testing.T) {
	d := drivertest.Start(t, drivertest.Options{})
	s, err := d.NewStream()
	require.NoError(t, err)
	at, err := d.Alloc(1024)
	require.NoError(t, err)
	one := blas.Matrix{Type: graph.F32, Ld: 1}
	call, err := New(d).Bind(blas.Product{M: 1, N: 1, K: 1, A: one, B: one, C: one, Workspace: 256}, blas.Places{A: at, B: at + 16, C: at + 32, Work: at + 256})
	require.NoError(t, err)
	require.NoError(t, call.Enqueue(s))
	require.NoError(t, d.Synchronize(s))
	work, err := d.Bytes(at+256, 256)
	require.NoError(t, err)
	require.Equal(t, byte(0xff), work[255])
	require.NoError(t, d.Free(at))
	require.NoError(t, d.DestroyStream(s))
}

func TestRefusals(t *testing.T) {
	f := blas.Matrix{Type: graph.F32, Ld: 8}
	h := blas.Matrix{Type: graph.BF16, Ld: 8}
	at := blas.Places{A: 256, B: 512, C: 1024, Bias: 2048, Work: 4096}
	lib := New(nil)
	for _, c := range []struct {
		p    blas.Product
		at   blas.Places
		want string
	}{
		{blas.Product{M: 0, N: 8, K: 8, A: f, B: f, C: f}, at, "sizes are at least 1"},
		{blas.Product{M: 8, N: 9, K: 8, A: f, B: f, C: f}, at, "rows of B have 9 elements and are 8 apart"},
		{blas.Product{M: 9, N: 8, K: 8, A: blas.Matrix{Ld: 8, Trans: true}, B: f, C: f}, at, "rows of A have 9 elements"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: h, C: f}, at, "A is f32, B bf16"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: h}, at, "C bf16"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: f}, blas.Places{A: 8, B: 512, C: 1024}, "A is at 0x8, want a multiple of 16"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: f, Bias: true}, blas.Places{A: 256, B: 512, C: 1024}, "the bias is at 0x0"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: f, Workspace: 16}, blas.Places{A: 256, B: 512, C: 1024, Work: 16}, "workspace at 0x10"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: f, Bias: true, Accumulate: true}, at, "cannot both"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: blas.Matrix{Ld: 8, Trans: true}}, at, "C is transposed"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: f, GELU: true}, at, "GELU over rows of 8 elements of f32"},
		{blas.Product{M: 8, N: 4, K: 8, A: h, B: h, C: h, GELU: true}, at, "GELU over rows of 4 elements of bf16; want bf16 or f16, and a multiple of 8"},
		{blas.Product{M: 8, N: 8, K: 8, A: h, B: h, C: h, GELU: true, Accumulate: true}, at, "GELU goes with neither DGELU nor Accumulate"},
		{blas.Product{M: 8, N: 8, K: 8, A: h, B: h, C: h, GELU: true, DGELU: true}, at, "GELU goes with neither DGELU nor Accumulate"},
		{blas.Product{M: 8, N: 8, K: 8, A: h, B: h, C: h, GELU: true}, at, "aux is at 0x0, want a multiple of 16"},
		{blas.Product{M: 8, N: 8, K: 8, A: h, B: h, C: h, GELU: true}, blas.Places{A: 256, B: 512, C: 1024, Aux: 1032}, "aux is at 0x408, want a multiple of 16"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: f, Sums: blas.SumsA}, at, "the sums are at 0x0"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: f, Sums: blas.SumsB}, blas.Places{A: 256, B: 512, C: 1024, Sums: 2056}, "the sums are at 0x808, want a multiple of 16"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: f, Sums: blas.SumsB, Bias: true}, at, "no bias, GELU or derivative"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: f, Sums: 3}, at, "a product has two"},
	} {
		_, err := lib.Bind(c.p, c.at)
		require.ErrorContains(t, err, c.want)
	}
	lib.Unsupported = func(p blas.Product) bool { return p.Bias }
	_, err := lib.Bind(blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: f, Bias: true}, at)
	require.ErrorIs(t, err, blas.ErrUnsupported)
	require.ErrorContains(t, err, "product 8×8×8 (A f32, B f32, C f32)")
}
