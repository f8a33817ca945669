// Command gemm generates the assembly of package kernels/cpu/gemm.
//
// Run it through go generate in that package; -set chooses a file's kernels.
package main

import (
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

var sets = map[string]func(){
	"f32avx512":  f32AVX512,
	"f32avx2":    f32AVX2,
	"packavx2":   packAVX2,
	"bf16avx512": bf16AVX512,
	"int8avx512": int8AVX512,
	"halfavx512": func() { half(true) },
	"halfavx2":   func() { half(false) },
	"amx":        amx,
}

func main() {
	set := flag.String("set", "", "kernels to generate")
	flag.Parse()
	gen, ok := sets[*set]
	if !ok {
		fmt.Fprintf(os.Stderr, "gemm: no set %q\n", *set)
		os.Exit(1)
	}
	gen()
	vlib.Finish("gemm")
}

// params loads parameters of the function, whose names are separated by spaces.
func params(names string, to ...reg.Register) {
	for i, name := range strings.Fields(names) {
		Load(Param(name), to[i])
	}
}

// byMasks ends the description of functions with masks.
const byMasks = ". load and store are masks: lanes in load are read, the others are zeros, and lanes in store are written. " +
	"Strides are in bytes."

// byRows writes function, which calls the micro-kernel for a number of rows.
func byRows(function, format string, most int) {
	var cases [][2]string
	for rows := 1; rows <= most; rows++ {
		cases = append(cases, [2]string{strconv.Itoa(rows), fmt.Sprintf(format, rows)})
	}
	vlib.Choose(function+"(t *tile, rows int)", "rows", "t", cases)
}

// Offsets of the fields of type tile in package gemm, in bytes.
const (
	tileA     = 0   // first packed A sliver
	tileB     = 8   // B sliver
	tileC     = 16  // first element of C
	tileBias  = 24  // bias of C's first column, or nil
	tileK     = 32  // depth
	tileN     = 40  // A slivers
	tileLdb   = 48  // bytes between rows of B
	tileLdc   = 56  // bytes between rows of C
	tileStep  = 64  // bytes between A slivers
	tileMask  = 72  // valid columns, a bit each
	tileAdd   = 80  // 0 stores, 1 adds to C
	tileNext  = 88  // what to bring into the second-level cache meanwhile
	tileRow   = 96  // AMX: bytes between rows of A
	tileKB    = 104 // AMX: bytes between blocks of 16 units of A
	tileTimes = 112 // AMX: blocks of K
	tileCfg   = 120 // AMX: the tile configuration, 64 bytes

	// AMX, of a row of tiles.
	tileOut       = 184 // first 16-bit element of C
	tileLdo       = 192 // bytes between its rows
	tileEnd       = 200 // of the lines of C that are brought nearer
	tileStepB     = 208 // bytes between slivers of B
	tileStepC     = 216 // bytes between tiles of sums
	tileRowScales = 224 // of int8
	tileColScales = 232

	tileAhead = 240 // AVX-512: bytes from one line that is brought nearer to the next
	tileTo    = 248 // AVX-512: where the kernel that packs writes B's sliver
)

func at(base reg.Register, disp int) operand.Mem { return operand.Mem{Base: base, Disp: disp} }

func idx(base, index reg.Register, scale uint8, disp int) operand.Mem {
	return operand.Mem{Base: base, Index: index, Scale: scale, Disp: disp}
}

var zmm = []reg.VecPhysical{
	reg.Z0, reg.Z1, reg.Z2, reg.Z3, reg.Z4, reg.Z5, reg.Z6, reg.Z7,
	reg.Z8, reg.Z9, reg.Z10, reg.Z11, reg.Z12, reg.Z13, reg.Z14, reg.Z15,
	reg.Z16, reg.Z17, reg.Z18, reg.Z19, reg.Z20, reg.Z21, reg.Z22, reg.Z23,
	reg.Z24, reg.Z25, reg.Z26, reg.Z27, reg.Z28, reg.Z29, reg.Z30, reg.Z31,
}

var ymm = []reg.VecPhysical{
	reg.Y0, reg.Y1, reg.Y2, reg.Y3, reg.Y4, reg.Y5, reg.Y6, reg.Y7,
	reg.Y8, reg.Y9, reg.Y10, reg.Y11, reg.Y12, reg.Y13, reg.Y14, reg.Y15,
}
