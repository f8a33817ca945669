package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

// Fields of adam8Scalars behind those of adamScalars, in order.
const (
	adam8MFactor = adamFields + iota
	adam8VFactor
	adam8MTop // written
	adam8VTop
	// Of the block behind: a quarter of the inverses of its scales.
	adam8MInverse
	adam8VInverse
	adam8Fields
	adam8Tables = 4 * adam8Fields // scratch of AVX2, in bytes: slopes and starts of both
)

// Offsets of q8Table's fields.
const (
	q8Slope    = 0
	q8Start    = 32
	q8Border   = 64
	q8PerUnit  = q8Border + 128
	q8From     = q8PerUnit + 128
	q8Last     = q8From + 128
	q8Borders  = q8Last + 128
	q8Segments = 7
	q8Gains    = q8Borders + 32
	q8Offsets  = q8Gains + 32
	q8Lasts    = q8Offsets + 32
	q8Bins     = q8Lasts + 32 // by two octaves, 16 each: border, perUnit, from, last
	q8Floor    = q8Bins + 4*64
)

func quant8() {
	for i, low := range lows {
		sig := "func(p, d *float32, m, v *byte, mo, vo *float32, n int, s *float32, low *uint16, mt, vt *float32)"
		kernel(fmt2("adamw8[%d]", i), "adamwQ8"+low.suffix, sig, "is AdamW8's update"+full, func(g *vlib.Gen) {
			p, gr, m, v, n := g.Ptr("p"), g.Ptr("d"), g.Ptr("m"), g.Ptr("v"), g.Ptr("n")
			mo, vo, base, out := g.Ptr("mo"), g.Ptr("vo"), g.Ptr("s"), g.Ptr("low")
			s := g.Scalars(base, adamFields)
			first := newReader(g, g.Ptr("mt"), true, operand.Mem{Base: base, Disp: 4 * adam8MFactor}, operand.Mem{Base: base, Disp: adam8Tables})
			second := newReader(g, g.Ptr("vt"), false, operand.Mem{Base: base, Disp: 4 * adam8VFactor}, operand.Mem{Base: base, Disp: adam8Tables + 64})
			tops := [2]vlib.Vec{g.Zero(), g.Zero()}
			g.LoopFull(n, func() {
				g.Fetch(p, gr)
				g.FetchBytes(m, v)
				d, mi := momentsOf(g, s, g.At(gr),
					moment{read: func() vlib.Vec { return first.read(m, 0) }, to: g.At(mo), top: tops[0], decayed: true},
					moment{read: func() vlib.Vec { return second.read(v, 0) }, to: g.At(vo), top: tops[1], positive: true, decayed: true})
				adamwStep(g, s, g.At(p), d, mi, func(x vlib.Vec) {
					if low.narrow != nil {
						low.narrow(g, x, g.At16(out))
					}
				})
			})
			storeTops(g, base, tops)
			g.Return()
		})
		adamwBehind(i, low.suffix, low.narrow)
	}
	for i, name := range []string{"q8WriteUnsigned", "q8WriteSigned"} {
		kernel(fmt2("q8write[%d]", i), name, "func(codes *byte, x *float32, n int, inverse float32, t *float32)", "is Q8Map.code for n elements, a multiple of 64.", func(g *vlib.Gen) {
			codes, x, n := g.Ptr("codes"), g.Ptr("x"), g.Ptr("n")
			w := newWriter(g, g.Ptr("t"), g.Param("inverse"), i == 1)
			if g.AVX512 {
				g.LoopBlocks(n, packed, func() { w.write(codes, x) })
			} else {
				g.LoopFull(n, func() { w.write256(codes, x) })
			}
			g.Return()
		})
	}
}

// q8Block is the elements of a block, packed those whose codes are packed at a time.
const q8Block, packed = 256, 4 * vlib.Lanes

// adamwBehind updates a block and writes the codes of the block before, whose moments
// lie at behind: where one waits for divisions and roots, the other computes.
func adamwBehind(i int, suffix string, narrow func(g *vlib.Gen, v vlib.Vec, m vlib.Mem)) {
	sig := "func(p, d *float32, m, v *byte, to, behind *float32, s *float32, low *uint16, mt, vt *float32)"
	doc := "is AdamW8's update for 256 elements, whose moments it leaves at to, and Q8Map.code of the 256 before, whose moments are at behind."
	kernel512(fmt2("adamw8Behind[%d]", i), "adamwQ8Behind"+suffix, sig, doc, func(g *vlib.Gen) {
		p, gr, m, v := g.Ptr("p"), g.Ptr("d"), g.Ptr("m"), g.Ptr("v")
		to, behind, base, out, mt, vt := g.Ptr("to"), g.Ptr("behind"), g.Ptr("s"), g.Ptr("low"), g.Ptr("mt"), g.Ptr("vt")
		var s []vlib.Arg
		for f := range adamFields {
			switch f {
			case adamGradScale, adamKeep, adamEps, adamStep: // of the registers there are not enough
				s = append(s, g.ScalarInMemory(base, f))
			default:
				s = append(s, g.Broadcast(operand.Mem{Base: base, Disp: 4 * f}))
			}
		}
		first := newReader(g, mt, true, operand.Mem{Base: base, Disp: 4 * adam8MFactor}, operand.Mem{})
		second := newReader(g, vt, false, operand.Mem{Base: base, Disp: 4 * adam8VFactor}, operand.Mem{})
		inverse := func(f int) vlib.Vec { return g.Broadcast(operand.Mem{Base: base, Disp: 4 * f}) }
		codes := [2]*q8Writer{newWriter512(g, mt, inverse(adam8MInverse), true), newWriter512(g, vt, inverse(adam8VInverse), false)}
		codes[1].share(codes[0])
		tops := [2]vlib.Vec{g.Zero(), g.Zero()}
		second16 := func(m vlib.Mem) vlib.Mem { m.Disp += 4 * q8Block; return m }
		n := GP64()
		MOVQ(operand.U32(q8Block), n)
		g.LoopBlocks(n, packed, func() {
			g.FetchNear(packed, []reg.GPVirtual{p, gr}, []reg.GPVirtual{m, v})
			var half reg.VecVirtual
			for u := range 4 {
				d, mi := momentsOf(g, s, g.At(gr, u),
					moment{read: func() vlib.Vec { return first.read(m, u) }, to: g.At(to, u), top: tops[0], decayed: true},
					moment{read: func() vlib.Vec { return second.read(v, u) }, to: second16(g.At(to, u)), top: tops[1], positive: true, decayed: true})
				adamwStep(g, s, g.At(p, u), d, mi, func(x vlib.Vec) {
					if narrow != nil {
						narrow(g, x, g.At16(out, u))
					}
				})
				w, at, codesAt := codes[u/2], [2]vlib.Mem{g.At(behind, u%2*2), g.At(behind, u%2*2+1)}, m
				if u >= 2 {
					at[0], at[1], codesAt = second16(at[0]), second16(at[1]), v
				}
				pair := w.pair(at[0], at[1])
				if u%2 == 0 {
					half = pair
					continue
				}
				to := g.Byte(codesAt, 0)
				to.Disp -= q8Block
				w.pack(half, pair, to)
			}
		})
		storeTops(g, base, tops)
		g.Return()
	})
}

func storeTops(g *vlib.Gen, base reg.Register, tops [2]vlib.Vec) {
	for i, top := range tops {
		VMOVD(g.MaxBits16(top).AsX(), operand.Mem{Base: base, Disp: 4 * (adam8MTop + i)})
	}
}

// orAnd is dst | second & first, of VPTERNLOGD.
const orAnd = 0xf8

// q8Reader reads codes as Q8Map.decayed does: n = code+1 is a float32 whose exponent says the
// decade.
type q8Reader struct {
	g            *vlib.Gen
	signed       bool
	slope, start operand.Op // a register, or memory on AVX2
	low7         vlib.Vec   // AVX-512: of the signed
}

// newReader returns a reader of codes times a factor, whose tables AVX2 keeps at
// scratch.
func newReader(g *vlib.Gen, t reg.Register, signed bool, factor, scratch operand.Mem) *q8Reader {
	r := &q8Reader{g: g, signed: signed}
	if !g.AVX512 {
		f, x := YMM(), YMM()
		VBROADCASTSS(factor, f)
		for i, to := range []*operand.Op{&r.slope, &r.start} {
			at := scratch
			at.Disp += 32 * i
			VMULPS(operand.Mem{Base: t, Disp: q8Slope + i*(q8Start-q8Slope)}, f, x)
			VMOVUPS(x, at)
			*to = at
		}
		return r
	}
	for i, to := range []*operand.Op{&r.slope, &r.start} {
		x := ZMM()
		VBROADCASTF32X8(operand.Mem{Base: t, Disp: q8Slope + i*(q8Start-q8Slope)}, x)
		VMULPS_BCST(factor, x, x)
		*to = x
	}
	if signed {
		r.low7 = g.RWord(0x7f)
	}
	return r
}

// read returns 16 codes of base as numbers times the factor, the u-th of the current.
func (r *q8Reader) read(base reg.Register, u int) vlib.Vec {
	g, x := r.g, r.g.New()
	for i, v := range x {
		if g.AVX512 {
			r.read512(g.Byte(base, 2*u), v)
		} else {
			r.read256(g.Byte(base, 2*u+i), v)
		}
	}
	return x
}

// magic are the bits of 2^23: or-ed with an integer below it, a float32 of their sum.
const magic = 0x4b000000

// andOr is dst & second | first, of VPTERNLOGD.
const andOr = 0xea

func (r *q8Reader) read512(at operand.Mem, v reg.VecVirtual) {
	g, code, f, octave := r.g, ZMM(), ZMM(), ZMM()
	if r.signed {
		VPMOVSXBD(at, code) // which leaves the sign where a float32 has it
		VMOVDQA32(code, f)
		VPTERNLOGD_BCST(operand.Imm(andOr), g.Word(magic), r.low7[0], f)
		VSUBPS_BCST(g.Word(math.Float32bits(1<<23-1)), f, f)
	} else {
		VPMOVZXBD(at, code)
		g.AddWord(magic+1, code, f)
		VSUBPS_BCST(g.Word(magic), f, f)
	}
	VPSRLD(operand.Imm(23), f, octave)
	VPERMPS(r.slope, octave, v)
	VPERMPS(r.start, octave, octave)
	VFMADD213PS(octave, f, v)
	if r.signed {
		VPTERNLOGD_BCST(operand.Imm(orAnd), g.Word(1<<31), code, v)
	}
}

func (r *q8Reader) read256(at operand.Mem, v reg.VecVirtual) {
	g := r.g
	VPMOVZXBD(at, v)
	sign, f, octave, start := YMM(), YMM(), YMM(), YMM()
	if r.signed {
		VPSLLD(operand.Imm(24), v, sign)
		g.AndWord(0x7f, v, v)
	}
	g.AddWord(1, v, f)
	VCVTDQ2PS(f, f)
	VPSRLD(operand.Imm(23), f, octave)
	VPERMPS(r.slope, octave, v)
	VPERMPS(r.start, octave, start)
	VFMADD213PS(start, f, v)
	if r.signed {
		g.AndWord(1<<31, sign, sign)
		VPOR(sign, v, v)
	}
}

// q8Writer writes codes.
type q8Writer struct {
	g       *vlib.Gen
	signed  bool
	base    reg.Register
	inverse vlib.Vec // AVX-512: a quarter of it, so that the octaves of 1 and of what is below are one bin
	// AVX-512 alone:
	floor reg.VecVirtual // a quarter of what smaller magnitudes are taken for
	one   reg.VecVirtual
	sign  reg.VecVirtual // 0x80, of the signed
	zero  reg.VecVirtual // of the unsigned
	order reg.VecVirtual // of dwords behind packing
}

// q8Order is the order in memory, once.
var q8Order operand.Mem

func newWriter(g *vlib.Gen, t reg.Register, inverse vlib.Vec, signed bool) *q8Writer {
	if !g.AVX512 {
		return &q8Writer{g: g, signed: signed, base: t, inverse: inverse}
	}
	g.MulTo(inverse, g.C(0.25))
	w := newWriter512(g, t, inverse, signed)
	w.share(nil)
	return w
}

// newWriter512 returns a writer that still lacks what it may share.
func newWriter512(g *vlib.Gen, t reg.Register, quarter vlib.Vec, signed bool) *q8Writer {
	w := &q8Writer{g: g, signed: signed, base: t, inverse: quarter, floor: g.Broadcast(operand.Mem{Base: t, Disp: q8Floor})[0]}
	if signed {
		w.sign = g.RWord(0x80)[0]
	} else {
		w.zero = g.Zero()[0]
	}
	return w
}

// share takes another writer's registers, or loads them.
func (w *q8Writer) share(o *q8Writer) {
	if o != nil {
		if o.order == nil {
			o.share(nil)
		}
		w.one, w.order = o.one, o.order
		return
	}
	w.one, w.order = w.g.RWord(1)[0], ZMM()
	if q8Order.Symbol.Name == "" {
		q8Order = GLOBL("q8order", RODATA|NOPTR)
		vlib.Words(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)
	}
	VMOVDQU32(q8Order, w.order)
}

// write writes the current 64 codes.
func (w *q8Writer) write(codes, x reg.Register) {
	g := w.g
	low := w.pair(g.At(x, 0), g.At(x, 1))
	w.pack(low, w.pair(g.At(x, 2), g.At(x, 3)), g.Byte(codes, 0))
}

// pair returns the codes of 32 numbers as words.
func (w *q8Writer) pair(a, b vlib.Mem) reg.VecVirtual {
	low := w.write512(a)
	VPACKUSDW(w.write512(b), low, low)
	return low
}

// pack writes the codes of two pairs as bytes.
func (w *q8Writer) pack(low, high reg.VecVirtual, to operand.Mem) {
	VPACKUSWB(high, low, low) // by 128-bit lanes: four codes of each 16 in turn
	VPERMD(low, w.order, low)
	VMOVDQU32(low, to)
}

const greaterEqual, notEqual = 0x1d, 0x0c // GE_OQ, NEQ_OQ

// write512 returns the codes of 16 numbers, by the tables of bins.
func (w *q8Writer) write512(at vlib.Mem) reg.VecVirtual {
	const largerMagnitude = 0x0b
	table := func(i int) operand.Mem { return operand.Mem{Base: w.base, Disp: q8Bins + 64*i} }
	x, y, bin, c, t, k := w.g.Load(at)[0], ZMM(), ZMM(), ZMM(), ZMM(), K()
	VMULPS(w.inverse[0], x, y)
	VRANGEPS(operand.Imm(largerMagnitude), w.floor, y, y)
	VPSRLD(operand.Imm(24), y, bin)
	VPERMPS(table(0), bin, t)
	VCMPPS(operand.Imm(greaterEqual), t, y, k)
	VPADDD(w.one, bin, k, bin)
	VPERMPS(table(1), bin, c)
	VPERMPS(table(2), bin, t)
	VFMADD213PS(t, y, c)
	VCVTTPS2DQ(c, c)
	VPERMD(table(3), bin, t)
	if w.signed {
		VPMINSD(t, c, c)
		VPSRLD(operand.Imm(24), x, x)
		VPTERNLOGD(operand.Imm(orAnd), w.sign, x, c)
		return c
	}
	positive := K()
	VCMPPS(operand.Imm(notEqual), w.zero, x, positive)
	VPMINSD_Z(t, c, positive, c)
	return c
}

// write256 writes the current 16 codes, by the tables of segments.
func (w *q8Writer) write256(codes, from reg.Register) {
	g := w.g
	x := g.Load(g.At(from))
	y := g.Mul(x, w.inverse)
	for i := range y {
		w.codes256(x[i], y[i])
	}
	VPACKUSDW(y[1], y[0], y[0]) // by 128-bit lanes: words 0-3, 8-11, 4-7, 12-15
	VPERMQ(operand.Imm(0xd8), y[0], y[0])
	high := XMM()
	VEXTRACTI128(operand.Imm(1), y[0], high)
	VPACKUSWB(high, y[0].AsX(), high)
	VMOVDQU(high, g.Byte(codes, 0))
}

// codes256 makes y, which is x over the scale, the codes.
func (w *q8Writer) codes256(x, y reg.VecVirtual) {
	g := w.g
	at := func(disp int) operand.Mem { return operand.Mem{Base: w.base, Disp: disp} }
	g.AndWord(1<<31-1, y, y)
	segment, t := YMM(), YMM()
	VPXOR(segment, segment, segment)
	for i := range q8Segments {
		VBROADCASTSS(at(q8Borders+4*i), t)
		VCMPPS(operand.Imm(greaterEqual), t, y, t)
		VPSUBD(t, segment, segment)
	}
	c := YMM()
	VPERMPS(at(q8Gains), segment, c)
	VPERMPS(at(q8Offsets), segment, t)
	VFMADD213PS(t, y, c)
	VCVTTPS2DQ(c, c)
	VPERMPS(at(q8Lasts), segment, t)
	VPMINSD(t, c, c)
	if w.signed {
		VPSRLD(operand.Imm(24), x, t)
		g.AndWord(0x80, t, t)
		VPOR(t, c, y)
		return
	}
	zero := YMM()
	VXORPS(zero, zero, zero)
	VPMAXSD(g.RWord(1)[0], c, c)
	VCMPPS(operand.Imm(notEqual), zero, x, t)
	VPAND(t, c, y)
}
