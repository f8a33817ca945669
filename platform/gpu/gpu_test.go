package gpu

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/platform"
)

// A variable that changes the precision of fp32 is rejected by name, before the driver is used. 0
// is the default and is accepted.
func TestTF32IsRefused(t *testing.T) {
	world := platform.World{Size: 1, Local: []int{0}}
	asked := &platform.MissingDevice{}
	open := func() error {
		_, err := New(platform.Options{Device: "cuda", World: world}, &Parts{Driver: func() (driver.API, error) { return nil, asked }})
		return err
	}
	t.Setenv(tf32Override, "1")
	require.ErrorContains(t, open(), `NVIDIA_TF32_OVERRIDE="1"`)
	t.Setenv(tf32Override, "0")
	require.ErrorIs(t, open(), asked)
}

// A process of a job has as many GPUs as ranks: those of its position on the host, or all that it
// sees.
func TestGPUsOfAProcess(t *testing.T) {
	list := make([]driver.Device, 8)
	for i := range list {
		list[i].Ordinal = i
	}
	for _, c := range []struct{ local, ranks, sees, from int }{{0, 1, 1, 0}, {3, 1, 1, 0}, {3, 1, 8, 3}, {1, 2, 8, 2}, {3, 2, 8, 6}, {3, 2, 2, 0}} {
		got, err := seen(c.local, c.ranks, list[:c.sees])
		require.NoError(t, err)
		require.Equal(t, list[c.from:c.from+c.ranks], got)
	}
	_, err := seen(2, 1, list[:2])
	require.ErrorContains(t, err, "this process is number 2 of its host, counted from 0, and sees 2 GPUs")
	_, err = seen(1, 2, list[:3])
	require.ErrorContains(t, err, "this process with 2 ranks, a GPU each, is number 1 of its host, counted from 0, and sees 3 GPUs")
}
