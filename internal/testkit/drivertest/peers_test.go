//go:build linux

package drivertest

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// two is a double of two devices, both retained, with a stream and 1,000 bytes on each.
func two(t *testing.T, o Options) (d *Driver, ctx [2]driver.Context, s [2]driver.Stream, m [2]driver.Address) {
	o.Devices = 2
	d = open(t, o)
	for i := 1; i >= 0; i-- { // the first is current at the end
		var err error
		ctx[i], err = d.Retain(i)
		require.NoError(t, err)
		require.NoError(t, d.SetCurrent(ctx[i]))
		s[i], err = d.NewStream()
		require.NoError(t, err)
		m[i] = alloc(t, d, 1000)
	}
	return d, ctx, s, m
}

// Memory, and what is left of it, is of the device whose context is current.
func TestDevicesHaveMemoryOfTheirOwn(t *testing.T) {
	d, ctx, _, _ := two(t, Options{Memory: 5000, Change: func(d *driver.Device) { d.Memory += int64(d.Ordinal) * 1000 }})
	for i, total := range []int64{5000, 6000} {
		require.NoError(t, d.SetCurrent(ctx[i]))
		free, all, err := d.MemInfo()
		require.NoError(t, err)
		require.Equal(t, []int64{total - 1000, total}, []int64{free, all})
		require.NoError(t, d.Take("load", total-1000))
		require.Equal(t, 2, code(t, d.Take("load", 1)))
		require.Equal(t, int64(1000), d.Most(i))
	}
}

// Between devices bytes go by copies of the driver's, which are counted, or by whoever
// was given access.
func TestOnlyPeerCopiesCrossDevices(t *testing.T) {
	d, ctx, s, m := two(t, Options{})
	require.NoError(t, d.Fill8(m[0], 3, 1000, s[0]))
	require.NoError(t, d.CopyPeer(m[1], ctx[1], m[0], ctx[0], 600, s[0]))
	require.NoError(t, d.Synchronize(s[0]))
	got, err := d.Bytes(m[1], 601)
	require.NoError(t, err)
	require.Equal(t, []byte{3, poison}, got[599:])
	require.Equal(t, map[[2]int]int64{{0, 1}: 600}, d.Traffic())
	require.Empty(t, d.Faults())
	require.Equal(t, 1, code(t, d.CopyPeer(m[1], ctx[0], m[0], ctx[0], 8, s[0])), "the context is not the memory's")
	require.Len(t, d.Faults(), 1)
	d.forget()

	ok, err := d.CanAccessPeer(0, 1)
	require.NoError(t, err)
	require.True(t, ok)
	for range 2 {
		ok, err = d.EnablePeerAccess(ctx[1])
		require.NoError(t, err)
		require.True(t, ok)
	}
	require.NoError(t, d.CopyOnDevice(m[0], m[1], 8, s[0]))
	require.NoError(t, d.Synchronize(s[0]))
	require.Empty(t, d.Faults())

	require.NoError(t, d.SetCurrent(ctx[1])) // it was not given access to the first's
	require.NoError(t, d.CopyOnDevice(m[1], m[0], 8, s[1]))
	require.Equal(t, 700, code(t, d.Synchronize(s[1])))
	require.Equal(t, 700, code(t, d.Fill8(m[1], 0, 8, s[1])), "its context is lost")
	require.NoError(t, d.SetCurrent(ctx[0]))
	require.NoError(t, d.Fill8(m[0], 0, 8, s[0]), "the other's is not")
	require.NoError(t, d.Synchronize(s[0]))
	require.Len(t, d.Faults(), 1)
}

// Devices without a link can't be given access.
func TestDevicesWithoutALink(t *testing.T) {
	d, ctx, _, _ := two(t, Options{NoLink: func(a, b int) bool { return true }})
	ok, err := d.CanAccessPeer(0, 1)
	require.NoError(t, err)
	require.False(t, ok)
	_, err = d.EnablePeerAccess(ctx[1])
	require.Equal(t, 217, code(t, err))
	_, err = d.EnablePeerAccess(ctx[0])
	require.Equal(t, 101, code(t, err))
	_, err = d.CanAccessPeer(0, 2)
	require.Equal(t, 101, code(t, err))
}

// A kernel that is told, or given an address, of another device's memory reaches nothing.
func TestKernelsReachTheirOwnDevice(t *testing.T) {
	d, _, s, m := two(t, Options{})
	d.Access("sum", s[0], ranges(m[1], 8), ranges(m[0], 8))
	require.NoError(t, d.Run(s[0], "sum", func() error { return nil }))
	require.Equal(t, 700, code(t, d.Synchronize(s[0])))
	require.ErrorContains(t, d.Faults()[0], ` reads 1000 bytes of device 1's memory`)
	require.ErrorContains(t, d.Faults()[0], "which device 0 has no access to")
}

// What belongs to one device's context fails with another's, as the driver has it; a wait
// for an event may cross.
func TestHandlesBelongToTheirContext(t *testing.T) {
	d, ctx, s, _ := two(t, Options{})
	e, err := d.NewEvent(true)
	require.NoError(t, err)
	require.NoError(t, d.Record(e, s[0]))
	require.NoError(t, d.Wait(s[1], e))
	require.NoError(t, d.Synchronize(s[1]))
	require.Empty(t, d.Faults())
	require.Equal(t, 400, code(t, d.Record(e, s[1])))
	require.Equal(t, 400, code(t, d.Run(s[1], "library", func() error { return nil })))
	require.Len(t, d.Faults(), 2)
	require.NoError(t, d.SetCurrent(ctx[1]))
	other, err := d.NewEvent(true)
	require.NoError(t, err)
	require.NoError(t, d.Record(other, s[1]))
	require.NoError(t, d.Synchronize(s[1]))
	_, err = d.Elapsed(e, other)
	require.Equal(t, 400, code(t, err))
}
