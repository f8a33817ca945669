package vec

import (
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

//go:generate go run -C ../asmgen ./vec -set elementwise -pkg vec -out ../vec/elementwise_amd64.s
//go:generate go run -C ../asmgen ./vec -set rows -pkg vec -out ../vec/rows_amd64.s
//go:generate go run -C ../asmgen ./vec -set columns -pkg vec -out ../vec/columns_amd64.s
//go:generate go run -C ../asmgen ./vec -set optim -pkg vec -out ../vec/optim_amd64.s
//go:generate go run -C ../asmgen ./vec -set sums -pkg vec -out ../vec/sums_amd64.s
//go:generate go run -C ../asmgen ./vec -set convert -pkg vec -out ../vec/convert_amd64.s
//go:generate go run -C ../asmgen ./vec -set dropout -pkg vec -out ../vec/dropout_amd64.s
//go:generate go run -C ../asmgen ./vec -set quant8 -pkg vec -out ../vec/quant8_amd64.s
//go:generate go run -C ../asmgen ./vec -set int8 -pkg vec -out ../vec/int8_amd64.s

// table has the assembly of one SIMD level; all entries or none are set, but for those
// of AVX-512 alone. An index
// [2] tells writing (0) from accumulating (1). Elementwise functions take whole
// groups of 16 elements; row and column functions take any number from 1.
type table struct {
	on bool

	binary  [3][2]func(y, a, b *float32, n int) // by op
	scale   [2]func(y, x *float32, n int, f float32)
	fill    [2]func(y *float32, n int, v float32)
	act     [numActs]func(y, x *float32, n int)
	actGrad [numActs][2]func(dx, dy, x *float32, n int)

	swiglu     func(y, gate, up *float32, n int)
	swigluGrad func(dgate, dup, dy, gate, up *float32, n int)
	rotate     [2]func(y1, y2, x1, x2, cos, sin *float32, n int) // forward, back

	rowSum      func(x *float32, n int) float32
	rowSqDiff   func(x *float32, n int, mean float32) float32
	rowDot      func(x, y *float32, n int) float32
	rowMax      func(x *float32, n int) float32
	rowExpSum   func(x *float32, n int, m float32) float32
	rowExpStore func(y, x *float32, n int, m float32) float32
	expScale    func(y, x *float32, n int, m, f float32)
	softmaxGrad [2]func(dx, dy, y *float32, n int, dot float32)

	normApply     func(y, x, gamma, beta *float32, n int, mean, rstd float32)
	normGradSums  func(dy, x, gamma *float32, n int, mean, rstd float32) (s1, s2 float32)
	normGradApply [2]func(dx, dy, x, gamma *float32, n int, mean, rstd, m1, m2 float32)
	rmsApply      func(y, x, gamma *float32, n int, rstd float32)
	rmsGradSum    func(dy, x, gamma *float32, n int, rstd float32) float32
	rmsGradApply  [2]func(dx, dy, x, gamma *float32, n int, rstd, m float32)

	colSum64, colSum16     func(y, x *float32, rows, stride, cols int)
	normCols64, normCols16 func(y, dy, x, mean, rstd *float32, rows, stride, cols int)
	rmsCols64, rmsCols16   func(y, dy, x, rstd *float32, rows, stride, cols int)

	adamw         [3]func(p, d, m, v *float32, n int, s *float32, low *uint16) // by Half
	adamw8        [3]func(p, d *float32, m, v *byte, mo, vo *float32, n int, s *float32, low *uint16, mt, vt *float32)
	adamw8Behind  [3]func(p, d *float32, m, v *byte, to, behind *float32, s *float32, low *uint16, mt, vt *float32) // AVX-512 alone
	q8write       [2]func(codes *byte, x *float32, n int, inverse float32, t *float32)                              // unsigned, signed; n a multiple of 64
	lambDirection func(p, d, m, v *float32, n int, s *float32)
	axpy          func(y, x *float32, n int, f float32)
	momentum      [3]func(p, d, b *float32, n int, s *float32) // none, plain, Nesterov

	sumTree     [9][2]func(dst *float32, srcs *[]float32, off, n int) // by number of sources, 2 to 8
	sumLeaves   [5][2]func(dst *float32, srcs *[]float32, off, n int) // by number of sources, 1 to 4
	sumTreeMany [2]func(dst *float32, srcs *[]float32, r, off, n int) // n a multiple of 64
	blockSum    func(x *float32) float64
	blockSqSum  func(x *float32) float64

	drop func(y, x *float32, n int, keys *uint32, c0, c1, c2, c3, threshold uint32, scale float32) // n a multiple of 64

	int8Top   func(x *float32, n int) float32
	int8Codes func(codes *byte, x *float32, n int, inverse float32)
	int8Read  func(x *float32, codes *byte, n int, scale float32)
	// Down 64 columns; stride in bytes, in elements.
	int8ColumnTops  func(tops, x *uint16, rows, stride int)
	int8ColumnCodes [2]func(codes *byte, x *uint16, rows, stride int, inverses *float32) // BF16, F16

	narrow [2]func(dst *uint16, src *float32, n int) // BF16, F16; n a multiple of 32
	widen  [2]func(dst *float32, src *uint16, n int)
}

// tables are filled by init on processors that have assembly.
var tables [level.AVX512 + 1]table

// simd is the table in use.
var simd = &tables[level.Current()]

// fast reports whether the assembly serves T and n elements.
func fast[T num.Float](n int) bool {
	var z T
	return unsafe.Sizeof(z) == 4 && n > 0 && simd.on
}

// groups returns how many of n elements the elementwise assembly takes: whole
// groups of 16, or none.
func groups[T num.Float](n int) int {
	if !fast[T](n) {
		return 0
	}
	return n &^ 15
}

// ptr returns the address of a slice's elements, which are float32.
func ptr[T num.Float](x []T) *float32 { return (*float32)(unsafe.Pointer(unsafe.SliceData(x))) }

func index(b bool) int {
	if b {
		return 1
	}
	return 0
}
