//go:build linux

package drivertest

import (
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// open is Start for tests that look at the faults themselves.
func open(t *testing.T, o Options) *Driver {
	runtime.LockOSThread()
	d := New(o)
	c, err := d.Retain(0)
	require.NoError(t, err)
	require.NoError(t, d.SetCurrent(c))
	t.Cleanup(func() { _ = d.Close(); runtime.UnlockOSThread() })
	return d
}

func alloc(t *testing.T, d *Driver, n int64) driver.Address {
	a, err := d.Alloc(n)
	require.NoError(t, err)
	return a
}

func streams(t *testing.T, d *Driver) (a, b driver.Stream) {
	a, err := d.NewStream()
	require.NoError(t, err)
	b, err = d.NewStream()
	require.NoError(t, err)
	return a, b
}

func code(t *testing.T, err error) int {
	t.Helper()
	var e *driver.Error
	require.ErrorAs(t, err, &e)
	return e.Code
}

func TestCopiesAndFillsRunInOrder(t *testing.T) {
	for _, seed := range []uint64{0, 1, 2} {
		d := open(t, Options{Seed: seed})
		s, u := streams(t, d)
		m := alloc(t, d, 1000)
		p, host, err := d.HostAlloc(1000)
		require.NoError(t, err)
		out := unsafe.Slice((*byte)(p), 1000)
		require.Equal(t, byte(poison), out[999])
		require.NoError(t, d.Fill8(m, 7, 1000, s))
		require.NoError(t, d.Fill32(m+4, 0x01020304, 2, s))
		e, err := d.NewEvent(false)
		require.NoError(t, err)
		require.NoError(t, d.Record(e, s))
		require.NoError(t, d.Wait(u, e))
		require.NoError(t, d.CopyToHost(p, m, 1000, u))
		require.NoError(t, d.Synchronize(u))
		require.Equal(t, []byte{7, 7, 7, 7, 4, 3, 2, 1, 4, 3, 2, 1, 7}, out[:13])
		done, err := d.Done(e)
		require.NoError(t, err)
		require.True(t, done)
		require.NoError(t, d.CopyOnDevice(m+512, m, 256, u))
		own := make([]byte, 256) // not page-locked: done when the call returns
		require.NoError(t, d.CopyToHost(unsafe.Pointer(&own[0]), m+512, 256, u))
		require.Equal(t, out[:256], own)
		require.NoError(t, d.CopyToDevice(m, p, 1000, u))
		require.NoError(t, d.DestroyStream(s))
		require.NoError(t, d.DestroyStream(u))
		require.NoError(t, d.DestroyEvent(e))
		require.NoError(t, d.Free(m))
		require.NoError(t, d.HostFree(p))
		require.NotZero(t, host)
		require.NoError(t, d.Release(0))
		require.NoError(t, d.Close())
	}
}

func TestUnorderedAccessesAreFound(t *testing.T) {
	for name, c := range map[string]struct {
		first, second  func(d *Driver, m driver.Address, s driver.Stream) error
		ordered, fault bool
	}{
		"write write": {write, write, false, true},
		"write read":  {write, read, false, true},
		"read write":  {read, write, false, true},
		"read read":   {read, read, false, false},
		"elsewhere":   {write, func(d *Driver, m driver.Address, s driver.Stream) error { return d.Fill8(m+100, 1, 100, s) }, false, false},
		"told": {write, func(d *Driver, m driver.Address, s driver.Stream) error {
			d.Access("k", s, ranges(m+50, 1), nil)
			return nil
		}, false, true},
		"ordered write": {write, write, true, false},
		"ordered read":  {write, read, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			d := open(t, Options{})
			s, u := streams(t, d)
			m := alloc(t, d, 1000)
			require.NoError(t, c.first(d, m, s))
			if c.ordered {
				e, _ := d.NewEvent(false)
				require.NoError(t, d.Record(e, s))
				require.NoError(t, d.Wait(u, e))
			}
			require.NoError(t, c.second(d, m, u))
			require.NoError(t, d.Synchronize(s))
			require.NoError(t, d.Synchronize(u))
			require.Equal(t, c.fault, len(d.Faults()) > 0, "%v", d.Faults())
			if c.fault {
				require.ErrorContains(t, d.Faults()[0], "nothing orders the two")
			}
			before := len(d.Faults())
			require.NoError(t, d.Fill8(m, 2, 300, s)) // the host waited for both
			require.NoError(t, d.Synchronize(s))
			require.Len(t, d.Faults(), before)
		})
	}
}

func write(d *Driver, m driver.Address, s driver.Stream) error { return d.Fill8(m, 1, 100, s) }
func read(d *Driver, m driver.Address, s driver.Stream) error {
	return d.CopyOnDevice(m+driver.Address(300+100*s), m+10, 20, s)
}

func TestHostKernelsAreOrderedByValues(t *testing.T) {
	for _, told := range []bool{true, false} {
		d := open(t, Options{})
		s, _ := streams(t, d)
		m := alloc(t, d, 100)
		p, words, err := d.HostAlloc(8)
		require.NoError(t, err)
		w := unsafe.Slice((*uint32)(p), 2)
		w[0], w[1] = 0, 0
		require.NoError(t, d.Fill8(m, 1, 100, s))
		require.NoError(t, d.WriteValue(s, words, 1))
		require.NoError(t, d.WaitValue(s, words+4, 1))
		require.NoError(t, d.Fill8(m, 2, 100, s))
		for atomic.LoadUint32(&w[0]) != 1 {
			time.Sleep(time.Millisecond)
		}
		b, err := d.Bytes(m, 100)
		require.NoError(t, err)
		require.Equal(t, byte(1), b[99], "the second fill waits")
		const worker = 5
		if told {
			d.HostSaw(worker, words)
		}
		d.HostAccess(worker, "update", ranges(m, 10), nil)
		if told {
			d.HostSet(worker, words+4)
		}
		atomic.StoreUint32(&w[1], 1)
		require.NoError(t, d.Synchronize(s))
		require.Equal(t, byte(2), b[99])
		require.Equal(t, told, len(d.Faults()) == 0)
	}
}

func TestBoundsAndUseAfterFree(t *testing.T) {
	d := open(t, Options{})
	s, _ := streams(t, d)
	m := alloc(t, d, 1000)
	require.Equal(t, 1, code(t, d.Fill8(m+500, 0, 501, s)))
	require.ErrorContains(t, d.Faults()[0], "reach 1 beyond 1000 bytes of device memory")
	gone := alloc(t, d, 64)
	require.NoError(t, d.Free(gone))
	require.Equal(t, 1, code(t, d.Free(gone)))
	d.Access("late", s, nil, ranges(gone, 4))
	require.Equal(t, 700, code(t, d.Synchronize(s)))
	require.ErrorContains(t, d.Faults()[len(d.Faults())-1], "were freed")
	_, err := d.Alloc(10)
	require.Equal(t, 700, code(t, err), "the context is lost")
}

func TestOverwrittenEdgesAndLeaksShowAtTheEnd(t *testing.T) {
	d := open(t, Options{})
	s, _ := streams(t, d)
	m := alloc(t, d, 10)
	b, err := d.Bytes(m, 10)
	require.NoError(t, err)
	require.NoError(t, d.Run(s, "stray", func() error { *(*byte)(unsafe.Add(unsafe.Pointer(&b[0]), 11)) = 0; return nil }))
	require.NoError(t, d.Synchronize(s))
	require.NoError(t, d.Free(m))
	alloc(t, d, 33)
	err = d.Close()
	require.ErrorContains(t, err, "the bytes after it were overwritten")
	require.ErrorContains(t, err, "leak: 33 bytes of device memory")
	require.ErrorContains(t, err, "leak: 2 stream(s)")
	require.ErrorContains(t, err, "the context of device 0, retained 1 time(s)")
}

func TestRunningOffAnAllocationLosesTheContext(t *testing.T) {
	d := open(t, Options{})
	s, _ := streams(t, d)
	m := alloc(t, d, 256)
	b, err := d.Bytes(m, 256)
	require.NoError(t, err)
	require.NoError(t, d.Run(s, "wild", func() error { *(*byte)(unsafe.Add(unsafe.Pointer(&b[0]), 256)) = 1; return nil }))
	err = d.Synchronize(s)
	require.Equal(t, 700, code(t, err))
	require.ErrorContains(t, err, `"wild": it reached unreadable memory`)
}

func TestFailuresAsTold(t *testing.T) {
	d := open(t, Options{Memory: 1000, Used: 100})
	available, total, err := d.MemInfo()
	require.NoError(t, err)
	require.Equal(t, [2]int64{900, 1000}, [2]int64{available, total})
	_, err = d.Alloc(901)
	require.EqualError(t, err, "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory")
	d.Fail("cuMemAlloc_v2", 3, 999)
	alloc(t, d, 900)
	_, err = d.Alloc(1)
	require.Equal(t, 999, code(t, err))
	s, u := streams(t, d)
	d.FailRun(2, 719)
	ran := 0
	require.NoError(t, d.Run(s, "k", func() error { ran++; return nil }))
	require.NoError(t, d.Synchronize(s))
	require.NoError(t, d.Run(s, "k", func() error { ran++; return nil }))
	require.Equal(t, 719, code(t, d.Synchronize(s)))
	require.Equal(t, 719, code(t, d.Synchronize(u)), "every stream of the context")
	require.Equal(t, 1, ran)
	require.Equal(t, 2, d.Calls()["run"])
}

func TestThreadsNeedAContext(t *testing.T) {
	d := open(t, Options{})
	got := make(chan error)
	go func() {
		runtime.LockOSThread() // a thread of its own, that ends with it
		_, err := d.Alloc(8)
		got <- err
	}()
	require.Equal(t, 201, code(t, <-got))
	require.ErrorContains(t, d.Faults()[0], "cuMemAlloc_v2 on a thread that has no current context")
}

// Random programs over streams and events: what an event orders has run.
func TestRandomInterleavingsKeepTheirOrder(t *testing.T) {
	for seed := uint64(1); seed <= 6; seed++ {
		rng := rand.New(rand.NewPCG(seed, 9))
		d := open(t, Options{Seed: seed})
		var list [4]driver.Stream
		for i := range list {
			list[i], _ = d.NewStream()
		}
		var events [3]driver.Event
		for i := range events {
			events[i], _ = d.NewEvent(false)
		}
		var ran [4]atomic.Int64
		var launched [4]int64
		var must [4][4]int64
		var recorded [3][4]int64
		for range 600 {
			s, e := rng.IntN(4), rng.IntN(3)
			switch rng.IntN(4) {
			case 0:
				require.NoError(t, d.Record(events[e], list[s]))
				recorded[e] = must[s]
				recorded[e][s] = launched[s]
			case 1:
				require.NoError(t, d.Wait(list[s], events[e]))
				for i, n := range recorded[e] {
					must[s][i] = max(must[s][i], n)
				}
			default:
				want := must[s]
				launched[s]++
				require.NoError(t, d.Run(list[s], "k", func() error {
					for i := range want {
						if i != s && ran[i].Load() < want[i] {
							return errors.New("out of order")
						}
					}
					ran[s].Add(1)
					return nil
				}))
			}
		}
		for _, s := range list {
			require.NoError(t, d.Synchronize(s), "seed %d", seed)
		}
	}
}

func TestModulesRunAsSharedLibraries(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler (cc): a shared library can't be built")
	}
	dir := t.TempDir()
	source, lib := filepath.Join(dir, "add.c"), filepath.Join(dir, "add.so")
	require.NoError(t, os.WriteFile(source, []byte(`#include <stdint.h>
struct params { float *x; int64_t n; float v; int32_t fail; };
int shim_add(const uint32_t g[3], const uint32_t b[3], uint32_t shared, const void *p) {
	const struct params *a = p;
	for (uint32_t i = 0; i < g[0] * b[0]; i++) if (i < a->n) a->x[i] += a->v + shared + g[1] * 100;
	return a->fail;
}
uintptr_t shim_size_add() { return 24; }`), 0o644))
	out, err := exec.Command(cc, "-shared", "-fPIC", "-o", lib, source).CombinedOutput()
	require.NoError(t, err, "%s", out)

	d := Start(t, Options{})
	_, err = d.LoadModule(make([]byte, 64))
	require.Equal(t, 200, code(t, err))
	m, err := d.LoadModule([]byte(ImagePrefix + lib))
	require.NoError(t, err)
	defer func() { require.NoError(t, d.UnloadModule(m)) }()
	_, err = d.Function(m, "sub")
	require.Equal(t, 500, code(t, err))
	f, err := d.Function(m, "add")
	require.NoError(t, err)
	s, err := d.NewStream()
	require.NoError(t, err)
	defer func() { require.NoError(t, d.DestroyStream(s)) }()
	x := alloc(t, d, 40)
	defer func() { require.NoError(t, d.Free(x)) }()
	var args driver.Args
	p, n := args.Pointer(x).Int64(10).Float32(0.5).Int32(0).Packed()
	require.NoError(t, d.Fill32(x, 0, 10, s))
	require.NoError(t, d.Launch(f, driver.Dim{X: 2, Y: 3, Z: 1}, driver.Dim{X: 8, Y: 1, Z: 1}, 4, s, p, n))
	got := make([]float32, 10)
	require.NoError(t, d.CopyToHost(unsafe.Pointer(&got[0]), x, 40, s))
	for _, v := range got {
		require.Equal(t, float32(304.5), v)
	}
	one := driver.Dim{X: 1, Y: 1, Z: 1}
	require.Equal(t, 1, code(t, d.Launch(f, one, driver.Dim{X: 1025, Y: 1, Z: 1}, 0, s, p, n)))
	require.Equal(t, 1, code(t, d.Launch(f, one, one, 48<<10+1, s, p, n)))
	require.Equal(t, 1, code(t, d.Launch(f, one, one, 0, s, p, n-4)), "a parameter less")
	require.Len(t, d.Faults(), 1)
	d.forget()
	require.NoError(t, d.AllowShared(f, 100<<10))
	require.NoError(t, d.Launch(f, one, one, 100<<10, s, p, n))
	require.NoError(t, d.Synchronize(s))
}
