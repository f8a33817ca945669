//go:build linux

package drivertest

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// gpu is one device: its memory, its primary context, and the devices whose memory it can access.
type gpu struct {
	says       driver.Device
	retained   int
	used, most int64 // bytes that are allocated, and were at most
	own        int64 // bytes that the driver took itself
	sticky     *driver.Error
	reaches    map[int]bool // by ordinal
}

// firstContext is the handle of the first device's primary context.
const firstContext = 0x1000

// Values for an allocation on no device, and for code that can access all memory.
const (
	onHost   = -1
	anywhere = -1
)

// here returns the device of the calling thread's current context, or −1.
func (d *Driver) here() int {
	c := d.current[unix.Gettid()]
	if c == 0 {
		return -1
	}
	return int(c) - firstContext
}

// ordinal returns the device of a retained context, or −1.
func (d *Driver) ordinal(c driver.Context) int {
	i := int(c) - firstContext
	if i < 0 || i >= len(d.gpus) || d.gpus[i].retained <= 0 {
		return -1
	}
	return i
}

// lost returns the error of a call in a device's lost context; gpu −1 is none.
func (d *Driver) lost(gpu int, call string) error {
	if gpu < 0 || d.gpus[gpu].sticky == nil {
		return nil
	}
	e := *d.gpus[gpu].sticky
	e.Call = call
	return &e
}

// own refuses an object that belongs to another device's context.
func (d *Driver) own(call, what string, gpu, with int) error {
	if gpu == with {
		return nil
	}
	d.fault("%s: %s is of device %d and is used with device %d's", call, what, gpu, with)
	return failure(call, 400, "%s is of device %d's context, not of device %d's", what, gpu, with)
}

// ownStream refuses work on a stream of a context that is not current.
func (d *Driver) ownStream(call string, s driver.Stream) error {
	if q := d.streams[s]; q != nil {
		return d.own(call, fmt.Sprintf("stream %d", s), q.gpu, d.here())
	}
	return nil // push names it
}

// canReach reports whether a device can access an allocation.
func (d *Driver) canReach(gpu int, m *allocation) bool {
	return gpu < 0 || m.gpu < 0 || gpu == m.gpu || d.gpus[gpu].reaches[m.gpu]
}

// pointers searches a launch's parameters for memory of devices that the function's device cannot
// access.
func (d *Driver) pointers(f *function, params []byte) error {
	if len(d.gpus) < 2 {
		return nil
	}
	for i := 0; i+8 <= len(params); i += 8 {
		at := driver.Address(binary.NativeEndian.Uint64(params[i:]))
		if m := d.find(at); m != nil && !d.canReach(f.gpu, m) {
			d.fault("kernel %s on device %d is given %#x, in %s, which it has no access to", f.name, f.gpu, uint64(at), m)
			e := failure("cuLaunchKernel", 700, "kernel %s reached %s", f.name, m)
			d.lose(f.gpu, e)
			return e
		}
	}
	return nil
}

// CanAccessPeer reports whether two devices have a link.
func (d *Driver) CanAccessPeer(ordinal, peer int) (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuDeviceCanAccessPeer"
	if err := d.enter(call); err != nil {
		return false, err
	}
	if min(ordinal, peer) < 0 || max(ordinal, peer) >= len(d.gpus) {
		return false, failure(call, 101, "devices %d and %d of %d", ordinal, peer, len(d.gpus))
	}
	return ordinal != peer && d.linked(ordinal, peer), nil
}

func (d *Driver) linked(a, b int) bool { return d.opts.NoLink == nil || !d.opts.NoLink(a, b) }

// EnablePeerAccess lets the calling thread's device access another device's memory.
func (d *Driver) EnablePeerAccess(peer driver.Context) (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuCtxEnablePeerAccess"
	if err := d.enter(call); err != nil {
		return false, err
	}
	here, there := d.here(), d.ordinal(peer)
	switch {
	case there < 0:
		d.fault("%s: context %#x is not retained", call, uintptr(peer))
		return false, failure(call, 201, "no such context")
	case here == there:
		return false, failure(call, 101, "device %d is asked to reach itself", here)
	case !d.linked(here, there):
		return false, failure(call, 217, "devices %d and %d have no link", here, there)
	}
	if d.gpus[here].reaches == nil {
		d.gpus[here].reaches = map[int]bool{}
	}
	d.gpus[here].reaches[there] = true
	return true, nil
}

// CopyPeer enqueues a copy between devices.
func (d *Driver) CopyPeer(dst driver.Address, to driver.Context, src driver.Address, from driver.Context, n int64, s driver.Stream) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuMemcpyPeerAsync"
	if err := d.enter(call); err != nil || n == 0 {
		return err
	}
	var sides [2][]byte
	var gpus [2]int
	for i, end := range []struct {
		at  driver.Address
		ctx driver.Context
	}{{src, from}, {dst, to}} {
		mem, err := d.memory(call, end.at, n)
		if err != nil {
			return err
		}
		m := d.find(end.at)
		if gpus[i] = d.ordinal(end.ctx); gpus[i] < 0 || m.gpu != gpus[i] {
			d.fault("%s: %s is not of context %#x", call, m, uintptr(end.ctx))
			return failure(call, 1, "%s is not of context %#x", m, uintptr(end.ctx))
		}
		sides[i] = mem
	}
	if gpus[0] != gpus[1] {
		d.traffic[gpus] += n
	}
	garbles := d.opts.Garbles != nil && d.opts.Garbles(gpus[0], gpus[1])
	return d.push(call, s, item{label: call, peers: true, reads: ranges(src, n), writes: ranges(dst, n), run: func() error {
		copy(sides[1], sides[0])
		if garbles {
			sides[1][n/2] ^= 1
		}
		return nil
	}})
}

// Traffic returns the bytes copied so far between each pair of devices, by ordinals.
func (d *Driver) Traffic() map[[2]int]int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	m := map[[2]int]int64{}
	for pair, n := range d.traffic {
		m[pair] = n
	}
	return m
}

// Most returns the highest number of bytes of a device that were allocated at one time.
func (d *Driver) Most(ordinal int) int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.gpus[ordinal].most
}
