package attn

import (
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
)

//go:generate go run -C ../asmgen ./attn -pkg attn -out ../attn/attn_amd64.s

type fptr = *float32

func at(p fptr, elements int) fptr {
	return (fptr)(unsafe.Add(unsafe.Pointer(p), 4*elements))
}

// productArgs is a tile product; strides and steps are in bytes.
type productArgs struct {
	a, b, c    fptr
	alpha      fptr // a factor a row for init 2
	aRow, aK   int
	bK         int
	cRow       int
	aBlock     int // from a block of 4 rows to the next
	bBlock     int
	blocks     int
	k          int     // steps of the first block's chains, without the tail's
	kStep      int     // more steps from a block to the next
	head, tail int     // see the generator; 3 and 0 for a rectangle
	init       int     // 0: chains start at +0, 1: at c, 2: at α·c
	pre        uintptr // rows to prefetch meanwhile, or 0; may run past their end
	preRow     int
}

// softmaxArgs is rows (a multiple of 16) of KeyTile scores that become
// probabilities.
type softmaxArgs struct {
	scores  fptr // (rows, KeyTile)
	m       fptr // (rows) running maximum
	l       fptr // (rows, 16) running sum
	alpha   fptr // (rows) out: the factor of what was summed before
	c       fptr // (rows) scratch
	rows    int
	visible int // keys that the first row sees, at least 1
	step    int // more keys from a row to the next
	scale   float32
	_       float32
}

// scoreGradArgs is rows of KeyTile scores that become probabilities, and of dp
// that become ds.
type scoreGradArgs struct {
	scores     fptr // (rows, KeyTile)
	dp         fptr // (rows, KeyTile)
	lse, delta fptr // (rows)
	rows       int
	_          [2]int
	scale      float32
	_          float32
}

type transposeArgs struct {
	in, out fptr // (64, columns) at stride inRow; (columns, 64)
	inRow   int  // bytes
	columns int  // a multiple of 8
}

type finishArgs struct {
	acc     fptr // (rows, columns)
	l       fptr // (rows, 16)
	sums    fptr // (rows), out
	rows    int
	columns int // a multiple of 16
}

type dotsArgs struct {
	x, y, out  fptr
	xRow, yRow int // bytes
	rows       int
	columns    int // a multiple of 16
}

type copyArgs struct {
	in, out       fptr
	inRow, outRow int // bytes
	rows          int
	columns       int // a multiple of 16
}

// product does a tile product of columns (a multiple of 16) at a level.
func product(l level.Level, args productArgs, columns int) {
	for columns > 0 {
		w := 16
		a := args // the kernels step through alpha in place
		if l == level.AVX512 {
			w = min(columns, 64)
			switch w {
			case 64:
				productAVX512W4(&a)
			case 48:
				productAVX512W3(&a)
			case 32:
				productAVX512W2(&a)
			default:
				productAVX512W1(&a)
			}
		} else {
			productAVX2(&a)
		}
		args.b, args.c = at(args.b, w), at(args.c, w)
		if args.pre != 0 {
			args.pre += uintptr(4 * w)
		}
		columns -= w
	}
}

func softmax(l level.Level, args *softmaxArgs) {
	if l == level.AVX512 {
		softmaxAVX512(args)
	} else {
		softmaxAVX2(args)
	}
}

func scoreGrad(l level.Level, args *scoreGradArgs) {
	if l == level.AVX512 {
		scoreGradAVX512(args)
	} else {
		scoreGradAVX2(args)
	}
}
