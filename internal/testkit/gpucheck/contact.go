package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	kernelscuda "github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
	"github.com/spillway-ml/spillway/kernels/cuda/nvrtc"
	gpuplatform "github.com/spillway-ml/spillway/platform/gpu"
)

// told is a line of the first contact: the result of a call, or why it failed.
type told struct {
	What  string `json:"what"`
	Value string `json:"value"`
	Error string `json:"error,omitempty"`
}

// contacts holds what the first contact needs.
type contacts struct {
	api      driver.API
	compiler func() (kernelscuda.Compiler, error)
	products func() (blas.Library, error)
	bytes    int64 // bytes per copy
	depth    int   // largest number of operations tried when measuring the depth of a stream
	edge     int64 // dimension of the square product
	tell     func(told)

	stream driver.Stream
	free   int64 // free device memory at the last check; 0: not checked yet
}

// runContact makes each driver call once, in a child process.
func runContact(ctx context.Context, b *bundle, r *result) {
	if b.gpu == nil {
		r.skip("on the CPU there is nobody to meet")
		return
	}
	o := b.execute(ctx, "contact", b.work, nil, b.self, "-child", "contact")
	r.contact(o)
}

// contact reads the output of a child, even if it did not complete.
func (r *result) contact(o *outcome) {
	r.Table = [][]string{{"call", "result"}}
	for line := range bytes.Lines(o.out) {
		var t told
		if json.Unmarshal(line, &t) != nil || t.What == "" {
			continue
		}
		if t.Error != "" {
			r.fail("%s: %s", t.What, t.Error)
			t.Value = "**" + shorten(t.Error, 200) + "**"
		}
		r.Table = append(r.Table, []string{t.What, t.Value})
	}
	if o.status != 0 {
		last := r.Table[len(r.Table)-1][0]
		r.fail("after %q: %s", last, o.ended())
	}
}

// runChild runs in a child process, on the machine's own libraries.
func runChild(what, shape, prec, source, uuid string) error {
	if what == "memory" {
		return memoryChild(os.Stdout, uuid)
	}
	api, err := driver.Open()
	if err != nil {
		return err
	}
	version, err := api.Version()
	if err != nil {
		return err
	}
	switch what {
	case "look":
		return lookChild(os.Stdout, api)
	case "compile":
		return compileChild(api, version, source)
	}
	lines := json.NewEncoder(os.Stdout)
	c := &contacts{api: api, bytes: 256 << 20, depth: 4096, edge: 8192, tell: func(t told) { _ = lines.Encode(t) }, // a closed pipe has no reader
		compiler: func() (kernelscuda.Compiler, error) { return gpuplatform.Compiler(version, nil) },
		products: func() (blas.Library, error) { return blas.Open(version) }}
	if what == "contact" {
		c.meet()
		return nil
	}
	if what == "peers" {
		c.peers()
		return nil
	}
	p := pool.New(1)
	defer p.Close()
	if what == "breakdown" {
		return breakdownChild(os.Stdout, *c, cpu.New(p), shape, prec)
	}
	return microChild(os.Stdout, *c, cpu.New(p), shape, prec)
}

// runCompile makes NVRTC compile every source into the cache of this program's runs, so that
// compiling does not count against the time limit of a test or a training run. This is needed even
// if the build embeds kernels, because the tests do not.
func runCompile(ctx context.Context, b *bundle, r *result) {
	if b.gpu == nil {
		r.skip("on the CPU nothing is compiled")
		return
	}
	start := time.Now()
	for i, o := range inParallel(kernelscuda.Sources(), func(name string) *outcome {
		return b.execute(ctx, "compile-"+name, b.work, nil, b.self, "-child", "compile", "-source", name)
	}) {
		if o.status != 0 {
			r.fail("%s: %s", kernelscuda.Sources()[i], shorten(o.ended(), 300))
		}
	}
	r.say("%d sources in %.1f s", len(kernelscuda.Sources()), time.Since(start).Seconds())
}

func compileChild(api driver.API, version int, name string) error {
	compiler, err := nvrtc.Open(nvrtc.Options{Driver: version})
	if err != nil {
		return err
	}
	text, err := kernelscuda.Source(name)
	if err != nil {
		return err
	}
	devices, err := api.Devices()
	if err == nil {
		_, err = compiler.Compile(name, text, devices[0])
	}
	return err
}

// step runs f and reports its result.
func (c *contacts) step(what string, f func() (string, error)) bool {
	start := time.Now()
	value, err := f()
	t := told{What: what, Value: value}
	if value == "" {
		t.Value = fmt.Sprintf("%.0f µs", float64(time.Since(start).Nanoseconds())/1e3)
	}
	if err != nil {
		t.Error = err.Error()
	}
	c.tell(t)
	return err == nil
}

// meet makes the calls. It skips those that depend on a failed one.
func (c *contacts) meet() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var ctx driver.Context
	ok := c.step("cuDevicePrimaryCtxRetain", func() (_ string, err error) { ctx, err = c.api.Retain(0); return "", err }) &&
		c.step("cuCtxSetCurrent", func() (string, error) { return "", c.api.SetCurrent(ctx) }) &&
		c.memory("cuMemGetInfo after the context") &&
		c.step("cuStreamCreate", func() (_ string, err error) { c.stream, err = c.api.NewStream(); return "", err })
	if !ok {
		return
	}
	c.values(ctx)
	c.copies()
	c.kernels()
	c.matrix()
	c.step("cuStreamDestroy", func() (string, error) { return "", c.api.DestroyStream(c.stream) })
	c.step("cuDevicePrimaryCtxRelease", func() (string, error) { return "", c.api.Release(0) })
}

// memory reports the free device memory and its decrease since the last check.
func (c *contacts) memory(what string) bool {
	return c.step(what, func() (string, error) {
		free, total, err := c.api.MemInfo()
		value := fmt.Sprintf("%d of %d bytes free, %d less than before", free, total, c.free-free)
		if c.free == 0 {
			value = fmt.Sprintf("%d of %d bytes free", free, total)
		}
		c.free = free
		return value, err
	})
}

// values tests the values in memory that order host kernels and streams, and the depth of a stream.
func (c *contacts) values(ctx driver.Context) {
	p, at, err := c.api.HostAlloc(4096)
	if !c.step("cuMemHostAlloc of 4096 bytes", func() (string, error) { return "", err }) {
		return
	}
	defer func() {
		c.step("cuMemFreeHost", func() (string, error) { return "", c.api.HostFree(p) })
	}()
	clear(unsafe.Slice((*byte)(p), 4096))
	reached, done := (*atomic.Uint32)(p), (*atomic.Uint32)(unsafe.Add(p, 64))
	ok := c.step("cuStreamWriteValue32, seen by the host", func() (string, error) {
		start := time.Now()
		if err := c.api.WriteValue(c.stream, at, 1); err != nil {
			return "", err
		}
		for reached.Load() != 1 {
			if time.Since(start) > 5*time.Second {
				return "", errors.New("the host did not see it within 5 s")
			}
		}
		return "", nil
	})
	ok = ok && c.step("cuStreamWaitValue32, let through by the host", func() (string, error) {
		if err := errors.Join(c.api.WaitValue(c.stream, at+64, 1), c.api.WriteValue(c.stream, at, 2)); err != nil {
			return "", err
		}
		if reached.Load() == 2 {
			return "", errors.New("the stream did not wait")
		}
		done.Store(1)
		return "", c.api.Synchronize(c.stream)
	})
	const many = 500
	c.step("cuStreamWriteValue32, 500 in a row", func() (string, error) {
		start := time.Now()
		for range many {
			if err := c.api.WriteValue(c.stream, at, 3); err != nil {
				return "", err
			}
		}
		issued := time.Since(start)
		err := c.api.Synchronize(c.stream)
		return fmt.Sprintf("%.2f µs to issue one, %.2f µs to run", micro(issued)/many, micro(time.Since(start))/many), err
	})
	if ok {
		c.step("operations that a stream holds", func() (string, error) { return c.holds(ctx, at, done) })
	}
}

func micro(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// holds fills a waiting stream from a separate thread until a call blocks.
func (c *contacts) holds(ctx driver.Context, at driver.Address, done *atomic.Uint32) (string, error) {
	var n atomic.Int64
	end := make(chan error, 1)
	if err := c.api.WaitValue(c.stream, at+64, 2); err != nil {
		return "", err
	}
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := c.api.SetCurrent(ctx)
		for err == nil && n.Load() < int64(c.depth) {
			if err = c.api.WriteValue(c.stream, at, 4); err == nil {
				n.Add(1)
			}
		}
		end <- err
	}()
	var err error
	text := ""
	for last := int64(-1); text == ""; {
		select {
		case err = <-end:
			text = fmt.Sprintf("more than %d", n.Load())
			end <- err
		case <-time.After(250 * time.Millisecond):
			if now := n.Load(); now == last {
				text = fmt.Sprintf("%d, then a call waits for room", now+1)
			} else {
				last = now
			}
		}
	}
	done.Store(2)
	err = <-end
	return text, errors.Join(err, c.api.Synchronize(c.stream))
}

// copies measures the rates of the link and of device memory.
func (c *contacts) copies() {
	var p unsafe.Pointer
	var host, a, b driver.Address
	n := c.bytes
	if !c.step(fmt.Sprintf("cuMemHostAlloc of %d bytes", n), func() (_ string, err error) {
		start := time.Now()
		p, host, err = c.api.HostAlloc(n)
		return rate(n, time.Since(start)), err
	}) {
		return
	}
	defer func() { _ = c.api.HostFree(p) }() // cuMemFreeHost was tried
	ok := c.step("cuMemAlloc", func() (_ string, err error) { a, err = c.api.Alloc(n); return "", err })
	ok = ok && c.step("cuMemAlloc, a second one", func() (_ string, err error) { b, err = c.api.Alloc(n); return "", err })
	if !ok {
		return
	}
	for _, m := range []struct {
		what  string
		moved int64
		f     func() error
	}{
		{"cuMemsetD8Async", n, func() error { return c.api.Fill8(a, 7, n, c.stream) }},
		{"cuMemcpyHtoDAsync", n, func() error { return c.api.CopyToDevice(a, p, n, c.stream) }},
		{"cuMemcpyDtoHAsync", n, func() error { return c.api.CopyToHost(p, a, n, c.stream) }},
		{"cuMemcpyDtoDAsync, read and written", 2 * n, func() error { return c.api.CopyOnDevice(b, a, n, c.stream) }},
	} {
		c.step(m.what, func() (string, error) {
			d, err := c.timed(m.f)
			return rate(m.moved, d), err
		})
	}
	_ = host
	c.step("cuMemFree, both", func() (string, error) { return "", errors.Join(c.api.Free(a), c.api.Free(b)) })
	c.memory("cuMemGetInfo after copies")
}

func rate(bytes int64, d time.Duration) string {
	return fmt.Sprintf("%.2f GB/s", float64(bytes)/max(d.Seconds(), 1e-9)/1e9)
}

// squareWork is the workspace of the square product in bytes.
const squareWork = 32 << 20

// randomize fills memory with random bits that are finite in fp32 and in 16 bits. With constant
// data a card draws less power and is faster.
func (c *contacts) randomize(at driver.Address, size int64) error {
	const block = 1 << 24
	p, _, err := c.api.HostAlloc(block)
	if err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(1, 1))
	for i, words := 0, unsafe.Slice((*uint16)(p), (min(block, size)+1)/2); i < len(words); i++ {
		words[i] = uint16(rng.IntN(2))<<15 | 0x3c00 | uint16(rng.IntN(0x180)) // bf16 of ±0.008 to ±0.1; fp16 near ±1
	}
	for off := int64(0); off < size && err == nil; off += block {
		err = c.api.CopyToDevice(at+driver.Address(off), p, min(block, size-off), c.stream)
	}
	return errors.Join(err, c.api.Synchronize(c.stream), c.api.HostFree(p))
}

// warmUp is how long the card works before a peak is measured. Tests on a double set it lower.
var warmUp = 300 * time.Millisecond

// steady returns the median of 20 runs after warmUp.
func (c *contacts) steady(f func() error) (time.Duration, error) {
	for start := time.Now(); time.Since(start) < warmUp; {
		if err := errors.Join(f(), c.api.Synchronize(c.stream)); err != nil {
			return 0, err
		}
	}
	return c.median(20, f)
}

// timed runs f once to warm up and returns the median of five runs, measured with events.
func (c *contacts) timed(f func() error) (time.Duration, error) {
	if err := f(); err != nil {
		return 0, err
	}
	return c.median(5, f)
}

// median returns the median time of f over the given number of runs, measured with events.
func (c *contacts) median(times int, f func() error) (time.Duration, error) {
	from, err := c.api.NewEvent(true)
	if err != nil {
		return 0, err
	}
	to, err := c.api.NewEvent(true)
	if err != nil {
		return 0, errors.Join(err, c.api.DestroyEvent(from))
	}
	var took []step
	for range times {
		if err == nil {
			err = errors.Join(c.api.Record(from, c.stream), f(), c.api.Record(to, c.stream), c.api.Synchronize(c.stream))
		}
		if err != nil {
			break
		}
		var ms float32
		if ms, err = c.api.Elapsed(from, to); err == nil {
			took = append(took, step{Seconds: float64(ms) / 1e3})
		}
	}
	err = errors.Join(err, c.api.DestroyEvent(from), c.api.DestroyEvent(to))
	if err != nil || len(took) == 0 {
		return 0, err
	}
	return time.Duration(median(took) * 1e9), nil
}

// kernels loads a module and launches one of its kernels on empty data.
func (c *contacts) kernels() {
	const source, name = "sum.cu", "sum_total"
	var image []byte
	var m driver.Module
	var f driver.Function
	ok := c.step("compile "+source, func() (string, error) {
		compiler, err := c.compiler()
		if err != nil {
			return "", err
		}
		text, err := kernelscuda.Source(source)
		if err != nil {
			return "", err
		}
		devices, err := c.api.Devices()
		if err == nil {
			image, err = compiler.Compile(source, text, devices[0])
		}
		return "", err
	})
	ok = ok && c.step("cuModuleLoadDataEx", func() (_ string, err error) { m, err = c.api.LoadModule(image); return "", err })
	ok = ok && c.step("cuModuleGetFunction", func() (_ string, err error) { f, err = c.api.Function(m, name); return "", err })
	if !ok {
		return
	}
	var word driver.Address
	ok = c.step("a predicate that is set", func() (_ string, err error) {
		if word, err = c.api.Alloc(256); err == nil {
			err = c.api.Fill32(word, 1, 64, c.stream)
		}
		return "", err
	})
	if ok {
		one := driver.Dim{X: 1, Y: 1, Z: 1}
		args := new(driver.Args).Pointer(word).Pointer(0).Pointer(0).Int64(0).Int32(0)
		p, size := args.Packed()
		launch := func() error { return c.api.Launch(f, one, driver.Dim{X: 256, Y: 1, Z: 1}, 0, c.stream, p, size) }
		c.step("cuLaunchKernel, the first", func() (string, error) { return "", errors.Join(launch(), c.api.Synchronize(c.stream)) })
		c.step("cuLaunchKernel, 500 in a row", func() (string, error) {
			start := time.Now()
			for range 500 {
				if err := launch(); err != nil {
					return "", err
				}
			}
			issued := time.Since(start)
			err := c.api.Synchronize(c.stream)
			return fmt.Sprintf("%.2f µs to issue one, %.2f µs to run", micro(issued)/500, micro(time.Since(start))/500), err
		})
		runtime.KeepAlive(args)
		c.step("cuMemFree of the predicate", func() (string, error) { return "", c.api.Free(word) })
	}
	c.memory("cuMemGetInfo after a kernel")
	c.step("cuModuleUnload", func() (string, error) { return "", c.api.UnloadModule(m) })
}

// matrix measures the rate of a square product of each type, to which other rates are compared.
func (c *contacts) matrix() {
	var lib blas.Library
	if !c.step("cublasLtCreate", func() (_ string, err error) { lib, err = c.products(); return "", err }) {
		return
	}
	c.memory("cuMemGetInfo after cuBLASLt's handle")
	n := c.edge
	at, err := c.api.Alloc(3*4*n*n + squareWork)
	if c.step("cuMemAlloc for a product", func() (string, error) { return "", err }) {
		c.step("its operands", func() (string, error) { return "", c.randomize(at, 3*4*n*n) })
		for _, t := range []graph.DType{graph.F32, graph.BF16, graph.F16} {
			c.step(fmt.Sprintf("cublasLtMatmul, %d cubed, %v", n, t), func() (string, error) {
				m := blas.Matrix{Type: t, Ld: n}
				next := driver.Address(4 * n * n)
				call, err := lib.Bind(blas.Product{M: n, N: n, K: n, A: m, B: m, C: m, Workspace: squareWork}, blas.Places{A: at, B: at + next, C: at + 2*next, Work: at + 3*next})
				if err != nil {
					return "", err
				}
				d, err := c.steady(func() error { return call.Enqueue(c.stream) })
				return fmt.Sprintf("%.1f TFLOP/s", 2*float64(n)*float64(n)*float64(n)/max(d.Seconds(), 1e-9)/1e12), err
			})
		}
		c.step("cuMemFree of a product's operands", func() (string, error) { return "", c.api.Free(at) })
	}
	c.memory("cuMemGetInfo after products")
	c.step("cublasLtDestroy", func() (string, error) { return "", lib.Close() })
}
