package here

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/gpus"
)

// gpuSources are the sources of information about this machine's GPUs.
type gpuSources struct {
	nvml   func() ([]gpus.GPU, error) // all of them
	driver func() (driver.API, error) // those that this process may use
	used   func(uuid [16]byte) (int64, error)
	hidden bool // some may be hidden from this process
}

// detectGPUs lists the machine's GPUs from NVML. It uses the driver if NVML fails, or if some GPUs
// may be hidden from this process: NVML lists those too. The driver cannot tell the memory in use
// without a context, so that comes from ask.used.
func detectGPUs(ask gpuSources) ([]gpus.GPU, error) {
	found, err := ask.nvml()
	if err == nil && !ask.hidden {
		return found, nil
	}
	api, driverErr := ask.driver()
	if driverErr != nil && err == nil {
		return found, nil
	}
	if driverErr != nil {
		return nil, fmt.Errorf("%w (%w)", err, driverErr)
	}
	list, driverErr := api.Devices()
	if driverErr != nil {
		return nil, driverErr
	}
	found = nil
	for _, d := range list {
		g := gpus.Product(d.Name, d.Memory)
		if used, err := ask.used(d.UUID); err == nil {
			g.Used = used
		}
		found = append(found, g)
	}
	switch {
	case len(found) == 0 && err == nil:
		return nil, errors.New("CUDA_VISIBLE_DEVICES hides this machine's GPUs; name one instead")
	case len(found) == 0:
		return nil, err
	}
	return found, nil
}

// GPU returns this machine's GPU; of several, the one with the least free memory.
func (Machine) GPU() (*gpus.GPU, error) {
	found, err := detectGPUs(gpuSources{gpus.Detect, driver.Open, gpus.Used, os.Getenv("CUDA_VISIBLE_DEVICES") != ""})
	if err != nil {
		return nil, err
	}
	g := slices.MinFunc(found, func(a, b gpus.GPU) int { // a plan that fits the smallest fits all
		return cmp.Compare(a.Memory-a.Used, b.Memory-b.Used)
	})
	return &g, nil
}
