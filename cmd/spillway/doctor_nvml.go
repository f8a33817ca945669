//go:build linux && cgo

package main

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// findGPUs asks NVML, which is opened at run time.
func findGPUs() gpuReport {
	none := func(format string, args ...any) gpuReport { return gpuReport{Note: fmt.Sprintf(format, args...)} }
	if ret := nvml.Init(); ret != nvml.SUCCESS {
		return none("libnvidia-ml.so.1 (NVML, part of NVIDIA's driver) says %s", nvml.ErrorString(ret))
	}
	defer nvml.Shutdown()
	n, ret := nvml.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return none("NVML can't count GPUs: %s", nvml.ErrorString(ret))
	}
	if n == 0 {
		return none("NVML sees no GPU")
	}
	var r gpuReport
	if v, ret := nvml.SystemGetDriverVersion(); ret == nvml.SUCCESS {
		r.Driver = v
	}
	for i := range n {
		g := gpuState{Name: fmt.Sprintf("GPU %d", i)}
		if h, ret := nvml.DeviceGetHandleByIndex(i); ret == nvml.SUCCESS {
			if v, ret := h.GetName(); ret == nvml.SUCCESS {
				g.Name = v
			}
			if v, ret := h.GetUUID(); ret == nvml.SUCCESS {
				g.UUID = v
			}
			if v, ret := h.GetMemoryInfo(); ret == nvml.SUCCESS {
				g.Total, g.Used = int64(v.Total), int64(v.Used)
			}
		}
		r.GPUs = append(r.GPUs, g)
	}
	return r
}
