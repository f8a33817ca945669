package main

import (
	"encoding/binary"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/ir"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Instructions that Go's assembler lacks are emitted as bytes. The encodings
// are Intel's (SDM volume 2, sections 2.4 and 2.7); TestEncodings in package
// gemm's generator compares them with GNU as.

func emit(code []byte) {
	data := func(opcode string, v operand.Op) {
		Instruction(&ir.Instruction{Opcode: opcode, Operands: []operand.Op{v}})
	}
	for ; len(code) >= 4; code = code[4:] {
		data("LONG", operand.U32(binary.LittleEndian.Uint32(code)))
	}
	if len(code) >= 2 {
		data("WORD", operand.U16(binary.LittleEndian.Uint16(code)))
		code = code[2:]
	}
	if len(code) == 1 {
		data("BYTE", operand.U8(code[0]))
	}
}

// evexDPBF16 is VDPBF16PS zmm1, zmm2, zmm3: EVEX.512.F3.0F38.W0 52 /r.
func evexDPBF16(dst, src1, src2 int) []byte {
	inv := func(n, bit int) byte { return byte(^n >> bit & 1) }
	p0 := inv(dst, 3)<<7 | inv(src2, 4)<<6 | inv(src2, 3)<<5 | inv(dst, 4)<<4 | 2
	p1 := byte(^src1&15)<<3 | 1<<2 | 2
	p2 := byte(2)<<5 | inv(src1, 4)<<3
	return []byte{0x62, p0, p1, p2, 0x52, 0xc0 | byte(dst&7)<<3 | byte(src2&7)}
}

// dpbf16 adds the products of the pairs of a and b to acc.
func dpbf16(b, a, acc reg.VecPhysical) {
	emit(evexDPBF16(number(acc), number(a), number(b)))
}

func number(r reg.VecPhysical) int {
	for i, z := range zmm {
		if z == r {
			return i
		}
	}
	panic("not a 512-bit register")
}

// Prefixes of VEX-encoded instructions.
const (
	pNone = iota
	p66
	pF3
	pF2
)

// vexTile is a three-byte VEX instruction of the map 0F38 with registers alone.
func vexTile(prefix int, op byte, reg, vvvv, rm int) []byte {
	return []byte{0xc4, 0xe2, byte(^vvvv&15)<<3 | byte(prefix), op, 0xc0 | byte(reg)<<3 | byte(rm)}
}

func tileRelease() []byte                     { return vexTile(pNone, 0x49, 0, 0, 0) }
func tileZero(t int) []byte                   { return vexTile(pF2, 0x49, t, 0, 0) }
func dpTiles(op [2]int, acc, a, b int) []byte { return vexTile(op[0], byte(op[1]), acc, b, a) }

// Tile products: prefix and opcode.
var (
	tdpbf16ps = [2]int{pF3, 0x5c}
	tdpbssd   = [2]int{pF2, 0x5e}
	tdpbusd   = [2]int{p66, 0x5e}
)

// tileMem is a tile load (prefix F2, with a hint 66), store (F3) at base + index + disp, or,
// with index < 0, the load of the configuration. Register numbers are the
// machine's: AX 0, CX 1, DX 2, BX 3, SP 4, BP 5, SI 6, DI 7, R8 … R15.
func tileMem(prefix int, op byte, tile, base, index, disp int) []byte {
	x := 1
	if index >= 0 {
		x = 1 ^ index>>3&1
	}
	p0 := byte(1<<7 | x<<6 | (1^base>>3&1)<<5 | 2)
	code := []byte{0xc4, p0, 15<<3 | byte(prefix), op}
	if index >= 0 {
		code = append(code, 0x84|byte(tile)<<3, byte(index&7)<<3|byte(base&7))
	} else {
		if base&7 == 4 {
			panic("base needs a SIB byte")
		}
		code = append(code, 0x80|byte(tile)<<3|byte(base&7))
	}
	return append(code, byte(disp), byte(disp>>8), byte(disp>>16), byte(disp>>24))
}

func tileLoad(tile, base, index, disp int) []byte { return tileMem(pF2, 0x4b, tile, base, index, disp) }

// tileLoadT1 is tileLoad with the hint that the memory is not read again soon.
func tileLoadT1(tile, base, index, disp int) []byte {
	return tileMem(p66, 0x4b, tile, base, index, disp)
}

func tileStore(tile, base, index, disp int) []byte {
	return tileMem(pF3, 0x4b, tile, base, index, disp)
}
func loadConfig(base, disp int) []byte { return tileMem(pNone, 0x49, 0, base, -1, disp) }
