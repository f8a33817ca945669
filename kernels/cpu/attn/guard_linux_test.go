package attn

import (
	"math/rand/v2"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// fenced copies x to new memory that ends, or begins, at an inaccessible page.
func fenced(t *testing.T, x []float32, atEnd bool) []float32 {
	page := syscall.Getpagesize()
	body := (4*len(x) + page - 1) / page * page
	m, err := syscall.Mmap(-1, 0, body+2*page, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { _ = syscall.Munmap(m) })
	require.NoError(t, syscall.Mprotect(m[:page], syscall.PROT_NONE))
	require.NoError(t, syscall.Mprotect(m[page+body:], syscall.PROT_NONE))
	from := page
	if atEnd {
		from = page + body - 4*len(x)
	}
	if len(x) == 0 {
		return nil
	}
	out := unsafe.Slice((*float32)(unsafe.Pointer(&m[from])), len(x))
	copy(out, x)
	return out
}

// No kernel reads or writes outside its operands: each operand borders an inaccessible page, once
// at its end and once at its beginning.
func TestGuardPages(t *testing.T) {
	everyLevel(t, func(t *testing.T, pl *pool.Pool) {
		for i, s := range shapes {
			want := newProblem[float32](rand.New(rand.NewPCG(16, uint64(i))), s, false)
			want.run(t, pl)
			for _, atEnd := range []bool{false, true} {
				got := newProblem[float32](rand.New(rand.NewPCG(16, uint64(i))), s, false)
				for _, x := range []*[]float32{&got.q, &got.k, &got.v, &got.y, &got.dy, &got.lse, &got.dq, &got.dk, &got.dv, &got.workF, &got.workB} {
					*x = fenced(t, *x, atEnd)
				}
				got.run(t, pl)
				requireSame(t, want.result(), got.result(), s.String())
			}
		}
	})
}
