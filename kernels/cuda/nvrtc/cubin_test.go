//go:build linux

package nvrtc_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/testkit/shim"
	"github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/kernels/cuda/nvrtc"
)

// Every kernel's machine code has as many parameter bytes as the driver double requires at a
// launch. So the double checks what a GPU reads.
func TestParametersAreTheCubins(t *testing.T) {
	c := open(t, nvrtc.Options{})
	host, err := shim.New()
	if errors.Is(err, shim.ErrNoCompiler) {
		t.Skip(err)
	}
	require.NoError(t, err)
	for _, name := range cuda.Sources() {
		source, err := cuda.Source(name)
		require.NoError(t, err)
		cubin, err := c.Compile(name, source, ampere)
		require.NoError(t, err)
		sizes, err := shim.CubinParameters(cubin)
		require.NoError(t, err)
		image, err := host.Compile(name, source, driver.Device{})
		require.NoError(t, err)
		lib, err := shim.Open(image)
		require.NoError(t, err)
		for kernel, n := range sizes {
			want, err := lib.ParameterBytes(kernel)
			require.NoError(t, err)
			require.Equal(t, want, n, "%s: %s", name, kernel)
		}
	}
	_, err = shim.CubinParameters([]byte("no ELF file"))
	require.ErrorContains(t, err, "cubin")
}
