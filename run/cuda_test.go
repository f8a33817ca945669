package run

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// A variable that changes what fp32 means is refused by name, before the driver is
// asked for anything; 0 is what holds anyway.
func TestTF32IsRefused(t *testing.T) {
	world := World{Size: 1, Local: []int{0}}
	asked := &MissingDevice{}
	open := func() error {
		_, err := NewPlatform(Options{Device: "cuda", World: world, CUDA: &CUDAParts{Driver: func() (driver.API, error) { return nil, asked }}})
		return err
	}
	t.Setenv(tf32Override, "1")
	require.ErrorContains(t, open(), `NVIDIA_TF32_OVERRIDE="1"`)
	t.Setenv(tf32Override, "0")
	require.ErrorIs(t, open(), asked)
}
