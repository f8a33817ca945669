//go:build linux

package drivertest

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// New memory is NaN in every float type. The bytes between an allocation and its guard pages have
// another pattern, which is checked when the allocation is freed.
const (
	poison    = 0xFF
	canary    = 0xA5
	alignment = 256 // of every allocation, as with cuMemAlloc
)

type allocation struct {
	gpu     int // its device; −1: page-locked memory of the host
	data    []byte
	at      driver.Address
	inner   []byte // the accessible pages around data
	whole   []byte // with the guard pages
	freed   bool
	history segments
}

func (a *allocation) live() bool { return !a.freed }

func (a *allocation) String() string {
	kind := "device"
	switch {
	case a.gpu < 0:
		kind = "page-locked"
	case a.gpu > 0:
		kind = fmt.Sprintf("device %d's", a.gpu)
	}
	return fmt.Sprintf("%d bytes of %s memory at %#x", len(a.data), kind, uint64(a.at))
}

func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// allocate maps memory that ends at a guard page, except for alignment.
func (d *Driver) allocate(size int64, gpu int) (*allocation, error) {
	page := int64(os.Getpagesize())
	padded := (size + alignment - 1) / alignment * alignment
	pages := (padded + page - 1) / page * page
	whole, err := unix.Mmap(-1, 0, int(pages+2*page), unix.PROT_NONE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	inner := whole[page : page+pages : page+pages]
	if err := unix.Mprotect(inner, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		_ = unix.Munmap(whole)
		return nil, os.NewSyscallError("mprotect", err)
	}
	start := pages - padded
	a := &allocation{gpu: gpu, inner: inner, whole: whole, data: inner[start : start+size : start+size]}
	a.at = driver.Address(address(a.data))
	fill(inner[:start], canary)
	fill(a.data, poison)
	fill(inner[start+size:], canary)
	i, _ := slices.BinarySearchFunc(d.allocs, a.at, func(b *allocation, at driver.Address) int { return compare(b.at, at) })
	d.allocs = slices.Insert(d.allocs, i, a)
	return a, nil
}

func compare(a, b driver.Address) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func fill(b []byte, v byte) {
	if len(b) == 0 {
		return
	}
	b[0] = v
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// release makes an allocation inaccessible. Its addresses are not reused.
func (d *Driver) release(a *allocation) error {
	front := int(uint64(a.at) - address(a.inner))
	edges := [2][]byte{a.inner[:front], a.inner[front+len(a.data):]}
	for i, e := range edges {
		if len(bytes.TrimLeft(e, string([]byte{canary}))) > 0 {
			d.fault("%s: the bytes %s it were overwritten", a, [2]string{"before", "after"}[i])
		}
	}
	a.freed = true
	a.history = nil
	if err := unix.Mprotect(a.inner, unix.PROT_NONE); err != nil {
		return os.NewSyscallError("mprotect", err)
	}
	if err := unix.Madvise(a.inner, unix.MADV_DONTNEED); err != nil {
		return os.NewSyscallError("madvise", err)
	}
	return nil
}

func (a *allocation) unmap() error { return os.NewSyscallError("munmap", unix.Munmap(a.whole)) }

// find returns the allocation, freed or not, that contains at, or nil.
func (d *Driver) find(at driver.Address) *allocation {
	i, exact := slices.BinarySearchFunc(d.allocs, at, func(b *allocation, at driver.Address) int { return compare(b.at, at) })
	if !exact {
		i--
	}
	if i < 0 || at >= d.allocs[i].at+driver.Address(len(d.allocs[i].data)) {
		return nil
	}
	return d.allocs[i]
}

// reach returns the allocation that contains a range, or an error.
func (d *Driver) reach(r driver.Range) (*allocation, error) {
	a := d.find(r.At)
	switch {
	case r.Len < 0:
		return nil, fmt.Errorf("a range of %d bytes", r.Len)
	case a == nil:
		return nil, fmt.Errorf("bytes [%#x, +%d) are out of any allocation", uint64(r.At), r.Len)
	case a.freed:
		return nil, fmt.Errorf("bytes [%#x, +%d) were freed (%s)", uint64(r.At), r.Len, a)
	case int64(r.At-a.at)+r.Len > int64(len(a.data)):
		return nil, fmt.Errorf("bytes [%#x, +%d) reach %d beyond %s", uint64(r.At), r.Len, int64(r.At-a.at)+r.Len-int64(len(a.data)), a)
	}
	return a, nil
}

// Alloc allocates device memory.
func (d *Driver) Alloc(size int64) (driver.Address, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.enter("cuMemAlloc_v2"); err != nil {
		return 0, err
	}
	if size <= 0 {
		return 0, failure("cuMemAlloc_v2", 1, "%d bytes", size)
	}
	here := d.here()
	g := &d.gpus[here]
	if size > d.left(g) {
		return 0, failure("cuMemAlloc_v2", 2, "out of memory")
	}
	a, err := d.allocate(size, here)
	if err != nil {
		return 0, failure("cuMemAlloc_v2", 2, "%v", err)
	}
	g.used += size
	g.most = max(g.most, g.used)
	return a.at, nil
}

// Free frees device memory.
func (d *Driver) Free(at driver.Address) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.giveBack("cuMemFree_v2", at, false)
}

func (d *Driver) giveBack(call string, at driver.Address, host bool) error {
	err := d.teardown(call)
	a := d.find(at)
	if a == nil || a.at != at || a.freed || (a.gpu < 0) != host {
		d.fault("%s of %#x, which is not the start of such memory", call, uint64(at))
		return failure(call, 1, "not the start of such memory")
	}
	if !host {
		d.gpus[a.gpu].used -= int64(len(a.data))
	}
	if e := d.release(a); e != nil {
		return failure(call, 999, "%v", e)
	}
	return err
}

// HostAlloc allocates page-locked memory. Its device address equals its pointer.
func (d *Driver) HostAlloc(size int64) (unsafe.Pointer, driver.Address, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.enter("cuMemHostAlloc"); err != nil {
		return nil, 0, err
	}
	if size <= 0 {
		return nil, 0, failure("cuMemHostAlloc", 1, "%d bytes", size)
	}
	a, err := d.allocate(size, onHost)
	if err != nil {
		return nil, 0, failure("cuMemHostAlloc", 2, "%v", err)
	}
	return unsafe.Pointer(unsafe.SliceData(a.data)), a.at, nil
}

// HostFree frees page-locked memory.
func (d *Driver) HostFree(p unsafe.Pointer) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.giveBack("cuMemFreeHost", driver.Address(uintptr(p)), true)
}

// Bytes returns a range of device or page-locked memory, for tests. A range that is not in a live
// allocation is an error.
func (d *Driver) Bytes(at driver.Address, n int64) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	a, err := d.reach(driver.Range{At: at, Len: n})
	if err != nil {
		return nil, err
	}
	off := int64(at - a.at)
	return a.data[off : off+n : off+n], nil
}
