//go:build linux

package drivertest

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// Limits of the double's device: those of compute capability 8.0.
const (
	sharedDefault = 48 << 10
	sharedOptin   = 163 << 10
	maxThreads    = 1024
	imageAlign    = 8 // see driver.API.LoadModule
)

// ImagePrefix begins a module image of the double. The path of a shared library
// follows. Function NAME of the module is the library's shim_NAME, with the C
// signature
//
//	int shim_NAME(const uint32_t grid[3], const uint32_t block[3], uint32_t shared, const void *params)
//
// 0 is success; shared is the bytes of dynamic shared memory, and params are
// packed as driver.Args packs them. Where the library has a shim_size_NAME(), that is
// how many bytes of parameters a launch must have.
const ImagePrefix = "shim:"

type module struct {
	gpu       int
	lib       uintptr
	functions map[string]driver.Function
}

type function struct {
	gpu    int
	name   string
	code   uintptr
	shared int // bytes that a launch may ask for
	params int // bytes; −1: not known
	loaded bool
}

// LoadModule opens an image: see ImagePrefix.
func (d *Driver) LoadModule(image []byte) (driver.Module, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuModuleLoadDataEx"
	if err := d.enter(call); err != nil {
		return 0, err
	}
	if uintptr(unsafe.Pointer(unsafe.SliceData(image)))%imageAlign != 0 {
		d.fault("%s of an image at %p, want a multiple of %d", call, unsafe.SliceData(image), imageAlign)
		return 0, failure(call, 200, "the image is not at a multiple of %d", imageAlign)
	}
	path, ok := strings.CutPrefix(string(image), ImagePrefix)
	if !ok {
		return 0, failure(call, 200, "the double loads images that begin with %q", ImagePrefix)
	}
	lib, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return 0, failure(call, 200, "%v", err)
	}
	m := driver.Module(d.handle())
	d.modules[m] = &module{gpu: d.here(), lib: lib, functions: map[string]driver.Function{}}
	return m, nil
}

// UnloadModule closes it, and its functions are gone.
func (d *Driver) UnloadModule(m driver.Module) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuModuleUnload"
	err := d.teardown(call)
	mod := d.modules[m]
	if mod == nil {
		d.fault("%s of module %d, which does not exist", call, m)
		return failure(call, 400, "no such module")
	}
	for _, f := range mod.functions {
		delete(d.functions, f)
	}
	delete(d.modules, m)
	if e := purego.Dlclose(mod.lib); e != nil {
		return failure(call, 999, "%v", e)
	}
	return err
}

// Function finds a function of a module.
func (d *Driver) Function(m driver.Module, name string) (driver.Function, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuModuleGetFunction"
	if err := d.enter(call); err != nil {
		return 0, err
	}
	mod := d.modules[m]
	if mod == nil {
		return 0, failure(call, 400, "no such module")
	}
	if err := d.own(call, "module", mod.gpu, d.here()); err != nil {
		return 0, err
	}
	if f, ok := mod.functions[name]; ok {
		return f, nil
	}
	code, err := purego.Dlsym(mod.lib, "shim_"+name)
	if err != nil {
		return 0, failure(call, 500, "no function %s", name)
	}
	f := driver.Function(d.handle())
	d.functions[f] = &function{gpu: mod.gpu, name: name, code: code, shared: sharedDefault, params: -1}
	if size, err := purego.Dlsym(mod.lib, "shim_size_"+name); err == nil {
		n, _, _ := purego.SyscallN(size)
		d.functions[f].params = int(n)
	}
	mod.functions[name] = f
	return f, nil
}

// AllowShared raises what a launch may ask for.
func (d *Driver) AllowShared(f driver.Function, bytes int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuFuncSetAttribute"
	if err := d.enter(call); err != nil {
		return err
	}
	fn := d.functions[f]
	if fn == nil {
		return failure(call, 400, "no such function")
	}
	if bytes < 0 || bytes > sharedOptin {
		return failure(call, 1, "%d bytes of shared memory, at most %d", bytes, sharedOptin)
	}
	fn.shared = max(sharedDefault, bytes)
	return nil
}

// Launch enqueues a function of a module.
func (d *Driver) Launch(f driver.Function, grid, block driver.Dim, shared int, s driver.Stream, params unsafe.Pointer, size uintptr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuLaunchKernel"
	if err := d.enter(call); err != nil {
		return err
	}
	fn := d.functions[f]
	if fn == nil {
		return failure(call, 400, "no such function")
	}
	if err := d.ownStream(call, s); err != nil {
		return err
	}
	if err := d.own(call, "function "+fn.name, fn.gpu, d.here()); err != nil {
		return err
	}
	threads := uint64(block.X) * uint64(block.Y) * uint64(block.Z)
	switch {
	case grid.X == 0 || grid.Y == 0 || grid.Z == 0 || threads == 0:
		return failure(call, 1, "%s: grid %v of blocks %v", fn.name, grid, block)
	case grid.X > 1<<31-1 || grid.Y > 65535 || grid.Z > 65535 || threads > maxThreads || block.Z > 64:
		return failure(call, 1, "%s: grid %v of blocks %v is over the limits", fn.name, grid, block)
	case shared < 0 || shared > fn.shared:
		return failure(call, 1, "%s: %d bytes of shared memory, %d are allowed", fn.name, shared, fn.shared)
	case fn.params >= 0 && int(size) != fn.params:
		d.fault("%s of %s with %d bytes of parameters, it has %d", call, fn.name, size, fn.params)
		return failure(call, 1, "%s: %d bytes of parameters, it has %d", fn.name, size, fn.params)
	}
	if err := d.load(call, fn); err != nil {
		return err
	}
	if err := d.pointers(fn, unsafe.Slice((*byte)(params), size)); err != nil {
		return err
	}
	packed := append([]byte(nil), unsafe.Slice((*byte)(params), size)...)
	packed = append(packed, make([]byte, 8)...) // never empty
	g, b := [3]uint32{grid.X, grid.Y, grid.Z}, [3]uint32{block.X, block.Y, block.Z}
	name, code := fn.name, fn.code
	return d.push(call, s, item{label: name, run: func() error {
		var r uintptr
		onLaunchThread(func() {
			r, _, _ = purego.SyscallN(code, uintptr(unsafe.Pointer(&g)), uintptr(unsafe.Pointer(&b)), uintptr(shared), uintptr(unsafe.Pointer(&packed[0])))
			runtime.KeepAlive(&g)
			runtime.KeepAlive(&b)
			runtime.KeepAlive(packed)
		})
		if int32(r) != 0 {
			return fmt.Errorf("kernel %s: the shim says %d", name, int32(r))
		}
		return nil
	}})
}

// load is a function's first launch: the driver waits until nothing runs, loads its
// code and gives threads more local memory where it needs that.
func (d *Driver) load(call string, fn *function) error {
	if fn.loaded {
		return nil
	}
	if c := d.capturing[unix.Gettid()]; c != nil {
		return c.refuse(call, "the code of "+fn.name+" is not loaded yet")
	}
	d.drainAll(call, fn.gpu)
	if err := d.lost(fn.gpu, call); err != nil {
		return err
	}
	if d.opts.FirstLaunch != nil && !fn.loaded {
		if err := d.take(call, &d.gpus[fn.gpu], d.opts.FirstLaunch(fn.name)); err != nil {
			return err
		}
	}
	fn.loaded = true
	return nil
}

// Libraries keep memory for each thread that they ran on (stacks of the kernel's
// threads), for good: all doubles of a process launch on the same two.
var launches = sync.OnceValue(func() chan func() {
	work := make(chan func())
	for range 2 {
		go func() {
			runtime.LockOSThread()
			for f := range work {
				f()
			}
		}()
	}
	return work
})

func onLaunchThread(f func()) {
	done := make(chan struct{})
	launches() <- func() { f(); close(done) }
	<-done
}

// side is one end of a copy: memory of the double, or other memory of the host,
// which is moved while the call lasts, as the driver does with pageable memory.
func (d *Driver) side(call string, p unsafe.Pointer, n int64) (mem []byte, pageable bool, err error) {
	at := driver.Address(uintptr(p))
	if d.find(at) == nil {
		return unsafe.Slice((*byte)(p), n), true, nil
	}
	mem, err = d.memory(call, at, n)
	return mem, false, err
}

// memory returns a range of a live allocation.
func (d *Driver) memory(call string, at driver.Address, n int64) ([]byte, error) {
	m, err := d.reach(driver.Range{At: at, Len: n})
	if err != nil {
		d.fault("%s: %v", call, err)
		return nil, failure(call, 1, "%v", err)
	}
	off := int64(at - m.at)
	return m.data[off : off+n : off+n], nil
}

func ranges(at driver.Address, n int64) []driver.Range { return []driver.Range{{At: at, Len: n}} }

// CopyToDevice enqueues a copy from page-locked memory.
func (d *Driver) CopyToDevice(dst driver.Address, src unsafe.Pointer, n int64, s driver.Stream) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuMemcpyHtoDAsync_v2"
	if err := d.enter(call); err != nil || n == 0 {
		return err
	}
	from, pageable, err := d.side(call, src, n)
	if err != nil {
		return err
	}
	to, err := d.memory(call, dst, n)
	if err != nil {
		return err
	}
	i := item{label: call, writes: ranges(dst, n)}
	if pageable {
		from = append([]byte(nil), from...)
	} else {
		i.reads = ranges(driver.Address(uintptr(src)), n)
	}
	i.run = func() error { copy(to, from); return nil }
	return d.push(call, s, i)
}

// CopyToHost enqueues a copy to page-locked memory.
func (d *Driver) CopyToHost(dst unsafe.Pointer, src driver.Address, n int64, s driver.Stream) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuMemcpyDtoHAsync_v2"
	if err := d.enter(call); err != nil || n == 0 {
		return err
	}
	to, pageable, err := d.side(call, dst, n)
	if err != nil {
		return err
	}
	from, err := d.memory(call, src, n)
	if err != nil {
		return err
	}
	i := item{label: call, reads: ranges(src, n), run: func() error { copy(to, from); return nil }}
	if !pageable {
		i.writes = ranges(driver.Address(uintptr(dst)), n)
	}
	if err := d.push(call, s, i); err != nil || !pageable {
		return err
	}
	if c := d.streams[s].into; c != nil {
		return c.refuse(call, "the memory is not page-locked")
	}
	d.drain(d.streams[s])
	return nil
}

// CopyOnDevice enqueues a copy.
func (d *Driver) CopyOnDevice(dst, src driver.Address, n int64, s driver.Stream) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuMemcpyDtoDAsync_v2"
	if err := d.enter(call); err != nil || n == 0 {
		return err
	}
	from, err := d.memory(call, src, n)
	if err != nil {
		return err
	}
	to, err := d.memory(call, dst, n)
	if err != nil {
		return err
	}
	if src < dst+driver.Address(n) && dst < src+driver.Address(n) {
		d.fault("%s: source and destination overlap", call)
		return failure(call, 1, "source and destination overlap")
	}
	return d.push(call, s, item{label: call, reads: ranges(src, n), writes: ranges(dst, n), run: func() error { copy(to, from); return nil }})
}

// Fill32 enqueues a fill with words.
func (d *Driver) Fill32(dst driver.Address, value uint32, words int64, s driver.Stream) error {
	return d.fill("cuMemsetD32Async", dst, value, 4*words, 4, s)
}

// Fill8 enqueues a fill with bytes.
func (d *Driver) Fill8(dst driver.Address, value byte, n int64, s driver.Stream) error {
	return d.fill("cuMemsetD8Async", dst, uint32(value), n, 1, s)
}

func (d *Driver) fill(call string, dst driver.Address, value uint32, n int64, size int, s driver.Stream) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.enter(call); err != nil || n == 0 {
		return err
	}
	to, err := d.memory(call, dst, n)
	if err != nil {
		return err
	}
	if uint64(dst)%uint64(size) != 0 {
		return failure(call, 1, "address %#x is not a multiple of %d", uint64(dst), size)
	}
	return d.push(call, s, item{label: call, writes: ranges(dst, n), run: func() error {
		if size == 1 {
			fill(to, byte(value))
			return nil
		}
		for i := 0; i < len(to); i += 4 {
			binary.NativeEndian.PutUint32(to[i:], value)
		}
		return nil
	}})
}
