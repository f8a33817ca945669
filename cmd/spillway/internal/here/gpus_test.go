package here

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/gpus"
)

// oneGPU is a driver that shows a GPU and does nothing else.
type oneGPU struct{ driver.API }

func (oneGPU) Devices() ([]driver.Device, error) {
	return []driver.Device{{Name: "NVIDIA H200", Memory: 140 << 30}}, nil
}

func TestDetectAsksTheDriverWhereNVMLIsMissing(t *testing.T) {
	noNVML := errors.New("no NVML; name a GPU instead")
	none := func() ([]gpus.GPU, error) { return nil, noNVML }
	shown := func() (driver.API, error) { return oneGPU{}, nil }
	unknown := func([16]byte) (int64, error) { return 0, noNVML }
	found, err := detectGPUs(gpuSources{none, shown, unknown, false})
	require.NoError(t, err)
	require.Equal(t, "h200-141", found[0].Name)
	require.Equal(t, int64(140)<<30, found[0].Memory)
	noDriver := func() (driver.API, error) { return nil, errors.New("no driver") }
	_, err = detectGPUs(gpuSources{none, noDriver, unknown, false})
	require.ErrorIs(t, err, noNVML)

	// NVML lists GPUs that CUDA_VISIBLE_DEVICES hides, too.
	both := func() ([]gpus.GPU, error) { return []gpus.GPU{{Name: "t4-16"}, {Name: "h200-141"}}, nil }
	used := func([16]byte) (int64, error) { return 7 << 30, nil }
	found, err = detectGPUs(gpuSources{both, shown, used, false})
	require.NoError(t, err)
	require.Len(t, found, 2)
	found, err = detectGPUs(gpuSources{both, shown, used, true})
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.Equal(t, int64(7)<<30, found[0].Used)
}
