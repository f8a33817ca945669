//go:build gpukernels

package images

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/internal/testkit/shim"
	"github.com/spillway-ml/spillway/kernels/cuda"
)

// Every current source is embedded for every architecture. PTX assembles for cards of both
// generations, to kernels with as many parameter bytes as the machine code. The test assembles a
// sample; SPILLWAY_LONG=1 assembles all.
func TestImagesAreTheSources(t *testing.T) {
	ptxas := os.Getenv("SPILLWAY_PTXAS")
	if ptxas == "" {
		t.Skip("SPILLWAY_PTXAS names no ptxas")
	}
	for _, arch := range Archs {
		c := New(12040, nil)
		for _, name := range cuda.Sources() {
			text, err := cuda.Source(name)
			require.NoError(t, err)
			code, err := c.find(arch.Name, name, Hash(text))
			require.NoError(t, err)
			require.NotEmpty(t, code, "%s for %s is not embedded as it is", name, arch.Name)
		}
	}
	for _, name := range long.Sample(uint64(os.Getpid()), 2, cuda.Sources()) {
		text, err := cuda.Source(name)
		require.NoError(t, err)
		t.Log("assembles", name)
		ptx, err := New(11080, nil).Compile(name, text, driver.Device{Major: 9})
		require.NoError(t, err)
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "k.ptx"), ptx[:len(ptx)-1], 0o600)) // without the zero byte
		for major, arch := range map[int]string{8: "sm_80", 9: "sm_90"} {
			out, err := exec.Command(ptxas, "-arch="+arch, "-o", filepath.Join(dir, "k.cubin"), filepath.Join(dir, "k.ptx")).CombinedOutput()
			require.NoError(t, err, "%s", out)
			assembled, err := os.ReadFile(filepath.Join(dir, "k.cubin"))
			require.NoError(t, err)
			is, err := shim.CubinParameters(assembled)
			require.NoError(t, err)
			cubin, err := New(12040, nil).Compile(name, text, driver.Device{Major: major})
			require.NoError(t, err)
			want, err := shim.CubinParameters(cubin)
			require.NoError(t, err)
			require.Equal(t, want, is)
		}
	}
}
