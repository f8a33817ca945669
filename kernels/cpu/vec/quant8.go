package vec

import (
	"math"
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// Blockwise 8-bit numbers (Dettmers et al., "8-bit optimizers via block-wise
// quantization", ICLR 2022): 256 numbers are codes of the dynamic map, a byte
// each, times the largest magnitude among them, their float32 scale. Blocks are
// counted from a parameter's start, so what is quantised does
// not depend on how the parameter is cut.
//
// The map's magnitudes are 0, 1, and between them decades down from [0.1, 1):
// each half as many equal steps as the one above, of which a code is the middle.
// With 7 bits and a sign there are 6 decades and 126 steps, with 8 bits 7 and 254.
// The largest magnitude's code is 1 exactly, so quantising again what was
// quantised gives the same codes and the same scale.

// Q8Block is the numbers of a block.
const Q8Block = 256

// Q8Blocks is the blocks of n numbers, of which the last may be short.
func Q8Blocks(n int) int { return (n + Q8Block - 1) / Q8Block }

// Q8Map is a map of codes.
type Q8Map struct {
	signed bool
	value  [256]float32 // by code
	t      q8Table
}

// q8Table is what codes are computed from. A magnitude's decade is found by the
// borders between decades, of which an octave has one at most; there it is
// magnitude·perUnit + from, without what is behind the point and at most last, that
// is the nearest code. The other way, code + 1 is a float32 whose exponent says the
// decade, and times slope, plus start, is the magnitude. The assembly knows the layout.
type q8Table struct {
	slope, start [8]float32 // by exponent of code + 1, of which three bits tell all apart but the first and the last
	// By octave from 2^-31 on: where a decade ends, and that which goes on into the
	// octave; at 32·2^-31 and above there is 1 alone.
	border, perUnit, from [32]float32
	last                  [32]int32
	// By decade: where the next begins, and the same three.
	borders, gains, offsets [8]float32
	lasts                   [8]int32
	// By two octaves from 2^-31 on, of a quarter of the magnitude: as by octave, and what
	// a smaller magnitude is taken for, so that no unsigned one becomes 0.
	bins struct {
		border, perUnit, from [16]float32
		last                  [16]int32
		floor                 float32
	}
}

// The dynamic maps: of first moments, and of second moments, which are never
// negative and where a positive number never becomes 0, by which an update would be
// divided.
var (
	Q8Signed   = newQ8(7)
	Q8Unsigned = newQ8(8)
)

func newQ8(bits int) *Q8Map {
	m := &Q8Map{signed: bits == 7}
	m.t.decades(bits)
	m.t.octaves()
	for c := range 1 << bits {
		v := m.t.magnitude(c)
		m.value[c] = v
		if m.signed {
			m.value[c|0x80] = math.Float32frombits(math.Float32bits(v) | 1<<31)
		}
	}
	m.t.byBins(0x1p-29)
	if !m.signed {
		m.t.byBins(m.value[1])
	}
	return m
}

// decades fills the tables by decade. Signed, the first is of what becomes 0;
// unsigned, nothing does. The last is 1's.
func (t *q8Table) decades(bits int) {
	at, middle := 0, 0.0 // the decade being filled, and the largest number below it
	for k := 1; k < bits; k++ {
		top, steps := math.Pow(10, float64(k-bits+1)), float64(int(1)<<k)
		t.slope[(k+7)%8] = float32(0.9 * top / steps)
		t.start[(k+7)%8] = float32(top * (0.1 - 0.9 + 0.45/steps))
		if first := top * (0.1 + 0.45/steps); bits == 7 || k > 1 {
			t.borders[at] = float32((middle + first) / 2)
			at++
		}
		t.gains[at] = float32(steps / 0.9 / top)
		t.offsets[at] = float32(steps - 1 - steps/9)
		t.lasts[at] = int32(2*steps) - 2
		middle = top * (1 - 0.45/steps)
	}
	t.borders[at], t.borders[7] = float32((middle+1)/2), float32(math.Inf(1))
	t.offsets[7], t.lasts[7] = float32(int(1)<<bits-1), 1<<bits-1
	// Code + 1 is 1 and 2^bits for the numbers 0 and 1.
	if bits == 7 {
		t.start[6] = 1
		return
	}
	t.slope[7], t.start[7] = 1./255, -float32(1./255)
}

// octaves derives the tables by octave.
func (t *q8Table) octaves() {
	d := 0
	for j := range t.border {
		t.perUnit[j], t.from[j], t.last[j] = t.gains[d], t.offsets[d], t.lasts[d]
		t.border[j] = float32(math.Inf(1))
		if t.borders[d] < float32(math.Ldexp(1, j-30)) {
			t.border[j] = t.borders[d]
			d++
		}
	}
}

// byBins derives the tables by two octaves, in which there is still one border at most.
func (t *q8Table) byBins(floor float32) {
	b, d := &t.bins, 0
	b.floor = floor / 4
	for j := range b.border {
		b.perUnit[j], b.from[j], b.last[j] = 4*t.gains[d], t.offsets[d], t.lasts[d]
		b.border[j] = float32(math.Inf(1))
		if t.borders[d]/4 < float32(math.Ldexp(1, 2*j-29)) {
			b.border[j] = t.borders[d] / 4
			d++
		}
	}
}

// magnitude is what a code without its sign stands for.
func (t *q8Table) magnitude(code int) float32 {
	return stands(code, &t.slope, &t.start)
}

// stands is the value of a code without its sign, by the tables of decades.
func stands(code int, slope, start *[8]float32) float32 {
	n := float32(code + 1)
	k := math.Float32bits(n) >> 23 & 7
	return num.Fma32(n, slope[k], start[k])
}

// code returns the nearest code, but for the rounding of one multiplication and
// addition, of y, which is x over the scale: at most 1 in magnitude and, in an unsigned
// map, not negative.
func (m *Q8Map) code(x, y float32) uint8 {
	a := math.Float32frombits(max(math.Float32bits(y)&^(1<<31), (127-31)<<23))
	j := math.Float32bits(a) >> 23 & 31
	if a >= m.t.border[j] {
		j++
	}
	c := min(int32(num.Fma32(a, m.t.perUnit[j], m.t.from[j])), m.t.last[j])
	switch {
	case m.signed:
		return uint8(c) | uint8(math.Float32bits(x)>>24&0x80)
	case x == 0:
		return 0
	}
	return uint8(max(c, 1))
}

// q8Inverse returns what numbers are multiplied by, one after the other, to be divided
// by their scale: a power of two, 1 unless the inverse would not be an ordinary number.
func q8Inverse(scale float32) (up, inverse float32) {
	switch up = 1; {
	case scale < 0x1p-126:
		up = 0x1p64
	case scale > 0x1p120: // a quarter of the inverse is ordinary too
		up = 0x1p-64
	}
	return up, 1 / float32(scale*up)
}

// Quantize writes the codes of a block of up to 256 numbers and returns its scale.
// Where one is not finite, all read as NaN.
func (m *Q8Map) Quantize(codes []byte, x []float32) (scale float32) {
	top := uint32(0)
	for _, v := range x {
		top = max(top, math.Float32bits(v)&^(1<<31))
	}
	return m.write(codes, x, top)
}

// write is Quantize where the bits of the largest magnitude are known.
func (m *Q8Map) write(codes []byte, x []float32, top uint32) (scale float32) {
	codes = codes[:len(x)]
	switch infinity := uint32(0xff << 23); {
	case top == 0:
		clear(codes)
		return 0
	case top >= infinity:
		clear(codes)
		return float32(math.NaN())
	}
	scale = math.Float32frombits(top)
	up, inverse := q8Inverse(scale)
	if n := len(x) &^ 63; up == 1 && fast[float32](n) {
		simd.q8write[index(m.signed)](unsafe.SliceData(codes), ptr(x), n, inverse, &m.t.slope[0])
		codes, x = codes[n:], x[n:]
	}
	for i, v := range x {
		codes[i] = m.code(v, float32(float32(v*up)*inverse))
	}
	return scale
}

// Dequantize reads the first len(x) numbers of a block.
func (m *Q8Map) Dequantize(x []float32, codes []byte, scale float32) {
	codes = codes[:len(x)]
	for i := range x {
		x[i] = float32(m.value[codes[i]] * scale)
	}
}

// q8Tiny tells whether a block's factor is so small that products of a table's values with it
// round to zero or lose bits.
func q8Tiny(factor float32) bool { return factor > 0 && factor < 0x1p-96 }

// decayed reads the first len(x) numbers of a block times a factor, the block's scale
// times a beta. The tables of decades take the factor, so that a number is rounded once;
// the assembly reads so, too.
func (m *Q8Map) decayed(x []float32, codes []byte, factor float32) {
	if q8Tiny(factor) {
		m.Dequantize(x, codes, factor)
		return
	}
	var slope, start [8]float32
	for k := range slope {
		slope[k], start[k] = float32(m.t.slope[k]*factor), float32(m.t.start[k]*factor)
	}
	codes = codes[:len(x)]
	for i, c := range codes {
		if !m.signed {
			x[i] = stands(int(c), &slope, &start)
			continue
		}
		v := stands(int(c&0x7f), &slope, &start)
		x[i] = math.Float32frombits(math.Float32bits(v) | uint32(c>>7)<<31)
	}
}
