//go:build linux

package cuda

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/device/cuda/drivertest"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cuda/blas/blastest"
	"github.com/spillway-ml/spillway/kernels/cuda/shim"
)

// bench is a device to run kernels on: the driver's double with kernels compiled
// by the shim, and products computed on the host.
type bench struct {
	api      driver.API
	lib      *Library
	stream   driver.Stream
	images   *imageLog
	products *blastest.Library
}

// imageLog remembers the libraries that a compiler made.
type imageLog struct {
	Compiler
	images [][]byte
}

func (l *imageLog) Compile(name, source string, dev driver.Device) ([]byte, error) {
	image, err := l.Compiler.Compile(name, source, dev)
	l.images = append(l.images, image)
	return image, err
}

// reverse changes the order in which threads and blocks run.
func (b *bench) reverse(t testing.TB, on bool) {
	for _, image := range b.images.images {
		l, err := shim.Open(image)
		require.NoError(t, err)
		l.Reverse(on)
	}
}

func newBench(t testing.TB) *bench {
	c, err := shim.New()
	if err == shim.ErrNoCompiler {
		t.Skip(err)
	}
	require.NoError(t, err)
	d := drivertest.Start(t, drivertest.Options{})
	devices, err := d.Devices()
	require.NoError(t, err)
	p := pool.New(1)
	log := &imageLog{Compiler: c}
	products := blastest.New(d)
	lib, err := New(Options{API: d, Device: devices[0], Compiler: log, Products: products, Host: cpu.New(p)})
	require.NoError(t, err)
	s, err := d.NewStream()
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, d.DestroyStream(s))
		require.NoError(t, lib.Close())
		p.Close()
	})
	return &bench{api: d, lib: lib, stream: s, images: log, products: products}
}

// arena is memory of a space in which a test puts operands.
type arena struct {
	space graph.Space
	at    driver.Address
	size  int64
	b     *bench
	host  unsafe.Pointer // of a copy of it in page-locked memory, or its own
}

func (a *arena) Space() graph.Space      { return a.space }
func (a *arena) Size() int64             { return a.size }
func (a *arena) Touched() int64          { return 0 }
func (a *arena) Address() driver.Address { return a.at }

// newArena allocates device memory and a page-locked twin for its contents.
func (b *bench) newArena(t testing.TB, size int64) *arena {
	at, err := b.api.Alloc(size)
	require.NoError(t, err)
	host, _, err := b.api.HostAlloc(size)
	require.NoError(t, err)
	a := &arena{space: graph.Device, at: at, size: size, b: b, host: host}
	t.Cleanup(func() { a.free(t) })
	return a
}

func (a *arena) free(t testing.TB) {
	if a.size == 0 {
		return
	}
	require.NoError(t, a.b.api.Free(a.at))
	require.NoError(t, a.b.api.HostFree(a.host))
	a.size = 0
}

// bytes is the twin's memory.
func (a *arena) bytes() []byte { return unsafe.Slice((*byte)(a.host), a.size) }

func (a *arena) upload(t testing.TB) {
	require.NoError(t, a.b.api.CopyToDevice(a.at, a.host, a.size, a.b.stream))
}

// download brings the contents to the twin, once all that was enqueued has run.
func (a *arena) download(t testing.TB) {
	require.NoError(t, a.b.api.CopyToHost(a.host, a.at, a.size, a.b.stream))
	require.NoError(t, a.b.api.Synchronize(a.b.stream))
}

// poisonByte fills memory with NaN of every float type.
const poisonByte = 0xff
