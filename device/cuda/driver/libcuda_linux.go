package driver

import (
	"bytes"
	"fmt"
	"runtime"
	"sync"
	"unsafe"

	"github.com/spillway-ml/spillway/internal/dl"

	"github.com/spillway-ml/spillway/device/cuda/dynlib"
)

// functions holds the addresses of libcuda's functions.
type functions struct {
	cuInit, cuDriverGetVersion, cuGetErrorName, cuGetErrorString                                                       uintptr
	cuDeviceGetCount, cuDeviceGet, cuDeviceGetName, cuDeviceGetUuid, cuDeviceTotalMem, cuDeviceGetAttribute            uintptr
	cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRelease, cuCtxSetCurrent, cuMemGetInfo                                 uintptr
	cuDeviceCanAccessPeer, cuCtxEnablePeerAccess, cuMemcpyPeerAsync                                                    uintptr
	cuMemAlloc, cuMemFree, cuMemHostAlloc, cuMemHostGetDevicePointer, cuMemFreeHost                                    uintptr
	cuStreamCreate, cuStreamDestroy, cuStreamSynchronize, cuStreamWaitEvent, cuStreamWriteValue32, cuStreamWaitValue32 uintptr
	cuEventCreate, cuEventDestroy, cuEventRecord, cuEventQuery, cuEventElapsedTime                                     uintptr
	cuMemcpyHtoDAsync, cuMemcpyDtoHAsync, cuMemcpyDtoDAsync, cuMemsetD32Async, cuMemsetD8Async                         uintptr
	cuModuleLoadDataEx, cuModuleUnload, cuModuleGetFunction, cuFuncSetAttribute, cuLaunchKernel                        uintptr
	cuStreamBeginCapture, cuStreamEndCapture, cuGraphInstantiate, cuGraphLaunch, cuGraphDestroy, cuGraphExecDestroy    uintptr
}

// symbols maps the versioned names of the functions to their address fields. The driver's
// library has all of them since CUDA 11.7.
func (f *functions) symbols() map[string]*uintptr {
	return map[string]*uintptr{
		"cuInit": &f.cuInit, "cuDriverGetVersion": &f.cuDriverGetVersion, "cuGetErrorName": &f.cuGetErrorName, "cuGetErrorString": &f.cuGetErrorString,
		"cuDeviceGetCount": &f.cuDeviceGetCount, "cuDeviceGet": &f.cuDeviceGet, "cuDeviceGetName": &f.cuDeviceGetName,
		"cuDeviceGetUuid": &f.cuDeviceGetUuid, "cuDeviceTotalMem_v2": &f.cuDeviceTotalMem, "cuDeviceGetAttribute": &f.cuDeviceGetAttribute,
		"cuDevicePrimaryCtxRetain": &f.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRelease_v2": &f.cuDevicePrimaryCtxRelease,
		"cuCtxSetCurrent": &f.cuCtxSetCurrent, "cuMemGetInfo_v2": &f.cuMemGetInfo,
		"cuDeviceCanAccessPeer": &f.cuDeviceCanAccessPeer, "cuCtxEnablePeerAccess": &f.cuCtxEnablePeerAccess, "cuMemcpyPeerAsync": &f.cuMemcpyPeerAsync,
		"cuMemAlloc_v2": &f.cuMemAlloc, "cuMemFree_v2": &f.cuMemFree, "cuMemHostAlloc": &f.cuMemHostAlloc,
		"cuMemHostGetDevicePointer_v2": &f.cuMemHostGetDevicePointer, "cuMemFreeHost": &f.cuMemFreeHost,
		"cuStreamCreate": &f.cuStreamCreate, "cuStreamDestroy_v2": &f.cuStreamDestroy, "cuStreamSynchronize": &f.cuStreamSynchronize,
		"cuStreamWaitEvent": &f.cuStreamWaitEvent, "cuStreamWriteValue32_v2": &f.cuStreamWriteValue32, "cuStreamWaitValue32_v2": &f.cuStreamWaitValue32,
		"cuEventCreate": &f.cuEventCreate, "cuEventDestroy_v2": &f.cuEventDestroy, "cuEventRecord": &f.cuEventRecord,
		"cuEventQuery": &f.cuEventQuery, "cuEventElapsedTime": &f.cuEventElapsedTime,
		"cuMemcpyHtoDAsync_v2": &f.cuMemcpyHtoDAsync, "cuMemcpyDtoHAsync_v2": &f.cuMemcpyDtoHAsync, "cuMemcpyDtoDAsync_v2": &f.cuMemcpyDtoDAsync,
		"cuMemsetD32Async": &f.cuMemsetD32Async, "cuMemsetD8Async": &f.cuMemsetD8Async,
		"cuModuleLoadDataEx": &f.cuModuleLoadDataEx, "cuModuleUnload": &f.cuModuleUnload, "cuModuleGetFunction": &f.cuModuleGetFunction,
		"cuFuncSetAttribute": &f.cuFuncSetAttribute, "cuLaunchKernel": &f.cuLaunchKernel,
		"cuStreamBeginCapture_v2": &f.cuStreamBeginCapture, "cuStreamEndCapture": &f.cuStreamEndCapture, "cuGraphInstantiateWithFlags": &f.cuGraphInstantiate,
		"cuGraphLaunch": &f.cuGraphLaunch, "cuGraphDestroy": &f.cuGraphDestroy, "cuGraphExecDestroy": &f.cuGraphExecDestroy,
	}
}

// Constants of cuda.h.
const (
	codeNotReady    = 600
	codePeerEnabled = 704 // peer access is already enabled
	codeTooManyPeer = 711 // the device supports no more peers

	jitErrorLog     = 5 // CU_JIT_ERROR_LOG_BUFFER
	jitErrorLogSize = 6 // bytes

	attributeClockRate    = 13
	attributeSMs          = 16
	attributeMajor        = 75
	attributeMinor        = 76
	attributeSharedOptin  = 97
	hostAllocPortable     = 1
	hostAllocDeviceMap    = 2
	streamNonBlocking     = 1
	eventDisableTiming    = 2
	waitValueGreaterEqual = 0 // compares the int32 difference, so values may wrap
	captureThreadLocal    = 1 // calls that a capture forbids are allowed on other threads

	functionDynamicShared = 8

	imageAlign = 8 // alignment of an ELF64 header

	launchEnd           = 0
	launchBufferPointer = 1
	launchBufferSize    = 2
)

// libcuda is the driver's library.
type libcuda struct {
	functions
	path string
}

var opened struct {
	once sync.Once
	lib  *libcuda
	err  error
}

// Open opens the driver's library and initializes it, once in a process. If there is none,
// the error is one line that lists the names and folders tried.
func Open() (API, error) {
	opened.once.Do(func() { opened.lib, opened.err = open() })
	if opened.err != nil {
		return nil, opened.err
	}
	return opened.lib, nil
}

func open() (*libcuda, error) {
	l, err := load()
	if err != nil {
		return nil, err
	}
	if err := l.call("cuInit", l.cuInit, 0); err != nil {
		return nil, fmt.Errorf("NVIDIA's driver (%s): %w", l.path, err)
	}
	return l, nil
}

// load opens the library and finds all its functions, without calling any.
func load() (*libcuda, error) {
	lib, err := dynlib.Open("NVIDIA's driver", Names...)
	if err != nil {
		return nil, err
	}
	l := &libcuda{path: lib.Path}
	if err := lib.Symbols(l.symbols()); err != nil {
		return nil, fmt.Errorf("NVIDIA's driver is too old, want one of CUDA 11.7 or later: %w", err)
	}
	return l, nil
}

// call makes a call whose arguments hold no pointers to Go memory, and allocates
// nothing unless it fails.
func (l *libcuda) call(name string, f uintptr, args ...uintptr) error {
	return l.check(name, syscall(f, args...))
}

// words holds the arguments of a call. It is reused, because SyscallN would allocate its
// argument list at each call.
type words [11]uintptr

var wordsPool = sync.Pool{New: func() any { return new(words) }}

func syscall(f uintptr, args ...uintptr) uintptr {
	w := wordsPool.Get().(*words)
	n := copy(w[:], args)
	r := dl.Call(f, w[:n]...)
	wordsPool.Put(w)
	return r
}

// check converts a result to an error. Calls that take pointers to Go memory use it with
// SyscallN directly: pointers converted in SyscallN's argument list stay in place.
func (l *libcuda) check(name string, r uintptr) error {
	if int32(r) != 0 {
		return l.failure(name, int(int32(r)))
	}
	return nil
}

func (l *libcuda) failure(name string, code int) error {
	return &Error{Call: name, Code: code, Name: l.text(l.cuGetErrorName, code, fmt.Sprintf("CUDA_ERROR_%d", code)), Text: l.text(l.cuGetErrorString, code, "")}
}

// text asks the driver for a string about a code.
func (l *libcuda) text(f uintptr, code int, otherwise string) string {
	var p *byte // points to the library's memory
	r := dl.Call(f, uintptr(code), uintptr(unsafe.Pointer(&p)))
	if int32(r) != 0 || p == nil {
		return otherwise
	}
	n := 0
	for n < 512 && *(*byte)(unsafe.Add(unsafe.Pointer(p), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(p, n))
}

func (l *libcuda) Version() (int, error) {
	var v int32
	r := dl.Call(l.cuDriverGetVersion, uintptr(unsafe.Pointer(&v)))
	return int(v), l.check("cuDriverGetVersion", r)
}

func (l *libcuda) Devices() ([]Device, error) {
	var n int32
	r := dl.Call(l.cuDeviceGetCount, uintptr(unsafe.Pointer(&n)))
	if err := l.check("cuDeviceGetCount", r); err != nil {
		return nil, err
	}
	list := make([]Device, 0, n)
	for i := range int(n) {
		d, err := l.device(i)
		if err != nil {
			return nil, fmt.Errorf("device %d: %w", i, err)
		}
		list = append(list, d)
	}
	return list, nil
}

func (l *libcuda) handle(ordinal int) (int32, error) {
	var h int32
	r := dl.Call(l.cuDeviceGet, uintptr(unsafe.Pointer(&h)), uintptr(ordinal))
	return h, l.check("cuDeviceGet", r)
}

func (l *libcuda) device(ordinal int) (Device, error) {
	d := Device{Ordinal: ordinal, StreamMemOps: true} // drivers with these function versions have them
	h, err := l.handle(ordinal)
	if err != nil {
		return d, err
	}
	name := make([]byte, 256)
	r := dl.Call(l.cuDeviceGetName, uintptr(unsafe.Pointer(&name[0])), uintptr(len(name)-1), uintptr(h))
	if err := l.check("cuDeviceGetName", r); err != nil {
		return d, err
	}
	d.Name = string(name[:bytes.IndexByte(name, 0)])
	r = dl.Call(l.cuDeviceGetUuid, uintptr(unsafe.Pointer(&d.UUID)), uintptr(h))
	if err := l.check("cuDeviceGetUuid", r); err != nil {
		return d, err
	}
	var total uint64
	r = dl.Call(l.cuDeviceTotalMem, uintptr(unsafe.Pointer(&total)), uintptr(h))
	if err := l.check("cuDeviceTotalMem_v2", r); err != nil {
		return d, err
	}
	d.Memory = int64(total)
	for _, a := range []struct {
		number int
		to     *int
	}{{attributeMajor, &d.Major}, {attributeMinor, &d.Minor}, {attributeSMs, &d.SMs}, {attributeSharedOptin, &d.SharedOptin}} {
		if *a.to, err = l.attribute(h, a.number); err != nil {
			return d, err
		}
	}
	if d.ClockKHz, err = l.attribute(h, attributeClockRate); err != nil {
		d.ClockKHz = 0 // drivers of CUDA 13 no longer promise it; 0 is unknown
	}
	return d, nil
}

func (l *libcuda) attribute(device int32, number int) (int, error) {
	var v int32
	r := dl.Call(l.cuDeviceGetAttribute, uintptr(unsafe.Pointer(&v)), uintptr(number), uintptr(device))
	return int(v), l.check("cuDeviceGetAttribute", r)
}

func (l *libcuda) Retain(ordinal int) (Context, error) {
	h, err := l.handle(ordinal)
	if err != nil {
		return 0, err
	}
	var c Context
	r := dl.Call(l.cuDevicePrimaryCtxRetain, uintptr(unsafe.Pointer(&c)), uintptr(h))
	return c, l.check("cuDevicePrimaryCtxRetain", r)
}

func (l *libcuda) Release(ordinal int) error {
	h, err := l.handle(ordinal)
	if err != nil {
		return err
	}
	return l.call("cuDevicePrimaryCtxRelease_v2", l.cuDevicePrimaryCtxRelease, uintptr(h))
}

func (l *libcuda) SetCurrent(c Context) error {
	return l.call("cuCtxSetCurrent", l.cuCtxSetCurrent, uintptr(c))
}

func (l *libcuda) MemInfo() (int64, int64, error) {
	var free, total uint64
	r := dl.Call(l.cuMemGetInfo, uintptr(unsafe.Pointer(&free)), uintptr(unsafe.Pointer(&total)))
	return int64(free), int64(total), l.check("cuMemGetInfo_v2", r)
}

func (l *libcuda) CanAccessPeer(ordinal, peer int) (bool, error) {
	from, err := l.handle(ordinal)
	if err != nil {
		return false, err
	}
	to, err := l.handle(peer)
	if err != nil {
		return false, err
	}
	var can int32
	r := dl.Call(l.cuDeviceCanAccessPeer, uintptr(unsafe.Pointer(&can)), uintptr(from), uintptr(to))
	return can != 0, l.check("cuDeviceCanAccessPeer", r)
}

func (l *libcuda) EnablePeerAccess(peer Context) (bool, error) {
	switch r := syscall(l.cuCtxEnablePeerAccess, uintptr(peer), 0); int32(r) {
	case 0, codePeerEnabled:
		return true, nil
	case codeTooManyPeer:
		return false, nil
	default:
		return false, l.check("cuCtxEnablePeerAccess", r)
	}
}

func (l *libcuda) Alloc(size int64) (Address, error) {
	var a Address
	r := dl.Call(l.cuMemAlloc, uintptr(unsafe.Pointer(&a)), uintptr(size))
	return a, l.check("cuMemAlloc_v2", r)
}

func (l *libcuda) Free(a Address) error { return l.call("cuMemFree_v2", l.cuMemFree, uintptr(a)) }

func (l *libcuda) HostAlloc(size int64) (unsafe.Pointer, Address, error) {
	var p unsafe.Pointer
	r := dl.Call(l.cuMemHostAlloc, uintptr(unsafe.Pointer(&p)), uintptr(size), hostAllocPortable|hostAllocDeviceMap)
	if err := l.check("cuMemHostAlloc", r); err != nil {
		return nil, 0, err
	}
	var a Address
	r = dl.Call(l.cuMemHostGetDevicePointer, uintptr(unsafe.Pointer(&a)), uintptr(p), 0)
	if err := l.check("cuMemHostGetDevicePointer_v2", r); err != nil {
		_ = l.HostFree(p) // the first error is returned
		return nil, 0, err
	}
	return p, a, nil
}

func (l *libcuda) HostFree(p unsafe.Pointer) error {
	return l.call("cuMemFreeHost", l.cuMemFreeHost, uintptr(p))
}

func (l *libcuda) NewStream() (Stream, error) {
	var s Stream
	r := dl.Call(l.cuStreamCreate, uintptr(unsafe.Pointer(&s)), streamNonBlocking)
	return s, l.check("cuStreamCreate", r)
}

func (l *libcuda) DestroyStream(s Stream) error {
	return l.call("cuStreamDestroy_v2", l.cuStreamDestroy, uintptr(s))
}

func (l *libcuda) Synchronize(s Stream) error {
	return l.call("cuStreamSynchronize", l.cuStreamSynchronize, uintptr(s))
}

func (l *libcuda) NewEvent(timed bool) (Event, error) {
	flags := uintptr(eventDisableTiming)
	if timed {
		flags = 0
	}
	var e Event
	r := dl.Call(l.cuEventCreate, uintptr(unsafe.Pointer(&e)), flags)
	return e, l.check("cuEventCreate", r)
}

func (l *libcuda) DestroyEvent(e Event) error {
	return l.call("cuEventDestroy_v2", l.cuEventDestroy, uintptr(e))
}

func (l *libcuda) Record(e Event, s Stream) error {
	return l.call("cuEventRecord", l.cuEventRecord, uintptr(e), uintptr(s))
}

func (l *libcuda) Wait(s Stream, e Event) error {
	return l.call("cuStreamWaitEvent", l.cuStreamWaitEvent, uintptr(s), uintptr(e), 0)
}

func (l *libcuda) Done(e Event) (bool, error) {
	r := syscall(l.cuEventQuery, uintptr(e))
	if int32(r) == codeNotReady {
		return false, nil
	}
	return int32(r) == 0, l.check("cuEventQuery", r)
}

func (l *libcuda) Elapsed(from, to Event) (float32, error) {
	var ms float32
	r := dl.Call(l.cuEventElapsedTime, uintptr(unsafe.Pointer(&ms)), uintptr(from), uintptr(to))
	return ms, l.check("cuEventElapsedTime", r)
}

func (l *libcuda) CopyToDevice(dst Address, src unsafe.Pointer, n int64, s Stream) error {
	return l.call("cuMemcpyHtoDAsync_v2", l.cuMemcpyHtoDAsync, uintptr(dst), uintptr(src), uintptr(n), uintptr(s))
}

func (l *libcuda) CopyToHost(dst unsafe.Pointer, src Address, n int64, s Stream) error {
	return l.call("cuMemcpyDtoHAsync_v2", l.cuMemcpyDtoHAsync, uintptr(dst), uintptr(src), uintptr(n), uintptr(s))
}

func (l *libcuda) CopyOnDevice(dst, src Address, n int64, s Stream) error {
	return l.call("cuMemcpyDtoDAsync_v2", l.cuMemcpyDtoDAsync, uintptr(dst), uintptr(src), uintptr(n), uintptr(s))
}

func (l *libcuda) CopyPeer(dst Address, to Context, src Address, from Context, n int64, s Stream) error {
	return l.call("cuMemcpyPeerAsync", l.cuMemcpyPeerAsync, uintptr(dst), uintptr(to), uintptr(src), uintptr(from), uintptr(n), uintptr(s))
}

func (l *libcuda) Fill32(dst Address, value uint32, words int64, s Stream) error {
	return l.call("cuMemsetD32Async", l.cuMemsetD32Async, uintptr(dst), uintptr(value), uintptr(words), uintptr(s))
}

func (l *libcuda) Fill8(dst Address, value byte, n int64, s Stream) error {
	return l.call("cuMemsetD8Async", l.cuMemsetD8Async, uintptr(dst), uintptr(value), uintptr(n), uintptr(s))
}

func (l *libcuda) WriteValue(s Stream, a Address, v uint32) error {
	return l.call("cuStreamWriteValue32_v2", l.cuStreamWriteValue32, uintptr(s), uintptr(a), uintptr(v), 0)
}

func (l *libcuda) WaitValue(s Stream, a Address, v uint32) error {
	return l.call("cuStreamWaitValue32_v2", l.cuStreamWaitValue32, uintptr(s), uintptr(a), uintptr(v), waitValueGreaterEqual)
}

func (l *libcuda) LoadModule(image []byte) (Module, error) {
	if len(image) == 0 {
		return 0, &Error{Call: "cuModuleLoadDataEx", Code: 200, Name: "CUDA_ERROR_INVALID_IMAGE", Text: "the image is empty"}
	}
	if uintptr(unsafe.Pointer(&image[0]))%imageAlign != 0 {
		return 0, &Error{Call: "cuModuleLoadDataEx", Code: 200, Name: "CUDA_ERROR_INVALID_IMAGE", Text: "the image is not at a multiple of 8"}
	}
	var (
		m       Module
		log     [8 << 10]byte // the log of the driver's PTX compiler
		options = [2]int32{jitErrorLog, jitErrorLogSize}
		values  = [2]uintptr{uintptr(unsafe.Pointer(&log)), unsafe.Sizeof(log)}
		pin     runtime.Pinner
	)
	pin.Pin(&log)
	defer pin.Unpin()
	r := dl.Call(l.cuModuleLoadDataEx, uintptr(unsafe.Pointer(&m)), uintptr(unsafe.Pointer(&image[0])), uintptr(len(options)),
		uintptr(unsafe.Pointer(&options)), uintptr(unsafe.Pointer(&values)))
	err := l.check("cuModuleLoadDataEx", r)
	if said, _, _ := bytes.Cut(log[:], []byte{0}); err != nil && len(said) > 0 {
		err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(said))
	}
	return m, err
}

func (l *libcuda) UnloadModule(m Module) error {
	return l.call("cuModuleUnload", l.cuModuleUnload, uintptr(m))
}

func (l *libcuda) Function(m Module, name string) (Function, error) {
	text := append([]byte(name), 0)
	var f Function
	r := dl.Call(l.cuModuleGetFunction, uintptr(unsafe.Pointer(&f)), uintptr(m), uintptr(unsafe.Pointer(&text[0])))
	if err := l.check("cuModuleGetFunction", r); err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	return f, nil
}

func (l *libcuda) AllowShared(f Function, bytes int) error {
	return l.call("cuFuncSetAttribute", l.cuFuncSetAttribute, uintptr(f), functionDynamicShared, uintptr(bytes))
}

// launchExtra is the array from which cuLaunchKernel reads its packed parameters. It is on the
// heap, so that its address does not change; a pool avoids an allocation at each launch.
type launchExtra struct {
	list [5]uintptr
	size uintptr
}

var launchExtras = sync.Pool{New: func() any { return new(launchExtra) }}

func (l *libcuda) Launch(f Function, grid, block Dim, shared int, s Stream, params unsafe.Pointer, size uintptr) error {
	x := launchExtras.Get().(*launchExtra)
	x.size = size
	x.list = [5]uintptr{launchBufferPointer, uintptr(params), launchBufferSize, uintptr(unsafe.Pointer(&x.size)), launchEnd}
	if size == 0 {
		x.list[0] = launchEnd
	}
	r := syscall(l.cuLaunchKernel, uintptr(f), uintptr(grid.X), uintptr(grid.Y), uintptr(grid.Z),
		uintptr(block.X), uintptr(block.Y), uintptr(block.Z), uintptr(shared), uintptr(s), 0, uintptr(unsafe.Pointer(&x.list)))
	runtime.KeepAlive(params)
	launchExtras.Put(x)
	return l.check("cuLaunchKernel", r)
}

func (l *libcuda) BeginCapture(s Stream) error {
	return l.call("cuStreamBeginCapture_v2", l.cuStreamBeginCapture, uintptr(s), captureThreadLocal)
}

func (l *libcuda) EndCapture(s Stream) (Graph, error) {
	var g Graph
	r := dl.Call(l.cuStreamEndCapture, uintptr(s), uintptr(unsafe.Pointer(&g)))
	return g, l.check("cuStreamEndCapture", r)
}

func (l *libcuda) DestroyGraph(g Graph) error {
	return l.call("cuGraphDestroy", l.cuGraphDestroy, uintptr(g))
}

func (l *libcuda) Instantiate(g Graph) (GraphExec, error) {
	var e GraphExec
	r := dl.Call(l.cuGraphInstantiate, uintptr(unsafe.Pointer(&e)), uintptr(g), 0)
	return e, l.check("cuGraphInstantiateWithFlags", r)
}

func (l *libcuda) DestroyGraphExec(e GraphExec) error {
	return l.call("cuGraphExecDestroy", l.cuGraphExecDestroy, uintptr(e))
}

func (l *libcuda) LaunchGraph(e GraphExec, s Stream) error {
	return l.call("cuGraphLaunch", l.cuGraphLaunch, uintptr(e), uintptr(s))
}
