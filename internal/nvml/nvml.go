// Package nvml asks NVIDIA's management library, which is part of the driver, what
// GPUs there are and how much of their memory is in use by anybody. The library is
// opened at run time: with go-nvml where cgo is built, by its symbols elsewhere.
package nvml

import (
	"encoding/hex"
	"errors"
)

// Names are the library's files.
var Names = []string{"libnvidia-ml.so.1"}

// ErrNoLibrary says that there is no NVML to open.
var ErrNoLibrary = errors.New("libnvidia-ml.so.1 (NVML, part of NVIDIA's driver) was looked for and not found")

// Library is NVML. Its errors have NVML's own texts.
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
	// Memory returns bytes: what programs can have, as CUDA counts it, and what all of them use.
	// Drivers older than 510 count to both what they reserve for themselves.
	Memory() (total, used int64, err error)
	Cores() (int, error)
	MaxClock(c Clock) (mhz int, err error)
	BusWidth() (bits int, err error)
}

// UUIDText writes an identifier of the driver's as NVML takes it.
func UUIDText(uuid [16]byte) string {
	h := hex.EncodeToString(uuid[:])
	return "GPU-" + h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}
