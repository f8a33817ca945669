//go:build !linux || !cgo

package main

// findGPUs has no NVML to ask: its binding needs cgo.
func findGPUs() gpuReport {
	found := openable([]string{"libnvidia-ml.so.1"})
	if found == "" {
		return gpuReport{Note: "libnvidia-ml.so.1 (NVML, part of NVIDIA's driver) was looked for and not found"}
	}
	return gpuReport{Note: found + " is there, but this binary was built without cgo, which asking it needs"}
}
