//go:build linux

package train

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/blastest"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/shim"
	"github.com/spillway-ml/spillway/kernels"
	kernelscuda "github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/platform/gpu"
)

// hungry makes cfg run on a double whose device allocates memory at the first run of every kernel
// and product.
func hungry(t *testing.T, cfg *request, memory int64, gpus int) *drivertest.Driver {
	d := onDouble(t, cfg, drivertest.Options{Memory: memory, Devices: gpus, FirstLaunch: func(string) int64 { return 3<<20 + 4096 },
		GraphBytes: func(operations int) int64 { return 64<<10 + 64<<10*int64(operations) }}, true)
	compiler, err := shim.New()
	require.NoError(t, err)
	cfg.cuda.Kernels = func(_ platform.Options, api driver.API, dev driver.Device, host kernels.Library) (gpu.Kernels, error) {
		products := blastest.New(d)
		products.FirstRun = func(p blas.Product) int64 { return 5 << 20 }
		return gpu.NewKernels(kernelscuda.Options{API: api, Device: dev, Compiler: compiler, Products: products, Host: host})
	}
	return d
}

// TestCUDAJobAtTheWall checks that the memory of kernels and products is measured before the arenas
// are allocated. A job that uses every byte of the GPU must run; with one byte less its plan is
// refused. It runs on one GPU and on two.
func TestCUDAJobAtTheWall(t *testing.T) {
	for _, gpus := range []int{1, 2} {
		jobAtTheWall(t, gpus)
	}
}

func jobAtTheWall(t *testing.T, gpus int) {
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Batch, c.Seq, c.Clip, c.Zero, c.poison = 2, 2, 1, 8, 1, 2, false
	start := func(memory int64) (peak, outside int64, err error) {
		one := c
		var warned []string
		one.Warn = func(line string) { warned = append(warned, line) }
		d := hungry(t, &one, memory, gpus)
		tr, err := one.start(context.Background())
		if err == nil {
			p := tr.Plan()
			peak, outside = p.Layout.Spaces[graph.Device].Peak, p.Config.Outside[graph.Device]
			launched := d.Calls()["cuModuleGetFunction"]
			require.NoError(t, tr.Run(context.Background(), nil))
			require.Equal(t, launched, d.Calls()["cuModuleGetFunction"])
			require.Positive(t, d.Calls()["cuGraphLaunch"])
			require.Empty(t, warned, "there is room for the graphs")
			err = tr.Close()
		}
		return peak, outside, errors.Join(err, d.Close())
	}
	peak, outside, err := start(16 << 30)
	require.NoError(t, err)
	each := int64(c.Ranks / gpus) // ranks per GPU
	require.Greater(t, each*outside, int64(gpu.GuessedOutside), "more than was thought before it was measured")
	wall := each * (peak + outside)
	again, measured, err := start(wall)
	require.NoError(t, err)
	require.Equal(t, []int64{peak, outside}, []int64{again, measured})
	_, _, err = start(wall - each)
	var refused *plan.DoesNotFit
	require.ErrorAs(t, err, &refused)
	require.Equal(t, graph.Device, refused.Space)
	require.Equal(t, outside, refused.Outside)
}
