package vec

import "math"

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
	base   []uint8      // by slice of magnitudes: the code of its smallest
	next   []float32    // where the next code begins; +Inf: not in this slice
}

// The dynamic maps: of first moments, and of second moments, which are never
// negative and where a positive number never becomes 0, by which an update would be
// divided.
var (
	Q8Signed   = newQ8(7)
	Q8Unsigned = newQ8(8)
)

// Magnitudes are looked up by slices of 1/128 octave from 2^-24 on; each has one
// border between codes at most.
const q8Octaves, q8Slices = 24, 128

func newQ8(bits int) *Q8Map {
	m := &Q8Map{signed: bits == 7}
	codes := []float64{0}
	for decade := bits - 2; decade >= 0; decade-- {
		top := math.Pow(10, float64(-decade))
		steps := 1 << (bits - 1 - decade)
		for i := range steps {
			codes = append(codes, top*(0.1+0.9*(float64(i)+0.5)/float64(steps)))
		}
	}
	codes = append(codes, 1)
	for i, v := range codes {
		m.value[i] = float32(v)
		if m.signed && i > 0 { // of two zeros one is never written
			m.value[i|0x80] = -float32(v)
		}
	}
	border := make([]float32, len(codes)) // where code i begins
	for i := 1; i < len(codes); i++ {
		border[i] = float32((codes[i-1] + codes[i]) / 2)
	}
	for s, code := 0, 0; s <= q8Octaves*q8Slices; s++ {
		low := math.Float32frombits(uint32(127-q8Octaves)<<23 + uint32(s)<<16)
		high := math.Float32frombits(math.Float32bits(low) + 1<<16)
		for code+1 < len(codes) && border[code+1] <= low {
			code++
		}
		next := float32(math.Inf(1))
		if code+1 < len(codes) && border[code+1] < high {
			next = border[code+1]
		}
		m.base, m.next = append(m.base, uint8(code)), append(m.next, next)
	}
	return m
}

// code returns the nearest code of x, at most 1 in magnitude and, in an unsigned
// map, not negative.
func (m *Q8Map) code(x float32) uint8 {
	bits := math.Float32bits(x)
	magnitude := bits &^ (1 << 31)
	const first = uint32(127-q8Octaves) << 7
	c := uint8(0)
	if s := magnitude >> 16; s >= first {
		s = min(s-first, q8Octaves*q8Slices)
		c = m.base[s]
		if math.Float32frombits(magnitude) >= m.next[s] {
			c++
		}
	}
	if !m.signed {
		if c == 0 && magnitude > 0 {
			return 1
		}
		return c
	}
	if c == 0 {
		return 0
	}
	return c | uint8(bits>>24&0x80)
}

// Quantize writes the codes of a block of up to 256 numbers and returns its scale.
// Where one is not finite, all read as NaN.
func (m *Q8Map) Quantize(codes []byte, x []float32) (scale float32) {
	for _, v := range x {
		if v = math.Float32frombits(math.Float32bits(v) &^ (1 << 31)); !(v <= scale) {
			scale = v
			if v != v {
				break
			}
		}
	}
	codes = codes[:len(x)]
	if scale == 0 || scale != scale || math.IsInf(float64(scale), 1) {
		clear(codes)
		if scale != 0 {
			scale = float32(math.NaN())
		}
		return scale
	}
	for i, v := range x {
		codes[i] = m.code(v / scale)
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
