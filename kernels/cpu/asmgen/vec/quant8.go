package main

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

// Fields of adam8Scalars behind those of adamScalars, in order.
const (
	adam8MScale = adamFields + iota
	adam8VScale
	adam8Fields
	adam8MTop = adam8Fields // written
	adam8VTop = adam8Fields + 1
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
)

func quant8() {
	for i, low := range lows {
		sig := "func(p, d *float32, m, v *byte, mo, vo *float32, n int, s *float32, low *uint16, mt, vt *float32)"
		kernel(fmt2("adamw8[%d]", i), "adamwQ8"+low.suffix, sig, "is AdamW8's update"+full, func(g *vlib.Gen) {
			p, gr, m, v, n := g.Ptr("p"), g.Ptr("d"), g.Ptr("m"), g.Ptr("v"), g.Ptr("n")
			mo, vo, base, out := g.Ptr("mo"), g.Ptr("vo"), g.Ptr("s"), g.Ptr("low")
			s := g.Scalars(base, adam8Fields)
			first, second := newReader(g, g.Ptr("mt"), true), newReader(g, g.Ptr("vt"), false)
			tops := [2]vlib.Vec{g.Zero(), g.Zero()}
			g.LoopFull(n, func() {
				g.Fetch(p, gr)
				g.FetchBytes(m, v)
				d, mi := momentsOf(g, s, g.At(gr),
					moment{read: func() vlib.Vec { return first.read(m, s[adam8MScale]) }, to: g.At(mo), top: tops[0]},
					moment{read: func() vlib.Vec { return second.read(v, s[adam8VScale]) }, to: g.At(vo), top: tops[1], positive: true})
				adamwStep(g, s, g.At(p), d, mi, func(x vlib.Vec) {
					if low.narrow != nil {
						low.narrow(g, x, g.At16(out))
					}
				})
			})
			for i, top := range tops {
				VMOVD(g.MaxBits16(top).AsX(), operand.Mem{Base: base, Disp: 4 * (adam8MTop + i)})
			}
			g.Return()
		})
	}
	for i, name := range []string{"q8WriteUnsigned", "q8WriteSigned"} {
		kernel(fmt2("q8write[%d]", i), name, "func(codes *byte, x *float32, n int, inverse float32, t *float32)", "is Q8Map.code for n elements, a multiple of 64.", func(g *vlib.Gen) {
			codes, x, n := g.Ptr("codes"), g.Ptr("x"), g.Ptr("n")
			w := newWriter(g, g.Ptr("t"), g.Param("inverse"), i == 1)
			g.LoopBlocks(n, 4*vlib.Lanes, func() { w.write(codes, x) })
			g.Return()
		})
	}
}

// orAnd is dst | second & first, of VPTERNLOGD.
const orAnd = 0xf8

// q8Reader reads codes: n = code+1 is a float32 whose exponent says the decade.
type q8Reader struct {
	g            *vlib.Gen
	signed       bool
	slope, start operand.Op // a register, or memory on AVX2
}

func newReader(g *vlib.Gen, t reg.Register, signed bool) *q8Reader {
	r := &q8Reader{g: g, signed: signed, slope: operand.Mem{Base: t, Disp: q8Slope}, start: operand.Mem{Base: t, Disp: q8Start}}
	if g.AVX512 {
		slope, start := ZMM(), ZMM()
		VBROADCASTF32X8(r.slope, slope)
		VBROADCASTF32X8(r.start, start)
		r.slope, r.start = slope, start
	}
	return r
}

// read returns the current 16 codes of base as numbers.
func (r *q8Reader) read(base reg.Register, scale vlib.Arg) vlib.Vec {
	g, x := r.g, r.g.New()
	for i, v := range x {
		VPMOVZXBD(g.Byte(base, i), v)
		sign, f, octave := g.NewReg(), g.NewReg(), g.NewReg()
		if r.signed {
			VPSLLD(operand.Imm(24), v, sign)
			g.AndWord(0x7f, v, v)
		}
		g.AddWord(1, v, f)
		VCVTDQ2PS(f, f)
		VPSRLD(operand.Imm(23), f, octave)
		VPERMPS(r.slope, octave, v)
		if m, ok := r.start.(operand.Mem); ok {
			start := g.NewReg()
			VPERMPS(m, octave, start)
			VFMADD213PS(start, f, v)
		} else {
			VPERMPS(r.start, octave, octave)
			VFMADD213PS(octave, f, v)
		}
		switch {
		case r.signed && g.AVX512:
			VPTERNLOGD_BCST(operand.Imm(orAnd), g.Word(1<<31), sign, v)
		case r.signed:
			g.AndWord(1<<31, sign, sign)
			VPOR(sign, v, v)
		}
	}
	g.MulTo(x, scale)
	return x
}

// q8Writer writes codes.
type q8Writer struct {
	g       *vlib.Gen
	signed  bool
	base    reg.Register
	inverse vlib.Vec
	// AVX-512 alone:
	tables                 [4][2]reg.VecVirtual // by octave: border, perUnit, from, last
	floor, one, sign, zero reg.VecVirtual       // 2^-31, 1, 0x80, 0
	order                  reg.VecVirtual       // of dwords behind packing
}

// q8Order is the order in memory, once.
var q8Order operand.Mem

func newWriter(g *vlib.Gen, t reg.Register, inverse vlib.Vec, signed bool) *q8Writer {
	w := &q8Writer{g: g, signed: signed, base: t, inverse: inverse}
	if !g.AVX512 {
		return w
	}
	for i := range w.tables {
		for j := range 2 {
			z := ZMM()
			VMOVUPS(operand.Mem{Base: t, Disp: q8Border + 128*i + 64*j}, z)
			w.tables[i][j] = z
		}
	}
	w.floor, w.one, w.sign, w.order = g.RWord(0x30000000)[0], g.RWord(1)[0], g.RWord(0x80)[0], ZMM()
	if q8Order.Symbol.Name == "" {
		q8Order = GLOBL("q8order", RODATA|NOPTR)
		for i := range vlib.Lanes {
			DATA(4*i, operand.U32(i%4*4+i/4))
		}
	}
	VMOVDQU32(q8Order, w.order)
	if w.zero = ZMM(); !signed {
		VPXORD(w.zero, w.zero, w.zero)
	}
	return w
}

// write writes the current 64 codes.
func (w *q8Writer) write(codes, x reg.Register) {
	g := w.g
	if !g.AVX512 {
		for u := range 4 {
			w.write256(codes, x, u)
		}
		return
	}
	var c [4]reg.VecVirtual
	for u := range c {
		c[u] = w.write512(g.Load(g.At(x, u))[0])
	}
	VPACKUSDW(c[1], c[0], c[0])
	VPACKUSDW(c[3], c[2], c[2])
	VPACKUSWB(c[2], c[0], c[0]) // by 128-bit lanes: four codes of each in turn
	VPERMD(c[0], w.order, c[0])
	VMOVDQU32(c[0], g.Byte(codes, 0))
}

const greaterEqual, notEqual = 0x1d, 0x0c // GE_OQ, NEQ_OQ

// write512 returns the codes of x, by the tables of octaves.
func (w *q8Writer) write512(x reg.VecVirtual) reg.VecVirtual {
	const largerMagnitude = 0x0b
	y, octave := ZMM(), ZMM()
	VMULPS(w.inverse[0], x, y)
	VRANGEPS(operand.Imm(largerMagnitude), w.floor, y, y)
	VPSRLD(operand.Imm(23), y, octave)
	look := func(i int) reg.VecVirtual {
		z := ZMM()
		VMOVAPS(octave, z)
		VPERMI2PS(w.tables[i][1], w.tables[i][0], z)
		return z
	}
	k := K()
	VCMPPS(operand.Imm(greaterEqual), look(0), y, k)
	VPADDD(w.one, octave, k, octave)
	c := look(1)
	VFMADD213PS(look(2), y, c)
	VCVTTPS2DQ(c, c)
	VPMINSD(look(3), c, c)
	if w.signed {
		sign := ZMM()
		VPSRLD(operand.Imm(24), x, sign)
		VPTERNLOGD(operand.Imm(orAnd), w.sign, sign, c)
		return c
	}
	positive := K()
	VCMPPS(operand.Imm(notEqual), w.zero, x, positive)
	VPMAXSD_Z(w.one, c, positive, c)
	return c
}

// write256 writes the u-th 16 of the current codes, by the tables of segments.
func (w *q8Writer) write256(codes, from reg.Register, u int) {
	g := w.g
	x := g.Load(g.At(from, u))
	y := g.Mul(x, w.inverse)
	for i := range y {
		w.codes256(x[i], y[i])
	}
	VPACKUSDW(y[1], y[0], y[0]) // by 128-bit lanes: words 0-3, 8-11, 4-7, 12-15
	VPERMQ(operand.Imm(0xd8), y[0], y[0])
	high := XMM()
	VEXTRACTI128(operand.Imm(1), y[0], high)
	VPACKUSWB(high, y[0].AsX(), high)
	VMOVDQU(high, g.Byte(codes, 2*u))
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
