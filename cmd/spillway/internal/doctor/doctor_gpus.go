package doctor

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/internal/nvml"
)

// findGPUs lists the GPUs with NVML, which is opened at run time.
func findGPUs() gpuReport {
	none := func(format string, args ...any) gpuReport { return gpuReport{Note: fmt.Sprintf(format, args...)} }
	lib, err := nvml.Open()
	if errors.Is(err, nvml.ErrNoLibrary) {
		return none("%v", err)
	}
	if err != nil {
		return none("libnvidia-ml.so.1 (NVML, part of NVIDIA's driver) says %v", err)
	}
	defer lib.Close()
	n, err := lib.Count()
	if err != nil {
		return none("NVML can't count GPUs: %v", err)
	}
	if n == 0 {
		return none("NVML sees no GPU")
	}
	var r gpuReport
	if v, err := lib.DriverVersion(); err == nil {
		r.Driver = v
	}
	for i := range n {
		g := gpuState{Name: fmt.Sprintf("GPU %d", i)}
		if d, err := lib.ByIndex(i); err == nil {
			if v, err := d.Name(); err == nil {
				g.Name = v
			}
			if v, err := d.UUID(); err == nil {
				g.UUID = v
			}
			if total, used, err := d.Memory(); err == nil {
				g.Total, g.Used = total, used
			}
		}
		r.GPUs = append(r.GPUs, g)
	}
	return r
}
