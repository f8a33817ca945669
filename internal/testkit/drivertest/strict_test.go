//go:build linux

package drivertest

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// forget drops the faults that a test made on purpose.
func (d *Driver) forget() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.faults = nil
}

// A stream that holds as much as it can holds up the call that adds one more, and with
// it every thread that makes a stream or an event, until something has run.
func TestStreamDepth(t *testing.T) {
	d := open(t, Options{Depth: 4})
	s, _ := streams(t, d)
	p, words, err := d.HostAlloc(4)
	require.NoError(t, err)
	word := (*uint32)(p)
	*word = 0
	m := alloc(t, d, 64)
	require.NoError(t, d.WaitValue(s, words, 1))
	for range 3 {
		require.NoError(t, d.Fill8(m, 1, 64, s))
	}
	var ready, pushed, made atomic.Bool
	on := func(f func() error, done *atomic.Bool) chan error {
		end := make(chan error, 1)
		go func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			err := d.SetCurrent(0x1000)
			ready.Store(true)
			if err == nil {
				err = f()
			}
			done.Store(true)
			end <- err
		}()
		return end
	}
	first := on(func() error { return d.Fill8(m, 2, 64, s) }, &pushed)
	for d.waiting() == 0 {
		runtime.Gosched()
	}
	ready.Store(false)
	second := on(func() error {
		e, err := d.NewEvent(false)
		if err == nil {
			err = d.DestroyEvent(e)
		}
		return err
	}, &made)
	for !ready.Load() || d.Calls()["cuEventCreate"] == 0 {
		runtime.Gosched()
	}
	require.False(t, pushed.Load() || made.Load())
	atomic.StoreUint32(word, 1)
	require.NoError(t, <-first)
	require.NoError(t, <-second)
	require.NoError(t, d.Synchronize(s))
	require.Empty(t, d.Faults())
}

func (d *Driver) waiting() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.blocked
}

// An image that does not begin at a multiple of 8 is refused.
func TestImageAlignment(t *testing.T) {
	d := open(t, Options{})
	image := make([]byte, 128)
	_, err := d.LoadModule(image[1:])
	require.Equal(t, 200, code(t, err))
	require.ErrorContains(t, err, "multiple of 8")
	require.Len(t, d.Faults(), 1)
}

// A function's first launch waits until no stream has anything to run, and takes the
// device's memory for good; where there is none, it fails.
func TestFirstLaunch(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("needs a C compiler")
	}
	dir := t.TempDir()
	source, lib := filepath.Join(dir, "k.c"), filepath.Join(dir, "k.so")
	require.NoError(t, os.WriteFile(source, []byte("int shim_a() { return 0; }\nint shim_b() { return 0; }\n"), 0o644))
	out, err := exec.Command(cc, "-shared", "-fPIC", "-o", lib, source).CombinedOutput()
	require.NoError(t, err, "%s", out)

	d := open(t, Options{Memory: 1000, FirstLaunch: func(string) int64 { return 600 }})
	m, err := d.LoadModule([]byte(ImagePrefix + lib))
	require.NoError(t, err)
	a, err := d.Function(m, "a")
	require.NoError(t, err)
	b, err := d.Function(m, "b")
	require.NoError(t, err)
	s, u := streams(t, d)
	one := driver.Dim{X: 1, Y: 1, Z: 1}
	var ran atomic.Bool
	require.NoError(t, d.Run(u, "before", func() error { runtime.Gosched(); ran.Store(true); return nil }))
	require.NoError(t, d.Launch(a, one, one, 0, s, unsafe.Pointer(&one), 0))
	require.True(t, ran.Load(), "loading code waits for the other stream")
	free, _, err := d.MemInfo()
	require.NoError(t, err)
	require.EqualValues(t, 400, free)
	require.NoError(t, d.Launch(a, one, one, 0, s, unsafe.Pointer(&one), 0))
	require.Equal(t, 2, code(t, d.Launch(b, one, one, 0, s, unsafe.Pointer(&one), 0)))
	require.NoError(t, d.Synchronize(s))
	require.Empty(t, d.Faults())
}

// Once a kernel has failed, every call of every thread says so, also those that make
// something: the process has no context any more.
func TestErrorsStick(t *testing.T) {
	d := open(t, Options{})
	s, u := streams(t, d)
	m := alloc(t, d, 64)
	d.FailRun(1, 700)
	require.NoError(t, d.Fill8(m, 1, 64, s))
	require.Equal(t, 700, code(t, d.Synchronize(s)))
	_, err := d.Alloc(64)
	require.Equal(t, 700, code(t, err))
	_, err = d.NewStream()
	require.Equal(t, 700, code(t, err))
	_, err = d.LoadModule(make([]byte, 64))
	require.Equal(t, 700, code(t, err))
	require.Equal(t, 700, code(t, d.Synchronize(u)), "another stream too")
	_, err = d.Retain(0)
	require.Equal(t, 700, code(t, err))
}
