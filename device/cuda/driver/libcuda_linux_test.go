package driver

import (
	"errors"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/dynlib"
)

// If the driver's library is on this machine, all its functions are found. With a GPU, memory is
// copied there and back; without one, cuInit returns the error.
func TestRealLibrary(t *testing.T) {
	l, err := load()
	var missing *dynlib.NotFound
	if errors.As(err, &missing) {
		t.Skipf("the driver's library is not here: %v", err)
	}
	require.NoError(t, err)
	for name, at := range l.symbols() {
		require.NotZero(t, *at, name)
	}
	api, err := Open()
	if err != nil {
		var e *Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, "cuInit", e.Call)
		require.Equal(t, "CUDA_ERROR_NO_DEVICE", e.Name)
		require.Equal(t, 100, e.Code)
		require.Equal(t, "no CUDA-capable device is detected", e.Text)
		require.ErrorContains(t, err, "libcuda.so.1")
		t.Skipf("the library is here, a GPU is not: %v", err)
	}
	require.NoError(t, roundTrip(api))
}

func roundTrip(api API) error {
	c, err := api.Retain(0)
	if err != nil {
		return err
	}
	if err := api.SetCurrent(c); err != nil {
		return err
	}
	a, err := api.Alloc(1 << 20)
	if err != nil {
		return err
	}
	p, _, err := api.HostAlloc(1 << 20)
	if err != nil {
		return err
	}
	s, err := api.NewStream()
	if err != nil {
		return err
	}
	host := unsafe.Slice((*byte)(p), 1<<20)
	host[12345] = 0
	err = errors.Join(api.Fill8(a, 7, 1<<20, s), api.CopyToHost(p, a, 1<<20, s), api.Synchronize(s))
	if err == nil && host[12345] != 7 {
		err = errors.New("a fill did not come back")
	}
	return errors.Join(err, api.DestroyStream(s), api.Free(a), api.HostFree(p), api.Release(0))
}

func TestWithoutTheLibrary(t *testing.T) {
	if _, err := load(); err == nil {
		t.Skip("the driver's library is on this machine")
	}
	_, err := Open()
	require.ErrorContains(t, err, "NVIDIA's driver was not found: looked for libcuda.so.1 in")
	require.NotContains(t, err.Error(), "\n")
}
