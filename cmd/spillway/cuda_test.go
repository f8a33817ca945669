package main

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// Without a driver, or a GPU, one line names the missing library, with status 1. The test does
// nothing on a machine with a GPU.
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
		require.Equal(t, cli.ExitBadInput, r.status, r.stderr)
		require.Regexp(t, `^spillway: (stage 0: )?--device cuda: .*libcuda\.so\.1[^\n]*\n$`, r.stderr)
	}
}

func TestStatusOfDriverErrors(t *testing.T) {
	call := &driver.Error{Call: "cuMemAlloc_v2", Code: 2, Name: "CUDA_ERROR_OUT_OF_MEMORY"}
	require.Equal(t, cli.ExitFault, cli.ExitStatus(fmt.Errorf("rank 0: %w", call)))
	require.Equal(t, cli.ExitBadInput, cli.ExitStatus(&spillway.MissingDevice{Device: "cuda", Err: call}), "cuInit finds no GPU")
}
