// Package exact adds float64 values exactly, in any order. The sum lives in a
// fixed number of int64, so it can rest in device memory and be reduced over
// ranks by plain int64 additions; the result does not depend on how the addends
// were spread over threads, shards or ranks.
//
// The representation is a fixed-point number over the whole range of float64
// (a superaccumulator; Kulisch, "Computer Arithmetic and Validity", 2008): limb
// i is the signed digit of 2^(32i-1074). Digits may exceed 32 bits between
// normalisations, which is what makes plain additions a merge.
package exact

import (
	"fmt"
	"math"
	"math/bits"
)

const (
	// digits cover 2^-1074 … 2^1024 (66 limbs) and sums of up to 2^63 such
	// values.
	digits = 69

	nans   = digits     // number of NaN addends
	posInf = digits + 1 // number of +Inf addends
	negInf = digits + 2 // number of -Inf addends

	// Limbs is the length of an accumulator in int64.
	Limbs = digits + 3
)

// Accumulator is an exact sum in the first Limbs elements of a slice. All zeros
// is the empty sum. Adding is safe for 2^30 calls of Add and Merge together
// between two calls of Normalize, counting those that went into merged
// accumulators since they were normalised.
type Accumulator []int64

// Of returns limbs as an Accumulator; it refuses slices of another length.
func Of(limbs []int64) (Accumulator, error) {
	if len(limbs) != Limbs {
		return nil, fmt.Errorf("exact: accumulator has %d int64, want %d", len(limbs), Limbs)
	}
	return limbs, nil
}

// Add adds x exactly.
func (a Accumulator) Add(x float64) {
	_ = a[Limbs-1]
	b := math.Float64bits(x)
	e := int(b >> 52 & 0x7ff)
	m := b & (1<<52 - 1)
	switch e {
	case 0x7ff:
		switch {
		case m != 0:
			a[nans]++
		case b>>63 == 0:
			a[posInf]++
		default:
			a[negInf]++
		}
		return
	case 0: // subnormal: the same unit as exponent 1
		e = 1
	default:
		m |= 1 << 52
	}
	// x = ±m·2^(e-1-1074)
	limb, shift := (e-1)/32, uint((e-1)%32)
	lo := m << shift
	hi := m >> (64 - shift) // 0 for shift 0: Go shifts by 64 to 0
	d := [3]int64{int64(lo & math.MaxUint32), int64(lo >> 32), int64(hi)}
	if b>>63 != 0 {
		d[0], d[1], d[2] = -d[0], -d[1], -d[2]
	}
	a[limb] += d[0]
	a[limb+1] += d[1]
	a[limb+2] += d[2]
}

// Merge adds b's sum to a's.
func (a Accumulator) Merge(b Accumulator) {
	for i := range Limbs {
		a[i] += b[i]
	}
}

// Normalize brings every digit but the highest into [0, 2^32) without changing
// the sum. Merged normalised accumulators count as one addition each.
func (a Accumulator) Normalize() {
	carry := int64(0)
	for i := range digits - 1 {
		v := a[i] + carry
		carry = v >> 32
		a[i] = v & math.MaxUint32
	}
	a[digits-1] += carry
}

// Float64 returns the sum, rounded once to nearest even. It is NaN if a NaN or
// infinities of both signs were added, and an infinity if one sign was, or if the
// sum is too large. An exact zero is +0.
func (a Accumulator) Float64() float64 {
	switch {
	case a[nans] != 0 || a[posInf] != 0 && a[negInf] != 0:
		return math.NaN()
	case a[posInf] != 0:
		return math.Inf(1)
	case a[negInf] != 0:
		return math.Inf(-1)
	}
	var d [Limbs]int64
	copy(d[:], a[:Limbs])
	Accumulator(d[:]).Normalize()
	sign := 1.0
	if d[digits-1] < 0 { // the highest digit carries the sign
		sign = -1
		for i := range digits {
			d[i] = -d[i]
		}
		Accumulator(d[:]).Normalize()
	}
	top := digits - 1
	for top >= 0 && d[top] == 0 {
		top--
	}
	if top < 0 {
		return 0
	}
	if d[top] > math.MaxUint32 { // only the highest digit can be
		return sign * math.Inf(1)
	}
	// Bits [pos-52, pos] are the mantissa, for subnormal sums [0, pos].
	pos := 32*top + bits.Len64(uint64(d[top])) - 1
	low := max(pos-52, 0)
	m := window(&d, low)
	if low > 0 {
		half := bit(&d, low-1)
		if half && (m&1 == 1 || anyBelow(&d, low-1)) {
			m++
		}
	}
	return sign * math.Ldexp(float64(m), low-1074) // m <= 2^53: no second rounding
}

// window returns the 53 bits from bit low upwards of a normalised number.
func window(d *[Limbs]int64, low int) uint64 {
	limb, shift := low/32, uint(low%32)
	at := func(i int) uint64 {
		if i >= digits {
			return 0
		}
		return uint64(d[i])
	}
	v := at(limb) | at(limb+1)<<32
	v >>= shift
	if shift > 0 {
		v |= at(limb+2) << (64 - shift)
	}
	return v & (1<<53 - 1)
}

func bit(d *[Limbs]int64, i int) bool { return d[i/32]>>(i%32)&1 == 1 }

// anyBelow reports whether a bit lower than i is set.
func anyBelow(d *[Limbs]int64, i int) bool {
	for k := range i / 32 {
		if d[k] != 0 {
			return true
		}
	}
	return d[i/32]&(1<<(i%32)-1) != 0
}
