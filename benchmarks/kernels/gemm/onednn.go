//go:build unix

package main

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// oneDNN has two ways to compute a product of plain matrices: the BLAS-like calls, and the matmul
// primitive on plain layouts. Which is faster depends on shape and type, so each shape is measured
// against the faster one.
type oneDNN struct {
	gemmBF16 func(ta, tb byte, m, n, k int64, alpha float32, a *uint16, lda int64, b *uint16, ldb int64, beta float32, c *float32, ldc int64) int32
	gemmU8S8 func(ta, tb, oc byte, m, n, k int64, alpha float32, a *uint8, lda int64, ao uint8, b *int8, ldb int64, bo int8, beta float32, c *int32, ldc int64, co *int32) int32
	engine   uintptr
	stream   uintptr
	lib      uintptr
}

// call calls a function of the library. Pointers must be converted in the call,
// so that what they point to is on the heap: a stack may move.
//
//go:uintptrescapes
func (d *oneDNN) call(name string, args ...uintptr) error {
	f, err := purego.Dlsym(d.lib, name)
	if err != nil {
		return err
	}
	if r, _, _ := purego.SyscallN(f, args...); int32(r) != 0 {
		return fmt.Errorf("%s: status %d", name, int32(r))
	}
	return nil
}

func openDNN(op string) (*library, error) {
	h, err := dlopen("libdnnl.so.2", "libdnnl.so")
	if err != nil {
		return nil, err
	}
	omp, err := dlopen("libgomp.so.1")
	if err != nil {
		return nil, err
	}
	d := &oneDNN{lib: h}
	purego.RegisterLibFunc(&d.gemmBF16, h, "dnnl_gemm_bf16bf16f32")
	purego.RegisterLibFunc(&d.gemmU8S8, h, "dnnl_gemm_u8s8s32")
	var threads func(int32)
	purego.RegisterLibFunc(&threads, omp, "omp_set_num_threads")
	var version func() *[3]int32
	purego.RegisterLibFunc(&version, h, "dnnl_version")
	v := version()
	const cpu = 1
	if err := d.call("dnnl_engine_create", uintptr(unsafe.Pointer(&d.engine)), cpu, 0); err != nil {
		return nil, err
	}
	const inOrder = 1
	if err := d.call("dnnl_stream_create", uintptr(unsafe.Pointer(&d.stream)), d.engine, inOrder); err != nil {
		return nil, err
	}
	l := &library{name: fmt.Sprintf("oneDNN %d.%d.%d", v[0], v[1], v[2]), setThreads: func(n int) { threads(int32(n)) }}
	l.prepare = func(s gemm.Spec, pl *pool.Pool) (*product, error) {
		if op == "bf16" {
			return d.bf16(s, pl)
		}
		return d.int8(s, pl)
	}
	return l, nil
}

const dnnBF16, dnnF32, dnnS32, dnnS8, dnnU8 = 2, 3, 4, 5, 6 // dnnl_data_type_t

// matmul returns a call of the matmul primitive on plain layouts. The caller keeps the matrices
// alive: the library's pointers to them do not.
func (d *oneDNN) matmul(s gemm.Spec, ta, tb, tc uintptr, a, b, c unsafe.Pointer) (func() error, error) {
	// The structs of 2.6 are plain memory: a dnnl_memory_desc_t has less than
	// 1 KiB, a dnnl_matmul_desc_t less than 8.
	var mds [3][2048]byte
	for i, m := range []struct {
		rows, cols int
		t          uintptr
		trans      bool
	}{{s.M, s.K, ta, s.TransA}, {s.K, s.N, tb, s.TransB}, {s.M, s.N, tc, false}} {
		dims := [12]int64{int64(m.rows), int64(m.cols)}
		strides := [12]int64{int64(m.cols), 1}
		if m.trans {
			strides = [12]int64{1, int64(m.rows)}
		}
		if err := d.call("dnnl_memory_desc_init_by_strides", uintptr(unsafe.Pointer(&mds[i])), 2, uintptr(unsafe.Pointer(&dims)), m.t, uintptr(unsafe.Pointer(&strides))); err != nil {
			return nil, err
		}
	}
	desc := make([]byte, 16384)
	if err := d.call("dnnl_matmul_desc_init", uintptr(unsafe.Pointer(&desc[0])), uintptr(unsafe.Pointer(&mds[0])), uintptr(unsafe.Pointer(&mds[1])), 0, uintptr(unsafe.Pointer(&mds[2]))); err != nil {
		return nil, err
	}
	var pd, prim uintptr
	if err := d.call("dnnl_primitive_desc_create", uintptr(unsafe.Pointer(&pd)), uintptr(unsafe.Pointer(&desc[0])), 0, d.engine, 0); err != nil {
		return nil, err
	}
	if err := d.call("dnnl_primitive_create", uintptr(unsafe.Pointer(&prim)), pd); err != nil {
		return nil, err
	}
	type arg struct {
		index  int32
		memory uintptr
	}
	const src, weights, dst = 1, 33, 17
	args := []arg{{index: src}, {index: weights}, {index: dst}}
	for i, p := range []unsafe.Pointer{a, b, c} {
		if err := d.call("dnnl_memory_create", uintptr(unsafe.Pointer(&args[i].memory)), uintptr(unsafe.Pointer(&mds[i])), d.engine, uintptr(p)); err != nil {
			return nil, err
		}
	}
	return func() error {
		if err := d.call("dnnl_primitive_execute", prim, d.stream, 3, uintptr(unsafe.Pointer(&args[0]))); err != nil {
			return err
		}
		return d.call("dnnl_stream_wait", d.stream)
	}, nil
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func status(r int32) {
	if r != 0 {
		panic(fmt.Sprintf("oneDNN: status %d", r))
	}
}

func letter(trans bool) byte {
	if trans {
		return 'T'
	}
	return 'N'
}

func lds(s gemm.Spec) (lda, ldb int64) {
	lda, ldb = int64(s.K), int64(s.N)
	if s.TransA {
		lda = int64(s.M)
	}
	if s.TransB {
		ldb = int64(s.K)
	}
	return lda, ldb
}

func (d *oneDNN) bf16(s gemm.Spec, pl *pool.Pool) (*product, error) {
	s.In, s.Out = gemm.BF16, gemm.F32
	p, err := gemm.New(s)
	if err != nil {
		return nil, err
	}
	half := func(n int) []uint16 {
		v := make([]uint16, n)
		for i, x := range random(n) {
			v[i] = uint16(uint32(int32(x*1024))&0x7f | 0x3f80)
		}
		return v
	}
	a, b, c, e := half(s.M*s.K), half(s.K*s.N), random(s.M*s.N), random(s.M*s.N)
	work := filled(gemm.Workspace(s))
	lda, ldb := lds(s)
	matmul, err := d.matmul(s, dnnBF16, dnnBF16, dnnF32, unsafe.Pointer(&a[0]), unsafe.Pointer(&b[0]), unsafe.Pointer(&e[0]))
	if err != nil {
		return nil, err
	}
	return &product{
		ours: func() { must(p.RunBytes(pl, gemm.Bytes(a), gemm.Bytes(b), gemm.Bytes(c), nil, work)) },
		theirs: faster(func() {
			status(d.gemmBF16(letter(s.TransA), letter(s.TransB), int64(s.M), int64(s.N), int64(s.K), 1, &a[0], lda, &b[0], ldb, 0, &e[0], int64(s.N)))
		}, func() { must(matmul()); runtime.KeepAlive([]any{a, b, e}) }),
	}, nil
}

func (d *oneDNN) int8(s gemm.Spec, pl *pool.Pool) (*product, error) {
	s.In, s.Out = gemm.U8S8, gemm.I32
	p, err := gemm.New(s)
	if err != nil {
		return nil, err
	}
	r := rand.New(rand.NewPCG(2, 2))
	a, b, c, e := make([]uint8, s.M*s.K), make([]int8, s.K*s.N), make([]int32, s.M*s.N), make([]int32, s.M*s.N)
	for i := range a {
		a[i] = uint8(r.Uint32())
	}
	for i := range b {
		b[i] = int8(r.Uint32())
	}
	for i := range c {
		c[i], e[i] = 1, 1
	}
	work := filled(gemm.Workspace(s))
	lda, ldb := lds(s)
	var offset int32
	matmul, err := d.matmul(s, dnnU8, dnnS8, dnnS32, unsafe.Pointer(&a[0]), unsafe.Pointer(&b[0]), unsafe.Pointer(&e[0]))
	if err != nil {
		return nil, err
	}
	return &product{
		ours: func() { must(p.RunBytes(pl, gemm.Bytes(a), gemm.Bytes(b), gemm.Bytes(c), nil, work)) },
		theirs: faster(func() {
			status(d.gemmU8S8(letter(s.TransA), letter(s.TransB), 'F', int64(s.M), int64(s.N), int64(s.K), 1, &a[0], lda, 0, &b[0], ldb, 0, 0, &e[0], int64(s.N), &offset))
		}, func() { must(matmul()); runtime.KeepAlive([]any{a, b, e}) }),
	}, nil
}

// faster returns the function whose best of three calls is shorter.
func faster(f, g func()) func() {
	best := func(f func()) float64 {
		t := measure(f, timing{})
		for range 2 {
			t = min(t, measure(f, timing{}))
		}
		return t
	}
	if best(f) <= best(g) {
		return f
	}
	return g
}
