package cpu_test

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
	"github.com/spillway-ml/spillway/offload/store"
)

func openDisk(t *testing.T, o cpu.Options) *cpu.Context {
	folder, err := store.Open(t.TempDir(), store.Options{Block: 64 << 10, Depth: 4})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, folder.Close()) })
	o.Disk = folder.Create
	c := cpu.New(3, o)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func launch(t *testing.T, s device.Stream, k device.Kernel, err error) {
	t.Helper()
	require.NoError(t, err)
	require.NoError(t, s.Launch(k))
}

func TestDiskArena(t *testing.T) {
	const size = 300_001
	c := openDisk(t, cpu.Options{})
	disk, err := c.Alloc(graph.Disk, size)
	require.NoError(t, err)
	require.Equal(t, int64(size), disk.Size())
	require.Equal(t, graph.Disk, disk.Space())
	host, err := c.Alloc(graph.Host, 2*size)
	require.NoError(t, err)
	mem, err := c.HostBytes(device.Ptr{Arena: host, Len: 2 * size})
	require.NoError(t, err)
	out, err := c.NewStream(graph.CopyOut)
	require.NoError(t, err)
	in, err := c.NewStream(graph.CopyIn)
	require.NoError(t, err)
	e, err := c.NewEvent()
	require.NoError(t, err)
	r := rand.New(rand.NewPCG(1, 2))
	for _, p := range []struct{ off, n, at int64 }{{0, size, 0}, {0, 4096, 0}, {4096, 70_000, 64}, {5, 1, 3}, {4095, 2, 9}, {65_536, 65_536, 4096}, {size - 7, 7, 1}, {100, 0, 0}} {
		for i := range mem[:size] {
			mem[i] = byte(r.Uint32())
		}
		there := device.Ptr{Arena: disk, Off: p.off, Len: p.n}
		k, err := c.Copy("park", there, device.Ptr{Arena: host, Off: p.at, Len: p.n})
		launch(t, out, k, err)
		require.NoError(t, out.Record(e))
		require.NoError(t, in.Wait(e))
		k, err = c.Copy("fetch", device.Ptr{Arena: host, Off: size + p.at, Len: p.n}, there)
		if p.at+p.n > size {
			t.Fatal("the test's ranges overlap")
		}
		launch(t, in, k, err)
		require.NoError(t, in.Sync())
		require.True(t, bytes.Equal(mem[p.at:p.at+p.n], mem[size+p.at:size+p.at+p.n]), "%+v", p)
	}
	require.Equal(t, int64(size), disk.Touched())
	require.Equal(t, device.Traffic{Read: 300001 + 4096 + 70000 + 1 + 2 + 65536 + 7, Written: 300001 + 4096 + 70000 + 1 + 2 + 65536 + 7}, c.DiskTraffic())
}

func TestDiskTouchedIsWhatRan(t *testing.T) {
	c := openDisk(t, cpu.Options{})
	disk, err := c.Alloc(graph.Disk, 100_000)
	require.NoError(t, err)
	host, err := c.Alloc(graph.Host, 100_000)
	require.NoError(t, err)
	s, err := c.NewStream(graph.CopyOut)
	require.NoError(t, err)
	k, err := c.Copy("park", device.Ptr{Arena: disk, Off: 8192, Len: 5000}, device.Ptr{Arena: host, Len: 5000})
	require.NoError(t, err)
	require.Zero(t, disk.Touched())
	launch(t, s, k, nil)
	require.NoError(t, s.Sync())
	require.Equal(t, int64(13192), disk.Touched())
}

func TestDiskRefusals(t *testing.T) {
	var o cpu.Options
	o.Capacity[graph.Disk] = 10_000
	c := openDisk(t, o)
	disk, err := c.Alloc(graph.Disk, 8192)
	require.NoError(t, err)
	_, err = c.Alloc(graph.Disk, 8192)
	require.EqualError(t, err, "rank 3: allocate 8192 bytes of disk memory: the capacity is 10000 bytes, of which 8192 are in use")
	dev, err := c.Alloc(graph.Device, 8192)
	require.NoError(t, err)
	d, m := device.Ptr{Arena: disk, Len: 64}, device.Ptr{Arena: dev, Len: 64}
	_, err = c.Copy("park", d, m)
	require.EqualError(t, err, `rank 3: copy "park": operands: device memory to disk memory: only host memory exchanges bytes with disk memory, go through it`)
	_, err = c.Copy("fetch", m, d)
	require.ErrorContains(t, err, "disk memory to device memory")
	_, err = c.Copy("move", device.Ptr{Arena: disk, Off: 128, Len: 64}, d)
	require.ErrorContains(t, err, "disk memory to disk memory")
	_, err = cpu.Bytes(d)
	require.ErrorContains(t, err, "which only copies reach")
	_, err = c.HostBytes(d)
	require.ErrorContains(t, err, "disk memory, want host memory")
}

func TestDiskPoison(t *testing.T) {
	c := openDisk(t, cpu.Options{Poison: true, Checker: cpu.NewChecker()})
	disk, err := c.Alloc(graph.Disk, 20_000)
	require.NoError(t, err)
	host, err := c.Alloc(graph.Host, 20_000)
	require.NoError(t, err)
	all := device.Ptr{Arena: host, Len: 20_000}
	mem, err := c.HostBytes(all)
	require.NoError(t, err)
	clear(mem)
	s, err := c.NewStream(graph.CopyIn)
	require.NoError(t, err)
	fetch := func() {
		k, err := c.Copy("fetch", all, device.Ptr{Arena: disk, Len: 20_000})
		launch(t, s, k, err)
		require.NoError(t, s.Sync())
	}
	fetch()
	require.Equal(t, bytes.Repeat([]byte{0xFF}, 20_000), mem, "never written")
	clear(mem)
	k, err := c.Copy("park", device.Ptr{Arena: disk, Len: 20_000}, all)
	launch(t, s, k, err)
	k, err = c.Poison("release", device.Ptr{Arena: disk, Off: 5000, Len: 7000})
	launch(t, s, k, err)
	fetch()
	require.Equal(t, make([]byte, 5000), mem[:5000])
	require.Equal(t, bytes.Repeat([]byte{0xFF}, 7000), mem[5000:12000])
	require.Equal(t, make([]byte, 8000), mem[12000:])
}

func TestDiskCopyAllocatesNothing(t *testing.T) {
	c := openDisk(t, cpu.Options{})
	disk, err := c.Alloc(graph.Disk, 1<<20)
	require.NoError(t, err)
	host, err := c.Alloc(graph.Host, 1<<20)
	require.NoError(t, err)
	s, err := c.NewStream(graph.CopyIn)
	require.NoError(t, err)
	// These unaligned offsets need copies through the workers' buffers.
	out, err := c.Copy("park", device.Ptr{Arena: disk, Off: 100, Len: 500_000}, device.Ptr{Arena: host, Off: 64, Len: 500_000})
	require.NoError(t, err)
	in, err := c.Copy("fetch", device.Ptr{Arena: host, Off: 64, Len: 500_000}, device.Ptr{Arena: disk, Off: 100, Len: 500_000})
	require.NoError(t, err)
	run := func() {
		_ = s.Launch(out)
		_ = s.Launch(in)
		_ = s.Sync()
	}
	run()
	require.Less(t, alloctest.PerRun(20, run), 1.0)
}
