//go:build linux

package cuda

import (
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
)

// instant is a driver whose operations complete immediately.
type instant struct {
	driver.API
	mem [3][8192]byte
	n   int
}

func (d *instant) Devices() ([]driver.Device, error) {
	return []driver.Device{{StreamMemOps: true}}, nil
}
func (d *instant) Retain(int) (driver.Context, error) { return 1, nil }
func (d *instant) Release(int) error                  { return nil }
func (d *instant) SetCurrent(driver.Context) error    { return nil }
func (d *instant) HostAlloc(int64) (unsafe.Pointer, driver.Address, error) {
	d.n++
	p := unsafe.Pointer(&d.mem[d.n-1])
	return p, driver.Address(uintptr(p)), nil
}
func (d *instant) HostFree(unsafe.Pointer) error                          { return nil }
func (d *instant) NewStream() (driver.Stream, error)                      { return 1, nil }
func (d *instant) DestroyStream(driver.Stream) error                      { return nil }
func (d *instant) NewEvent(bool) (driver.Event, error)                    { return 1, nil }
func (d *instant) DestroyEvent(driver.Event) error                        { return nil }
func (d *instant) Record(driver.Event, driver.Stream) error               { return nil }
func (d *instant) Wait(driver.Stream, driver.Event) error                 { return nil }
func (d *instant) Done(driver.Event) (bool, error)                        { return true, nil }
func (d *instant) WaitValue(driver.Stream, driver.Address, uint32) error  { return nil }
func (d *instant) Fill8(driver.Address, byte, int64, driver.Stream) error { return nil }
func (d *instant) WriteValue(_ driver.Stream, a driver.Address, v uint32) error {
	for i := range d.mem {
		base := driver.Address(uintptr(unsafe.Pointer(&d.mem[i])))
		if a >= base && a < base+8192 {
			(*atomic.Uint32)(unsafe.Pointer(&d.mem[i][a-base])).Store(v)
		}
	}
	return nil
}

func TestLaunchAllocatesNothing(t *testing.T) {
	c, err := New(0, Options{Driver: &instant{}})
	require.NoError(t, err)
	h := alloc(t, c, graph.Host, 64)
	a, b := stream(t, c, graph.Compute), stream(t, c, graph.HostWork)
	e, back := event0(t, c), event0(t, c)
	gpu := &poisonKernel{movement{label: "k", touches: [2]device.Ptr{h}, operands: 1}, 1}
	host := &hostPoison{movement{label: "k", touches: [2]device.Ptr{h}, operands: 1}, nil}
	run := func() {
		for range 20 {
			_ = a.Launch(gpu)
			_ = a.Record(e)
			_ = b.Wait(e)
			_ = b.Launch(host)
			_ = b.Launch(host)
			_ = b.Record(back)
			_ = a.Wait(back)
		}
		_ = a.Sync()
		_ = b.Sync()
	}
	run()
	require.Zero(t, alloctest.PerRun(100, run))
	require.NoError(t, c.Close())
}

// ramDisk is a disk tier in memory.
type ramDisk struct {
	mem    []byte
	moved  device.Traffic
	closed bool
}

type transfer func() error

func (t transfer) Run() error { return t() }

func (d *ramDisk) Load(mem []byte, off int64) device.Transfer {
	return transfer(func() error { d.moved.Read += int64(copy(mem, d.mem[off:])); return nil })
}
func (d *ramDisk) Store(mem []byte, off int64) device.Transfer {
	return transfer(func() error { d.moved.Written += int64(copy(d.mem[off:], mem)); return nil })
}
func (d *ramDisk) Fill(off, n int64, b byte) device.Transfer {
	return transfer(func() error {
		for i := range d.mem[off : off+n] {
			d.mem[off+int64(i)] = b
		}
		return nil
	})
}
func (d *ramDisk) Traffic() device.Traffic { return d.moved }
func (d *ramDisk) Close() error            { d.closed = true; return nil }

func TestDiskGoesThroughHostMemory(t *testing.T) {
	disk := &ramDisk{}
	c, _ := open(t, drivertest.Options{}, Options{Disk: func(_ int, n int64, initial byte) (device.Disk, error) {
		disk.mem = make([]byte, n)
		return disk, nil
	}})
	f, h, d := alloc(t, c, graph.Disk, 100), alloc(t, c, graph.Host, 100), alloc(t, c, graph.Device, 100)
	s := stream(t, c, graph.CopyOut)
	p, err := c.Poison("poison", d)
	require.NoError(t, err)
	var ks []device.Kernel
	for _, r := range [][2]device.Ptr{{h, d}, {f, h}, {at(h, 0, 50), at(f, 50, 50)}, {at(h, 50, 50), at(h, 0, 50)}} {
		k, err := c.Copy("c", r[0], r[1])
		require.NoError(t, err)
		ks = append(ks, k)
	}
	for _, k := range append([]device.Kernel{p}, ks...) {
		require.NoError(t, s.Launch(k))
	}
	require.NoError(t, s.Sync())
	require.Equal(t, byte(255), disk.mem[99])
	require.Equal(t, device.Traffic{Read: 50, Written: 100}, c.DiskTraffic())
	require.Equal(t, int64(100), f.Arena.Touched())
	_, err = c.Copy("c", d, f)
	require.ErrorContains(t, err, "only host memory exchanges bytes with disk memory")
	for _, r := range []device.Ptr{f, h} {
		k, err := c.Poison("poison", r)
		require.NoError(t, err)
		require.NoError(t, s.Launch(k))
	}
	require.NoError(t, s.Sync())
	require.Equal(t, byte(255), disk.mem[0])
	require.NoError(t, c.Close())
	require.True(t, disk.closed)
}
