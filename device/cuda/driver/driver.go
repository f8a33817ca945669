// Package driver is the part of the CUDA driver API that Spillway calls, as an
// interface: one implementation opens libcuda at run time, a double in tests
// runs copies and kernels on the host, in stream order.
//
// Every method is one call of the driver. Its error is an *Error that names the
// call and the code. Addresses are of the one address space that the driver
// gives device and page-locked memory.
package driver

import "unsafe"

// Names are the files of the driver's library.
var Names = []string{"libcuda.so.1"}

// Handles of the driver. The zero Stream is the default stream, which Spillway
// does not use; a zero of another type is no object.
type (
	// Address of device memory, or of page-locked host memory as a kernel sees it.
	Address  uint64
	Context  uintptr
	Stream   uintptr
	Event    uintptr
	Module   uintptr
	Function uintptr
	// Graph is captured work, GraphExec one that can be launched.
	Graph     uintptr
	GraphExec uintptr
)

// Dim is the size of a grid in blocks or of a block in threads.
type Dim struct{ X, Y, Z uint32 }

// Device is what the driver says of a device.
type Device struct {
	Ordinal      int
	Name         string
	UUID         [16]byte
	Major, Minor int   // compute capability
	Memory       int64 // bytes
	SMs          int
	SharedOptin  int // bytes of shared memory that a block may ask for
	ClockKHz     int
	StreamMemOps bool // StreamWriteValue and StreamWaitValue work
}

// FunctionInfo is what the compiler gave a kernel.
type FunctionInfo struct {
	Registers  int // of a thread
	LocalBytes int // spilled or indexed memory of a thread
	Shared     int // bytes of static shared memory of a block
	MaxThreads int // of a block
}

// API is the driver. Its calls act on the context that is current on the
// calling thread, which the caller has locked.
type API interface {
	Version() (int, error) // 12040 is 12.4
	Devices() ([]Device, error)

	// Retain gives the primary context of a device; Release gives it back.
	Retain(ordinal int) (Context, error)
	Release(ordinal int) error
	SetCurrent(c Context) error
	MemInfo() (free, total int64, err error)
	// CanAccessPeer tells whether a device can reach another one's memory, by ordinal.
	CanAccessPeer(ordinal, peer int) (bool, error)
	// EnablePeerAccess lets the current context reach the memory of the peer's, for the
	// life of both; ok is false where the device has no link left for it. It may be called
	// again.
	EnablePeerAccess(peer Context) (ok bool, err error)

	Alloc(bytes int64) (Address, error)
	Free(a Address) error
	// HostAlloc gives page-locked memory of exactly the size, which kernels and
	// StreamWriteValue can reach at the Address.
	HostAlloc(bytes int64) (unsafe.Pointer, Address, error)
	HostFree(p unsafe.Pointer) error

	NewStream() (Stream, error) // does not synchronise with the default stream
	DestroyStream(s Stream) error
	Synchronize(s Stream) error
	NewEvent(timed bool) (Event, error)
	DestroyEvent(e Event) error
	Record(e Event, s Stream) error
	Wait(s Stream, e Event) error
	// Done tells whether what was before the event's last Record has run.
	Done(e Event) (bool, error)
	Elapsed(from, to Event) (ms float32, err error)

	CopyToDevice(dst Address, src unsafe.Pointer, bytes int64, s Stream) error
	CopyToHost(dst unsafe.Pointer, src Address, bytes int64, s Stream) error
	CopyOnDevice(dst, src Address, bytes int64, s Stream) error
	// CopyPeer copies between the memory of two devices, given by their contexts. It goes
	// over the link between them where one has access to the other's memory, else through
	// the host: the driver sees to that.
	CopyPeer(dst Address, to Context, src Address, from Context, bytes int64, s Stream) error
	Fill32(dst Address, value uint32, words int64, s Stream) error
	Fill8(dst Address, value byte, bytes int64, s Stream) error

	// WriteValue stores v at a when the stream gets there; WaitValue holds the
	// stream until the word at a, less v, is not negative as an int32. WriteValue is
	// a barrier for what the stream wrote before it, also as the host sees it: v2 of
	// the call does not take the flag that leaves the barrier out.
	WriteValue(s Stream, a Address, v uint32) error
	WaitValue(s Stream, a Address, v uint32) error

	// LoadModule takes a cubin, or PTX that ends in a zero byte, at an address that is a
	// multiple of 8: the driver reads an ELF file's header in place. The error of PTX that it
	// cannot translate has its log.
	LoadModule(image []byte) (Module, error)
	UnloadModule(m Module) error
	Function(m Module, name string) (Function, error)
	FunctionInfo(f Function) (FunctionInfo, error)
	// AllowShared raises the shared memory that a launch of f may ask for.
	AllowShared(f Function, bytes int) error
	// Launch runs f with the parameters packed as C lays them out: each at a
	// multiple of its size. The driver has copied them when it returns.
	Launch(f Function, grid, block Dim, shared int, s Stream, params unsafe.Pointer, size uintptr) error

	// BeginCapture has what the calling thread enqueues on s collected instead of run, until
	// EndCapture gives it as a graph. What may not be captured (memory, a wait of the host,
	// the first launch of a function whose code is loaded then) fails, and EndCapture with
	// it; s is as before then.
	BeginCapture(s Stream) error
	EndCapture(s Stream) (Graph, error)
	DestroyGraph(g Graph) error
	// Instantiate makes a graph ready to run, for which the device may take memory. The
	// graph is not needed any more.
	Instantiate(g Graph) (GraphExec, error)
	DestroyGraphExec(e GraphExec) error
	LaunchGraph(e GraphExec, s Stream) error
}
