package gemm

import "github.com/spillway-ml/spillway/kernels/cpu/level"

// form is the content of a packed 32-bit unit and the instructions that use it.
type form uint8

const (
	formF32     form = iota
	formWide         // 16-bit floats, packed as float32
	formBF16         // pairs, VDPBF16PS
	formBytes        // fours of uint8 and int8, VPDPBUSD
	formFlipped      // the same where A is int8: 128 is added to it, and 128 times B's column sums taken away
	formPairs        // pairs of int16, VPMADDWD
	formTiles        // pairs or fours, AMX
)

// kernels is the set of one level for inputs of one type. Methods branch
// instead of going through function values, so that tiles stay on the stack.
type kernels struct {
	level              level.Level
	in                 Type
	form               form
	mr, nr             int // rows and columns of a tile of C in registers
	lanes              int // rows that transposeLanes takes at a time
	group              int // elements of k a unit
	depth              int // a sliver's depth is a multiple of it
	tileRows, tileCols int // of a task's tile; multiples of mr and nr
}

func (s *kernels) tiles() bool { return s.form == formTiles }

// packsOnTheWay says that microPack can be called.
func (s *kernels) packsOnTheWay() bool { return s.form == formF32 && s.level == level.AVX512 }

// rowsAtOnce is how many stored rows are packed before going back for the next
// sliver, so that few pages are open at a time.
const rowsAtOnce = 16

// allKernels returns the n sets for a type that may run at a level, the best
// first.
func allKernels(in Type, l level.Level) (all [3]kernels, n int) {
	base := kernels{level: l, in: in, mr: 2, nr: 8, lanes: 8, group: 1, depth: 1, tileRows: 168, tileCols: 128}
	switch l {
	case level.AVX512:
		base.mr, base.nr, base.lanes = 14, 32, 16
	case level.AVX2:
		base.mr, base.nr, base.lanes = 6, 16, 8
	}
	tiles := base
	tiles.form, tiles.mr, tiles.nr, tiles.depth, tiles.tileRows = formTiles, 32, 32, 16, 256
	pairs := base
	pairs.form, pairs.group = formPairs, 2
	with := func(k kernels, form form, group int, feature level.Feature) {
		if l == level.AVX512 && level.Has(feature) {
			k.form, k.group = form, group
			all[n] = k
			n++
		}
	}
	switch in {
	case F32:
		all[0] = base
		return all, 1
	case BF16:
		with(tiles, formTiles, 2, level.AMXBF16)
		with(base, formBF16, 2, level.AVX512BF16)
		base.form = formWide
		all[n] = base
		if n > 0 && all[n-1].form == formBF16 && !level.Has(level.FastBF16) {
			all[n-1], all[n] = all[n], all[n-1]
		}
		return all, n + 1
	case F16:
		base.form = formWide
		all[0] = base
		return all, 1
	case U8S8:
		with(tiles, formTiles, 4, level.AMXInt8)
		with(base, formBytes, 4, level.AVX512VNNI)
	case S8:
		with(tiles, formTiles, 4, level.AMXInt8)
		with(base, formFlipped, 4, level.AVX512VNNI)
	}
	if l == level.AVX512 { // the pair kernels are AVX2's
		pairs.level, pairs.mr, pairs.nr, pairs.lanes = level.AVX2, 6, 16, 8
	}
	all[n] = pairs
	return all, n + 1
}

// bestKernels returns the set that products of a type use at a level; see Spec.Portable.
func bestKernels(in Type, portable bool, l level.Level) kernels {
	all, n := allKernels(in, l)
	for _, k := range all[:n] {
		if !portable || in != BF16 || k.form == formWide {
			return k
		}
	}
	panic("gemm: no kernel widens bf16")
}
