//go:build unix

package main

import (
	"fmt"
	"math/rand/v2"
	"os"

	"github.com/ebitengine/purego"

	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// library is the other side of a comparison.
type library struct {
	name       string
	setThreads func(int)
	prepare    func(gemm.Spec, *pool.Pool) (*product, error)
}

func open(op string) (*library, error) {
	switch op {
	case "f32":
		return openBLAS()
	case "bf16", "int8":
		return openDNN(op)
	}
	return nil, fmt.Errorf("-op %q: it is f32, bf16 or int8", op)
}

func dlopen(names ...string) (uintptr, error) {
	var err error
	for _, n := range names {
		var h uintptr
		if h, err = purego.Dlopen(n, purego.RTLD_NOW|purego.RTLD_GLOBAL); err == nil {
			return h, nil
		}
	}
	return 0, err
}

func openBLAS() (*library, error) {
	for _, e := range []string{"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"} {
		if v, set := os.LookupEnv(e); set {
			return nil, fmt.Errorf("%s=%s makes OpenBLAS slower than it is: unset it", e, v)
		}
	}
	h, err := dlopen("libopenblas.so.0", "libopenblas.so")
	if err != nil {
		return nil, err
	}
	const rowMajor, noTrans, trans = 101, 111, 112
	var sgemm func(order, ta, tb, m, n, k int32, alpha float32, a *float32, lda int32, b *float32, ldb int32, beta float32, c *float32, ldc int32)
	var threads func(int32)
	var core func() string
	purego.RegisterLibFunc(&sgemm, h, "cblas_sgemm")
	purego.RegisterLibFunc(&threads, h, "openblas_set_num_threads")
	purego.RegisterLibFunc(&core, h, "openblas_get_corename")
	l := &library{name: "OpenBLAS, core " + core(), setThreads: func(n int) { threads(int32(n)) }}
	l.prepare = func(s gemm.Spec, pl *pool.Pool) (*product, error) {
		p, err := gemm.New(s)
		if err != nil {
			return nil, err
		}
		a, b, c, d := random(s.M*s.K), random(s.K*s.N), random(s.M*s.N), random(s.M*s.N)
		work := filled(gemm.Workspace(s))
		ta, lda := int32(noTrans), s.K
		if s.TransA {
			ta, lda = trans, s.M
		}
		tb, ldb := int32(noTrans), s.N
		if s.TransB {
			tb, ldb = trans, s.K
		}
		return &product{
			ours: func() { must(p.Run(pl, a, b, c, nil, work)) },
			theirs: func() {
				sgemm(rowMajor, ta, tb, int32(s.M), int32(s.N), int32(s.K), 1, &a[0], int32(lda), &b[0], int32(ldb), 0, &d[0], int32(s.N))
			},
		}, nil
	}
	return l, nil
}

// ourF32 returns our float32 product of a shape.
func ourF32(s gemm.Spec, pl *pool.Pool) (func(), error) {
	p, err := gemm.New(s)
	if err != nil {
		return nil, err
	}
	a, b, c, work := random(s.M*s.K), random(s.K*s.N), random(s.M*s.N), filled(gemm.Workspace(s))
	return func() { must(p.Run(pl, a, b, c, nil, work)) }, nil
}

func random(n int) []float32 {
	r := rand.New(rand.NewPCG(1, uint64(n)))
	v := make([]float32, n)
	for i := range v {
		v[i] = r.Float32() - 0.5
	}
	return v
}

// filled returns memory that was written to. The kernel maps all unwritten pages to one page of
// zeros.
func filled(n int64) []byte {
	v := make([]byte, n+1)[:n]
	for i := range v {
		v[i] = byte(i)
	}
	return v
}
