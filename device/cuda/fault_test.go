//go:build linux

package cuda

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
)

func TestErrorsAreStickyAndNameTheOperation(t *testing.T) {
	for _, where := range []string{"host", "device", "launch"} {
		t.Run(where, func(t *testing.T) {
			c, _ := open(t, drivertest.Options{}, Options{Marks: 1})
			a, b := stream(t, c, graph.Compute), stream(t, c, graph.Comm)
			e := event0(t, c)
			hooked := make(chan error, 2)
			c.OnError(func(err error) { hooked <- err })
			boom := errors.New("boom")
			fail := func() error { time.Sleep(5 * time.Millisecond); return boom }
			ran := false
			require.NoError(t, a.Launch(onGPU("before", func() {})))
			switch where {
			case "host":
				require.NoError(t, a.Launch(&hostFn{label: "h.0/ln", run: fail}))
			case "device":
				require.NoError(t, a.Launch(&fn{label: "h.0/ln", run: fail}))
			case "launch":
				require.Error(t, a.Launch(refused{}))
			}
			_ = a.Record(e)
			_ = b.Wait(e)
			_ = b.Launch(onHost("after", func() { ran = true }))
			err := a.Sync()
			require.ErrorContains(t, err, `rank 3, stream compute, operation "h.0/ln": `)
			if where == "host" {
				require.ErrorIs(t, err, boom)
			}
			require.Equal(t, err, b.Sync())
			require.Equal(t, err, a.Launch(onGPU("more", func() { ran = true })))
			require.Equal(t, err, a.Record(e))
			require.Equal(t, err, a.Wait(e))
			c.Abort(errors.New("later"))
			require.Equal(t, err, a.Sync())
			require.False(t, ran)
			require.Equal(t, err, <-hooked)
			require.Empty(t, hooked, "called once")
		})
	}
}

type refused struct{}

func (refused) Label() string         { return "h.0/ln" }
func (refused) Touches() []device.Ptr { return nil }
func (refused) Enqueue(driver.API, driver.Stream) error {
	return &driver.Error{Call: "cuLaunchKernel", Code: 1, Name: "CUDA_ERROR_INVALID_VALUE"}
}

// picky is a kernel whose Check returns an error.
type picky struct {
	fn
	found error
}

func (p *picky) Check() error { return p.found }

func TestWhatAKernelFindsWrongIsItsError(t *testing.T) {
	c, _ := open(t, drivertest.Options{}, Options{})
	s := stream(t, c, graph.Compute)
	k := &picky{}
	k.fn = fn{label: "embed", run: func() error { k.found = errors.New("token 7 of 5"); return nil }}
	require.NoError(t, s.Launch(k))
	require.NoError(t, s.Launch(onGPU("after", func() {})))
	require.EqualError(t, s.Sync(), `rank 3, stream compute, operation "embed": token 7 of 5`)
	require.ErrorContains(t, s.Launch(k), "token 7 of 5")
}

func TestPanicNamesOperationAndLine(t *testing.T) {
	c, _ := open(t, drivertest.Options{}, Options{})
	s := stream(t, c, graph.Compute)
	var none []int
	require.NoError(t, s.Launch(onHost("h.1/gelu", func() { _ = none[len(none)+2] })))
	err := s.Sync()
	require.ErrorContains(t, err, `operation "h.1/gelu": broken invariant: the kernel panicked at fault_test.go:`)
	require.ErrorContains(t, err, "index out of range [2]")
}

// An abort releases a Sync that waits for a stuck host kernel, and device work that waits for one.
func TestAbortReleasesWaits(t *testing.T) {
	for _, where := range []string{"host kernel", "queue", "device"} {
		t.Run(where, func(t *testing.T) {
			c, _ := open(t, drivertest.Options{}, Options{Queue: 1})
			a, b := stream(t, c, graph.Compute), stream(t, c, graph.Comm)
			e := event0(t, c)
			gate := make(chan struct{})
			defer close(gate)
			stuck := onHost("stuck", func() { <-gate })
			if where == "device" {
				stuck = onGPU("stuck", func() { <-gate })
			}
			require.NoError(t, a.Launch(stuck))
			require.NoError(t, a.Launch(onGPU("behind", func() {})))
			require.NoError(t, a.Record(e))
			require.NoError(t, b.Wait(e))
			require.NoError(t, b.Launch(onHost("after", func() { t.Error("it ran") })))
			lost := errors.New("rank 1 is lost")
			time.AfterFunc(10*time.Millisecond, func() { c.Abort(lost) })
			if where == "queue" {
				for range 3 { // the queue holds one, so this blocks until the abort
					_ = a.Launch(onHost("more", func() {}))
				}
			}
			require.ErrorIs(t, b.Sync(), lost)
			require.ErrorIs(t, a.Sync(), lost, "Sync does not wait for what is stuck")
		})
	}
}

func TestRunningNamesWhatIsStuck(t *testing.T) {
	c, _ := open(t, drivertest.Options{}, Options{Marks: 1})
	a, b := stream(t, c, graph.Compute), stream(t, c, graph.Comm)
	require.Empty(t, c.Running())
	gate := make(chan struct{})
	require.NoError(t, a.Launch(onGPU("fine", func() {})))
	require.NoError(t, a.Launch(onHost("host", func() { <-gate })))
	require.NoError(t, a.Launch(onGPU("later", func() {})))
	require.NoError(t, b.Launch(onGPU("ok", func() {})))
	require.NoError(t, b.Launch(onGPU("device", func() { <-gate })))
	require.NoError(t, b.Launch(onGPU("later", func() {})))
	want := []string{"operation host on stream compute", "operation device on stream comm"}
	require.Eventually(t, func() bool { return fmt.Sprint(c.Running()) == fmt.Sprint(want) }, time.Minute, time.Millisecond)
	close(gate)
	require.NoError(t, a.Sync())
	require.NoError(t, b.Sync())
	require.Empty(t, c.Running())
}

func TestCloseNamesWhatDoesNotEnd(t *testing.T) {
	old := closeGrace
	closeGrace = 20 * time.Millisecond
	defer func() { closeGrace = old }()
	for _, where := range []string{"host", "device"} {
		runtime.LockOSThread()
		double := drivertest.New(drivertest.Options{})
		c, err := New(0, Options{Driver: double, Marks: 1})
		require.NoError(t, err)
		s := stream(t, c, graph.Compute)
		gate := make(chan struct{})
		k := onHost("forever", func() { <-gate })
		if where == "device" {
			k = onGPU("forever", func() { <-gate })
		}
		require.NoError(t, s.Launch(k))
		c.Abort(errors.New("lost"))
		if where == "host" {
			require.Eventually(t, func() bool { return s.host.current() != nil || s.ctx.failed.Load() }, time.Minute, time.Millisecond)
		}
		err = c.Close()
		if where == "device" || err != nil { // an abort may come before a host kernel begins
			require.ErrorContains(t, err, `stream compute still runs operation "forever" after 20ms; its memory is not given back`)
		}
		close(gate)
		_ = double.Close()
		runtime.UnlockOSThread()
	}
}

// use performs a small run with every operation of a context.
func use(c *Context) error {
	d, err := c.Alloc(graph.Device, 4096)
	if err != nil {
		return err
	}
	h, err := c.Alloc(graph.Host, 4096)
	if err != nil {
		return err
	}
	dev, host := device.Ptr{Arena: d, Len: 4096}, device.Ptr{Arena: h, Len: 4096}
	var streams [2]*Stream
	for i := range streams {
		s, err := c.NewStream(graph.StreamID(i))
		if err != nil {
			return err
		}
		streams[i] = s.(*Stream)
		if i == 0 {
			if err := streams[i].Time(&spans{}); err != nil {
				return err
			}
		}
	}
	e, err := c.NewEvent()
	if err != nil {
		return err
	}
	var kernels []device.Kernel
	for _, r := range [][2]device.Ptr{{host, dev}, {dev, host}, {at(dev, 0, 64), at(dev, 64, 64)}} {
		k, err := c.Copy("h.0/copy", r[0], r[1])
		if err != nil {
			return err
		}
		kernels = append(kernels, k)
	}
	p, err := c.Poison("h.0/poison", dev)
	if err != nil {
		return err
	}
	for range 3 {
		for _, k := range append([]device.Kernel{p, onHost("h.0/update", func() {}, host)}, kernels...) {
			if err := streams[0].Launch(k); err != nil {
				return err
			}
		}
		if err := streams[0].Record(e); err != nil {
			return err
		}
		if err := streams[1].Wait(e); err != nil {
			return err
		}
		if err := streams[1].Launch(onGPU("h.0/read", func() {}, dev)); err != nil {
			return err
		}
		for _, s := range streams {
			if err := s.Sync(); err != nil {
				return err
			}
		}
	}
	return nil
}

// Each driver call fails once: its first, second or last use. The error names the rank, the call
// and its code, and, for calls of operations, the operation. Nothing leaks or blocks.
func TestEveryCallCanFail(t *testing.T) {
	attempt := func(tell func(d *drivertest.Driver)) (calls map[string]int, runErr, closeErr, doubleErr error) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		double := drivertest.New(drivertest.Options{})
		tell(double)
		c, err := New(3, Options{Driver: double, Marks: 2})
		if err != nil {
			return double.Calls(), err, nil, double.Close()
		}
		runErr = use(c)
		closeErr = c.Close()
		return double.Calls(), runErr, closeErr, double.Close()
	}
	calls, runErr, closeErr, doubleErr := attempt(func(*drivertest.Driver) {})
	require.NoError(t, errors.Join(runErr, closeErr, doubleErr))
	require.Greater(t, len(calls), 20)
	for call, n := range calls {
		for _, nth := range []int{1, 2, n} {
			if nth > n || call == "cuEventQuery" && nth > 2 { // how often it is asked depends on time
				continue
			}
			tell := func(d *drivertest.Driver) { d.Fail(call, nth, 999) }
			if call == "run" {
				tell = func(d *drivertest.Driver) { d.FailRun(nth, 719) }
			}
			_, runErr, closeErr, doubleErr := attempt(tell)
			err := errors.Join(runErr, closeErr)
			name := fmt.Sprintf("%s, call %d of %d", call, nth, n)
			require.Error(t, err, name)
			require.ErrorContains(t, err, "rank 3", name)
			if call == "run" {
				require.ErrorContains(t, err, "CUDA_ERROR_LAUNCH_FAILED (719)", name)
				require.ErrorContains(t, err, `operation "h.0/`, name)
			} else {
				require.ErrorContains(t, err, call+": CUDA_ERROR_UNKNOWN (999)", name)
			}
			if strings.Contains(call, "Memcpy") || strings.Contains(call, "Value") || call == "Run" || call == "cuStreamWaitEvent" {
				require.ErrorContains(t, err, `operation "h.0/`, name)
			}
			require.NoError(t, doubleErr, name)
		}
	}
}

// Without stream memory operations device work runs, and host kernels are refused with an error
// that names the operation.
func TestWithoutStreamMemoryOperations(t *testing.T) {
	c, _ := open(t, drivertest.Options{NoStreamMemOps: true}, Options{Marks: 1})
	s := stream(t, c, graph.Compute)
	ran := false
	require.NoError(t, s.Launch(onGPU("k", func() { ran = true })))
	require.NoError(t, s.Sync())
	require.True(t, ran)
	require.ErrorContains(t, s.Launch(onHost("h.0/update", func() {})), `operation "h.0/update": it runs on the host between device work, which needs stream memory operations`)
}
