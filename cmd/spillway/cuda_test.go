package main

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/gpus"
)

// Without a driver, or a GPU, one line says what was looked for, with status 1.
// Where this machine has a GPU there is nothing to see.
func TestNoGPUIsOneLineAndStatus1(t *testing.T) {
	if api, err := driver.Open(); err == nil {
		if list, err := api.Devices(); err == nil && len(list) > 0 {
			t.Skip("this machine has a GPU")
		}
	}
	for _, args := range [][]string{
		{"train", "--device", "cuda", "--model", "../../testdata/gpt2", "--data", "../../testdata/text.bin"},
		{"train", "--device", "cuda", "--fit", "--model", "../../testdata/gpt2", "--data", "../../testdata/text.bin"},
		{"bench", "zero", "--device", "cuda", "--model", "../../testdata/gpt2", "--data", "../../testdata/text.bin"},
	} {
		r := command(args...)
		require.Equal(t, exitBadInput, r.status, r.stderr)
		require.Regexp(t, `^spillway: (stage 0: )?--device cuda: .*libcuda\.so\.1[^\n]*\n$`, r.stderr)
	}
}

func TestStatusOfDriverErrors(t *testing.T) {
	call := &driver.Error{Call: "cuMemAlloc_v2", Code: 2, Name: "CUDA_ERROR_OUT_OF_MEMORY"}
	require.Equal(t, exitFault, exitStatus(fmt.Errorf("rank 0: %w", call)))
	require.Equal(t, exitBadInput, exitStatus(&spillway.MissingDevice{Device: "cuda", Err: call}), "cuInit finds no GPU")
}

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

	// NVML tells of GPUs that CUDA_VISIBLE_DEVICES hides, too.
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
