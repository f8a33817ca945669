// Package driver defines the part of the CUDA driver API that Spillway calls as an interface.
// One implementation opens libcuda at run time; a test double runs copies and kernels on the
// host, in stream order.
//
// Every method is one driver call. Its error is an *Error that names the call and the code.
// Addresses are in CUDA's unified address space for device and page-locked memory.
package driver

import "unsafe"

// Names are the file names of the driver's library.
var Names = []string{"libcuda.so.1"}

// Handles of the driver. The zero Stream is the default stream, which Spillway does not use.
// For other types zero means that there is no object.
type (
	// Address is the device address of device memory or of page-locked host memory.
	Address  uint64
	Context  uintptr
	Stream   uintptr
	Event    uintptr
	Module   uintptr
	Function uintptr
	// Graph is captured work (CUgraph); GraphExec is an instantiated graph that can be launched.
	Graph     uintptr
	GraphExec uintptr
)

// Dim is the size of a grid in blocks or of a block in threads.
type Dim struct{ X, Y, Z uint32 }

// Device describes a GPU, as reported by the driver.
type Device struct {
	Ordinal      int
	Name         string
	UUID         [16]byte
	Major, Minor int   // compute capability
	Memory       int64 // bytes
	SMs          int
	SharedOptin  int // most shared memory of a block, in bytes (with opt-in)
	ClockKHz     int
	StreamMemOps bool // WriteValue and WaitValue are supported
}

// API is the driver. Its calls act on the context that is current on the calling thread. The
// caller must have locked the goroutine to its thread.
type API interface {
	Version() (int, error) // 12040 is 12.4
	Devices() ([]Device, error)

	// Retain returns the primary context of a device; Release releases it.
	Retain(ordinal int) (Context, error)
	Release(ordinal int) error
	SetCurrent(c Context) error
	MemInfo() (free, total int64, err error)
	// CanAccessPeer tells whether device ordinal can access the memory of device peer.
	CanAccessPeer(ordinal, peer int) (bool, error)
	// EnablePeerAccess lets the current context access the memory of the peer context, as
	// long as both exist. ok is false if the device supports no more peers. Repeated calls
	// are allowed.
	EnablePeerAccess(peer Context) (ok bool, err error)

	Alloc(bytes int64) (Address, error)
	Free(a Address) error
	// HostAlloc returns page-locked memory of exactly the given size. Kernels and WriteValue
	// access it at the returned Address.
	HostAlloc(bytes int64) (unsafe.Pointer, Address, error)
	HostFree(p unsafe.Pointer) error

	NewStream() (Stream, error) // does not synchronise with the default stream
	DestroyStream(s Stream) error
	Synchronize(s Stream) error
	NewEvent(timed bool) (Event, error)
	DestroyEvent(e Event) error
	Record(e Event, s Stream) error
	Wait(s Stream, e Event) error
	// Done tells whether the work before the event's last Record has run.
	Done(e Event) (bool, error)
	Elapsed(from, to Event) (ms float32, err error)

	CopyToDevice(dst Address, src unsafe.Pointer, bytes int64, s Stream) error
	CopyToHost(dst unsafe.Pointer, src Address, bytes int64, s Stream) error
	CopyOnDevice(dst, src Address, bytes int64, s Stream) error
	// CopyPeer copies between the memory of two devices, given by their contexts. The driver
	// uses the link between them if peer access is enabled, else it copies through the host.
	CopyPeer(dst Address, to Context, src Address, from Context, bytes int64, s Stream) error
	Fill32(dst Address, value uint32, words int64, s Stream) error
	Fill8(dst Address, value byte, bytes int64, s Stream) error

	// WriteValue stores v at a in stream order. WaitValue holds the stream until the word at
	// a minus v is not negative as an int32. Writes of the stream before WriteValue are visible,
	// to the host too, before its store: version 2 of the call lacks the flag that omits this
	// barrier.
	WriteValue(s Stream, a Address, v uint32) error
	WaitValue(s Stream, a Address, v uint32) error

	// LoadModule loads a cubin, or PTX that ends in a zero byte. image must be aligned to 8
	// bytes, because the driver reads the ELF header in place. If PTX does not compile, the
	// error contains the driver's log.
	LoadModule(image []byte) (Module, error)
	UnloadModule(m Module) error
	Function(m Module, name string) (Function, error)
	// AllowShared sets the largest dynamic shared memory, in bytes, of launches of f.
	AllowShared(f Function, bytes int) error
	// Launch runs f with packed parameters in C's layout: each at a multiple of its size.
	// The driver has copied them when Launch returns.
	Launch(f Function, grid, block Dim, shared int, s Stream, params unsafe.Pointer, size uintptr) error

	// BeginCapture makes the driver collect work that the calling thread enqueues on s
	// instead of running it, until EndCapture returns it as a graph. Calls that cannot be
	// captured (memory allocation, host waits, the first launch of a function, which loads
	// its code) fail, and then EndCapture fails too; s is unchanged afterwards.
	BeginCapture(s Stream) error
	EndCapture(s Stream) (Graph, error)
	DestroyGraph(g Graph) error
	// Instantiate prepares a graph for launches, which may allocate device memory. The graph
	// can be destroyed afterwards.
	Instantiate(g Graph) (GraphExec, error)
	DestroyGraphExec(e GraphExec) error
	LaunchGraph(e GraphExec, s Stream) error
}
