//go:build linux

package cuda

import (
	"os"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/blastest"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/shim"
	"github.com/spillway-ml/spillway/kernels/cpu"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
	"github.com/spillway-ml/spillway/kernels/cuda/nvrtc"
)

// onGPU is the environment variable that makes these tests run on the first GPU, with NVRTC and
// cuBLASLt, instead of the doubles.
const onGPU = "SPILLWAY_TEST_GPU"

// bench is a device to run kernels on. It is the driver double, with kernels compiled by the shim
// and products computed on the host, or a GPU.
type bench struct {
	api      driver.API
	lib      *Library
	stream   driver.Stream
	images   *imageLog         // images compiled by the shim
	products *blastest.Library // nil on a GPU
}

// imageLog records the libraries that a compiler made.
type imageLog struct {
	Compiler
	images [][]byte
}

func (l *imageLog) Compile(name, source string, dev driver.Device) ([]byte, error) {
	image, err := l.Compiler.Compile(name, source, dev)
	l.images = append(l.images, image)
	return image, err
}

// reverse changes the order in which the double runs threads and blocks.
func (b *bench) reverse(t testing.TB, on bool) {
	if b.products == nil {
		return // a GPU's order cannot be set
	}
	for _, image := range b.images.images {
		l, err := shim.Open(image)
		require.NoError(t, err)
		l.Reverse(on)
	}
}

// double returns the double of products. On a GPU it skips the test, for tests that need the double
// to fail.
func (b *bench) double(t testing.TB) *blastest.Library {
	if b.products == nil {
		t.Skip("for the doubles, not for a GPU")
	}
	return b.products
}

// gpu returns a bench on the first GPU.
func gpu(t testing.TB) *bench {
	runtime.LockOSThread()
	api, err := driver.Open()
	require.NoError(t, err)
	devices, err := api.Devices()
	require.NoError(t, err)
	require.NotEmpty(t, devices)
	ctx, err := api.Retain(devices[0].Ordinal)
	require.NoError(t, err)
	require.NoError(t, api.SetCurrent(ctx))
	c, err := nvrtc.Open(nvrtc.Options{})
	require.NoError(t, err)
	lt, err := blas.Open(0)
	require.NoError(t, err)
	p := pool.New(1)
	lib, err := New(Options{API: api, Device: devices[0], Compiler: c, Products: lt, Host: cpu.New(p)})
	require.NoError(t, err)
	s, err := api.NewStream()
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, api.DestroyStream(s))
		require.NoError(t, lib.Close())
		require.NoError(t, lt.Close())
		p.Close()
		// The context is not released, so that the next test retains it without making a new one.
		runtime.UnlockOSThread()
	})
	return &bench{api: api, lib: lib, stream: s}
}

func newBench(t testing.TB) *bench {
	if os.Getenv(onGPU) != "" {
		return gpu(t)
	}
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
	host  unsafe.Pointer // its copy in page-locked memory, or its own
}

func (a *arena) Space() graph.Space      { return a.space }
func (a *arena) Size() int64             { return a.size }
func (a *arena) Touched() int64          { return 0 }
func (a *arena) Address() driver.Address { return a.at }

// newArena allocates device memory and a page-locked host copy of it.
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

// bytes returns the host copy.
func (a *arena) bytes() []byte { return unsafe.Slice((*byte)(a.host), a.size) }

func (a *arena) upload(t testing.TB) {
	require.NoError(t, a.b.api.CopyToDevice(a.at, a.host, a.size, a.b.stream))
}

// download copies the contents to the host copy after all enqueued work.
func (a *arena) download(t testing.TB) {
	require.NoError(t, a.b.api.CopyToHost(a.host, a.at, a.size, a.b.stream))
	require.NoError(t, a.b.api.Synchronize(a.b.stream))
}

// poisonByte fills memory with NaN in every float type.
const poisonByte = 0xff
