//go:build linux && cgo

package gpus

import (
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Detect returns the machine's own GPUs as the driver describes them; rates and
// links of a known product are its preset's. It fails, in one line, where there
// is no driver or no GPU.
func Detect() (found []GPU, err error) {
	if ret := nvml.Init(); ret != nvml.SUCCESS {
		if errors.Is(ret, nvml.ERROR_LIBRARY_NOT_FOUND) {
			return nil, errors.New("no NVIDIA driver was found on this machine (libnvidia-ml.so.1 does not open); name a GPU instead")
		}
		return nil, fmt.Errorf("the NVIDIA driver does not answer: %w; name a GPU instead", ret)
	}
	defer nvml.Shutdown()
	n, ret := nvml.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("NVML: number of GPUs: %w", ret)
	}
	if n == 0 {
		return nil, errors.New("the NVIDIA driver shows no GPU; name one instead")
	}
	for i := range n {
		g, err := describe(i)
		if err != nil {
			return nil, fmt.Errorf("NVML: GPU %d: %w", i, err)
		}
		found = append(found, g)
	}
	return found, nil
}

func describe(i int) (GPU, error) {
	d, ret := nvml.DeviceGetHandleByIndex(i)
	if ret != nvml.SUCCESS {
		return GPU{}, ret
	}
	name, ret := d.GetName()
	if ret != nvml.SUCCESS {
		return GPU{}, ret
	}
	mem, ret := d.GetMemoryInfo()
	if ret != nvml.SUCCESS {
		return GPU{}, ret
	}
	g, known := byProduct(name)
	if !known {
		g = unknown(d, name)
	}
	g.Memory, g.Used = int64(mem.Total), int64(mem.Used)
	return g, nil
}

// Used returns the bytes in use, by all processes and the driver, of the GPU
// with this identifier. Its error says why NVML does not tell.
func Used(uuid [16]byte) (int64, error) {
	if ret := nvml.Init(); ret != nvml.SUCCESS {
		return 0, fmt.Errorf("NVML: %w", ret)
	}
	defer nvml.Shutdown()
	h := hex.EncodeToString(uuid[:])
	d, ret := nvml.DeviceGetHandleByUUID("GPU-" + h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:])
	if ret != nvml.SUCCESS {
		return 0, fmt.Errorf("NVML: the GPU's handle: %w", ret)
	}
	mem, ret := d.GetMemoryInfo()
	if ret != nvml.SUCCESS {
		return 0, fmt.Errorf("NVML: memory: %w", ret)
	}
	return int64(mem.Used), nil
}

// unknown estimates a GPU that has no preset from its counts and clocks: fp32
// from its cores (2 operations a cycle each), 16 bits at twice that, which every
// tensor core exceeds.
func unknown(d nvml.Device, name string) GPU {
	g := GPU{Name: normal(name), Product: name, PCIe: pcie4x16, Network: 25 * gbit, Source: "NVML: cores, clocks and bus width"}
	cores, r1 := d.GetNumGpuCores()
	clock, r2 := d.GetMaxClockInfo(nvml.CLOCK_SM) // MHz
	if r1 == nvml.SUCCESS && r2 == nvml.SUCCESS {
		g.Rates.FP32 = float64(cores) * 2 * float64(clock) * 1e6
		g.Rates.FP16, g.Rates.BF16 = 2*g.Rates.FP32, 2*g.Rates.FP32
	}
	bus, r1 := d.GetMemoryBusWidth() // bits
	memory, r2 := d.GetMaxClockInfo(nvml.CLOCK_MEM)
	if r1 == nvml.SUCCESS && r2 == nvml.SUCCESS {
		g.MemoryBandwidth = float64(bus) / 8 * 2 * float64(memory) * 1e6
	}
	return g
}
