//go:build unix

package blas

import (
	"errors"
	"fmt"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/device/cuda/dynlib"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
)

// found opens the library without a handle, because descriptions need no GPU.
func found(t *testing.T) *Lt {
	l, err := load(0)
	var missing *dynlib.NotFound
	if errors.As(err, &missing) {
		t.Skip(err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	return l
}

var shapes = []Product{
	{M: 5, N: 7, K: 3, A: Matrix{Type: graph.F32, Ld: 3}, B: Matrix{Type: graph.F32, Ld: 7}, C: Matrix{Type: graph.F32, Ld: 7}, Accumulate: true},
	{M: 512, N: 768, K: 3072, A: Matrix{Type: graph.BF16, Trans: true, Ld: 512}, B: Matrix{Type: graph.BF16, Trans: true, Ld: 3072},
		C: Matrix{Type: graph.BF16, Ld: 768}, Bias: true, Workspace: 1 << 20},
	{M: 64, N: 100, K: 32, A: Matrix{Type: graph.BF16, Ld: 40}, B: Matrix{Type: graph.BF16, Ld: 128}, C: Matrix{Type: graph.F32, Ld: 104}, Bias: true},
	{M: 64, N: 128, K: 32, A: Matrix{Type: graph.BF16, Ld: 32}, B: Matrix{Type: graph.BF16, Trans: true, Ld: 32}, C: Matrix{Type: graph.BF16, Ld: 128}, DGELU: true},
	{M: 64, N: 128, K: 32, A: Matrix{Type: graph.BF16, Ld: 32}, B: Matrix{Type: graph.BF16, Ld: 128}, C: Matrix{Type: graph.BF16, Ld: 128}, GELU: true, Bias: true},
	{M: 64, N: 128, K: 32, A: Matrix{Type: graph.F16, Ld: 32}, B: Matrix{Type: graph.F16, Trans: true, Ld: 32}, C: Matrix{Type: graph.F16, Ld: 128}, GELU: true, Workspace: 1 << 20},
	{M: 64, N: 128, K: 32, A: Matrix{Type: graph.BF16, Trans: true, Ld: 64}, B: Matrix{Type: graph.BF16, Ld: 128}, C: Matrix{Type: graph.F32, Ld: 128}, Sums: SumsB, Accumulate: true},
	{M: 128, N: 64, K: 32, A: Matrix{Type: graph.F16, Trans: true, Ld: 128}, B: Matrix{Type: graph.F16, Ld: 64}, C: Matrix{Type: graph.F16, Ld: 64}, Sums: SumsA},
}

// The library accepts every attribute with its number and size, and returns the layouts that were
// set.
func TestDescriptions(t *testing.T) {
	l := found(t)
	t.Logf("%s, version %d", l.Path(), l.Version())
	require.GreaterOrEqual(t, l.Version(), 110000)
	var get, layoutGet uintptr
	require.NoError(t, l.lib.Symbols(map[string]*uintptr{"cublasLtMatmulDescGetAttribute": &get, "cublasLtMatrixLayoutGetAttribute": &layoutGet}))
	read := func(fn, object uintptr, attribute int, size uintptr) uint64 {
		var v uint64
		var written uintptr
		r, _, _ := purego.SyscallN(fn, object, uintptr(attribute), uintptr(unsafe.Pointer(&v)), size, uintptr(unsafe.Pointer(&written)))
		require.NoError(t, statusError("get", r))
		require.Equal(t, size, written)
		return v
	}
	for _, p := range shapes {
		desc, free, err := l.describe(p)
		require.NoError(t, err)
		trans := map[bool]uint64{false: opN, true: opT}
		require.Equal(t, trans[p.B.Trans], read(get, desc, descTransA, 4))
		require.Equal(t, trans[p.A.Trans], read(get, desc, descTransB, 4))
		epilogue := uint64(epilogueDefault)
		switch {
		case p.GELU && p.Bias:
			epilogue = 164 // CUBLASLT_EPILOGUE_GELU_AUX_BIAS
		case p.GELU:
			epilogue = 160 // CUBLASLT_EPILOGUE_GELU_AUX
		case p.Bias:
			epilogue = epilogueBias
		case p.DGELU:
			epilogue = epilogueDGELU
		case p.Sums != NoSums: // the library's factors are ours, exchanged
			epilogue = map[Side]uint64{SumsA: epilogueBGradB, SumsB: epilogueBGradA}[p.Sums]
			require.EqualValues(t, dataType(p.C.Type), read(get, desc, descBiasType, 4))
		}
		if p.GELU || p.DGELU {
			require.EqualValues(t, p.N, read(get, desc, descAuxLd, 8))
			require.EqualValues(t, dataType(p.C.Type), read(get, desc, descAuxType, 4))
		}
		require.Equal(t, epilogue, read(get, desc, descEpilogue, 4))
		extra := p.extra(Places{})
		for i := range extra {
			at := uint64(4096 * (i + 1))
			require.NoError(t, l.set("set", l.sym.descSet, desc, extra[i].attribute, &at))
		}
		for i, e := range extra {
			require.EqualValues(t, 4096*(i+1), read(get, desc, e.attribute, 8))
		}
		require.NoError(t, free())
		_, free, err = l.preference(p)
		require.NoError(t, err)
		require.NoError(t, free())

		// Without a handle only the heuristic fails, after everything else has been made.
		var pl ltPlan
		require.Error(t, l.plan(p, &pl))
		const layoutType, layoutRows, layoutCols, layoutLd = 0, 2, 3, 4
		for _, m := range []struct {
			layout     uintptr
			m          Matrix
			cols, rows int64 // in the library's order
		}{{pl.a, p.B, p.N, p.K}, {pl.b, p.A, p.K, p.M}, {pl.c, p.C, p.N, p.M}} {
			if m.m.Trans {
				m.cols, m.rows = m.rows, m.cols
			}
			require.EqualValues(t, dataType(m.m.Type), read(layoutGet, m.layout, layoutType, 4))
			require.EqualValues(t, m.cols, read(layoutGet, m.layout, layoutRows, 8))
			require.EqualValues(t, m.rows, read(layoutGet, m.layout, layoutCols, 8))
			require.EqualValues(t, m.m.Ld, read(layoutGet, m.layout, layoutLd, 8))
		}
		require.NoError(t, pl.owned.free())
	}
}

// Sixteen words reach the library. If it refuses a call, the error names the call.
func TestACallThatTheLibraryRefuses(t *testing.T) {
	l := found(t)
	c := &ltCall{lib: l, plan: &ltPlan{one: 1}}
	c.words()
	err := c.Enqueue(0)
	var failed *driver.Error
	require.ErrorAs(t, err, &failed)
	require.Equal(t, "cublasLtMatmul", failed.Call)
	require.Contains(t, []string{"CUBLAS_STATUS_NOT_INITIALIZED", "CUBLAS_STATUS_INVALID_VALUE"}, failed.Name)
}

func TestEnqueueAllocatesNothing(t *testing.T) {
	l := found(t)
	libc, err := purego.Dlopen("libc.so.6", purego.RTLD_LAZY)
	require.NoError(t, err)
	l.sym.matmul, err = purego.Dlsym(libc, "ffs") // the first bit of its first word, the handle: 0
	require.NoError(t, err)
	c := &ltCall{lib: l, plan: &ltPlan{one: 1}}
	c.words()
	require.Zero(t, alloctest.PerRun(100, func() { err = c.Enqueue(7) }))
	require.NoError(t, err)
}

func TestBindRemembersARefusal(t *testing.T) {
	l := found(t)
	p := shapes[0]
	at := Places{A: 256, B: 512, C: 1024}
	_, first := l.Bind(p, at)
	require.ErrorContains(t, first, "product 5×7×3 (A f32, B f32, C f32)")
	_, again := l.Bind(p, at)
	require.Same(t, first, again)
}

// If a library refuses an epilogue because it does not know it, this is ErrUnsupported and no
// failure: a kernel replaces the epilogue.
func TestALibraryWithoutTheEpilogue(t *testing.T) {
	refused := fmt.Errorf("attribute 12: %w", statusError("cublasLtMatmulDescSetAttribute", statusInvalidValue))
	require.ErrorIs(t, older(Product{DGELU: true}, refused), ErrUnsupported)
	require.ErrorIs(t, older(Product{GELU: true, Bias: true}, refused), ErrUnsupported)
	require.Equal(t, refused, older(Product{Bias: true}, refused))
	failed := statusError("cublasLtMatmulAlgoGetHeuristic", 13)
	require.Equal(t, failed, older(Product{DGELU: true}, failed))
	require.NoError(t, older(Product{DGELU: true}, nil))
	require.ErrorIs(t, older(Product{Sums: SumsB}, refused), ErrUnsupported)
	require.Equal(t, failed, older(Product{Sums: SumsB}, failed))
}

func TestOpenNamesWhatIsMissing(t *testing.T) {
	l, err := Open(0)
	if err == nil {
		require.NoError(t, l.Close())
		t.Skip("there is a GPU, or a cuBLASLt that needs none")
	}
	require.Regexp(t, "cuBLASLt was not found|cublasLtCreate", err.Error())
}
