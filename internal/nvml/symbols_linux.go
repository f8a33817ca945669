package nvml

import (
	"bytes"
	"errors"
	"fmt"
	"unsafe"

	"github.com/spillway-ml/spillway/internal/dl"

	"github.com/spillway-ml/spillway/device/cuda/dynlib"
)

// symbols are addresses of the library's functions, in the versions that exist since CUDA 11.
type symbols struct {
	init, shutdown, errorString, version, count uintptr
	byIndex, byUUID, name, uuid, memory, clock  uintptr
	cores, busWidth, memory2                    uintptr // 0 in older drivers
}

// library is NVML by its symbols.
type library struct {
	path string
	f    symbols
}

// OpenSymbols does the same as Open without go-nvml. It also looks in the folders of CUDA's
// libraries.
func OpenSymbols() (Library, error) {
	lib, err := dynlib.Open("NVML", Names...)
	if missing, ok := errors.AsType[*dynlib.NotFound](err); ok && len(missing.Tried) == 0 {
		return nil, ErrNoLibrary
	}
	if err != nil {
		return nil, err
	}
	l := &library{path: lib.Path}
	if err := lib.Symbols(map[string]*uintptr{
		"nvmlInit_v2": &l.f.init, "nvmlShutdown": &l.f.shutdown, "nvmlErrorString": &l.f.errorString,
		"nvmlSystemGetDriverVersion": &l.f.version, "nvmlDeviceGetCount_v2": &l.f.count,
		"nvmlDeviceGetHandleByIndex_v2": &l.f.byIndex, "nvmlDeviceGetHandleByUUID": &l.f.byUUID,
		"nvmlDeviceGetName": &l.f.name, "nvmlDeviceGetUUID": &l.f.uuid, "nvmlDeviceGetMemoryInfo": &l.f.memory,
		"nvmlDeviceGetMaxClockInfo": &l.f.clock,
	}); err != nil {
		return nil, err
	}
	for name, at := range map[string]*uintptr{
		"nvmlDeviceGetNumGpuCores": &l.f.cores, "nvmlDeviceGetMemoryBusWidth": &l.f.busWidth, "nvmlDeviceGetMemoryInfo_v2": &l.f.memory2,
	} {
		if lib.Symbols(map[string]*uintptr{name: at}) != nil {
			*at = 0 // older drivers lack the function; it then returns an error
		}
	}
	r := dl.Call(l.f.init)
	if err := l.check("nvmlInit_v2", r); err != nil {
		return nil, fmt.Errorf("%s: %w", l.path, err)
	}
	return l, nil
}

var errOlder = errors.New("this driver's NVML lacks the query; install a newer driver")

func (l *library) check(call string, r uintptr) error {
	code := int32(r)
	if code == 0 {
		return nil
	}
	text := dl.Call(l.f.errorString, uintptr(code))
	return fmt.Errorf("%s: %s (%d)", call, cString(text), code)
}

// cString copies a C string from the library's memory.
func cString(p uintptr) string {
	if p == 0 {
		return "no text"
	}
	at := *(*unsafe.Pointer)(unsafe.Pointer(&p))
	n := 0
	for n < 512 && *(*byte)(unsafe.Add(at, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(at), n))
}

// textBytes is the buffer size for NVML's texts, with the final NUL; all are shorter.
const textBytes = 128

func (l *library) DriverVersion() (string, error) {
	buf := make([]byte, textBytes)
	r := dl.Call(l.f.version, uintptr(unsafe.Pointer(&buf[0])), textBytes)
	return upToZero(buf), l.check("nvmlSystemGetDriverVersion", r)
}

func upToZero(buf []byte) string {
	text, _, _ := bytes.Cut(buf, []byte{0})
	return string(text)
}

func (l *library) Count() (int, error) {
	var n uint32
	r := dl.Call(l.f.count, uintptr(unsafe.Pointer(&n)))
	return int(n), l.check("nvmlDeviceGetCount_v2", r)
}

func (l *library) ByIndex(i int) (Device, error) {
	d := &device{lib: l}
	r := dl.Call(l.f.byIndex, uintptr(i), uintptr(unsafe.Pointer(&d.handle)))
	return d, l.check("nvmlDeviceGetHandleByIndex_v2", r)
}

func (l *library) ByUUID(uuid string) (Device, error) {
	d := &device{lib: l}
	text := append([]byte(uuid), 0)
	r := dl.Call(l.f.byUUID, uintptr(unsafe.Pointer(&text[0])), uintptr(unsafe.Pointer(&d.handle)))
	return d, l.check("nvmlDeviceGetHandleByUUID", r)
}

func (l *library) Close() { _ = dl.Call(l.f.shutdown) }

type device struct {
	lib    *library
	handle uintptr
}

func (d *device) text(call string, f uintptr) (string, error) {
	buf := make([]byte, textBytes)
	r := dl.Call(f, d.handle, uintptr(unsafe.Pointer(&buf[0])), textBytes)
	return upToZero(buf), d.lib.check(call, r)
}

func (d *device) Name() (string, error) { return d.text("nvmlDeviceGetName", d.lib.f.name) }
func (d *device) UUID() (string, error) { return d.text("nvmlDeviceGetUUID", d.lib.f.uuid) }

func (d *device) Memory() (total, used int64, err error) {
	if d.lib.f.memory2 != 0 {
		m := struct { // nvmlMemory_v2_t
			version                     uint32
			total, reserved, free, used uint64
		}{version: 2 << 24}
		m.version |= uint32(unsafe.Sizeof(m))
		r := dl.Call(d.lib.f.memory2, d.handle, uintptr(unsafe.Pointer(&m)))
		return int64(m.total - m.reserved), int64(m.used), d.lib.check("nvmlDeviceGetMemoryInfo_v2", r)
	}
	var m struct{ total, free, used uint64 } // nvmlMemory_t
	r := dl.Call(d.lib.f.memory, d.handle, uintptr(unsafe.Pointer(&m)))
	return int64(m.total), int64(m.used), d.lib.check("nvmlDeviceGetMemoryInfo", r)
}

func (d *device) number(call string, f uintptr) (int, error) {
	if f == 0 {
		return 0, errOlder
	}
	var v uint32
	r := dl.Call(f, d.handle, uintptr(unsafe.Pointer(&v)))
	return int(v), d.lib.check(call, r)
}

func (d *device) Cores() (int, error) { return d.number("nvmlDeviceGetNumGpuCores", d.lib.f.cores) }

func (d *device) BusWidth() (int, error) {
	return d.number("nvmlDeviceGetMemoryBusWidth", d.lib.f.busWidth)
}

func (d *device) MaxClock(c Clock) (int, error) {
	var v uint32
	r := dl.Call(d.lib.f.clock, d.handle, uintptr(c), uintptr(unsafe.Pointer(&v)))
	return int(v), d.lib.check("nvmlDeviceGetMaxClockInfo", r)
}
