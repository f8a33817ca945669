package gpus

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/internal/nvml"
)

// Detect returns this machine's GPUs as the driver describes them. A known product has its
// preset's rates and links. Without a driver or a GPU it returns a one-line error.
func Detect() (found []GPU, err error) {
	lib, err := nvml.Open()
	if errors.Is(err, nvml.ErrNoLibrary) {
		return nil, errors.New("no NVIDIA driver was found on this machine (libnvidia-ml.so.1 does not open); name a GPU instead")
	}
	if err != nil {
		return nil, fmt.Errorf("the NVIDIA driver does not answer: %w; name a GPU instead", err)
	}
	defer lib.Close()
	n, err := lib.Count()
	if err != nil {
		return nil, fmt.Errorf("NVML: number of GPUs: %w", err)
	}
	if n == 0 {
		return nil, errors.New("the NVIDIA driver shows no GPU; name one instead")
	}
	for i := range n {
		g, err := describe(lib, i)
		if err != nil {
			return nil, fmt.Errorf("NVML: GPU %d: %w", i, err)
		}
		found = append(found, g)
	}
	return found, nil
}

func describe(lib nvml.Library, i int) (GPU, error) {
	d, err := lib.ByIndex(i)
	if err != nil {
		return GPU{}, err
	}
	name, err := d.Name()
	if err != nil {
		return GPU{}, err
	}
	total, used, err := d.Memory()
	if err != nil {
		return GPU{}, err
	}
	g, known := byProduct(name)
	if !known {
		g = unknown(d, name)
	}
	g.Memory, g.Used = total, used
	return g, nil
}

// Used returns the bytes in use, by all processes and the driver, of the GPU with this identifier.
// If NVML has no answer, the error gives the reason.
func Used(uuid [16]byte) (int64, error) {
	lib, err := nvml.Open()
	if err != nil {
		return 0, fmt.Errorf("NVML: %w", err)
	}
	defer lib.Close()
	d, err := lib.ByUUID(nvml.UUIDText(uuid))
	if err != nil {
		return 0, fmt.Errorf("NVML: the GPU's handle: %w", err)
	}
	_, used, err := d.Memory()
	if err != nil {
		return 0, fmt.Errorf("NVML: memory: %w", err)
	}
	return used, nil
}

// unknown estimates a GPU that has no preset from its counts and clocks: fp32
// from its cores (2 operations a cycle each), 16 bits at twice that, which every
// tensor core exceeds.
func unknown(d nvml.Device, name string) GPU {
	g := GPU{Name: normal(name), Product: name, PCIe: pcie4x16, Network: 25 * gbit, Source: "NVML: cores, clocks and bus width"}
	cores, err1 := d.Cores()
	clock, err2 := d.MaxClock(nvml.ClockSM)
	if err1 == nil && err2 == nil {
		g.Rates.FP32 = float64(cores) * 2 * float64(clock) * 1e6
		g.Rates.FP16, g.Rates.BF16 = 2*g.Rates.FP32, 2*g.Rates.FP32
	}
	bus, err1 := d.BusWidth()
	memory, err2 := d.MaxClock(nvml.ClockMemory)
	if err1 == nil && err2 == nil {
		g.MemoryBandwidth = float64(bus) / 8 * 2 * float64(memory) * 1e6
	}
	return g
}
