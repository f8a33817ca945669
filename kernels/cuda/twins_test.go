//go:build linux

package cuda

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// twinKernels wraps each warp instruction of flash.cuh in a kernel, which loads a lane's registers
// from memory and stores them.
const twinKernels = `
#define TWINS(T) \
	KERNEL(32, twin_mma_##T, const u32 *a, const u32 *b, float *d) { \
		const int l = threadIdx.x; \
		u32 x[4], y[2]; \
		for (int i = 0; i < 4; i++) x[i] = a[4 * l + i]; \
		for (int i = 0; i < 2; i++) y[i] = b[2 * l + i]; \
		mma(d + 4 * l, x, y, T()); \
	} \
	KERNEL(32, twin_two_##T, const float *low, const float *high, u32 *to) { \
		to[threadIdx.x] = two(low[threadIdx.x], high[threadIdx.x], T()); \
	}
TWINS(bf16)
TWINS(f16)
KERNEL(32, twin_ldmatrix, const u16 *m, const int *row, u32 *to) {
	DYNAMIC_SHARED(u16, s);
	for (int i = threadIdx.x; i < 32 * 8; i += 32) s[i] = m[i];
	__syncthreads();
	ldmatrix<PLAIN>(to + 4 * threadIdx.x, s + row[threadIdx.x]);
	ldmatrix<TRANSPOSED>(to + 128 + 4 * threadIdx.x, s + row[threadIdx.x]);
}
`

// twin runs one of those kernels over a warp. Operands are words; the last one is the output, which
// it returns.
func (b *bench) twin(t *testing.T, name string, shared int, operands ...[]uint32) []uint32 {
	f, err := b.lib.functionOf("twins.cu", func() (string, error) {
		var text string
		for _, part := range []string{prelude, "flash.cuh"} {
			s, err := sources.ReadFile("src/" + part)
			if err != nil {
				return "", err
			}
			text += string(s)
		}
		return text + twinKernels, nil
	}, name, shared)
	require.NoError(t, err)
	args := new(driver.Args)
	var last *arena
	for _, words := range operands {
		last = b.newArena(t, int64(4*len(words)))
		for i, w := range words {
			binary.LittleEndian.PutUint32(last.bytes()[4*i:], w)
		}
		last.upload(t)
		args.Pointer(last.at)
	}
	p, size := args.Packed()
	one := driver.Dim{X: 1, Y: 1, Z: 1}
	require.NoError(t, b.api.Launch(f, one, driver.Dim{X: 32, Y: 1, Z: 1}, shared, b.stream, p, size))
	last.download(t)
	got := make([]uint32, last.size/4)
	for i := range got {
		got[i] = binary.LittleEndian.Uint32(last.bytes()[4*i:])
	}
	return got
}

// halves are the two 16-bit types of the tensor cores.
var halves = []struct {
	name   string
	narrow func(float32) uint16
	widen  func(uint16) float32
}{{"bf16", num.BF16, num.FromBF16}, {"f16", num.F16, num.FromF16}}

func pair(low, high uint16) uint32 { return uint32(low) | uint32(high)<<16 }

// A tensor-core product has the fragment layout of the PTX manual. The twin adds in fp32 in the
// order of k. With integers every order gives the same sum, so a GPU must agree too.
func TestTensorProductIsItsTwin(t *testing.T) {
	for _, whole := range []bool{true, false} {
		for _, h := range halves {
			b := newBench(t)
			if !whole && b.products == nil {
				continue // a GPU adds in an unknown order
			}
			rng := rand.New(rand.NewPCG(3, 4))
			draw := func() uint16 {
				if whole {
					return h.narrow(float32(rng.IntN(17) - 8))
				}
				return h.narrow(float32(rng.NormFloat64()))
			}
			var a [16][16]uint16
			var w [16][8]uint16 // k by n
			var d [16][8]float32
			for i := range a {
				for k := range a[i] {
					a[i][k] = draw()
				}
				for n := range w[i] {
					w[i][n], d[i][n] = draw(), h.widen(draw())
				}
			}
			fa, fb, fd := make([]uint32, 128), make([]uint32, 64), make([]uint32, 128)
			for lane := range 32 {
				g, c := lane/4, 2*(lane%4)
				for i := range 4 { // rows g and g+8, then the second half of k
					row, k := g+i%2*8, c+i/2*8
					fa[4*lane+i] = pair(a[row][k], a[row][k+1])
					fd[4*lane+i] = math.Float32bits(d[g+i/2*8][c+i%2])
				}
				for i := range 2 {
					fb[2*lane+i] = pair(w[c+8*i][g], w[c+8*i+1][g])
				}
			}
			got := b.twin(t, "twin_mma_"+h.name, 0, fa, fb, fd)
			for row := range d {
				for n, sum := range d[row] {
					for k := range 16 {
						sum = num.Fma32(h.widen(a[row][k]), h.widen(w[k][n]), sum)
					}
					at := 4*(row%8*4+n/2) + row/8*2 + n%2
					require.Equal(t, math.Float32bits(sum), got[at], "%s, row %d, column %d", h.name, row, n)
				}
			}
		}
	}
}

// ldmatrix gives lane 4g+t the columns 2t and 2t+1 of row g of each of four matrices, whose rows
// may be anywhere. Transposed, it gives rows 2t and 2t+1 of column g.
func TestMatrixLoadIsItsTwin(t *testing.T) {
	b := newBench(t)
	rng := rand.New(rand.NewPCG(5, 6))
	words, rows := make([]uint32, 32*8/2), make([]uint32, 32)
	for i := range words {
		words[i] = pair(uint16(2*i), uint16(2*i+1)) // an element is its index
	}
	for i, at := range rng.Perm(32) {
		rows[i] = uint32(8 * at)
	}
	element := func(matrix, row, col int) uint16 { return uint16(rows[8*matrix+row]) + uint16(col) }
	got := b.twin(t, "twin_ldmatrix", 2*32*8, words, rows, make([]uint32, 256))
	for lane := range 32 {
		g, c := lane/4, 2*(lane%4)
		for m := range 4 {
			require.Equal(t, pair(element(m, g, c), element(m, g, c+1)), got[4*lane+m], "lane %d, matrix %d", lane, m)
			require.Equal(t, pair(element(m, c, g), element(m, c+1, g)), got[128+4*lane+m], "lane %d, matrix %d, turned", lane, m)
		}
	}
}

// Two values are rounded to nearest, ties to even, into one word, the first in its low half.
func TestPairIsRoundedAsEach(t *testing.T) {
	for _, h := range halves {
		b := newBench(t)
		rng := rand.New(rand.NewPCG(7, 8))
		low, high := make([]uint32, 32), make([]uint32, 32)
		for i := range low {
			x := math.Float32bits(float32(rng.NormFloat64()))
			low[i], high[i] = x, x&^0xffff|0x8000 // the second lies between two of bf16
			if h.name == "f16" {
				high[i] = x&^0x1fff | 0x1000
			}
		}
		for i, special := range []float32{0, float32(math.Copysign(0, -1)), float32(math.Inf(1)), 65519, 65520, 1e-8, 6e-8} {
			low[i] = math.Float32bits(special)
		}
		got := b.twin(t, "twin_two_"+h.name, 0, low, high, make([]uint32, 32))
		for i := range low {
			want := pair(h.narrow(math.Float32frombits(low[i])), h.narrow(math.Float32frombits(high[i])))
			require.Equal(t, want, got[i], "%s of %v and %v", h.name, math.Float32frombits(low[i]), math.Float32frombits(high[i]))
		}
	}
}
