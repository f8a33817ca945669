// Package vlib writes one kernel for two instruction sets. A kernel is described
// over vectors of 16 virtual lanes of float32; Both emits the description for
// AVX-512 (a vector is one zmm register) and for AVX2 (two ymm registers, the low
// lanes first), with masked tails, so that the two give the same bits.
//
// Names of functions end in AVX512 or AVX2. On AVX2 a description may keep seven
// vectors alive, less one half for each broadcast value: there is no spilling, and
// avo would then hand out registers that AVX2 lacks; package vec has a test that
// reads the generated files for that.
package vlib

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/gotypes"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Lanes is the number of virtual lanes of a vector.
const Lanes = 16

// Gen emits one function for one instruction set.
type Gen struct {
	AVX512 bool
	name   string
	labels int
	mask   *Mask           // masks loads and stores, set within a tail
	index  reg.GPVirtual   // element index of the innermost Loop
	held   map[float32]Vec // constants kept in registers
}

// Vec is 16 lanes: one zmm or two ymm registers. A broadcast value on AVX2 is the
// same register twice and must not be a destination.
type Vec []reg.VecVirtual

// Arg is a source operand: a Vec, a constant, or memory.
type Arg interface{ half(i int) operand.Op }

func (v Vec) half(i int) operand.Op { return v[i] }

// Mem is 64 bytes of memory that hold a vector.
type Mem operand.Mem

func (m Mem) half(i int) operand.Op {
	m.Disp += 32 * i
	return operand.Mem(m)
}

// constant is a broadcast constant in the data section.
type constant struct{ mem operand.Mem }

func (c constant) half(int) operand.Op { return c.mem }

// Mask selects the first lanes of a vector.
type Mask struct {
	k  reg.OpmaskVirtual
	at reg.GPVirtual // AVX2: where the words of the mask lie, for want of registers
}

// words is the i-th half of the mask in memory.
func (m *Mask) words(i int) operand.Mem { return operand.Mem{Base: m.at, Disp: 64 + 32*i} }

// half is the i-th half of the mask in a register.
func (m *Mask) half(i int) reg.VecVirtual {
	y := YMM()
	VMOVUPS(m.words(i), y)
	return y
}

// Both emits a function for each instruction set. signature is a Go function type;
// the body ends with Return.
func Both(name, signature, doc string, body func(g *Gen)) {
	both(name, signature, doc, NOSPLIT, body)
}

// BothWithFrame is Both for functions that need more stack than a few hundred
// bytes, by AllocLocal.
func BothWithFrame(name, signature, doc string, body func(g *Gen)) {
	both(name, signature, doc, 0, body)
}

// AVX512 is Both for a function that AVX2 lacks.
func AVX512(name, signature, doc string, body func(g *Gen)) {
	emit(true, name+"AVX512", signature, doc, NOSPLIT, body)
}

func both(name, signature, doc string, flags attr.Attribute, body func(g *Gen)) {
	emit(true, name+"AVX512", signature, doc, flags, body)
	emit(false, name+"AVX2", signature, doc, flags, body)
}

func emit(avx512 bool, name, signature, doc string, flags attr.Attribute, body func(g *Gen)) {
	g := &Gen{AVX512: avx512, name: name, held: map[float32]Vec{}}
	TEXT(name, flags, signature)
	declare(name, strings.TrimPrefix(signature, "func"), doc)
	body(g)
}

// Return ends the function.
func (g *Gen) Return() {
	VZEROUPPER()
	RET()
}

// New returns an undefined vector.
func (g *Gen) New() Vec {
	if g.AVX512 {
		return Vec{ZMM()}
	}
	return Vec{YMM(), YMM()}
}

// Zero returns a vector of +0, for instance to accumulate in.
func (g *Gen) Zero() Vec {
	v := g.New()
	for _, r := range v {
		if g.AVX512 {
			VPXORD(r, r, r)
		} else {
			VXORPS(r, r, r)
		}
	}
	return v
}

// Ptr loads the parameter, a pointer or an integer, into a register.
func (g *Gen) Ptr(name string) reg.GPVirtual {
	r := GP64()
	Load(Param(name), r)
	return r
}

// Broadcast returns a vector whose lanes are all the float32 at m.
func (g *Gen) Broadcast(m operand.Mem) Vec {
	if g.AVX512 {
		z := ZMM()
		VBROADCASTSS(m, z)
		return Vec{z}
	}
	y := YMM()
	VBROADCASTSS(m, y)
	return Vec{y, y}
}

// Param returns a float32 parameter in every lane.
func (g *Gen) Param(name string) Vec { return g.Broadcast(paramAddr(Param(name).Resolve())) }

// ParamMem returns where a parameter lies.
func (g *Gen) ParamMem(name string) operand.Mem { return paramAddr(Param(name).Resolve()) }

func paramAddr(b *gotypes.Basic, err error) operand.Mem {
	if err != nil {
		panic(err)
	}
	return b.Addr
}

var constants = map[uint32]operand.Mem{}

// word returns 32 bytes of the data section, filled with a 32-bit word.
func word(w uint32) operand.Mem {
	m, ok := constants[w]
	if !ok {
		m = GLOBL(fmt.Sprintf("w%08x", w), RODATA|NOPTR)
		Words(slices.Repeat([]uint32{w}, 8)...)
		constants[w] = m
	}
	return m
}

// Words are the content of the data section's last symbol, an even number of them.
func Words(w ...uint32) {
	for i := 0; i < len(w); i += 2 {
		DATA(4*i, operand.U64(uint64(w[i])|uint64(w[i+1])<<32))
	}
}

// HighWords are the numbers 1, 3, …, 63: of the 64 16-bit words of two AVX-512 registers
// of float32, those that are an element's high half.
func HighWords() (w []uint32) {
	for i := range uint32(Lanes) {
		w = append(w, 4*i+1|(4*i+3)<<16)
	}
	return w
}

// LaneWords are 16 words of ones and 16 of zeros.
func LaneWords() []uint32 {
	return append(slices.Repeat([]uint32{0xffffffff}, Lanes), make([]uint32, Lanes)...)
}

// C returns a constant in every lane: a register if it is held, else memory.
func (g *Gen) C(v float32) Arg {
	if r, ok := g.held[v]; ok {
		return r
	}
	return constant{word(math.Float32bits(v))}
}

// Hold keeps constants in registers from here on. AVX2 has too few: there it
// does nothing.
func (g *Gen) Hold(vs ...float32) {
	if !g.AVX512 {
		return
	}
	for _, v := range vs {
		if _, ok := g.held[v]; !ok {
			g.held[v] = g.Broadcast(word(math.Float32bits(v)))
		}
	}
}

// R returns a constant in a register (on AVX2 one that is no destination).
func (g *Gen) R(v float32) Vec {
	if r, ok := g.held[v]; ok {
		return r
	}
	return g.Broadcast(word(math.Float32bits(v)))
}

// Copy returns a new vector with a's value, which may be overwritten.
func (g *Gen) Copy(a Arg) Vec {
	d := g.New()
	_, isConst := a.(constant)
	for i, r := range d {
		switch m := a.half(i).(type) {
		case operand.Mem:
			switch {
			case isConst && g.AVX512:
				VBROADCASTSS(m, r)
			default:
				VMOVUPS(m, r)
			}
		default:
			VMOVAPS(m, r)
		}
	}
	return d
}

// Label returns a label that is unique in the function.
func (g *Gen) Label(hint string) string {
	g.labels++
	return fmt.Sprintf("%s%d", hint, g.labels)
}

// Loop runs body for the elements [0, n) by 16 at a time, and once more with a
// mask for the last n mod 16. In body, At addresses the current elements, and
// loads and stores obey the mask. n is consumed.
func (g *Gen) Loop(n reg.GPVirtual, body func()) {
	outer := g.index
	g.index = GP64()
	XORQ(g.index, g.index)
	top, tail, done := g.Label("loop"), g.Label("tail"), g.Label("done")
	SUBQ(operand.Imm(Lanes), n)
	JLT(operand.LabelRef(tail))
	Label(top)
	body()
	ADDQ(operand.Imm(Lanes), g.index)
	SUBQ(operand.Imm(Lanes), n)
	JGE(operand.LabelRef(top))
	Label(tail)
	ADDQ(operand.Imm(Lanes), n)
	JZ(operand.LabelRef(done))
	g.Masked(n, body)
	Label(done)
	g.index = outer
}

// LoopFull runs body for [0, n) by 16 at a time; n is a multiple of 16 and is
// consumed.
func (g *Gen) LoopFull(n reg.GPVirtual, body func()) { g.LoopBlocks(n, Lanes, body) }

// LoopBlocks runs body for [0, n) by size at a time; n is a multiple of size and
// is consumed.
func (g *Gen) LoopBlocks(n reg.GPVirtual, size int, body func()) {
	outer := g.index
	g.index = GP64()
	XORQ(g.index, g.index)
	top, done := g.Label("loop"), g.Label("done")
	SUBQ(operand.Imm(uint64(size)), n)
	JLT(operand.LabelRef(done))
	Label(top)
	body()
	ADDQ(operand.Imm(uint64(size)), g.index)
	SUBQ(operand.Imm(uint64(size)), n)
	JGE(operand.LabelRef(top))
	Label(done)
	g.index = outer
}

// laneTable is 16 words of ones and 16 of zeros.
var laneTable *operand.Mem

// MaskFor returns the mask of the first n lanes, n in [0, 16].
func (g *Gen) MaskFor(n reg.GPVirtual) *Mask {
	if g.AVX512 {
		ones, k := GP32(), K()
		MOVL(operand.U32(1<<Lanes-1), ones)
		BZHIL(n.As32(), ones, ones)
		KMOVW(ones, k)
		return &Mask{k: k}
	}
	if laneTable == nil {
		m := GLOBL("lanes", RODATA|NOPTR)
		Words(LaneWords()...)
		laneTable = &m
	}
	at, neg := GP64(), GP64()
	MOVQ(n, neg)
	NEGQ(neg)
	LEAQ(*laneTable, at)
	LEAQ(operand.Mem{Base: at, Index: neg, Scale: 4}, at)
	return &Mask{at: at}
}

// Masked runs body with loads and stores limited to the first n lanes.
func (g *Gen) Masked(n reg.GPVirtual, body func()) {
	old := g.mask
	g.mask = g.MaskFor(n)
	body()
	g.mask = old
}

// InTail reports whether the code being emitted is masked.
func (g *Gen) InTail() bool { return g.mask != nil }

// Fetch brings arrays of float32 into the cache ahead of use, once in 256
// elements and a run of one array after the other: line by line, with many arrays
// at equal offsets of their pages, the memory's rows would change all the time.
func (g *Gen) Fetch(bases ...reg.GPVirtual) {
	const run, ahead = 256, 512 // elements
	skip := g.Label("near")
	TESTQ(operand.U32(run-1), g.index)
	JNZ(operand.LabelRef(skip))
	for _, b := range bases {
		for line := range run / Lanes {
			m := operand.Mem(g.At(b))
			m.Disp += 4*ahead + 64*line
			PREFETCHT0(m)
		}
	}
	Label(skip)
}

// FetchBytes is Fetch for arrays of bytes.
func (g *Gen) FetchBytes(bases ...reg.GPVirtual) {
	const run, ahead, line = 256, 1024, 64
	skip := g.Label("near")
	TESTQ(operand.U32(run-1), g.index)
	JNZ(operand.LabelRef(skip))
	for _, b := range bases {
		for at := 0; at < run; at += line {
			m := g.Byte(b, 0)
			m.Disp += ahead + at
			PREFETCHT0(m)
		}
	}
	Label(skip)
}

// FetchNear brings the lines of elements elements of 4 bytes and of 1, which one turn
// of a loop takes, into the cache ahead of use. A turn's few lines leave room for the
// misses of its loads, where Fetch would fill what the cache can wait for.
func (g *Gen) FetchNear(elements int, floats, bytes []reg.GPVirtual) {
	const ahead = 512 // elements
	for _, b := range floats {
		for at := 0; at < 4*elements; at += 64 {
			m := operand.Mem(g.At(b))
			m.Disp += 4*ahead + at
			PREFETCHT0(m)
		}
	}
	for _, b := range bytes {
		m := g.Byte(b, 0)
		m.Disp += ahead
		PREFETCHT0(m)
	}
}

// At addresses the current 16 float32 of an array; u counts groups of 16 onwards.
func (g *Gen) At(base reg.Register, u ...int) Mem {
	m := Mem{Base: base, Index: g.index, Scale: 4}
	for _, v := range u {
		m.Disp += 64 * v
	}
	return m
}

// At16 addresses the current 16 elements of an array of 2-byte elements; u counts groups
// of 16 onwards.
func (g *Gen) At16(base reg.Register, u ...int) Mem {
	m := Mem{Base: base, Index: g.index, Scale: 2}
	for _, v := range u {
		m.Disp += 32 * v
	}
	return m
}

// Fixed addresses 16 float32 from base + disp bytes.
func (g *Gen) Fixed(base reg.Register, disp int) Mem { return Mem{Base: base, Disp: disp} }

// Load loads 16 float32; lanes beyond the mask are +0.
func (g *Gen) Load(m Mem) Vec {
	d := g.New()
	for i, r := range d {
		switch {
		case g.mask == nil:
			VMOVUPS(m.half(i), r)
		case g.AVX512:
			VMOVUPS_Z(m.half(i), g.mask.k, r)
		default:
			VMASKMOVPS(m.half(i), g.mask.half(i), r)
		}
	}
	return d
}

// Src is m itself where an instruction can read it, and a masked load in a tail.
func (g *Gen) Src(m Mem) Arg {
	if g.mask == nil {
		return m
	}
	return g.Load(m)
}

// Store stores the lanes within the mask.
func (g *Gen) Store(v Vec, m Mem) {
	for i, r := range v {
		switch {
		case g.mask == nil:
			VMOVUPS(r, m.half(i))
		case g.AVX512:
			VMOVUPS(r, g.mask.k, m.half(i))
		default:
			VMASKMOVPS(r, g.mask.half(i), m.half(i))
		}
	}
}

// Keep zeroes the lanes beyond the mask, in place; without a mask it does nothing.
func (g *Gen) Keep(v Vec) {
	if g.mask == nil {
		return
	}
	for i, r := range v {
		if g.AVX512 {
			VMOVAPS_Z(r, g.mask.k, r)
		} else {
			VANDPS(g.mask.words(i), r, r)
		}
	}
}

// Else sets the lanes beyond the mask to a constant, in place.
func (g *Gen) Else(v Vec, c float32) {
	if g.mask == nil {
		return
	}
	if g.AVX512 {
		d := g.Broadcast(word(math.Float32bits(c)))
		VBLENDMPS(v[0], d[0], g.mask.k, v[0])
		return
	}
	d := g.Broadcast(word(math.Float32bits(c)))
	for i, r := range v {
		VBLENDVPS(g.mask.half(i), r, d[i], r)
	}
}

// Comparisons for ZeroUnless.
const (
	notLess      = 0x15 // NLT_UQ: true for NaN
	greater      = 0x1e // GT_OQ
	notLessEqual = 0x16 // NLE_UQ: true for NaN
)

// NewReg returns one undefined register of the instruction set's width.
func (g *Gen) NewReg() reg.VecVirtual {
	if g.AVX512 {
		return ZMM()
	}
	return YMM()
}

// RWord returns a 32-bit word in every lane of a vector that is no destination.
func (g *Gen) RWord(w uint32) Vec { return g.Broadcast(word(w)) }

// AndWord is dst = x & a word.
func (g *Gen) AndWord(w uint32, x, dst reg.VecVirtual) {
	if g.AVX512 {
		VPANDD_BCST(word(w), x, dst)
		return
	}
	VPAND(word(w), x, dst)
}

// AddWord is dst = x + a word, as 32-bit integers.
func (g *Gen) AddWord(w uint32, x, dst reg.VecVirtual) {
	if g.AVX512 {
		VPADDD_BCST(word(w), x, dst)
		return
	}
	VPADDD(word(w), x, dst)
}

// Word returns a 32-bit word in memory, eight times.
func (g *Gen) Word(w uint32) operand.Mem { return word(w) }

// Byte addresses the i-th group of 8 from the current elements on of an array of
// bytes.
func (g *Gen) Byte(base reg.Register, i int) operand.Mem {
	return operand.Mem{Base: base, Index: g.index, Scale: 1, Disp: 8 * i}
}
