//go:build linux

// Package blastest is a double of the GPU's matrix products. It computes them in the driver
// double's memory, in stream order.
package blastest

import (
	"fmt"
	"math"
	"sync"
	"unsafe"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
)

// Driver runs work in stream order and gives access to its memory; drivertest.Driver implements it.
type Driver interface {
	Run(s driver.Stream, label string, f func() error) error
	Bytes(at driver.Address, n int64) ([]byte, error)
	Take(call string, bytes int64) error
}

// Library is the double. It sums in fp64 and rounds once. It fills all of its workspace with NaN,
// because a library may leave anything there.
type Library struct {
	// Unsupported, if not nil, reports the products for which there is no algorithm.
	Unsupported func(p blas.Product) bool
	// FirstRun returns the device memory that the library allocates, and never frees, when a
	// product first runs: its kernels, which are loaded then. nil means none.
	FirstRun func(p blas.Product) int64

	driver Driver

	mu    sync.Mutex
	bound []blas.Product
	ran   map[blas.Product]bool
}

var _ blas.Library = (*Library)(nil)

// New returns a double of the library on a driver double.
func New(d Driver) *Library { return &Library{driver: d, ran: map[blas.Product]bool{}} }

// Bound returns all products bound so far.
func (l *Library) Bound() []blas.Product {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]blas.Product(nil), l.bound...)
}

// Close implements blas.Library.
func (l *Library) Close() error { return nil }

// Bind implements blas.Library.
func (l *Library) Bind(p blas.Product, at blas.Places) (blas.Call, error) {
	if err := p.Validate(at); err != nil {
		return nil, err
	}
	if l.Unsupported != nil && l.Unsupported(p) {
		return nil, fmt.Errorf("%s: %w", p, blas.ErrUnsupported)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bound = append(l.bound, p)
	return &call{p: p, at: at, driver: l.driver, lib: l}, nil
}

type call struct {
	p      blas.Product
	at     blas.Places
	driver Driver
	lib    *Library
}

func (c *call) Enqueue(s driver.Stream) error {
	if err := c.lib.load(c.p); err != nil {
		return err
	}
	return c.driver.Run(s, "cublasLtMatmul", c.run)
}

// load allocates the memory of a product's first run.
func (l *Library) load(p blas.Product) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.FirstRun == nil || l.ran[p] {
		return nil
	}
	l.ran[p] = true
	return l.driver.Take("cublasLtMatmul", l.FirstRun(p))
}

// elements is an operand in memory: f32 values, or the bits of 16-bit values.
type elements struct {
	f32  []float32
	half []uint16
	m    blas.Matrix
}

func (c *call) operand(m blas.Matrix, rows, cols int64, at driver.Address) (elements, error) {
	n := m.Elems(rows, cols)
	mem, err := c.driver.Bytes(at, n*m.Type.Size())
	if err != nil {
		return elements{}, err
	}
	p := unsafe.Pointer(unsafe.SliceData(mem))
	if m.Type != graph.F32 {
		return elements{half: unsafe.Slice((*uint16)(p), n), m: m}, nil
	}
	return elements{f32: unsafe.Slice((*float32)(p), n), m: m}, nil
}

func (e elements) get(i int64) float32 {
	switch {
	case e.half == nil:
		return e.f32[i]
	case e.m.Type == graph.F16:
		return num.FromF16(e.half[i])
	}
	return num.FromBF16(e.half[i])
}

func (e elements) set(i int64, v float32) {
	switch {
	case e.half == nil:
		e.f32[i] = v
	case e.m.Type == graph.F16:
		e.half[i] = num.F16(v)
	default:
		e.half[i] = num.BF16(v)
	}
}

// lines returns the n rows of length k after op, widened, or the columns if byColumn is set.
func (e elements) lines(n, k int64, byColumn bool) []float64 {
	v := make([]float64, n*k)
	for i := range n {
		for j := range k {
			at := i*e.m.Ld + j
			if e.m.Trans != byColumn {
				at = j*e.m.Ld + i
			}
			v[i*k+j] = float64(e.get(at))
		}
	}
	return v
}

// geluDerivative returns the derivative of x/2·(1 + tanh u), with u = √(2/π)·(x + 0.044715·x³).
func geluDerivative(x float64) float64 {
	const root, cube = 0.7978845608028654, 0.044715
	t := math.Tanh(root * (x + cube*x*x*x))
	return (1+t)/2 + x/2*(1-t*t)*root*(1+3*cube*x*x)
}

// gelu returns x/2·(1 + tanh u); see geluDerivative.
func gelu(x float64) float64 {
	const root, cube = 0.7978845608028654, 0.044715
	return x / 2 * (1 + math.Tanh(root*(x+cube*x*x*x)))
}

// fourDots returns the dot products of a row with columns j to j+3 of n, which are adjacent in
// memory. Each addition waits for the previous one of its sum, so four sums at a time need a third
// of the time.
func fourDots(row, columns []float64, j, n int64) [4]float64 {
	k := int64(len(row))
	column := func(i int64) []float64 { return columns[min(j+i, n-1)*k:][:len(row)] }
	c0, c1, c2, c3 := column(0), column(1), column(2), column(3)
	var s0, s1, s2, s3 float64
	for i, x := range row {
		s0 += x * c0[i]
		s1 += x * c1[i]
		s2 += x * c2[i]
		s3 += x * c3[i]
	}
	return [4]float64{s0, s1, s2, s3}
}

func (c *call) run() error {
	p := c.p
	var operands [6]elements
	sums := p.SumsLen()
	for i, o := range []struct {
		m          blas.Matrix
		rows, cols int64
		at         driver.Address
	}{{p.A, p.M, p.K, c.at.A}, {p.B, p.K, p.N, c.at.B}, {p.C, p.M, p.N, c.at.C}, {blas.Matrix{Type: p.C.Type, Ld: p.N}, 1, p.N, c.at.Bias},
		{blas.Matrix{Type: p.C.Type, Ld: p.N}, p.M, p.N, c.at.Aux}, {blas.Matrix{Type: p.C.Type, Ld: sums}, 1, sums, c.at.Sums}} {
		if i == 3 && !p.Bias || i == 4 && !p.GELU && !p.DGELU || i == 5 && p.Sums == blas.NoSums {
			continue
		}
		var err error
		if operands[i], err = c.operand(o.m, o.rows, o.cols, o.at); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
	}
	a, b := operands[0].lines(p.M, p.K, false), operands[1].lines(p.N, p.K, true)
	out, bias, aux := operands[2], operands[3], operands[4]
	factor := map[blas.Side][]float64{blas.SumsA: a, blas.SumsB: b}[p.Sums]
	for i := range sums { // written, not accumulated
		var sum float64
		for _, x := range factor[i*p.K : (i+1)*p.K] {
			sum += x
		}
		operands[5].set(i, float32(sum))
	}
	var dots [4]float64
	for i := range p.M {
		for j := range p.N {
			if j%4 == 0 {
				dots = fourDots(a[i*p.K:(i+1)*p.K], b, j, p.N)
			}
			sum := dots[j%4]
			at := i*p.C.Ld + j
			if p.Bias {
				sum += float64(bias.get(j))
			}
			if p.GELU {
				aux.set(i*p.N+j, float32(sum))
				sum = gelu(sum)
			}
			if p.DGELU {
				sum *= geluDerivative(float64(aux.get(i*p.N + j)))
			}
			if p.Accumulate {
				sum += float64(out.get(at))
			}
			out.set(at, float32(sum))
		}
	}
	if p.Workspace > 0 {
		work, err := c.driver.Bytes(c.at.Work, p.Workspace)
		if err != nil {
			return fmt.Errorf("%s: workspace: %w", p, err)
		}
		work[0] = 0xff
		for n := 1; n < len(work); n *= 2 { // tens of MiB
			copy(work[n:], work[:n])
		}
	}
	return nil
}
