//go:build linux

package blas_test

import (
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/blastest"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
)

// onGPU makes the first GPU's context current and opens cuBLASLt, or skips the test without a GPU.
func onGPU(t *testing.T) (driver.API, *blas.Lt) {
	api, err := driver.Open()
	if err != nil {
		t.Skipf("needs a GPU: %v", err)
	}
	devices, err := api.Devices()
	if err != nil || len(devices) == 0 {
		t.Skipf("needs a GPU: the driver finds none (%v)", err)
	}
	runtime.LockOSThread()
	c, err := api.Retain(0)
	require.NoError(t, err)
	require.NoError(t, api.SetCurrent(c))
	lt, err := blas.Open(0)
	require.NoError(t, err)
	t.Logf("%s: %s, version %d", devices[0].Name, lt.Path(), lt.Version())
	t.Cleanup(func() {
		require.NoError(t, lt.Close())
		require.NoError(t, api.Release(0))
		runtime.UnlockOSThread()
	})
	return api, lt
}

func TestProductsOnAGPU(t *testing.T) {
	api, lt := onGPU(t)
	blastest.Check(t, api, lt)
}

// A product gives the same bits every time, with and without split K.
func TestProductsOnAGPUAreDeterministic(t *testing.T) {
	api, lt := onGPU(t)
	s, err := api.NewStream()
	require.NoError(t, err)
	const m, n, k, workspace = 64, 96, 8192, 32 << 20
	var at [3]driver.Address
	for i, size := range []int64{m * k, k * n, m * n} {
		at[i], err = api.Alloc(4 * size)
		require.NoError(t, err)
	}
	work, err := api.Alloc(workspace)
	require.NoError(t, err)
	host, _, err := api.HostAlloc(4 * k * n)
	require.NoError(t, err)
	values := unsafe.Slice((*float32)(host), k*n)
	for i := range values {
		values[i] = float32(i%1009)/1009 - 0.5
	}
	require.NoError(t, api.CopyToDevice(at[0], host, 4*m*k, s))
	require.NoError(t, api.CopyToDevice(at[1], host, 4*k*n, s))
	f := func(ld int64) blas.Matrix { return blas.Matrix{Type: graph.F32, Ld: ld} }
	for _, bytes := range []int64{0, workspace} {
		call, err := lt.Bind(blas.Product{M: m, N: n, K: k, A: f(k), B: f(n), C: f(n), Workspace: bytes}, blas.Places{A: at[0], B: at[1], C: at[2], Work: work})
		require.NoError(t, err)
		var first []float32
		for range 20 {
			require.NoError(t, call.Enqueue(s))
			require.NoError(t, api.CopyToHost(host, at[2], 4*m*n, s))
			require.NoError(t, api.Synchronize(s))
			if first == nil {
				first = append(first, values[:m*n]...)
			}
			require.Equal(t, first, values[:m*n])
		}
	}
	for _, a := range append(at[:], work) {
		require.NoError(t, api.Free(a))
	}
	require.NoError(t, api.HostFree(host))
	require.NoError(t, api.DestroyStream(s))
}
