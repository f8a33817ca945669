//go:build linux && cgo

package nvml

import (
	"errors"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Open opens the library and initialises it.
func Open() (Library, error) {
	switch ret := nvml.Init(); {
	case ret == nvml.SUCCESS:
		return bound{}, nil
	case errors.Is(ret, nvml.ERROR_LIBRARY_NOT_FOUND):
		return OpenSymbols() // go-nvml looks in fewer places
	default:
		return nil, ret
	}
}

// bound is NVML through go-nvml.
type bound struct{}

func result[T any](v T, ret nvml.Return) (T, error) {
	if ret != nvml.SUCCESS {
		return v, ret
	}
	return v, nil
}

func (bound) DriverVersion() (string, error) { return result(nvml.SystemGetDriverVersion()) }
func (bound) Count() (int, error)            { return result(nvml.DeviceGetCount()) }
func (bound) Close()                         { nvml.Shutdown() }

func (bound) ByIndex(i int) (Device, error) {
	d, err := result(nvml.DeviceGetHandleByIndex(i))
	return boundDevice{d}, err
}

func (bound) ByUUID(uuid string) (Device, error) {
	d, err := result(nvml.DeviceGetHandleByUUID(uuid))
	return boundDevice{d}, err
}

type boundDevice struct{ d nvml.Device }

func (b boundDevice) Name() (string, error) { return result(b.d.GetName()) }
func (b boundDevice) UUID() (string, error) { return result(b.d.GetUUID()) }
func (b boundDevice) Cores() (int, error)   { return result(b.d.GetNumGpuCores()) }

func (b boundDevice) Memory() (total, used int64, err error) {
	if m, ret := b.d.GetMemoryInfo_v2(); ret == nvml.SUCCESS {
		return int64(m.Total - m.Reserved), int64(m.Used), nil
	}
	m, err := result(b.d.GetMemoryInfo()) // a driver older than 510
	return int64(m.Total), int64(m.Used), err
}

func (b boundDevice) MaxClock(c Clock) (int, error) {
	mhz, err := result(b.d.GetMaxClockInfo(nvml.ClockType(c)))
	return int(mhz), err
}

func (b boundDevice) BusWidth() (int, error) {
	bits, err := result(b.d.GetMemoryBusWidth())
	return int(bits), err
}
