// Package nvml queries NVIDIA's management library (NVML), part of the driver, for the GPUs and the
// memory in use on them by all processes. The library is opened at run time: through go-nvml in
// builds with cgo, otherwise by its symbols.
package nvml

import (
	"encoding/hex"
	"errors"
)

// Names are the library's file names.
var Names = []string{"libnvidia-ml.so.1"}

// ErrNoLibrary is the error if NVML was not found.
var ErrNoLibrary = errors.New("libnvidia-ml.so.1 (NVML, part of NVIDIA's driver) was looked for and not found")

// Library is an open NVML. Its errors have NVML's own texts.
type Library interface {
	DriverVersion() (string, error)
	Count() (int, error)
	ByIndex(i int) (Device, error)
	ByUUID(uuid string) (Device, error) // "GPU-…"
	Close()
}

// Clock is a clock of a GPU, in NVML's numbers.
type Clock int

// The multiprocessors' clock, and the memory's.
const (
	ClockSM     Clock = 1
	ClockMemory Clock = 2
)

// Device is a GPU.
type Device interface {
	Name() (string, error)
	UUID() (string, error)
	// Memory returns total, the bytes that programs can use as CUDA counts them, and used, the
	// bytes that all programs use. Drivers older than 510 include the driver's reserved bytes
	// in both.
	Memory() (total, used int64, err error)
	Cores() (int, error)
	MaxClock(c Clock) (mhz int, err error)
	BusWidth() (bits int, err error)
}

// UUIDText formats a driver's device identifier as NVML expects it.
func UUIDText(uuid [16]byte) string {
	h := hex.EncodeToString(uuid[:])
	return "GPU-" + h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}
