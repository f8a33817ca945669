package num

import "math"

// BF16 rounds x to bfloat16, to nearest even. A NaN stays a (quiet) NaN with the
// upper part of its payload.
func BF16(x float32) uint16 {
	b := math.Float32bits(x)
	if b&0x7fffffff > 0x7f800000 {
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// FromBF16 returns the value of a bfloat16.
func FromBF16(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

// F16 rounds x to IEEE binary16, to nearest even, as VCVTPS2PH does: overflow
// gives an infinity, small results are subnormal, a NaN stays a quiet NaN with
// the upper part of its payload.
func F16(x float32) uint16 {
	b := math.Float32bits(x)
	sign := uint16(b >> 16 & 0x8000)
	b &= 0x7fffffff
	switch {
	case b > 0x7f800000:
		return sign | 0x7e00 | uint16(b>>13&0x3ff)
	case b >= 0x477ff000: // 65520 and up round to infinity
		return sign | 0x7c00
	case b >= 0x38800000: // normal
		return sign | uint16((b-0x38000000+0xfff+b>>13&1)>>13)
	case b < 0x33000000: // below half the smallest subnormal
		return sign
	}
	e := b >> 23
	m := b&0x7fffff | 0x800000
	shift := 126 - e // value = m·2^(e-150); result unit 2^-24
	r := m >> shift
	rest := m & (1<<shift - 1)
	half := uint32(1) << (shift - 1)
	if rest > half || rest == half && r&1 == 1 {
		r++
	}
	return sign | uint16(r)
}

// FromF16 returns the value of a binary16, as VCVTPH2PS does: a NaN becomes quiet.
func FromF16(h uint16) float32 {
	sign := uint32(h&0x8000) << 16
	e := uint32(h >> 10 & 0x1f)
	m := uint32(h & 0x3ff)
	switch {
	case e == 0x1f && m != 0:
		return math.Float32frombits(sign | 0x7fc00000 | m<<13)
	case e == 0x1f:
		return math.Float32frombits(sign | 0x7f800000)
	case e == 0:
		return math.Float32frombits(sign | math.Float32bits(float32(m)*(1.0/(1<<24))))
	}
	return math.Float32frombits(sign | (e+112)<<23 | m<<13)
}
