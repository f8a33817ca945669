//go:build gpukernels

package main

import (
	"bytes"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/root"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/testkit/blastest"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/shim"
	"github.com/spillway-ml/spillway/kernels"
	kernelscuda "github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/kernels/cuda/images"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/platform/gpu"
)

// embedded is a double whose driver loads embedded images: for each it runs the shim's form of the
// same source.
type embedded struct {
	*drivertest.Driver
	host *shim.Compiler
}

func (d embedded) LoadModule(image []byte) (driver.Module, error) {
	for _, arch := range images.Archs {
		list, err := images.Embedded(arch.Name)
		if err != nil {
			return 0, err
		}
		for _, m := range list {
			if !bytes.Equal(m.Code, image) {
				continue
			}
			text, err := kernelscuda.Source(m.Source)
			if err != nil {
				return 0, err
			}
			host, err := d.host.Compile(m.Source, text, driver.Device{})
			if err != nil {
				return 0, err
			}
			return d.Driver.LoadModule(host)
		}
	}
	return 0, fmt.Errorf("an image of %d bytes that is not embedded", len(image))
}

// A build with embedded kernels trains on a machine that has a driver and products but no
// NVRTC.
func TestEmbeddedKernelsTrainWithoutNVRTC(t *testing.T) {
	host, err := shim.New()
	if err != nil {
		t.Skip(err)
	}
	d := embedded{drivertest.New(drivertest.Options{Devices: 1, Memory: 4 << 30}), host}
	loaded := 0
	gpu.DoubleCUDA(gpu.Parts{
		Driver: func() (driver.API, error) { return d, nil },
		Used:   func([16]byte) (int64, error) { return 0, nil },
		Kernels: func(o platform.Options, api driver.API, dev driver.Device, host kernels.Library) (gpu.Kernels, error) {
			version, err := api.Version()
			if err != nil {
				return nil, err
			}
			compiler, err := gpu.Compiler(version, o.Warn)
			if err != nil {
				return nil, err
			}
			loaded++
			return gpu.NewKernels(kernelscuda.Options{API: api, Device: dev, Compiler: compiler, Products: blastest.New(d.Driver), Host: host})
		},
	})
	require.Empty(t, os.Getenv("SPILLWAY_CUDA_LIBS"))
	var out, errs bytes.Buffer
	require.Zero(t, root.Run(t.Context(), tinyWith("--device", "cuda", "--seq", "8"), &out, &errs), errs.String())
	require.Equal(t, 1, loaded)
	require.NoError(t, d.Close())
}
