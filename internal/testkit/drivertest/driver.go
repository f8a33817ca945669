//go:build linux

package drivertest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// Options of a Driver.
type Options struct {
	// Memory of each device in bytes, and the part of it that others use. Default 1 GiB, 0.
	Memory, Used int64
	// Devices is the number of devices. Default 1; negative for none.
	Devices int
	// Change modifies the description of a device. nil: all are equal.
	Change func(d *driver.Device)
	// NoLink reports whether two devices cannot access each other's memory. nil: all can.
	NoLink func(a, b int) bool
	// Garbles reports whether data copied between two devices arrives changed, as behind some
	// IOMMUs. nil: none does.
	Garbles func(from, to int) bool
	// Seed, if not 0, determines the order in which streams run, one operation at a time: for a
	// while one stream has priority and another comes last. With 0, streams run as soon as they
	// can, two operations at a time.
	Seed uint64
	// NoStreamMemOps makes WriteValue and WaitValue unsupported.
	NoStreamMemOps bool
	// Depth is the number of operations that can wait in a stream. The call that adds one more
	// blocks, and meanwhile no thread can create a stream or an event. Default 1020, as observed
	// with drivers of CUDA 12.
	Depth int
	// FirstLaunch returns the memory that the device uses permanently when a function is first
	// launched: its code, which is loaded then, and more local memory. nil: none.
	FirstLaunch func(kernel string) int64
	// GraphBytes returns the device memory that an instantiated graph of that many operations uses
	// until it is destroyed. nil: none.
	GraphBytes func(operations int) int64
}

// Driver is the double. It implements driver.API and driver.Observer.
type Driver struct {
	opts Options

	mu   sync.Mutex
	cond *sync.Cond // something was enqueued, has run, or has failed
	wg   sync.WaitGroup

	calls   map[string]int
	fail    map[string]map[int]int // by call, count: the code
	failRun map[int]int            // by number of work item: the code
	ran     int                    // work items begun
	faults  []error
	closed  bool

	gpus      []gpu // by ordinal
	current   map[int]driver.Context
	traffic   map[[2]int]int64
	allocs    []*allocation // by address, freed ones too
	blocked   int           // calls blocked by a full stream
	next      uintptr       // handles
	streams   map[driver.Stream]*stream
	order     []*stream
	events    map[driver.Event]*event
	modules   map[driver.Module]*module
	functions map[driver.Function]*function
	graphs    map[driver.Graph]*collected
	execs     map[driver.GraphExec]*readyGraph
	capturing map[int]*capture // by thread

	rng   *rand.Rand
	rank  map[*stream]int // priority of streams in the present era, lower first
	era   int             // picks left in it
	races *races
}

var (
	_ driver.API      = (*Driver)(nil)
	_ driver.Observer = (*Driver)(nil)
)

// New starts a double. The caller must Close it.
func New(o Options) *Driver {
	if o.Memory == 0 {
		o.Memory = 1 << 30
	}
	if o.Devices == 0 {
		o.Devices = 1
	}
	if o.Depth == 0 {
		o.Depth = 1020
	}
	d := &Driver{
		opts: o, calls: map[string]int{}, fail: map[string]map[int]int{}, failRun: map[int]int{},
		gpus: make([]gpu, max(0, o.Devices)), current: map[int]driver.Context{}, traffic: map[[2]int]int64{}, streams: map[driver.Stream]*stream{},
		events: map[driver.Event]*event{}, modules: map[driver.Module]*module{}, functions: map[driver.Function]*function{},
		graphs: map[driver.Graph]*collected{}, execs: map[driver.GraphExec]*readyGraph{}, capturing: map[int]*capture{},
		rng: rand.New(rand.NewPCG(o.Seed, 1)), rank: map[*stream]int{}, races: newRaces(),
	}
	for i := range d.gpus {
		d.gpus[i].says = d.describe(i)
	}
	d.cond = sync.NewCond(&d.mu)
	workers := 2
	if o.Seed != 0 {
		workers = 1
	}
	for range workers {
		d.wg.Add(1)
		go d.work()
	}
	return d
}

// Start is New for a test's own goroutine. It locks the goroutine to its thread and makes the first
// device's context current. At the end the test fails if the double has found faults or leaks.
func Start(t testing.TB, o Options) *Driver {
	t.Helper()
	runtime.LockOSThread()
	d := New(o)
	c, err := d.Retain(0)
	if err == nil {
		err = d.SetCurrent(c)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = d.Release(0)
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		runtime.UnlockOSThread()
	})
	return d
}

// Fail makes the n-th call of a driver function such as "cuMemAlloc_v2", counted from 1, return a
// code. Some codes: 1 invalid value, 2 out of memory, 999 unknown.
func (d *Driver) Fail(call string, n, code int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fail[call] == nil {
		d.fail[call] = map[int]int{}
	}
	d.fail[call][n] = code
}

// FailRun makes the n-th copy, fill, launch or Run, counted from 1 in execution order, fail with a
// code when it runs. As on a GPU the context is then lost: this and every later call returns the
// code.
func (d *Driver) FailRun(n, code int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.failRun[n] = code
}

// Calls returns the number of calls of each function so far; "run" counts executed work.
func (d *Driver) Calls() map[string]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	m := map[string]int{"run": d.ran}
	for k, v := range d.calls {
		m[k] = v
	}
	return m
}

// Faults returns the faults that the double has found so far.
func (d *Driver) Faults() []error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.faults)
}

// Close ends the double. Its error lists all faults, and the memory, streams, events, modules and
// contexts that were not released.
func (d *Driver) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	d.cond.Broadcast()
	d.mu.Unlock()
	d.wg.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	errs := d.faults
	for _, s := range d.order {
		if n := len(s.queue); n > 0 {
			errs = append(errs, fmt.Errorf("%s: %d operation(s) never ran, the first is %s", s.agent.name, n, quote(s.queue[0].label)))
		}
	}
	for _, a := range d.allocs {
		if a.live() {
			errs = append(errs, fmt.Errorf("leak: %s", a))
		}
		if err := a.unmap(); err != nil {
			errs = append(errs, err)
		}
	}
	for _, leak := range []struct {
		what string
		n    int
	}{{"stream", len(d.streams)}, {"event", len(d.events)}, {"module", len(d.modules)}, {"graph", len(d.graphs)}, {"graph that is ready", len(d.execs)}} {
		if leak.n > 0 {
			errs = append(errs, fmt.Errorf("leak: %d %s(s)", leak.n, leak.what))
		}
	}
	for ordinal := range d.gpus {
		if n := d.gpus[ordinal].retained; n != 0 {
			errs = append(errs, fmt.Errorf("leak: the context of device %d, retained %d time(s) more than released", ordinal, n))
		}
	}
	return errors.Join(errs...)
}

const maxFaults = 20

func (d *Driver) fault(format string, args ...any) {
	if len(d.faults) < maxFaults {
		d.faults = append(d.faults, fmt.Errorf(format, args...))
	}
}

// codes are the names of the error codes that the double returns.
var codes = map[int]string{
	1: "CUDA_ERROR_INVALID_VALUE", 2: "CUDA_ERROR_OUT_OF_MEMORY", 100: "CUDA_ERROR_NO_DEVICE", 101: "CUDA_ERROR_INVALID_DEVICE",
	200: "CUDA_ERROR_INVALID_IMAGE", 201: "CUDA_ERROR_INVALID_CONTEXT", 217: "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", 400: "CUDA_ERROR_INVALID_HANDLE", 500: "CUDA_ERROR_NOT_FOUND",
	700: "CUDA_ERROR_ILLEGAL_ADDRESS", 701: "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", 719: "CUDA_ERROR_LAUNCH_FAILED",
	801: "CUDA_ERROR_NOT_SUPPORTED", 401: "CUDA_ERROR_ILLEGAL_STATE", 900: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
	901: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", 908: "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", 999: "CUDA_ERROR_UNKNOWN",
}

func failure(call string, code int, format string, args ...any) *driver.Error {
	name := codes[code]
	if name == "" {
		name = fmt.Sprintf("CUDA_ERROR_%d", code)
	}
	return &driver.Error{Call: call, Code: code, Name: name, Text: fmt.Sprintf(format, args...)}
}

// free lists the calls that need no current context.
var free = []string{"cuDriverGetVersion", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2", "cuCtxSetCurrent", "cuDeviceCanAccessPeer"}

// enter begins a call: it counts the call and returns the error that was planned for it. The caller
// holds mu.
func (d *Driver) enter(call string) error {
	d.calls[call]++
	if code, ok := d.fail[call][d.calls[call]]; ok {
		return failure(call, code, "as told")
	}
	here := d.here()
	if call != "cuCtxSetCurrent" { // which leaves a lost context for another
		if err := d.lost(here, call); err != nil {
			return err
		}
	}
	if !slices.Contains(free, call) && here < 0 {
		d.fault("%s on a thread that has no current context", call)
		return failure(call, 201, "no current context on this thread")
	}
	return d.whileCapturing(call)
}

// teardown is enter for calls that release something: they release it even if they return an error.
func (d *Driver) teardown(call string) error { return d.enter(call) }

func (d *Driver) handle() uintptr {
	d.next++
	return d.next
}

// Version returns that of CUDA 12.4.
func (d *Driver) Version() (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return 12040, d.enter("cuDriverGetVersion")
}

// Devices describes the double's devices.
func (d *Driver) Devices() ([]driver.Device, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.enter("cuDeviceGet"); err != nil {
		return nil, err
	}
	var list []driver.Device
	for i := range d.gpus {
		list = append(list, d.gpus[i].says)
	}
	return list, nil
}

func (d *Driver) describe(ordinal int) driver.Device {
	says := driver.Device{
		Ordinal: ordinal, Name: "Double", UUID: [16]byte{15: byte(ordinal)}, Major: 8, Minor: 0, Memory: d.opts.Memory,
		SMs: 4, SharedOptin: sharedOptin, ClockKHz: 1_000_000, StreamMemOps: !d.opts.NoStreamMemOps,
	}
	if d.opts.Change != nil {
		d.opts.Change(&says)
	}
	return says
}

// Retain returns a device's context.
func (d *Driver) Retain(ordinal int) (driver.Context, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.enter("cuDevicePrimaryCtxRetain"); err != nil {
		return 0, err
	}
	if ordinal < 0 || ordinal >= len(d.gpus) {
		return 0, failure("cuDevicePrimaryCtxRetain", 101, "device %d of %d", ordinal, d.opts.Devices)
	}
	d.gpus[ordinal].retained++
	return driver.Context(firstContext + ordinal), nil
}

// Release releases a device's context.
func (d *Driver) Release(ordinal int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.teardown("cuDevicePrimaryCtxRelease_v2")
	g := &d.gpus[ordinal]
	if g.retained--; g.retained == 0 {
		g.reaches = nil // the context is gone
	}
	return err
}

// SetCurrent makes a context current on the calling thread; 0 makes none current.
func (d *Driver) SetCurrent(c driver.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.enter("cuCtxSetCurrent"); err != nil {
		return err
	}
	if c != 0 && d.ordinal(c) < 0 {
		return failure("cuCtxSetCurrent", 201, "no such context")
	}
	if err := d.lost(d.ordinal(c), "cuCtxSetCurrent"); err != nil {
		return err
	}
	d.current[unix.Gettid()] = c
	return nil
}

// MemInfo returns the available and the total memory of the device.
func (d *Driver) MemInfo() (available, total int64, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.enter("cuMemGetInfo_v2"); err != nil {
		return 0, 0, err
	}
	g := &d.gpus[d.here()]
	return d.left(g), g.says.Memory, nil
}

// left returns the unused memory of a device.
func (d *Driver) left(g *gpu) int64 { return g.says.Memory - d.opts.Used - g.used - g.own }

// Take uses memory of the calling thread's device permanently, as a library that loads code does.
func (d *Driver) Take(call string, bytes int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	here := d.here()
	if here < 0 {
		return failure(call, 201, "no current context on this thread")
	}
	return d.take(call, &d.gpus[here], bytes)
}

func (d *Driver) take(call string, g *gpu, bytes int64) error {
	if bytes > d.left(g) {
		return failure(call, 2, "%d bytes for code and local memory, %d are left", bytes, d.left(g))
	}
	g.own += bytes
	return nil
}

// quote shortens a label for a message.
func quote(label string) string { return fmt.Sprintf("%q", strings.TrimSpace(label)) }
